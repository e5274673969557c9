"""Policy networks: one Keras model from raw observation to head, input scaling inside.

A network is built by a factory, never copied, so targets and copies are equal by construction
and share nothing. Layers have fixed names, so that weights can be stored by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.architectures import Architecture
from quarl_tf.environments import EnvSpec
from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.files import atomic_path
from quarl_tf.keras import keras, tf
from quarl_tf.seeding import generator

NetworkFactory = Callable[[], "keras.Model"]
Floats = npt.NDArray[np.float32]
Forward = Callable[[npt.NDArray[Any]], Floats]
Weights = dict[str, Floats]

#: Rank of a batch of vectors, and of one of images.
_FLAT, _IMAGES = 2, 4

#: Name of every policy network; the converter's names of operations start with it.
NAME = "policy"

#: Normalised observations beyond this many standard deviations are cut off (as the papers' DDPG
#: does); it also bounds the range that the first int8 tensor must cover.
CLIP_DEVIATIONS = 5.0


#: Growth of the number of observations after which their statistics are looked at again.
_GROWTH = 1.01


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

    def in_numpy(self, mean: Floats, scale: Floats) -> Forward:
        """Return the same for arrays, with given statistics."""
        return lambda x: np.clip((x - mean) * scale, -CLIP_DEVIATIONS, CLIP_DEVIATIONS)


class ByteScaling(keras.layers.Layer):  # type: ignore[misc]
    """Map bytes to 0 ... 1."""

    def call(self, inputs: Any) -> Any:
        """Scale a batch of observations."""
        return tf.cast(inputs, self.compute_dtype) * (1.0 / 255.0)

    def in_numpy(self) -> Forward:
        """Return the same for arrays."""
        return lambda x: x.astype(np.float32) * np.float32(1.0 / 255.0)


class ActionScaling(keras.layers.Layer):  # type: ignore[misc]
    """Map ±1 to the bounds of an action.

    Of a stochastic policy the action is the mean of a normal distribution; the layer keeps the
    logarithm of its standard deviation, in the action's own units, with the network's weights.
    """

    def __init__(
        self, low: Sequence[float], high: Sequence[float], *, stochastic: bool, name: str
    ) -> None:
        """Keep the bounds."""
        super().__init__(name=name)
        bottom, top = np.array(low, np.float32), np.array(high, np.float32)
        self.half: Floats = (top - bottom) / np.float32(2)
        self._middle: Floats = (top + bottom) / np.float32(2)
        self._stochastic = stochastic

    def build(self, input_shape: Any) -> None:
        """Create the deviation: half the action's range to start with."""
        del input_shape
        if self._stochastic:
            self.log_deviation = self.add_weight(
                name="log_deviation",
                shape=self.half.shape,
                initializer=keras.initializers.Constant(np.log(self.half)),
            )

    def call(self, inputs: Any) -> Any:
        """Scale a batch."""
        return inputs * self.half + self._middle

    def in_numpy(self, *log_deviation: Floats) -> Forward:
        """Return the same for arrays; the deviation plays no part in it."""
        del log_deviation
        return lambda x: x * self.half + self._middle


