"""Quantise after training, from flatbuffer to flatbuffer, without the training.

`int8` is integer from the first layer to the head. The normaliser before it stays in float: one
int8 scale for a raw observation would drown its small features (CartPole's pole angle is ±0.2
beside velocities of ±3), after it all features fill the same ±5, each in two int8 numbers. Kernels
have a scale for each output and are rounded by what their layer computes, layers are equalised or,
on images, smoothed, and the head of a discrete policy is centred first. On images the head is
computed in two stages, in 16 bits, and the ranges of layers are those that bring it nearest to the
float one; see benchmarks/int8_recipes.json and int8_games.json.
"""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf.export import auto, calibration, integer, preparation, rounding
from quarl_tf.export.graph import LAYERS, Graph, in_float16, in_float32
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import require_writable, sha256, write_bytes
from quarl_tf.quantization.grid import Array, fake_quantize
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import INT8_SCHEMES, REFERENCE, Run, Scheme, TensorFormat, actions
from quarl_tf.spec.actions import Choices
from quarl_tf.spec.scheme import FLOAT_SCHEMES
from quarl_tf.store.records import Sidecar
from quarl_tf.store.state import sources
from quarl_tf.store.workspace import Workspace, has_sidecar, sidecar_path, write_artifact

#: Keys of a sidecar's check that name what a copy was made from; without them, fp32 and rollouts.
_MADE_FROM = ("source", "recorded_sha256")


def quantized(
    content: bytes,
    scheme: Scheme,
    observations: Array | None = None,
    choices: Choices | None = None,
) -> bytes:
    """Return a quantised float32 flatbuffer; a QuarlError where scheme or flatbuffer is unfit.

    Kernels of `ptq_wN` and `ptq_paper_wN` have grids of the papers' granularity: one for a
    fully-connected kernel, one per output channel for a convolution (QuaRL, Krishnan et al., arXiv
    1910.01055, section 3). Calibrated schemes need observations [n, ...]; `choices` are the
    numbers of discrete actions, if the greatest values of the head are chosen.
    """
    if scheme.calibrated and observations is not None:
        return _calibrated(content, scheme, observations, choices)
    recipe, form = scheme.recipe, scheme.recipe.default.weights
    if form is None or scheme.kind != "weights":
        raise _impossible(scheme)
    preparation.require_quantisable(content, flatbuffer.WEIGHTED)
    if form.ieee:
        return in_float16(content)
    forms: dict[int, TensorFormat | None] = {}  # By the operator's number.
    if scheme.single_layers:
        whole = Graph(content)
        layers = whole.layers()
        recipe.require_layers(layers)
        forms = {whole.operators.index(op): recipe.of(name).weights for name, op in layers.items()}
    axes = {"FULLY_CONNECTED": None, "DEPTHWISE_CONV_2D": 3}
    copy, changed = bytearray(content), dict[int, TensorFormat]()
    for graph in flatbuffer.parsed(copy):
        for number, op in enumerate(graph.operators):
            kernel = graph.tensors[op.inputs[1]] if op.name in flatbuffer.WEIGHTED else None
            if kernel is None or kernel.data is None or kernel.dtype != "float32":
                continue
            values = kernel.data.view(np.float32).reshape(kernel.shape)  # A view of `copy`.
            kernel_form, address = forms.get(number) or form, values.ctypes.data
            if address not in changed:  # Operators may share a kernel.
                values[...] = fake_quantize(values, kernel_form, axes.get(op.name, 0))
            if changed.setdefault(address, kernel_form) != kernel_form:
                raise UsageError(
                    "Several layers share a kernel; give all of them the same bits. "
                    f"Received: scheme={scheme.name!r}, kernel={kernel.name!r}"
                )
    return bytes(copy)


def _impossible(scheme: Scheme) -> UsageError:
    return UsageError(
        f"Without its training a file can become fp16, {', '.join(INT8_SCHEMES)}, "
        "int8-LAYER=32, ptq_opt_wNaN for N = 2 ... 8, or ptq_wN, ptq_opt_wN and ptq_paper_wN for "
        f"N = 2 ... 32. Received: scheme={scheme.name!r}"
    )


def _calibrated(
    content: bytes, scheme: Scheme, observations: Array, choices: Choices | None
) -> bytes:
    if scheme.kind == "stock":
        from quarl_tf.export import converter  # Loads TensorFlow, which the others do not need.

        return converter.stock_int8(content, observations)
    preparation.require_quantisable(content, LAYERS)
    scheme.recipe.require_layers(Graph(content).layers())
    if scheme.kind == "integer" and scheme.name != "int8_tensor":
        content = preparation.prepared(content, observations, choices)
    elif scheme.recipe.head.activations is not None:
        content = preparation.centred(content, choices)
    quantise = integer.quantized if scheme.kind == "integer" else rounding.optimised
    return quantise(content, observations, scheme.recipe)


