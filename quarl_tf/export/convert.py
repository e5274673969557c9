"""Export a trained network to flatbuffers, one a scheme, each checked against its network.

Only this module knows the TFLite converter. A flatbuffer has one signature, observation to head,
for one observation at a time, with the normaliser inside.

`int8` is integer from the first layer to the head. The normaliser in front of it stays in float:
one int8 scale for a raw observation would drown its small features (CartPole's pole angle is ±0.2
beside velocities of ±3), after it all features fill the same ±5. The head of a discrete policy is
centred first (`ptq.centre_head`), and of a dueling one only the advantages are exported. Images go
in as the bytes they are; there all is integer.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import agents, environments, networks, presets
from quarl_tf.environments import EnvSpec
from quarl_tf.export import int4, ptq
from quarl_tf.foundation import native_output, provenance
from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.build import Weights
from quarl_tf.quantization import qat, quantizing
from quarl_tf.quantization.ptq import centre_head, half_weights, quantize_weights
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Run, Scheme, require_possible
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.state import not_exported
from quarl_tf.store.workspace import Workspace, write_artifact

#: Largest difference between flatbuffer and network, relative to the largest head value (at least
#: 1): what float32 sums in another order may differ by. Sums over the 28224 bytes of four frames
#: differ by 2e-5 on some processors.
FLOAT_TOLERANCE = 5e-5

#: Observations, evenly spread, that the check compares heads on: so many or all if there are fewer,
#: up to twice as many where more are no multiple of it.
_CHECKED = 200

#: Of a quantisation-aware training: by how many steps each of the head's values may be off on
#: average, an observation counting for one at most, where a file spells the quantisers out and
#: where kernels round biases and sums to integers. Rounding a value to its grid changes it by 0.25.
_STEPS_APART, _STEPS_APART_NATIVE = 0.02, 0.25


@dataclass(frozen=True)
class TrainedNetwork:
    """What a finished training left to be exported."""

    record: TrainingRecord
    run: Run
    spec: EnvSpec
    build: networks.NetworkFactory
    weights: Weights
    #: Greedy rollout observations [n, ...] to calibrate and check with.
    observations: npt.NDArray[Any]

    def network(self, weights: Weights) -> keras.Model:
        """Build the network with given weights."""
        network = self.build()
        networks.set_weights(network, weights)
        return network

    def converter(self, weights: Weights) -> Any:
        """Return a converter of the network with given weights."""
        spec = self.spec
        return _converter(self.network(weights), spec.observation_shape, spec.observation_dtype)


def load(workspace: Workspace, run_id: str) -> TrainedNetwork:
    """Load a finished training.

    Raises:
        QuarlError: The run is not there, not finished, or its files were changed.
    """
    folder = workspace.run_dir(run_id)
    record = TrainingRecord.load(folder / "training.json")
    record.verify(folder)
    run = Run.from_dict(record.run)
    spec = environments.env_spec(run.env_id)
    preset = replace(presets.restore(run.algo, record.preset), precision="float32")
    factory = agents.network_factory(run.algo, spec, preset, run.seed)
    return TrainedNetwork(
        record,
        run,
        spec,
        lambda: quantizing(run.quantization)(factory()),
        networks.load_weights(folder / "network.npz"),
        networks.load_weights(folder / "calibration.npz")["observations"],
    )


def export(
    workspace: Workspace, run_id: str, schemes: Sequence[Scheme], update: Update
) -> list[Path]:
    """Export a run in several schemes; what exists and is whole is left as it is.

    Returns:
        The flatbuffers, in the order of `schemes`.

    Raises:
        QuarlError: The run is not finished, the converter failed, or a flatbuffer does not compute
            what its network does.
    """
    missing = not_exported(workspace, run_id, [scheme.name for scheme in schemes])
    trained = load(workspace, run_id)
    require_possible(trained.run, schemes)
    for i, scheme in enumerate(schemes):
        update(i, len(schemes), scheme.name)
        if scheme.name in missing:
            _export_one(trained, scheme, workspace.artifact(run_id, scheme.name))
    update(len(schemes), len(schemes), "")
    return [workspace.artifact(run_id, scheme.name) for scheme in schemes]


def _export_one(trained: TrainedNetwork, scheme: Scheme, path: Path) -> None:
    usual = _aware if scheme.aware else _simulated
    convert = _CONVERTERS.get(scheme.name, usual)
    content, expected = convert(trained, scheme)
    sidecar = _describe(trained, scheme, content)
    checked = replace(sidecar, check=_check(trained, Policy(content, sidecar), expected))
    write_artifact(path, content, checked)


def _describe(trained: TrainedNetwork, scheme: Scheme, content: bytes) -> Sidecar:
    audit = flatbuffer.audit(content)
    if scheme.name in ("int8", "qat_int8"):
        _require_int8(audit, trained.spec.observation_dtype)
    record, spec = trained.record, trained.spec
    return Sidecar(
        run=record.run,
        run_id=record.run_id,
        env_id=trained.run.env_id,
        scheme=scheme.name,
        native=scheme.native,
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        head=_head(trained, scheme),
        num_actions=spec.num_actions,
        action_low=_listed(spec.action_low),
        action_high=_listed(spec.action_high),
        action_std=_action_std(trained),
        observation_shape=list(spec.observation_shape),
        observation_dtype=spec.observation_dtype,
        tensor_dtypes=audit.tensor_dtypes,
        weight_dtypes=audit.weight_dtypes,
        operators=audit.operators,
        check={},
        network_sha256=record.network_sha256,
        calibration_sha256=record.calibration_sha256 if scheme.name == "int8" else None,
        preset=record.preset,
        trained_commits=record.commits,
        trained_on=record.processors,
        versions=provenance.package_versions(),
        commit=provenance.source_commit(),
        sources=provenance.sources(),
    )


def _head(trained: TrainedNetwork, scheme: Scheme) -> str:
    kind = agents.head(trained.run.algo, trained.spec)
    # Centred, or without the value of a dueling network, they are no longer values of states.
    without_value = scheme.aware and trained.record.preset.get("dueling")
    return "advantages" if kind == "q_values" and (scheme.name == "int8" or without_value) else kind


def _action_std(trained: TrainedNetwork) -> list[float] | None:
    logarithm = trained.weights.get("action/log_deviation:0")
    return None if logarithm is None else np.exp(logarithm).tolist()


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)


def _check(trained: TrainedNetwork, policy: Policy, expected: keras.Model) -> dict[str, Any]:
    """Compare the flatbuffer's heads with those of the network it should equal.

    Raises:
        QuarlError: They differ by more than rounding though the scheme computes what it does.
    """
    seen = trained.observations[:: max(1, len(trained.observations) // _CHECKED)]
    # Not by XLA, which rounds a weight that training has left right between two codes to the other
    # one: it multiplies by the inverse of a step and adds in one operation.
    wanted = expected(seen, training=False).numpy()
    heads = np.stack([policy.head(observation) for observation in seen])
    difference = float(np.abs(heads - wanted).max())
    scale = max(1.0, float(np.abs(wanted).max()))
    name = policy.sidecar.scheme
    exact = name not in ("dynamic_int8", "int8")
    check: dict[str, Any] = {
        "observations": len(seen),
        "max_abs_difference": difference,
        "max_abs_head": scale,
    }
    if trained.run.quantization is None:
        check["tolerance"] = FLOAT_TOLERANCE * scale if exact else None
        same = not exact or difference <= check["tolerance"]
    else:
        # Sums in another order, or in integers with biases rounded to theirs, may take the other
        # one of two neighbouring codes. In a hidden layer that may be many steps of a steep head,
        # so that each counts for one at most.
        steps = np.abs(heads - wanted) / qat.head_step(expected)
        check["mean_steps_apart"] = float(np.minimum(steps, 1.0).mean(axis=0).max())
        most = _STEPS_APART_NATIVE if name == "qat_int8" else _STEPS_APART
        same = check["mean_steps_apart"] <= most
    if not same:
        raise QuarlError(
            f"The {name} flatbuffer does not compute what its network does; nothing was written: "
            "export where it was trained, or report it. Received: " + _found(check)
        )
    if trained.spec.num_actions is not None:
        agreed = heads.argmax(axis=1) == wanted.argmax(axis=1)
        check["action_agreement"] = float(agreed.mean())
    return check


def _found(check: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in check.items())


def _require_int8(audit: flatbuffer.FlatbufferAudit, observation_dtype: str) -> None:
    """Refuse an int8 flatbuffer with a layer left in float, or another input than observations."""
    layers = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D")
    left = [op for op in audit.operators if op.startswith(layers) and not op.endswith(" int8")]
    if left:
        raise QuarlError(f"The converter left layers of the int8 flatbuffer in float: {left}")
    # Floats meet the normaliser first, which stays in float.
    if any(tensor.dtype != observation_dtype for tensor in audit.inputs):
        raise QuarlError(
            f"The int8 flatbuffer should take {observation_dtype} observations as they are. "
            f"Received: operators={audit.operators}"
        )


Converted = tuple[bytes, keras.Model]


def _fp32(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    return _convert(trained.converter(trained.weights)), trained.network(trained.weights)


def _simulated(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    content, _ = _fp32(trained, scheme)
    stored = _as_stored(trained, lambda weights: quantize_weights(weights, scheme.recipe))
    return ptq.quantized(content, scheme), trained.network(stored)


def _fp16(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    converter = trained.converter(trained.weights)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_types = [tf.float16]
    try:
        halves = _as_stored(trained, half_weights)
    except ValueError as error:
        raise QuarlError(
            "fp16 holds numbers up to 65504, and weights or a normaliser of this network are "
            f"larger; name the schemes without it (--schemes fp32,int8). Received: {error}"
        ) from error
    return _convert(converter), trained.network(halves)


def _as_stored(trained: TrainedNetwork, change: Callable[[Weights], Weights]) -> Weights:
    """Change weights as they lie in a flatbuffer: bytes are scaled within the first kernel."""
    first, scale = "convolution_0/kernel:0", np.float32(255)
    if trained.spec.observation_dtype != "uint8" or first not in trained.weights:
        return change(trained.weights)
    changed = change({**trained.weights, first: trained.weights[first] / scale})
    return {**changed, first: changed[first] * scale}


def _dynamic_int8(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    converter = trained.converter(trained.weights)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    return _convert(converter), trained.network(trained.weights)


def _int8(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    """Quantise with the ranges that the calibration observations reach."""
    discrete = trained.spec.num_actions is not None
    network = trained.network(centre_head(trained.weights) if discrete else trained.weights)
    watched = qat.watched(network, scheme.recipe, skip=(keras.layers.LayerNormalization,))
    qat.watch(watched, trained.observations)
    quantized = qat.quantized(watched)
    qat.freeze(quantized)
    content = _convert(_converter_of_quantized(trained, quantized, scheme))
    expected = trained.network(centre_head(trained.weights) if discrete else trained.weights)
    return content, networks.action_head(expected) if discrete else expected


def _aware(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    """Convert a quantisation-aware network as it trained; ranges and codes are its own."""
    network = trained.network(trained.weights)
    content = _convert(_converter_of_quantized(trained, network, scheme))
    expected = trained.network(trained.weights)
    discrete = trained.spec.num_actions is not None
    return content, networks.action_head(expected) if discrete else expected


def _packed(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    """Convert as a simulated scheme, and store the kernels as integers."""
    content, expected = _aware(trained, replace(scheme, native=False))
    return int4.pack(content, qat.kernel_grids(expected)), expected


def _converter_of_quantized(trained: TrainedNetwork, network: keras.Model, scheme: Scheme) -> Any:
    """Return a converter of a network whose ranges are frozen."""
    spec = trained.spec
    of_bytes = scheme.native and spec.observation_dtype == "uint8"
    dtype = "float32" if of_bytes else spec.observation_dtype
    call = qat.exported(network, native=scheme.native)
    converter = _converter(call, spec.observation_shape, dtype)
    if scheme.native:
        # Without observations to calibrate with, so that only what has a range becomes integer:
        # what scales observations and actions stays in float.
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if of_bytes:
        converter.inference_input_type = tf.uint8
    return converter


_CONVERTERS: Mapping[str, Callable[[TrainedNetwork, Scheme], Converted]] = {
    "fp32": _fp32,
    "fp16": _fp16,
    "dynamic_int8": _dynamic_int8,
    "int8": _int8,
    "qat_int4": _packed,
}


def _converter(network: Callable[[Any], Any], shape: tuple[int, ...], dtype: str) -> Any:
    signature = [tf.TensorSpec((1, *shape), dtype, name="observation")]
    serve = tf.function(lambda observation: {"head": network(observation)}, signature)
    variables = network if isinstance(network, keras.Model) else tf.Module()
    return tf.lite.TFLiteConverter.from_concrete_functions(
        [serve.get_concrete_function()], variables
    )


def _convert(converter: Any) -> bytes:
    with native_output.caught() as said, warnings.catch_warnings():
        # It takes whatever has ranges for a network with integer inputs; ours are floats, or bytes.
        warnings.filterwarnings("ignore", "Statistics for quantized inputs", UserWarning)
        try:
            content: bytes = converter.convert()
        except Exception as error:
            raise QuarlError(
                f"The TFLite converter failed: {one_line(error)[:300]} {said()[-300:]}"
            ) from error
    return content
