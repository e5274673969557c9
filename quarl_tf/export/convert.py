"""Export a trained network to flatbuffers, one per scheme, each checked against its network.

A flatbuffer has one signature, observation to head, for one observation at a time, with the
normaliser inside. Schemes after training are made of the fp32 flatbuffer (`export.ptq`).
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import agents, environments, networks, presets
from quarl_tf.export import int4, integer, ptq
from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.graph import with_scaled_head
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.keras import keras, require_unforked, tf
from quarl_tf.networks import Weights
from quarl_tf.networks.layers import ActionScaling
from quarl_tf.quantization import quantizing
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import REFERENCE, Run, Scheme
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, write_artifact

#: Largest difference between flatbuffer and network, relative to the largest head value (at least
#: 1): float32 sums in another order. Sums over the 28224 bytes of four frames differ by 2e-5 on
#: some processors.
_FLOAT_TOLERANCE = 5e-5

#: Heads are compared on about this many evenly spread observations, or on all of fewer.
_SAMPLE = 200

#: Largest mean error of a head's value after a quantisation-aware training, in steps, of at most
#: one per observation: in a file with explicit quantisers, and in integer kernels, which round
#: biases and sums. Rounding a value to its grid changes it by 0.25 on average.
_STEPS_APART, _STEPS_APART_NATIVE = 0.02, 0.25


class TrainedNetwork:
    """A finished training."""

    def __init__(self, workspace: Workspace, run: Run) -> None:
        """Load it; a QuarlError where it is missing, or its files were changed."""
        require_unforked()
        self._workspace, folder = workspace, workspace.run_dir(run.run_id)
        self.run, self.record = run, TrainingRecord.load(folder / "training.json")
        self.record.verify(folder)
        self.spec = environments.env_spec(run.env_id)
        self.preset = replace(presets.restore(run.algo, self.record.preset), precision="float32")
        self.weights = networks.load_weights(folder / "network.npz")
        #: Observations [n, ...] of rollouts, to calibrate and check with.
        self.observations = networks.load_weights(folder / "calibration.npz")["observations"]
        #: The fp32 flatbuffer and its network, as a whole and of the acting part alone.
        self.float32 = functools.cache(self._float32)

    def network(self, weights: Weights) -> keras.Model:
        """Build the network with given weights."""
        # Keras numbers nameless layers within a process: begun anew, files have the same names.
        keras.backend.reset_uids()
        run = self.run
        network = agents.build_network(run.algo, self.spec, self.preset, run.seed)
        network = quantizing(run.quantization)(network)
        networks.set_weights(network, weights)
        return network

    def _float32(self, *, acting: bool) -> tuple[bytes, keras.Model]:
        network = self.network(self.weights)
        network = networks.acting(network) if acting else network
        return self.convert(networks.unscaled(network), Scheme.parse(REFERENCE)), network

    def convert(self, unscaled: Callable[[Any], Any], scheme: Scheme) -> bytes:
        """Convert a policy without the scaling of its action, which is added in float32.

        The converter would fold it into the head's kernel, which is then on no grid of its own.
        """
        converter = of_function(unscaled, self.spec.observation_shape, self.spec.observation_dtype)
        if scheme.name == "dynamic_int8":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        content = converted(converter)
        if self.spec.num_actions is None:
            scaling = ActionScaling(*self.spec.bounds, stochastic=False, name="action")
            if not scaling.is_identity:
                return with_scaled_head(content, scaling.half, scaling.middle)
        return content

    def export(self, scheme: Scheme) -> None:
        """Export it in a possible scheme; a QuarlError where a flatbuffer is not its network."""
        if scheme.aware:
            content, expected = _convert_aware(self, scheme)
        else:  # fp32, which others are made of.
            content, expected = self.float32(acting=scheme.calibrated)
        if scheme.name == "dynamic_int8":
            content = self.convert(networks.unscaled(expected), scheme)
        policy = Policy(content, _describe(self, scheme, content))
        sidecar = replace(policy.sidecar, check=_compare(policy, expected, self.observations))
        if scheme.post_training:
            content, sidecar = ptq.copied(policy, content, scheme, self.observations)
        write_artifact(self._workspace.artifact(self.run.run_id, scheme.name), content, sidecar)


def _describe(training: TrainedNetwork, scheme: Scheme, content: bytes) -> Sidecar:
    record, deviation = training.record, training.weights.get("action/log_deviation:0")
    head = agents.head(training.run.algo, training.spec)
    # Without the value of a dueling network, they are no longer values of states.
    without_value = record.preset.get("dueling") and (scheme.aware or scheme.calibrated)
    if head == "q_values" and without_value:
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


def _convert_aware(training: TrainedNetwork, scheme: Scheme) -> tuple[bytes, keras.Model]:
    """Convert a quantisation-aware network with the ranges and codes of its training."""
    from quarl_tf.quantization import qat  # Plain networks do not wait for it.

    network, quantization = training.network(training.weights), training.run.quantization
    content = training.convert(qat.exported(network, rounded=scheme.name != "qat_int8"), scheme)
    write = {"qat_int8": integer.trained, "qat_int4": int4.pack}.get(scheme.name)
    if write is not None and quantization is not None:
        content = write(content, quantization.recipe, qat.grids(network), training.preset.byte_unit)
    return content, networks.acting(training.network(training.weights))


def _compare(
    policy: Policy, expected: keras.Model, observations: npt.NDArray[Any]
) -> dict[str, Any]:
    """Compare heads with those of the network; a QuarlError where more than rounding differs."""
    sample = observations[:: max(1, len(observations) // _SAMPLE)]
    # Not compiled by XLA, which multiplies by the inverse of a step and adds in one operation: a
    # weight right between two codes is then rounded to the other one.
    expected_heads = expected(sample, training=False).numpy()
    heads = np.stack([policy.head(observation) for observation in sample])
    scheme = Scheme.parse(policy.sidecar.scheme)
    check = ptq.compared(heads, expected_heads, policy.sidecar.num_actions)
    if not scheme.aware:
        is_exact = scheme.name != "dynamic_int8"
        tolerance = _FLOAT_TOLERANCE * max(1.0, check["max_abs_head"]) if is_exact else None
        check["tolerance"] = tolerance
        is_equal = tolerance is None or check["max_abs_difference"] <= tolerance
    else:
        from quarl_tf.quantization import qat

        # Rounding may take the other one of two neighbouring codes. In a hidden layer that may be
        # many steps of a steep head, so an observation counts for at most one.
        steps = np.abs(heads - expected_heads) / qat.head_step(expected)
        check["mean_steps_apart"] = float(np.minimum(steps, 1.0).mean(axis=0).max())
        limit = _STEPS_APART_NATIVE if scheme.name == "qat_int8" else _STEPS_APART
        is_equal = check["mean_steps_apart"] <= limit
    if not is_equal:
        name = REFERENCE if scheme.post_training else scheme.name
        raise QuarlError(
            f"The {name} flatbuffer does not compute what its network does; nothing was "
            "written: export where it was trained, or report it. Received: "
            + ", ".join(f"{name}={value:g}" for name, value in check.items())
        )
    return check
