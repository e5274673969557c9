"""Export a trained network to flatbuffers, one per scheme, each checked against its network.

A flatbuffer has one signature, observation to head, for one observation at a time, with the
normaliser inside. Schemes after training start from the fp32 flatbuffer (`export.ptq`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quarl_tf import agents, environments, networks, presets
from quarl_tf.environments import EnvSpec
from quarl_tf.export import int4, integer, ptq
from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.graph import with_scaled_head
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Weights
from quarl_tf.networks.layers import ActionScaling, Floats
from quarl_tf.quantization import qat, quantizing
from quarl_tf.quantization.grid import fake_quantize, round_to_half
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import REFERENCE, Recipe, Run, Scheme, actions, require_layers
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, write_artifact

#: Largest difference between flatbuffer and network, relative to the largest head value (at least
#: 1): float32 sums in another order. Sums over the 28224 bytes of four frames differ by 2e-5 on
#: some processors.
_FLOAT_TOLERANCE = 5e-5

#: Heads are compared on about this many evenly spread observations, or on all of fewer.
_SAMPLE = 200

_FULLY_CONNECTED_RANK = 2

#: How the name of a kernel ends, behind that of its layer.
_KERNEL = "/kernel:0"

#: Largest mean error of a head's value after a quantisation-aware training, in steps, of at most
#: one per observation: in a file with explicit quantisers, and in integer kernels, which round
#: biases and sums. Rounding a value to its grid changes it by 0.25 on average.
_STEPS_APART, _STEPS_APART_NATIVE = 0.02, 0.25


@dataclass(frozen=True)
class TrainedNetwork:
    """A finished training."""

    record: TrainingRecord
    run: Run
    spec: EnvSpec
    build: Callable[[], keras.Model]
    weights: Weights
    #: Greedy rollout observations [n, ...] to calibrate and check with.
    observations: npt.NDArray[Any]

    def network(self, weights: Weights) -> keras.Model:
        """Build the network with given weights."""
        # Keras numbers nameless layers within a process: begun anew, files have the same names.
        keras.backend.reset_uids()
        network = self.build()
        networks.set_weights(network, weights)
        return network

    def convert(self, unscaled: Callable[[Any], Any], **settings: Any) -> bytes:
        """Convert a policy without the scaling of its action, which is added in float32.

        The converter would fold it into the head's kernel, which is then on no grid of its own.
        `settings` are the converter's.
        """
        converter = of_function(unscaled, self.spec.observation_shape, self.spec.observation_dtype)
        for name, value in settings.items():
            setattr(converter, name, value)
        content = converted(converter)
        if self.spec.num_actions is not None:
            return content
        scaling = ActionScaling(*self.spec.bounds, stochastic=False, name="action")
        if scaling.is_identity:
            return content
        return with_scaled_head(content, scaling.half, scaling.middle)


def load(workspace: Workspace, run: Run) -> TrainedNetwork:
    """Load a finished training; a QuarlError where it is missing, or its files were changed."""
    folder = workspace.run_dir(run.run_id)
    record = TrainingRecord.load(folder / "training.json")
    record.verify(folder)
    spec = environments.env_spec(run.env_id)
    preset = replace(presets.restore(run.algo, record.preset), precision="float32")
    prepare = quantizing(run.quantization)
    return TrainedNetwork(
        record,
        run,
        spec,
        lambda: prepare(agents.build_network(run.algo, spec, preset, run.seed)),
        networks.load_weights(folder / "network.npz"),
        networks.load_weights(folder / "calibration.npz")["observations"],
    )


def exporter(workspace: Workspace, run: Run) -> Callable[[Scheme], None]:
    """Return a function that exports a trained run in a possible scheme.

    It raises a QuarlError where the flatbuffer differs from its network.
    """
    training = load(workspace, run)
    return lambda scheme: _export(training, scheme, workspace.artifact(run.run_id, scheme.name))


def _export(training: TrainedNetwork, scheme: Scheme, path: Path) -> None:
    if scheme.aware:
        convert = _convert_aware
    elif scheme.calibrated:
        convert = _convert_calibrated
    else:
        convert = _convert_plain if scheme.native else _convert_simulated
    content, expected, choice = convert(training, scheme)
    sidecar = _describe(training, scheme, content)
    comparison = _compare(Policy(content, sidecar), expected, training.observations)
    write_artifact(path, content, replace(sidecar, check={**comparison, **choice}))


def _describe(training: TrainedNetwork, scheme: Scheme, content: bytes) -> Sidecar:
    record, deviation = training.record, training.weights.get("action/log_deviation:0")
    head = agents.head(training.run.algo, training.spec)
    # Centred, or without the value of a dueling network, they are no longer values of states.
    without_value = record.preset.get("dueling") and (scheme.aware or scheme.calibrated)
    if head == "q_values" and (scheme.centred or without_value):
        head = "advantages"
    return Sidecar(
        run=record.run,
        run_id=record.run_id,
        env_id=training.run.env_id,
        scheme=scheme.name,
        native=scheme.native,
        head=head,
        action_std=None if deviation is None else np.exp(deviation).tolist(),
        **training.spec.facts,
        network_sha256=record.network_sha256,
        calibration_sha256=record.calibration_sha256 if scheme.calibrated else None,
        preset=record.preset,
        trained_commits=record.commits,
        trained_on=record.processors,
        **ptq.described(content),
    )


class _Conversion(NamedTuple):
    """A flatbuffer, the network that it should compute, and how its recipe was chosen."""

    content: bytes
    expected: keras.Model
    choice: Mapping[str, Any] = {}


def _convert_plain(training: TrainedNetwork, scheme: Scheme) -> _Conversion:
    """Convert to fp32, fp16 or dynamic_int8, which need the converter alone."""
    settings: dict[str, Any] = {}
    if scheme.name != REFERENCE:
        settings["optimizations"] = [tf.lite.Optimize.DEFAULT]
    if scheme.name == "fp16":
        settings["target_spec"] = tf.lite.TargetSpec(supported_types=[tf.float16])
    network, weights = training.network(training.weights), training.weights
    content = training.convert(networks.unscaled(network), **settings)
    if scheme.name == "fp16":
        try:
            weights = _as_stored(training, content, half_weights)
        except ValueError as error:
            raise QuarlError(
                "fp16 holds numbers up to 65504, and weights or a normaliser of this network are "
                f"larger; name the schemes without it (--schemes fp32,int8). Received: {error}"
            ) from error
    return _Conversion(content, training.network(weights))


def _convert_simulated(training: TrainedNetwork, scheme: Scheme) -> _Conversion:
    def change(weights: Weights) -> Weights:
        return quantize_weights(weights, scheme.recipe)

    if scheme.single_layers:  # A flatbuffer does not have the names of its layers.
        network = training.network(change(training.weights))
        return _Conversion(training.convert(networks.unscaled(network)), network)
    content = _convert_plain(training, Scheme.parse(REFERENCE)).content
    expected = training.network(_as_stored(training, content, change))
    return _Conversion(ptq.quantized(content, scheme), expected)


def quantize_weights(weights: Weights, recipe: Recipe) -> Weights:
    """Round every kernel to its grid; biases and the normaliser do not change.

    As in the papers, a fully-connected kernel has one grid, a convolution one per output channel
    (QuaRL, Krishnan et al., arXiv 1910.01055, section 3).
    """
    layers = {name: name.removesuffix(_KERNEL) for name in weights if name.endswith(_KERNEL)}
    require_layers(recipe, layers.values())

    def quantize(name: str, kernel: Floats) -> Floats:
        form = recipe.of(layers[name]).weights if name in layers else None
        if form is None:
            return kernel
        one_grid = kernel.ndim == _FULLY_CONNECTED_RANK and not form.per_channel
        return fake_quantize(kernel, form, None if one_grid else -1)

    return {name: quantize(name, value) for name, value in weights.items()}


def half_weights(weights: Weights) -> Weights:
    """Round every variable to IEEE half, as fp16 flatbuffers store them."""
    return {name: round_to_half(value) for name, value in weights.items()}


def _as_stored(
    training: TrainedNetwork, content: bytes, change: Callable[[Weights], Weights]
) -> Weights:
    """Change weights as a flatbuffer has them: its first kernel may scale bytes."""
    if not flatbuffer.kernel_scales_bytes(flatbuffer.parsed(content)[0]):
        return change(training.weights)
    first = next(name for name in training.weights if name.endswith(_KERNEL))
    scale = np.float32(255)
    new_weights = change({**training.weights, first: training.weights[first] / scale})
    return {**new_weights, first: new_weights[first] * scale}


def _convert_calibrated(training: TrainedNetwork, scheme: Scheme) -> _Conversion:
    """Quantise with the ranges over the calibration observations."""
    expected = networks.acting(training.network(training.weights))
    content = training.convert(networks.unscaled(expected))
    policy = Policy(content, _describe(training, Scheme.parse(REFERENCE), content))
    content, choice = ptq.calibrated(content, scheme, training.observations, policy)
    return _Conversion(content, expected, choice)


def _convert_aware(training: TrainedNetwork, scheme: Scheme) -> _Conversion:
    """Convert a quantisation-aware network with the ranges and codes of its training."""
    network, quantization = training.network(training.weights), training.run.quantization
    recipe = quantization.recipe if quantization and scheme.name == "qat_int8" else None
    content = training.convert(qat.exported(network, rounded=recipe is None))
    expected = networks.acting(training.network(training.weights))
    if recipe is not None:
        content = integer.trained(content, recipe, qat.grids(network))
    elif scheme.name == "qat_int4":
        content = int4.pack(content, qat.kernel_grids(expected))
    return _Conversion(content, expected)


def _compare(
    policy: Policy, expected: keras.Model, observations: npt.NDArray[Any]
) -> dict[str, Any]:
    """Compare heads with those of the network; a QuarlError where more than rounding differs."""
    sample = observations[:: max(1, len(observations) // _SAMPLE)]
    # Not compiled by XLA, which multiplies by the inverse of a step and adds in one operation: a
    # weight right between two codes is then rounded to the other one.
    expected_heads = expected(sample, training=False).numpy()
    heads = np.stack([policy.head(observation) for observation in sample])
    scheme, choices = Scheme.parse(policy.sidecar.scheme), policy.sidecar.num_actions
    if choices is not None and scheme.centred:
        # Some have no common part of all actions, which changes no choice.
        heads, expected_heads = (actions.centred(x, choices) for x in (heads, expected_heads))
    check = ptq.compared(heads, expected_heads, choices)
    if not scheme.aware:
        is_exact = scheme.name != "dynamic_int8" and not scheme.calibrated
        tolerance = _FLOAT_TOLERANCE * max(1.0, check["max_abs_head"]) if is_exact else None
        check["tolerance"] = tolerance
        is_equal = tolerance is None or check["max_abs_difference"] <= tolerance
    else:
        # Rounding may take the other one of two neighbouring codes. In a hidden layer that may be
        # many steps of a steep head, so an observation counts for at most one.
        steps = np.abs(heads - expected_heads) / qat.head_step(expected)
        check["mean_steps_apart"] = float(np.minimum(steps, 1.0).mean(axis=0).max())
        limit = _STEPS_APART_NATIVE if scheme.name == "qat_int8" else _STEPS_APART
        is_equal = check["mean_steps_apart"] <= limit
    if not is_equal:
        raise QuarlError(
            f"The {scheme.name} flatbuffer does not compute what its network does; nothing was "
            "written: export where it was trained, or report it. Received: "
            + ", ".join(f"{name}={value:g}" for name, value in check.items())
        )
    return check
