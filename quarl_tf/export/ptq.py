"""Quantise after training, from flatbuffer to flatbuffer, without the training.

`int8` is integer from the first layer to the head. The normaliser in front of it stays in float:
one int8 scale for a raw observation would drown its small features (CartPole's pole angle is ±0.2
beside velocities of ±3), after it all features fill the same ±5, each in two int8 numbers. Kernels
have a scale for each output and are rounded by what their layer computes, layers are equalised, and
the head of a discrete policy is centred first; see benchmarks/int8_recipes.json.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import write_bytes
from quarl_tf.quantization.gptq import best_grid
from quarl_tf.quantization.grid import Array, Grid, fake_quantize
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import CALIBRATED, REFERENCE, Scheme, TensorFormat, actions
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path, write_artifact


def quantized(
    content: bytes,
    scheme: Scheme,
    observations: Array | None = None,
    *,
    discrete: bool = False,
) -> bytes:
    """Return a quantised float32 flatbuffer.

    Weights alone have the papers' granularity: one grid for a fully-connected kernel, one per
    output channel for a convolution (QuaRL, Krishnan et al., arXiv 1910.01055, section 3).

    Args:
        content: The flatbuffer.
        scheme: A `ptq_wN` or `ptq_paper_wN`, or one of `CALIBRATED`.
        observations: [n, ...] observations to calibrate with.
        discrete: Whether the greatest value of the head is chosen.

    Raises:
        UsageError: The scheme is none of these.
        QuarlError: The flatbuffer is damaged or none.
    """
    if observations is not None:
        _require_fitting(content, observations)
    if scheme.name in CALIBRATED and observations is not None:
        return _calibrated(content, scheme, observations, discrete=discrete)
    if scheme.calibrated and observations is not None:
        if discrete and scheme.recipe.head.activations is not None:
            from quarl_tf.export import integer

            content = integer.centred(content)
        return _optimised(content, scheme, observations)
    form = scheme.recipe.default.weights
    if form is None or scheme.calibrated or not scheme.post_training:
        raise UsageError(
            f"Without its training a flatbuffer can become {', '.join(CALIBRATED)}, or ptq_wN, "
            f"ptq_opt_wN and ptq_paper_wN for N = 2 ... 32, of all layers. "
            f"Received: scheme={scheme.name!r}"
        )

    def change(operator: str, kernel: Array) -> Array:
        return fake_quantize(kernel, form, None if operator == "FULLY_CONNECTED" else 0)

    return flatbuffer.with_kernels(content, change)


def _require_fitting(content: bytes, observations: Array) -> None:
    """Refuse observations that are none, or of another environment."""
    (wanted,) = flatbuffer.audit(content).inputs
    if len(observations) == 0 or observations.shape[1:] != wanted.shape[1:]:
        raise UsageError(
            "Observations to calibrate with are those of the policy's environment, at least one: "
            f"[n, {', '.join(map(str, wanted.shape[1:]))}]. Received: shape={observations.shape}"
        )


@flatbuffer.understood()
def calibrated(
    content: bytes, scheme: Scheme, observations: Array, policy: Policy
) -> tuple[bytes, dict[str, Any]]:
    """Return a flatbuffer of a scheme that takes observations, and how it was chosen, if it was.

    Args:
        content: The fp32 flatbuffer.
        scheme: Its scheme is `calibrated`.
        observations: [n, ...] observations to calibrate with.
        policy: The fp32 flatbuffer, loaded.
    """
    if scheme.name == "int8_auto":
        from quarl_tf.export import auto

        return auto.chosen(content, policy, observations)
    discrete = policy.sidecar.num_actions is not None
    return quantized(content, scheme, observations, discrete=discrete), {}


def _calibrated(content: bytes, scheme: Scheme, observations: Array, *, discrete: bool) -> bytes:
    if scheme.name == "int8_stock":
        from quarl_tf.export import stock  # TensorFlow's converter; the others need none.

        return stock.quantized(content, observations)
    # The interpreter of a board has no need of it.
    from quarl_tf.export import integer

    if scheme.name != "int8_tensor":
        content = integer.prepared(content, observations, discrete=discrete)
    elif discrete:
        content = integer.centred(content)
    return integer.quantized(content, observations, scheme.recipe)


def _optimised(content: bytes, scheme: Scheme, observations: Array) -> bytes:
    """Round each kernel, and what it is multiplied with, behind those rounded already.

    Before it is rounded a kernel makes up for all rounding before it.
    """
    from quarl_tf.export import integer

    content = integer.equalised(content)
    graph, plain = integer.Graph(content), integer.Graph(content)

    def round_tensor(owner: Any, side: str, form: TensorFormat) -> None:
        values = integer.held(graph, owner, side, observations).reshape(1, -1)
        values = values[:, :: max(1, values.size // _MOST_VALUES)].astype(np.float64)
        grid = best_grid(values, np.ones(values.size), form)
        graph.round(getattr(owner, side)[0], Grid(*(end.item() for end in grid)))

    entering = scheme.recipe.observation.activations
    for name, operator in graph.layers().items():
        if entering is not None:
            round_tensor(operator, "inputs", entering)
        given = integer.inputs(plain, plain.layers()[name], observations)
        integer.fit_kernel(graph, operator, observations, given)
        entering = scheme.recipe.of(name).activations
        integer.round_kernel(graph, operator, observations, scheme.recipe.of(name).weights)
    if entering is not None:
        round_tensor(graph.layers()["head"], "outputs", entering)
    return graph.pack()


#: Values of a tensor that its range is chosen by, about.
_MOST_VALUES = 200_000


def described(content: bytes) -> dict[str, Any]:
    """Return what a sidecar says of a flatbuffer that is made now, unchecked."""
    audit = flatbuffer.audit(content)
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
        "tensor_dtypes": audit.tensor_dtypes,
        "weight_dtypes": audit.weight_dtypes,
        "operators": audit.operators,
        "check": {},
        "versions": provenance.package_versions(),
        "commit": provenance.source_commit(),
        "sources": provenance.sources(),
    }


def quantize(source: Path, scheme: Scheme, target: Path | None = None) -> Path:
    """Write a quantised copy of an fp32 flatbuffer, with its sidecar.

    Activations are calibrated on greedy rollouts of the flatbuffer.

    A sidecar that describes these very bytes is left as it is: a file that was not kept comes back.

    Args:
        source: The fp32 flatbuffer.
        scheme: As in `quantized`.
        target: Where to; by default `<scheme>.tflite` beside it.

    Returns:
        The path of the copy.

    Raises:
        UsageError: The scheme is another, or the flatbuffer is not fp32.
        QuarlError: The flatbuffer or its sidecar is missing or damaged.
    """
    policy = Policy.load(source)
    if policy.sidecar.scheme != REFERENCE:
        raise UsageError(
            f"Policies are quantised from {REFERENCE}.tflite. "
            f"Received: scheme={policy.sidecar.scheme!r} of {str(source)!r}"
        )
    sidecar, observations = policy.sidecar, None
    choice: dict[str, Any] = {}
    content = flatbuffer.read(source)
    if scheme.calibrated:
        # Gymnasium; rounding weights needs none.
        from quarl_tf.export import calibration

        observations = calibration.observations(policy)
        content, choice = calibrated(content, scheme, observations, policy)
    else:
        content = quantized(content, scheme)
    target = source.with_name(f"{scheme.name}.tflite") if target is None else target
    digest = hashlib.sha256(content).hexdigest()
    with contextlib.suppress(QuarlError):
        known = Sidecar.load(sidecar_path(target))
        if (known.scheme, known.sha256) == (scheme.name, digest):
            write_bytes(target, content)
            return target
    whole = scheme.recipe.default.activations is not None
    relative = sidecar.head == "q_values" and scheme.calibrated and whole
    made = replace(
        sidecar,
        scheme=scheme.name,
        native=scheme.native,
        head="advantages" if relative else sidecar.head,
        **described(content),
    )
    if observations is not None:
        agreement = _agreement(policy, Policy(content, made), observations)
        made = replace(made, check={**agreement, **choice})
    write_artifact(target, content, made)
    return target


def _agreement(reference: Policy, policy: Policy, observations: Array) -> dict[str, float]:
    """Compare heads over observations; of discrete ones what all actions share does not count."""
    heads = np.array([[p.head(o) for o in observations] for p in (reference, policy)])
    if reference.sidecar.num_actions is not None:
        heads -= heads.mean(axis=-1, keepdims=True)
    found = {
        "observations": len(observations),
        "max_abs_difference": float(np.abs(heads[0] - heads[1]).max()),
        "max_abs_head": float(np.abs(heads[0]).max()),
    }
    if reference.sidecar.num_actions is not None:
        choices = reference.sidecar.num_actions
        found["action_agreement"] = actions.agreement(heads[0], heads[1], choices)
    return found
