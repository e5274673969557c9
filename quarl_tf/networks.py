"""Policy networks: one Keras model from raw observation to head, input scaling inside.

A network is built by a factory and never cloned, so targets and copies are equal by construction
and share nothing. Layers have fixed names, so that weights can be stored by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec
from quarl_tf.errors import QuarlError
from quarl_tf.keras import keras, tf
from quarl_tf.records import atomic_path
from quarl_tf.seeding import generator

NetworkFactory = Callable[[], "keras.Model"]
Weights = dict[str, npt.NDArray[np.float32]]

#: Name of every policy network; the converter's names of operations start with it.
NAME = "policy"

#: Normalised observations beyond this many standard deviations are cut off (as the papers' DDPG
#: does); it also bounds the range that the first int8 tensor must cover.
CLIP_DEVIATIONS = 5.0


class ObservationNormalizer(keras.layers.Layer):  # type: ignore[misc]
    """Map every feature to (x − mean) · inverse_deviation, cut off at ±5.

    The statistics are variables of the network that `RunningStatistics` sets, not gradient descent.
    They are exported with it, so a flatbuffer takes raw observations.
    """

    def build(self, input_shape: Any) -> None:
        """Create the statistics: identity until they are set."""
        self.mean = self.add_weight(
            name="mean", shape=input_shape[1:], initializer="zeros", trainable=False
        )
        self.inverse_deviation = self.add_weight(
            name="inverse_deviation", shape=input_shape[1:], initializer="ones", trainable=False
        )

    def call(self, inputs: Any) -> Any:
        """Normalise a batch of observations."""
        normalised = (inputs - self.mean) * self.inverse_deviation
        return tf.clip_by_value(normalised, -CLIP_DEVIATIONS, CLIP_DEVIATIONS)


class RunningStatistics:
    """Mean and variance of all observations seen so far, by Chan's parallel update."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Start without observations."""
        self.count = 0.0
        self.mean = np.zeros(shape, np.float64)
        self.squares = np.zeros(shape, np.float64)

    def update(self, observations: npt.NDArray[np.float32]) -> None:
        """Take in a batch [n, ...]."""
        batch = observations.astype(np.float64)
        count, mean = len(batch), batch.mean(axis=0)
        difference = mean - self.mean
        total = self.count + count
        self.squares += ((batch - mean) ** 2).sum(axis=0)
        self.squares += difference**2 * (self.count * count / total)
        self.mean += difference * (count / total)
        self.count = total

    def apply_to(self, network: keras.Model) -> None:
        """Set the normaliser of a network to these statistics."""
        layer = network.get_layer("normalizer")
        deviation = np.sqrt(self.squares / max(self.count, 1.0))
        layer.mean.assign(self.mean.astype(np.float32))
        # A feature that never moved says nothing; 1e-2 keeps it from being blown up.
        layer.inverse_deviation.assign((1.0 / np.maximum(deviation, 1e-2)).astype(np.float32))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state for a checkpoint."""
        return {"count": np.array(self.count), "mean": self.mean, "squares": self.squares}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""
        self.count = float(arrays["count"])
        self.mean, self.squares = arrays["mean"].copy(), arrays["squares"].copy()


@dataclass(frozen=True)
class Mlp:
    """The architecture of a fully-connected network with a linear head.

    Attributes:
        hidden_layers: Units of the hidden layers.
        outputs: Values of the head.
        activation: Activation of the hidden layers, "relu" or "tanh".
        head_gain: Scale of the head's orthogonal initial weights; None for Glorot uniform weights
            everywhere.
    """

    hidden_layers: tuple[int, ...]
    outputs: int
    activation: str = "relu"
    head_gain: float | None = None


def mlp_factory(
    spec: EnvSpec, mlp: Mlp, seed: int, purpose: str = "initial weights"
) -> NetworkFactory:
    """Return a factory of networks; every call draws the same initial weights.

    Args:
        spec: Shape of the observations.
        mlp: Architecture.
        seed: The run's seed.
        purpose: Name of the draw, so that two networks of a run start differently.
    """

    def build() -> keras.Model:
        observation = keras.Input(spec.observation_shape, name="observation")
        normalised = ObservationNormalizer(name="normalizer")(observation)
        return keras.Model(observation, _dense_layers(normalised, mlp, seed, purpose), name=NAME)

    return build


def actor_factory(spec: EnvSpec, mlp: Mlp, seed: int) -> NetworkFactory:
    """Return a factory of networks whose head is an action within its bounds, by tanh."""
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)

    def build() -> keras.Model:
        observation = keras.Input(spec.observation_shape, name="observation")
        normalised = ObservationNormalizer(name="normalizer")(observation)
        squashed = tf.tanh(_dense_layers(normalised, mlp, seed, "initial weights"))
        action = squashed * ((high - low) / 2) + (high + low) / 2
        return keras.Model(observation, action, name=NAME)

    return build


def critic_factory(spec: EnvSpec, mlp: Mlp, seed: int) -> NetworkFactory:
    """Return a factory of networks from observation and action to one value."""
    half = (np.array(spec.action_high, np.float32) - np.array(spec.action_low, np.float32)) / 2

    def build() -> keras.Model:
        observation = keras.Input(spec.observation_shape, name="observation")
        action = keras.Input(half.shape, name="action")
        normalised = ObservationNormalizer(name="normalizer")(observation)
        joined = tf.concat([normalised, action / half], axis=-1)
        value = _dense_layers(joined, mlp, seed, "initial critic weights")
        return keras.Model([observation, action], value, name="critic")

    return build


def _dense_layers(hidden: Any, mlp: Mlp, seed: int, purpose: str) -> Any:
    draws = generator(seed, purpose).integers(2**31, size=len(mlp.hidden_layers) + 1)
    seeds = iter(draws.tolist())

    def dense(units: int, name: str, activation: str | None, gain: float) -> Any:
        draw = next(seeds)
        initializer = (
            keras.initializers.GlorotUniform(seed=draw)
            if mlp.head_gain is None
            else keras.initializers.Orthogonal(gain, seed=draw)
        )
        return keras.layers.Dense(
            units, activation=activation, kernel_initializer=initializer, name=name
        )

    for i, units in enumerate(mlp.hidden_layers):
        hidden = dense(units, f"hidden_{i}", mlp.activation, math.sqrt(2))(hidden)
    return dense(mlp.outputs, "head", None, mlp.head_gain or 1.0)(hidden)


def forward(network: keras.Model) -> Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]:
    """Return the compiled forward pass: observations [n, ...] to heads [n, outputs]."""
    compiled = tf.function(network, jit_compile=True)

    def run(observations: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        heads: npt.NDArray[np.float32] = compiled(tf.constant(observations)).numpy()
        return heads

    return run


def greedy(
    network: keras.Model, *, discrete: bool
) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    """Return the greedy policy of a network: observations [n, ...] to actions."""
    run = forward(network)
    return (lambda observations: run(observations).argmax(axis=1)) if discrete else run


def weights(network: keras.Model) -> Weights:
    """Return a copy of all variables by name, the normaliser's included."""
    return {variable.name: variable.numpy() for variable in network.variables}


def set_weights(network: keras.Model, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Set all variables by name.

    Raises:
        QuarlError: The names or shapes are not this network's.
    """
    expected = {v.name: tuple(v.shape) for v in network.variables}
    received = {name: value.shape for name, value in values.items()}
    if expected != received:
        raise QuarlError(f"The weights do not fit the network {expected}. Received: {received}")
    for variable in network.variables:
        variable.assign(values[variable.name])


def save_weights(path: Path, values: Weights) -> None:
    """Write weights as `.npz`, whole or not at all."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **values)  # type: ignore[arg-type]


def load_weights(path: Path) -> Weights:
    """Read weights written by `save_weights`."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
