"""Quantise after training, from flatbuffer to flatbuffer, without the training.

`int8` is integer from the first layer to the head. The normaliser before it stays in float: one
int8 scale for a raw observation would drown its small features (CartPole's pole angle is ±0.2
beside velocities of ±3), after it all features fill the same ±5, each in two int8 numbers. Kernels
have a scale for each output and are rounded by what their layer computes, layers are equalised or,
on images, smoothed, and the head of a discrete policy is centred first, on images also spread over
several int8 numbers; see benchmarks/int8_recipes.json.
"""

import contextlib
import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf.export import auto, calibration, integer, preparation, rounding
from quarl_tf.export.graph import LAYERS, Graph, in_float32
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import write_bytes
from quarl_tf.quantization.grid import Array, fake_quantize
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import CALIBRATED, REFERENCE, Scheme, actions
from quarl_tf.spec.actions import Choices
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import has_sidecar, sidecar_path, write_artifact

#: Schemes that others are made from.
_SOURCES = (REFERENCE, "fp16")

#: Operators that multiply by weights.
_PRODUCTS = {*flatbuffer.WEIGHTED, "BATCH_MATMUL", "CONV_3D"}


def quantized(
    content: bytes,
    scheme: Scheme,
    observations: Array | None = None,
    choices: Choices | None = None,
) -> bytes:
    """Return a quantised float32 flatbuffer; a QuarlError where scheme or flatbuffer is unfit.

    Weights alone (`ptq_wN`, `ptq_paper_wN`) have the papers' granularity: one grid for a
    fully-connected kernel, one per output channel for a convolution (QuaRL, Krishnan et al., arXiv
    1910.01055, section 3). Calibrated schemes need observations [n, ...]; `choices` are the
    numbers of discrete actions, if the greatest values of the head are chosen.
    """
    if observations is not None:
        _require_fitting(content, observations)
        if scheme.calibrated:
            return _calibrated(content, scheme, observations, choices)
    form = scheme.recipe.default.weights
    if form is None or scheme.calibrated or not scheme.post_training:
        raise UsageError(
            f"Without its training a flatbuffer can become {', '.join(CALIBRATED)}, or ptq_wN, "
            f"ptq_opt_wN and ptq_paper_wN for N = 2 ... 32, of all layers. "
            f"Received: scheme={scheme.name!r}"
        )
    _require_quantisable(content, flatbuffer.WEIGHTED)
    axes = {"FULLY_CONNECTED": None, "DEPTHWISE_CONV_2D": 3}

    def change(operator: str, kernel: Array) -> Array:
        return fake_quantize(kernel, form, axes.get(operator, 0))

    return flatbuffer.with_kernels(content, change)


def _require_quantisable(content: bytes, names: Collection[str]) -> None:
    """Refuse weights of other operators than these, which would stay in float without a word."""
    for graph in flatbuffer.parsed(content):
        for operator in graph.operators:
            has_weights = any(graph.tensors[i].data is not None for i in operator.inputs[:2])
            if operator.name in _PRODUCTS and operator.name not in names and has_weights:
                raise UsageError(
                    f"This scheme quantises the weights of {', '.join(sorted(names))} alone; "
                    f"name another scheme. Received: operator={operator.name}"
                )


def _require_fitting(content: bytes, observations: Array) -> None:
    """Require at least one observation of the flatbuffer's input shape."""
    (source,) = flatbuffer.audit(content).inputs
    if len(observations) == 0 or observations.shape[1:] != source.shape[1:]:
        raise UsageError(
            "Observations to calibrate with are those of the policy's environment, at least one: "
            f"[n, {', '.join(map(str, source.shape[1:]))}]. Received: shape={observations.shape}"
        )


def _require_free(target: Path, source: Path, scheme: Scheme, made_from: str) -> None:
    """Require a place for a copy where no other file or sidecar would be lost."""
    flaw = None
    if target.suffix != ".tflite":
        flaw = "A flatbuffer's name ends in .tflite"
    elif target.resolve() == source.resolve():
        flaw = "The copy would replace its source"
    elif target != _default_target(source, scheme) and _is_foreign(target):
        flaw = "The copy would replace a file that is not ours"
    else:
        with contextlib.suppress(QuarlError):  # A damaged or missing sidecar is replaced.
            sidecar = Sidecar.load(sidecar_path(target))
            if sidecar.scheme != scheme.name:
                flaw = "The copy would replace a file of another scheme"
            elif sidecar.check.get("source", REFERENCE) != made_from:
                flaw = f"The copy would replace one that was not made from {made_from}"
    if flaw is not None:
        raise UsageError(f"{flaw}; give another path. Received: {str(target)!r}")