class RunningStatistics:
    """Mean and variance of all observations seen so far, by Chan's parallel update.

    Of bytes nothing is kept: `ByteScaling` knows their range.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Start without observations."""
        self._wanted = spec.observation_dtype != "uint8"
        shape = spec.observation_shape if self._wanted else ()
        self.count = self._applied = 0.0
        self.mean = np.zeros(shape, np.float64)
        self.squares = np.zeros(shape, np.float64)

    def update(self, observations: npt.NDArray[np.float32]) -> None:
        """Take in a batch [n, ...]."""
        if not self._wanted:
            return
        batch = observations.astype(np.float64)
        count, mean = len(batch), batch.mean(axis=0)
        difference = mean - self.mean
        total = self.count + count
        self.squares += ((batch - mean) ** 2).sum(axis=0)
        self.squares += difference**2 * (self.count * count / total)
        self.mean += difference * (count / total)
        self.count = total

    def apply_to(self, networks: Sequence[keras.Model]) -> bool:
        """Set the normalisers of networks to these statistics, once there is 1 % more of them.

        Returns:
            Whether they were set.
        """
        if not self._wanted or self.count < _GROWTH * self._applied:
            return False
        self._applied = self.count
        deviation = np.sqrt(self.squares / max(self.count, 1.0))
        mean = self.mean.astype(np.float32)
        # A feature that never moved says nothing; 1e-2 keeps it from being blown up.
        scale = (1.0 / np.maximum(deviation, 1e-2)).astype(np.float32)
        for network in networks:
            layer = within(network.get_layer("normalizer"))
            layer.mean.assign(mean)
            layer.inverse_deviation.assign(scale)
        return True

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state for a checkpoint."""
        counts = {"count": np.array(self.count), "applied": np.array(self._applied)}
        return {**counts, "mean": self.mean, "squares": self.squares}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""
        self.count, self._applied = float(arrays["count"]), float(arrays["applied"])
        self.mean, self.squares = arrays["mean"].copy(), arrays["squares"].copy()


@dataclass(frozen=True)
class Design:
    """How a network is built behind its scaled observations.

    Attributes:
        architecture: Hidden layers.
        outputs: Values of the head, which is linear.
        activation: Activation of the hidden layers, "relu" or "tanh".
        head_gain: Scale of the head's orthogonal initial weights; None for Glorot uniform weights
            everywhere.
        layer_norm: Whether hidden fully-connected layers are normalised before their activation.
        precision: Arithmetic of the hidden layers, "float32" or "bfloat16"; weights and head are
            float32 always.
        dueling: Whether a state's value and the actions' advantages have a last hidden layer each
            (Wang et al., arXiv 1511.06581); the head is then the advantages.
    """

    architecture: Architecture
    outputs: int
    activation: str = "relu"
    head_gain: float | None = None
    layer_norm: bool = False
    precision: str = "float32"
    dueling: bool = False


def policy_factory(
    spec: EnvSpec, design: Design, seed: int, purpose: str = "initial weights"
) -> NetworkFactory:
    """Return a factory of networks; every call draws the same initial weights.

    Args:
        spec: Shape and type of the observations.
        design: What stands behind them.
        seed: The run's seed.
        purpose: Name of the draw, so that two networks of a run start differently.
    """

    def build() -> keras.Model:
        observation = _observation(spec)
        head = _Layers(design, seed, purpose).build(observation)
        return keras.Model(observation, head, name=NAME)

    return build


def actor_factory(
    spec: EnvSpec, design: Design, seed: int, *, stochastic: bool = False
) -> NetworkFactory:
    """Return a factory of networks whose head is a continuous action.

    Args:
        spec: Observations, and the action's bounds.
        design: What stands between.
        seed: The run's seed.
        stochastic: Whether it is the mean of a distribution; else tanh keeps it within its bounds.
    """
    low, high = spec.action_low or (), spec.action_high or ()

    def build() -> keras.Model:
        observation = _observation(spec)
        head = _Layers(design, seed, "initial weights").build(observation)
        if not stochastic:
            head = keras.layers.Activation("tanh", name="squash")(head)
        action = ActionScaling(low, high, stochastic=stochastic, name="action")(head)
        return keras.Model(observation, action, name=NAME)

    return build


def critic_factory(spec: EnvSpec, design: Design, seed: int) -> NetworkFactory:
    """Return a factory of networks from observation and action to one value."""
    half = (np.array(spec.action_high, np.float32) - np.array(spec.action_low, np.float32)) / 2

    def build() -> keras.Model:
        observation = _observation(spec)
        action = keras.Input(half.shape, name="action")
        layers = _Layers(design, seed, "initial critic weights")
        seen = layers.convolved(layers.scaled(observation))
        joined = tf.concat([tf.cast(seen, tf.float32), action / half], axis=-1)
        return keras.Model([observation, action], layers.connected(joined), name="critic")

    return build


def _observation(spec: EnvSpec) -> Any:
    return keras.Input(spec.observation_shape, name="observation", dtype=spec.observation_dtype)


class _Layers:
    """Builds the layers of one network, each with initial weights of its own."""

    def __init__(self, design: Design, seed: int, purpose: str) -> None:
        self._design = design
        self._random = generator(seed, purpose)
        self._policy = "mixed_bfloat16" if design.precision == "bfloat16" else design.precision

    def build(self, observation: Any) -> Any:
        """Build all layers, from the observation to the head."""
        return self.connected(self.convolved(self.scaled(observation)))

    def scaled(self, observation: Any) -> Any:
        """Build what brings observations into a range that fits the layers behind."""
        if observation.dtype == tf.uint8:
            return ByteScaling(dtype=self._policy, name="byte_scaling")(observation)
        return ObservationNormalizer(name="normalizer")(observation)

    def convolved(self, hidden: Any) -> Any:
        """Build the convolutions, and flatten what comes out of them."""
        design = self._design
        for i, layer in enumerate(design.architecture.convolutions):
            if len(hidden.shape) != _IMAGES or min(hidden.shape[1:3]) < layer.kernel:
                raise UsageError(
                    f"Convolution {i} needs images of {layer.kernel} by {layer.kernel} or more; "
                    "choose another network, for example -p network=[64,64]. "
                    f"Received: shape={hidden.shape[1:]}"
                )
            hidden = keras.layers.Conv2D(
                layer.filters,
                layer.kernel,
                layer.stride,
                activation=design.activation,
                kernel_initializer=self._initializer(math.sqrt(2)),
                dtype=self._policy,
                name=f"convolution_{i}",
            )(hidden)
        return keras.layers.Flatten(name="flat")(hidden) if len(hidden.shape) > _FLAT else hidden

    def connected(self, hidden: Any) -> Any:
        """Build the fully-connected layers and the head."""
        design = self._design
        before = own = hidden
        for i, units in enumerate(design.architecture.hidden_layers):
            before, own = own, self._hidden(own, units, f"hidden_{i}")
        head = self._linear(own, design.outputs, "head", design.head_gain or 1.0)
        if not design.dueling:
            return head
        for units in design.architecture.hidden_layers[-1:]:
            before = self._hidden(before, units, "value_hidden")
        value = self._linear(before, 1, "value", 1.0)
        return head - tf.reduce_mean(head, axis=-1, keepdims=True) + value

    def _hidden(self, inputs: Any, units: int, name: str) -> Any:
        design, initializer = self._design, self._initializer(math.sqrt(2))
        # Quantised, tanh is a layer of its own: a table that a quantised sum goes into.
        apart = design.layer_norm or design.activation == "tanh"
        activation = None if apart else design.activation
        hidden = keras.layers.Dense(
            units, activation, kernel_initializer=initializer, dtype=self._policy, name=name
        )(inputs)
        if not apart:
            return hidden
        if design.layer_norm:
            norm = keras.layers.LayerNormalization(dtype=self._policy, name=f"{name}_norm")
            hidden = norm(hidden)
        return keras.layers.Activation(
            design.activation, dtype=self._policy, name=f"{name}_{design.activation}"
        )(hidden)

    def _linear(self, inputs: Any, units: int, name: str, gain: float) -> Any:
        initializer = self._initializer(gain)
        return keras.layers.Dense(units, kernel_initializer=initializer, name=name)(inputs)

    def _initializer(self, gain: float) -> Any:
        draw = int(self._random.integers(2**31))
        if self._design.head_gain is None:
            return keras.initializers.GlorotUniform(seed=draw)
        return keras.initializers.Orthogonal(gain, seed=draw)


def is_convolutional(network: keras.Model) -> bool:
    """Tell whether a network has convolutions."""
    return any(isinstance(within(layer), keras.layers.Conv2D) for layer in network.layers)


def within(layer: Any) -> Any:
    """Return the layer inside a wrapper, or the layer itself."""
    return getattr(layer, "layer", layer)


def quantized_test(network: keras.Model) -> Callable[[], bool]:
    """Return a function that tells whether a network is quantised, its ranges frozen."""
    # One stands for all: they freeze together. To look for it takes longer than to read it.
    frozen = next((v for v in network.variables if v.name.endswith("_frozen:0")), None)
    return lambda: frozen is not None and bool(frozen.numpy())


def compiled(function: Callable[..., Any], network: keras.Model) -> Callable[..., Any]:
    """Compile a function of arrays: by XLA for small layers, else for oneDNN's kernels.

    XLA saves the calls between small operations but has slow convolutions on CPUs.

    Args:
        function: Takes tensors, one for each array.
        network: The network that it is about. Once the ranges of a quantisation-aware one are
            frozen, it computes something else, and is compiled anew.
    """
    quantized = quantized_test(network)
    by_kind: dict[tuple[Any, ...], Any] = {}

    def call(*arrays: npt.NDArray[Any]) -> Any:
        tensors = [tf.constant(array) for array in arrays]
        kind = (quantized(), *(array.shape for array in arrays))
        if kind not in by_kind:
            traced = tf.function(function, jit_compile=not is_convolutional(network))
            by_kind[kind] = traced.get_concrete_function(*tensors)
        # TensorFlow's own search for the trace that fits takes 200 us a call, and to match the
        # arguments with its signature as long again.
        found = by_kind[kind]
        return found.inference_fn.call_preflattened([*tensors, *found.captured_inputs])

    return call


def forward(network: keras.Model) -> Forward:
    """Return the compiled forward pass: observations [n, ...] to heads [n, outputs]."""
    run = compiled(network, network)

    def call(observations: npt.NDArray[Any]) -> Floats:
        heads: Floats = run(observations).numpy()
        return heads

    return call


class Snapshot:
    """The forward pass of a network, up to date after each `refresh`.

    Networks without convolutions are evaluated by NumPy as they stood then: a call into TensorFlow
    costs 150 us however small the network, which is ten times what the arithmetic of a few
    observations takes. Those with convolutions are evaluated as they stand.
    """

    def __init__(self, network: keras.Model) -> None:
        """Take the first snapshot."""
        self._compiled = forward(network) if is_convolutional(network) else None
        # Kept, for Keras walks through all it contains whenever it is asked for variables.
        self.variables: Sequence[Any] = list(network.variables)
        self._layers = [(layer, list(layer.variables)) for layer in network.layers[1:]]
        self._steps: list[Forward] = []
        self.refresh()

    def refresh(self, values: Sequence[npt.NDArray[Any]] | None = None) -> None:
        """Bring the snapshot up to date; with convolutions it always is.

        Args:
            values: Of all the network's variables, if they are at hand; reading them one by one
                takes longer than evaluating a small network.
        """
        if self._compiled is not None:
            return
        arrays = [variable.numpy() for variable in self.variables] if values is None else values
        by_variable = {id(v): array for v, array in zip(self.variables, arrays, strict=True)}
        self._steps = [
            in_numpy(layer, [by_variable[id(v)] for v in variables])
            for layer, variables in self._layers
        ]

    def __call__(self, observations: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return heads [n, outputs] of observations [n, ...]."""
        if self._compiled is not None:
            return self._compiled(observations)
        for step in self._steps:
            observations = step(observations)
        return observations


