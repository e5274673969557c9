"""Export a trained network to flatbuffers, one a scheme, each checked against its network.

Only this module knows the TFLite converter. A flatbuffer has one signature, observation to head,
for one observation at a time, with the normaliser inside.

`int8` is integer from the first layer to the head. The normaliser in front of it stays in float:
one int8 scale for a raw observation would drown its small features (CartPole's pole angle is ±0.2
beside velocities of ±3), after it all features fill the same ±5. The head of a discrete policy is
centred first (`ptq.centre_head`).
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

from quarl_tf import (
    agents,
    environments,
    flatbuffer,
    native_output,
    networks,
    presets,
    records,
)
from quarl_tf.display import Update
from quarl_tf.environments import EnvSpec
from quarl_tf.errors import QuarlError
from quarl_tf.keras import keras, tf
from quarl_tf.networks import Weights
from quarl_tf.policies import Policy
from quarl_tf.quantization.ptq import centre_head, half_weights, quantize_weights
from quarl_tf.records import Sidecar, TrainingRecord, Workspace
from quarl_tf.spec import Run, Scheme

#: Largest difference between flatbuffer and network, relative to the largest head value (at least
#: 1): what float32 sums in another order may differ by.
FLOAT_TOLERANCE = 1e-5

#: Observations that the check compares heads on.
_CHECKED = 200

#: The normaliser's operations, as the converter names their results.
_NORMALIZER_NODES = [
    f"policy/normalizer/{name}" for name in ("sub", "mul", "clip_by_value/Minimum", "clip_by_value")
]


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


def load(workspace: Workspace, run_id: str) -> TrainedNetwork:
    """Load a finished training.

    Raises:
        QuarlError: The run is not there, not finished, or its files were changed.
    """
    folder = workspace.run_dir(run_id)
    record = TrainingRecord.load(folder / "training.json")
    record.verify(folder)
    run = Run(**record.run)
    spec = environments.env_spec(run.env_id)
    preset = presets.restore(run.algo, record.preset)
    return TrainedNetwork(
        record,
        run,
        spec,
        agents.network_factory(run.algo, spec, preset, run.seed),
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
    missing = records.not_exported(workspace, run_id, [scheme.name for scheme in schemes])
    trained = load(workspace, run_id)
    for i, scheme in enumerate(schemes):
        update(i, len(schemes), scheme.name)
        if scheme.name in missing:
            _export_one(trained, scheme, workspace.artifact(run_id, scheme.name))
    records.copy_curve(workspace, run_id)
    update(len(schemes), len(schemes), "")
    return [workspace.artifact(run_id, scheme.name) for scheme in schemes]


def _export_one(trained: TrainedNetwork, scheme: Scheme, path: Path) -> None:
    content, expected = _CONVERTERS.get(scheme.name, _simulated)(trained, scheme)
    sidecar = _describe(trained, scheme, content)
    checked = replace(sidecar, check=_check(trained, Policy(content, sidecar), expected))
    records.write_artifact(path, content, checked)


def _describe(trained: TrainedNetwork, scheme: Scheme, content: bytes) -> Sidecar:
    audit = flatbuffer.audit(content)
    if scheme.name == "int8":
        _require_int8(audit)
    record, spec = trained.record, trained.spec
    return Sidecar(
        run=record.run,
        run_id=record.run_id,
        env_id=trained.run.env_id,
        scheme=scheme.name,
        native=scheme.native,
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        head=_head(trained.run.algo, scheme),
        num_actions=spec.num_actions,
        action_low=_listed(spec.action_low),
        action_high=_listed(spec.action_high),
        observation_shape=list(spec.observation_shape),
        observation_dtype=spec.observation_dtype,
        tensor_dtypes=audit.tensor_dtypes,
        weight_dtypes=audit.weight_dtypes,
        operators=audit.operators,
        check={},
        network_sha256=record.network_sha256,
        calibration_sha256=record.calibration_sha256 if scheme.name == "int8" else None,
        preset=record.preset,
        versions=records.package_versions(),
        commit=records.source_commit(),
    )


def _head(algo: str, scheme: Scheme) -> str:
    kind = agents.head(algo)
    # Centred, Q-values are no longer values of states; logits mean what they did.
    return "advantages" if kind == "q_values" and scheme.name == "int8" else kind


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)


def _check(trained: TrainedNetwork, policy: Policy, expected: Weights) -> dict[str, Any]:
    """Compare the flatbuffer's heads with those of the network it should equal.

    Raises:
        QuarlError: They differ by more than float rounding though the scheme computes in float.
    """
    seen = trained.observations[:: max(1, len(trained.observations) // _CHECKED)]
    wanted = networks.forward(trained.network(expected))(seen)
    heads = np.stack([policy.head(observation) for observation in seen])
    difference = float(np.abs(heads - wanted).max())
    scale = max(1.0, float(np.abs(wanted).max()))
    name = policy.sidecar.scheme
    exact = name not in ("dynamic_int8", "int8")
    if exact and not difference <= FLOAT_TOLERANCE * scale:
        raise QuarlError(
            f"The {name} flatbuffer does not compute what its network does; nothing was written. "
            f"Received: largest difference {difference:g} at heads up to {scale:g}"
        )
    check: dict[str, Any] = {
        "observations": len(seen),
        "max_abs_difference": difference,
        "max_abs_head": scale,
        "tolerance": FLOAT_TOLERANCE * scale if exact else None,
    }
    if trained.spec.num_actions is not None:
        same = heads.argmax(axis=1) == wanted.argmax(axis=1)
        check["action_agreement"] = float(same.mean())
    return check


def _require_int8(audit: flatbuffer.FlatbufferAudit) -> None:
    """Refuse an int8 flatbuffer with a layer left in float, or the normaliser not left there."""
    layers = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D")
    left = [op for op in audit.operators if op.startswith(layers) and not op.endswith(" int8")]
    if left:
        raise QuarlError(f"The converter left layers of the int8 flatbuffer in float: {left}")
    if any(tensor.dtype != "float32" for tensor in audit.inputs):
        raise QuarlError(
            "The converter quantised the normaliser of the int8 flatbuffer as well. "
            f"Received: operators={audit.operators}"
        )


Converted = tuple[bytes, Weights]


def _fp32(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    return _convert(_converter(trained, trained.weights)), trained.weights


def _simulated(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    quantized = quantize_weights(trained.weights, scheme.weight_bits, scheme.mode or "code")
    return _convert(_converter(trained, quantized)), quantized


def _fp16(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    converter = _converter(trained, trained.weights)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_types = [tf.float16]
    return _convert(converter), half_weights(trained.weights)


def _dynamic_int8(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    converter = _converter(trained, trained.weights)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    return _convert(converter), trained.weights


def _int8(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    discrete = trained.spec.num_actions is not None
    weights = centre_head(trained.weights) if discrete else trained.weights
    converter = _converter(trained, weights)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([row[None]] for row in trained.observations)
    # The float operators are for the normaliser; `_require_int8` sees to the layers.
    converter.target_spec.supported_ops = [
        tf.lite.OpsSet.TFLITE_BUILTINS_INT8,
        tf.lite.OpsSet.TFLITE_BUILTINS,
    ]
    # The converter itself has no way to keep an operator in float; its debugger's list has.
    options = tf.lite.experimental.QuantizationDebugOptions(denylisted_nodes=_NORMALIZER_NODES)

    def convert() -> bytes:
        debugger = tf.lite.experimental.QuantizationDebugger(
            converter=converter,
            debug_dataset=converter.representative_dataset,
            debug_options=options,
        )
        content: bytes = debugger.get_nondebug_quantized_model()
        return content

    return _quietly(convert), weights


_CONVERTERS: Mapping[str, Callable[[TrainedNetwork, Scheme], Converted]] = {
    "fp32": _fp32,
    "fp16": _fp16,
    "dynamic_int8": _dynamic_int8,
    "int8": _int8,
}


def _converter(trained: TrainedNetwork, weights: Weights) -> Any:
    network = trained.network(weights)
    shape = (1, *trained.spec.observation_shape)
    signature = [tf.TensorSpec(shape, trained.spec.observation_dtype, name="observation")]
    serve = tf.function(lambda observation: {"head": network(observation)}, signature)
    return tf.lite.TFLiteConverter.from_concrete_functions([serve.get_concrete_function()], network)


def _convert(converter: Any) -> bytes:
    content: bytes = _quietly(converter.convert)
    return content


def _quietly(convert: Callable[[], bytes]) -> bytes:
    with native_output.caught() as said, warnings.catch_warnings():
        # The converter's debugger runs TensorFlow's own interpreter, which says it will go.
        warnings.filterwarnings("ignore", ".*tf.lite.Interpreter is deprecated", UserWarning)
        try:
            return convert()
        except Exception as error:
            raise QuarlError(
                f"The TFLite converter failed: {str(error).splitlines()[0]} {said()[-300:]}"
            ) from error