def _is_foreign(target: Path) -> bool:
    return any(map(Path.exists, (target, sidecar_path(target)))) and not has_sidecar(target)


def _default_target(source: Path, scheme: Scheme) -> Path:
    return source.with_name(f"{scheme.name}.tflite")


def _calibrated(
    content: bytes, scheme: Scheme, observations: Array, choices: Choices | None
) -> bytes:
    if scheme.name == "int8_stock":
        from quarl_tf.export import converter  # Loads TensorFlow, which the others do not need.

        return converter.stock_int8(content, observations)
    _require_quantisable(content, LAYERS)
    is_integer = scheme.name in CALIBRATED
    if is_integer and scheme.name != "int8_tensor":
        float_head = scheme.recipe.head.activations is None
        content = preparation.prepared(content, observations, choices, float_head=float_head)
    elif scheme.recipe.head.activations is not None:
        content = preparation.centred(content, choices)
    if is_integer:
        return integer.quantized(content, observations, scheme.recipe)
    return rounding.optimised(content, observations, scheme.recipe)


@flatbuffer.understood()
def calibrated(
    content: bytes, scheme: Scheme, observations: Array, policy: Policy
) -> tuple[bytes, dict[str, Any]]:
    """Return an fp32 flatbuffer in a calibrated scheme, and how its recipe was chosen, if it was.

    `observations` [n, ...] calibrate it; `policy` is the same flatbuffer, loaded.
    """
    if scheme.name == "int8_auto":
        return auto.chosen(content, policy, observations)
    return quantized(content, scheme, observations, policy.sidecar.num_actions), {}


def described(content: bytes) -> dict[str, Any]:
    """Return a sidecar's facts of a flatbuffer that is made now, unchecked."""
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
    """Write a quantised copy of an fp32 or fp16 flatbuffer with its sidecar; return its path.

    The default target is `<scheme>.tflite` beside it. Activations are calibrated on greedy rollouts
    of the flatbuffer. A sidecar with the hash of the copy is kept.

    Raises:
        UsageError: The scheme needs a training, or the flatbuffer is not one of floats.
        QuarlError: The flatbuffer or its sidecar is missing or damaged.
    """
    policy = Policy.load(source)
    sidecar = policy.sidecar
    if sidecar.scheme not in _SOURCES:
        raise UsageError(
            f"Policies are quantised from {'.tflite or '.join(_SOURCES)}.tflite. "
            f"Received: scheme={sidecar.scheme!r} of {str(source)!r}"
        )
    target = target or _default_target(source, scheme)
    _require_free(target, source, scheme, sidecar.scheme)
    float_content, observations, head = flatbuffer.read(source), None, sidecar.head
    if "float16" in sidecar.weight_dtypes:
        float_content = in_float32(float_content)
    check: dict[str, Any] = {} if sidecar.scheme == REFERENCE else {"source": sidecar.scheme}
    if scheme.calibrated:
        observations = calibration.observations(policy)
        content, choice = calibrated(float_content, scheme, observations, policy)
        check |= choice
        if head == "q_values" and scheme.centred and preparation.separable(Graph(float_content)):
            head = "advantages"
    else:
        content = quantized(float_content, scheme)
    facts = described(content)
    with contextlib.suppress(QuarlError):
        target_sidecar = Sidecar.load(sidecar_path(target))
        if (target_sidecar.scheme, target_sidecar.sha256) == (scheme.name, facts["sha256"]):
            write_bytes(target, content)
            return target
    if observations is not None:
        heads, reference = (auto.heads(x, policy, observations) for x in (content, float_content))
        choices = sidecar.num_actions
        if choices is not None:  # Without the common part of all actions.
            heads, reference = (actions.centred(x, choices) for x in (heads, reference))
        check |= compared(heads, reference, choices)
    facts |= {"scheme": scheme.name, "native": scheme.native, "head": head, "check": check}
    write_artifact(target, content, replace(sidecar, **facts))
    return target


def compared(heads: Array, reference: Array, choices: Choices | None) -> dict[str, Any]:
    """Compare heads [n, outputs] with those of a reference."""
    check = {
        "observations": len(heads),
        "max_abs_difference": float(np.abs(heads - reference).max()),
        "max_abs_head": float(np.abs(reference).max()),
    }
    if choices is not None:
        check["action_agreement"] = actions.agreement(heads, reference, choices)
    return check