@flatbuffer.understood()
def copied(
    policy: Policy, content: bytes, scheme: Scheme, observations: Array | None
) -> tuple[bytes, Sidecar]:
    """Return a quantised copy of a policy, and its sidecar.

    `content` is the policy's flatbuffer in float32. Heads are compared on observations [n, ...],
    which also calibrate the copy; None for schemes that need none.
    """
    source = policy.sidecar
    head, choices, check = source.head, source.num_actions, dict[str, Any]()
    if scheme.name == "int8_auto" and observations is not None:
        copy, check = auto.chosen(content, policy, observations)
    else:
        copy = quantized(content, scheme, observations, choices)
    if head == "q_values" and scheme.centred and preparation.separable(Graph(content)):
        head = "advantages"
    if observations is not None:
        heads, reference = (auto.heads(x, policy, observations) for x in (copy, content))
        if choices is not None and scheme.centred:  # Without the common part of all actions.
            heads, reference = (actions.centred(x, choices) for x in (heads, reference))
        check |= compared(heads, reference, choices)
    facts = described(copy) | {"head": head, "check": check}
    return copy, replace(source, scheme=scheme.name, native=scheme.native, **facts)


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


def float_policy(source: Path) -> tuple[Policy, bytes]:
    """Load an fp32 or fp16 policy, and its flatbuffer in float32; a UsageError for another."""
    policy = Policy.load(source)
    if (scheme := policy.sidecar.scheme) not in FLOAT_SCHEMES:
        raise UsageError(
            f"Policies are quantised from {'.tflite or '.join(FLOAT_SCHEMES)}.tflite. "
            f"Received: scheme={scheme!r} of {str(source)!r}"
        )
    content = flatbuffer.read(source)
    return policy, in_float32(content) if "float16" in policy.sidecar.weight_dtypes else content


def quantize(source: Path, scheme: Scheme, recorded: Path | None = None) -> Path:
    """Write a quantised copy of an fp32 or fp16 flatbuffer with its sidecar; return its path.

    It is `<scheme>.tflite` beside it; one of this network that is there, intact, is kept.
    Activations are calibrated on rollouts of the flatbuffer and, beside them, on the
    observations [n, ...] of a file `recorded`, `.npy`. A sidecar with the hash of the copy is kept.
    A UsageError where the scheme needs a training or no observations, the flatbuffer is not one of
    floats, or another file is where the copy belongs; a QuarlError where a file is missing or
    damaged.
    """
    policy, content = float_policy(source)
    sidecar = policy.sidecar
    if not scheme.post_training or scheme.name == sidecar.scheme:
        raise _impossible(scheme)
    if recorded is not None and not scheme.calibrated:
        raise UsageError(
            f"This scheme uses no observations; leave them out. Received: scheme={scheme.name!r}"
        )
    made_from = {} if sidecar.scheme == REFERENCE else {"source": sidecar.scheme}
    if recorded is not None:
        recorded_observations = calibration.recorded(recorded, sidecar)
        made_from["recorded_sha256"] = sha256(recorded)
    target = source.with_name(f"{scheme.name}.tflite")
    former, is_foreign = None, False
    with contextlib.suppress(QuarlError):  # A copy with a damaged sidecar is replaced.
        is_foreign = target.exists() and not has_sidecar(target)
        former = Sidecar.load(sidecar_path(target))
    if former is not None:
        found = {k: v for k, v in former.check.items() if k in _MADE_FROM}
        if (former.scheme, found) != (scheme.name, made_from):
            raise _other_file(target, scheme, f"{former.scheme} {_made_from(found)}")
        is_intact = target.exists() and sha256(target) == former.sha256
        if is_intact and former.network_sha256 == sidecar.network_sha256:
            return target
    require_writable(target)  # Before the rollouts.
    observations = calibration.observations(policy) if scheme.calibrated else None
    if observations is not None and recorded is not None:
        observations = np.concatenate([observations, recorded_observations])
    copy, copy_sidecar = copied(policy, content, scheme, observations)
    if is_foreign and target.read_bytes() != copy:
        raise _other_file(target, scheme, "a file without a sidecar")
    if former is not None and former.sha256 == copy_sidecar.sha256:
        write_bytes(target, copy)
        return target
    write_artifact(target, copy, replace(copy_sidecar, check=made_from | copy_sidecar.check))
    return target


def export(workspace: Workspace, run: Run, scheme: Scheme) -> None:
    """Make a scheme of a run whose training is not here, of its float flatbuffer.

    A QuarlError where that is not here, or the scheme needs the training.
    """
    quantize(require_source(workspace, run, scheme), scheme)


def require_source(workspace: Workspace, run: Run, scheme: Scheme) -> Path:
    """Return the float flatbuffer that a scheme of a run is made of; a QuarlError if it lacks."""
    if found := sources(workspace.artifact(run.run_id, scheme.name)):
        return found[0]
    if not run.adopted:
        raise QuarlError(
            f"{scheme.name} is made by a training, or of a float file, which is not here; make it "
            f"elsewhere ({run.commands(scheme.name)}), or delete "
            f"{workspace.artifact_dir(run.run_id)} and train here. Received: run={run.run_id!r}"
        )
    raise QuarlError(
        f"The {REFERENCE} of an adopted run is the file it was adopted from; adopt it "
        f"again ({workspace.command(run.command('adopt'))}). "
        f"Received: {workspace.artifact(run.run_id, REFERENCE)} missing or changed"
    )


def _other_file(path: Path, scheme: Scheme, received: str) -> UsageError:
    return UsageError(
        f"The copy would replace {path}, which is not {scheme.name} made from the same float file "
        f"and observations; move it and its .json away. Received: {received}"
    )


def _made_from(sources: dict[str, Any]) -> str:
    observations = " and recorded observations" if "recorded_sha256" in sources else ""
    return f"made from {sources.get('source', REFERENCE)}{observations}"


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