def in_numpy(layer: Any, values: Sequence[npt.NDArray[Any]]) -> Forward:
    """Return what a layer computes with given values of its variables."""
    if hasattr(layer, "in_numpy"):
        own: Forward = layer.in_numpy(*values)
        return own
    if isinstance(layer, keras.layers.Dense):
        kernel, bias = values
        activation = _ACTIVATIONS[layer.activation.__name__]
        return lambda x: activation(x @ kernel + bias)
    if isinstance(layer, keras.layers.LayerNormalization):
        (gamma, beta), epsilon = values, layer.epsilon

        def normalise(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            centred = x - x.mean(axis=-1, keepdims=True)
            variance = (centred * centred).mean(axis=-1, keepdims=True)
            scaled: npt.NDArray[np.float32] = centred / np.sqrt(variance + epsilon) * gamma + beta
            return scaled

        return normalise
    if isinstance(layer, keras.layers.Activation):
        return _ACTIVATIONS[layer.activation.__name__]
    if isinstance(layer, keras.layers.Flatten):
        return lambda x: x.reshape(len(x), -1)
    raise QuarlError(f"No NumPy twin of this layer. Received: {layer.name} ({type(layer)})")


_ACTIVATIONS: Mapping[str, Forward] = {
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
}


def chooser(network: keras.Model) -> keras.Model:
    """Return the part of a discrete policy that chooses: a dueling network without the value."""
    return keras.Model(network.input, network.get_layer("head").output, name=NAME)


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
