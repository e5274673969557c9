"""Export a trained network to flatbuffers, one a scheme, each checked against its network.

A flatbuffer has one signature, observation to head, for one observation at a time, with the
normaliser inside. What is quantised after training is made of the fp32 flatbuffer (`export.ptq`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quarl_tf import agents, environments, networks, presets
from quarl_tf.environments import EnvSpec
from quarl_tf.export import check, int4, integer, ptq
from quarl_tf.export.converter import converted, of_function
from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Weights
from quarl_tf.quantization import qat, quantizing
from quarl_tf.quantization.ptq import half_weights, quantize_weights
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import CALIBRATED, REFERENCE, Run, Scheme
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, write_artifact


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
        return of_function(self.network(weights), spec.observation_shape, spec.observation_dtype)


def load(workspace: Workspace, run_id: str) -> TrainedNetwork:
    """Load a finished training; a QuarlError where it is not there, or its files were changed."""
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


def export(workspace: Workspace, run_id: str, schemes: Sequence[str], update: Update) -> None:
    """Export a run in possible schemes; a QuarlError where a file is not what its network is."""
    trained = load(workspace, run_id)
    for done, scheme in enumerate(schemes):
        update(done, len(schemes), scheme)
        _export_one(trained, Scheme.parse(scheme), workspace.artifact(run_id, scheme))
    update(len(schemes), len(schemes), "")


def _export_one(trained: TrainedNetwork, scheme: Scheme, path: Path) -> None:
    usual = _aware if scheme.aware else _calibrated if scheme.calibrated else _simulated
    convert = _CONVERTERS.get(scheme.name, usual)
    content, expected, choice = convert(trained, scheme)
    sidecar = _describe(trained, scheme, content)
    found = check.compare(
        Policy(content, sidecar),
        expected,
        trained.observations,
        aware=scheme.aware,
    )
    write_artifact(path, content, replace(sidecar, check={**found, **choice}))


def _describe(trained: TrainedNetwork, scheme: Scheme, content: bytes) -> Sidecar:
    record = trained.record
    return Sidecar(
        run=record.run,
        run_id=record.run_id,
        env_id=trained.run.env_id,
        scheme=scheme.name,
        native=scheme.native,
        head=_head(trained, scheme),
        action_std=_action_std(trained),
        **trained.spec.facts,
        network_sha256=record.network_sha256,
        calibration_sha256=record.calibration_sha256 if scheme.calibrated else None,
        preset=record.preset,
        trained_commits=record.commits,
        trained_on=record.processors,
        **ptq.described(content),
    )


def _head(trained: TrainedNetwork, scheme: Scheme) -> str:
    kind = agents.head(trained.run.algo, trained.spec)
    # Centred, or without the value of a dueling network, they are no longer values of states.
    without_value = scheme.aware and trained.record.preset.get("dueling")
    relative = scheme.name in CALIBRATED or without_value
    return "advantages" if kind == "q_values" and relative else kind


def _action_std(trained: TrainedNetwork) -> list[float] | None:
    logarithm = trained.weights.get("action/log_deviation:0")
    return None if logarithm is None else np.exp(logarithm).tolist()


class Converted(NamedTuple):
    """A flatbuffer, the network that it should compute, and how it was chosen, if it was."""

    content: bytes
    expected: keras.Model
    choice: Mapping[str, Any] = {}


def _fp32(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    del scheme
    content = converted(trained.converter(trained.weights))
    return Converted(content, trained.network(trained.weights))


def _simulated(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    if scheme.single_layers:  # Of a flatbuffer's layers the names are not known.
        weights = quantize_weights(trained.weights, scheme.recipe)
        return Converted(converted(trained.converter(weights)), trained.network(weights))
    content = _fp32(trained, scheme).content
    stored = _as_stored(trained, lambda weights: quantize_weights(weights, scheme.recipe))
    return Converted(ptq.quantized(content, scheme), trained.network(stored))


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
    return Converted(converted(converter), trained.network(halves))


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
    return Converted(converted(converter), trained.network(trained.weights))


def _calibrated(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    """Quantise with the ranges that the calibration observations reach."""
    spec = trained.spec
    expected = networks.acting(trained.network(trained.weights), spec)
    content = converted(of_function(expected, spec.observation_shape, spec.observation_dtype))
    policy = Policy(content, _describe(trained, Scheme.parse(REFERENCE), content))
    made, choice = ptq.calibrated(content, scheme, trained.observations, policy)
    return Converted(made, expected, choice)


def _aware(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    """Convert a quantisation-aware network as it trained; ranges and codes are its own."""
    network, spec = trained.network(trained.weights), trained.spec
    call = qat.exported(network, rounded=not scheme.native)
    content = converted(of_function(call, spec.observation_shape, spec.observation_dtype))
    if scheme.native and trained.run.quantization is not None:
        content = integer.trained(content, trained.run.quantization.recipe, qat.grids(network))
    return Converted(content, networks.acting(trained.network(trained.weights), spec))


def _packed(trained: TrainedNetwork, scheme: Scheme) -> Converted:
    """Convert as a simulated scheme, and store the kernels as integers."""
    content, expected, _ = _aware(trained, replace(scheme, native=False))
    return Converted(int4.pack(content, qat.kernel_grids(expected)), expected)


_CONVERTERS: Mapping[str, Callable[[TrainedNetwork, Scheme], Converted]] = {
    "fp32": _fp32,
    "fp16": _fp16,
    "dynamic_int8": _dynamic_int8,
    "qat_int4": _packed,
}
