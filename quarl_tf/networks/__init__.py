"""Policy networks: Keras models from raw observation to head, with the input scaling inside.

Networks are built anew, never copied, so that two networks share nothing. Layers have fixed names,
by which weights are stored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import atomic_path
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.foundation.seeding import generator
from quarl_tf.networks.layers import ActionScaling, ByteScaling, Floats, ObservationNormalizer
from quarl_tf.presets import Preset
from quarl_tf.spec.architectures import Architecture

Weights = dict[str, Floats]

_FLAT, _IMAGES = 2, 4  #: Ranks of batches of vectors and of images.
_NAME = "policy"  #: Of every policy network; it prefixes the names of operations in flatbuffers.


@dataclass(frozen=True)
class Design:
    """Layers of a network behind its scaled observations."""

    architecture: Architecture
    outputs: int
    activation: str = "relu"  #: Of hidden layers: "relu" or "tanh".
    #: Gain of the head's orthogonal initial weights; None for Glorot's uniform ones everywhere.
    head_gain: float | None = None
    layer_norm: bool = False  #: Of hidden fully-connected layers, before their activation.
    #: Of hidden layers: "float32" or "bfloat16"; weights and head are float32.
    precision: str = "float32"
    byte_zero: int = 0  #: Observations of bytes x become (x - byte_zero) / byte_unit.
    byte_unit: float = 255.0
    #: Separate last hidden layers for the state's value and the actions' advantages (Wang et al.,
    #: arXiv 1511.06581); the head is then the advantages.
    dueling: bool = False

    @classmethod
    def of(cls, preset: Preset, outputs: int, **settings: Any) -> Self:
        """Return the design of a preset."""
        names = "layer_norm", "precision", "byte_zero", "byte_unit"
        settings |= {name: getattr(preset, name) for name in names}
        return cls(preset.architecture, outputs, **settings)


def build_policy(
    spec: EnvSpec, design: Design, seed: int, purpose: str = "initial weights"
) -> keras.Model:
    """Build a network with a linear head; `purpose` names the initial weights."""
    observation = _observation(spec)
    return keras.Model(observation, _Layers(design, seed, purpose).head(observation), name=_NAME)


def build_actor(spec: EnvSpec, design: Design, seed: int, stochastic: bool = False) -> keras.Model:
    """Build a network whose output is a continuous action.

    It is bounded by tanh or, if `stochastic`, the mean of a distribution.
    """
    observation = _observation(spec)
    head = _Layers(design, seed, "initial weights").head(observation)
    if not stochastic:
        head = keras.layers.Activation("tanh", name="squash")(head)
    action = ActionScaling(*spec.bounds, stochastic=stochastic, name="action")(head)
    return keras.Model(observation, action, name=_NAME)


def build_critic(spec: EnvSpec, design: Design, seed: int) -> keras.Model:
    """Build a network from observation and action to a value."""
    low, high = spec.bounds
    middle, half_range = (high + low) / 2, (high - low) / 2
    observation, layers = _observation(spec), _Layers(design, seed, "initial critic weights")
    action = keras.Input(half_range.shape, name="action")
    features = tf.cast(layers.features(observation), tf.float32)
    scaled_action = (action - middle) / half_range
    value = layers.fully_connected(tf.concat([features, scaled_action], axis=-1))
    return keras.Model([observation, action], value, name="critic")


def _observation(spec: EnvSpec) -> Any:
    return keras.Input(spec.observation_shape, name="observation", dtype=spec.observation_dtype)


class _Layers:
    """Builds the layers of a network; each draws its own initial weights."""

    def __init__(self, design: Design, seed: int, purpose: str) -> None:
        self._design = design
        self._random = generator(seed, purpose)
        self._dtype = "mixed_bfloat16" if design.precision == "bfloat16" else "float32"

    def head(self, observation: Any) -> Any:
        return self.fully_connected(self.features(observation))

    def features(self, observation: Any) -> Any:
        """Build the input scaling, the convolutions and their flattening."""
        design = self._design
        if observation.dtype == tf.uint8:
            scaling = ByteScaling(
                design.byte_zero, design.byte_unit, dtype=self._dtype, name="byte_scaling"
            )
            hidden = scaling(observation)
        elif (design.byte_zero, design.byte_unit) != (0, 255.0):
            raise UsageError(
                "byte_zero and byte_unit scale observations of bytes; leave them out. "
                f"Received: byte_zero={design.byte_zero}, byte_unit={design.byte_unit:g}"
            )
        else:
            hidden = ObservationNormalizer(name="normalizer")(observation)
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
                dtype=self._dtype,
                name=f"convolution_{i}",
            )(hidden)
        return keras.layers.Flatten(name="flat")(hidden) if len(hidden.shape) > _FLAT else hidden

    def fully_connected(self, features: Any) -> Any:
        design = self._design
        previous = hidden = features
        for i, units in enumerate(design.architecture.hidden_layers):
            previous, hidden = hidden, self._hidden(hidden, units, f"hidden_{i}")
        head = self._linear(hidden, design.outputs, "head", design.head_gain or 1.0)
        if not design.dueling:
            return head
        for units in design.architecture.hidden_layers[-1:]:
            previous = self._hidden(previous, units, "value_hidden")
        value = self._linear(previous, 1, "value", 1.0)
        return head - tf.reduce_mean(head, axis=-1, keepdims=True) + value

    def _hidden(self, inputs: Any, units: int, name: str) -> Any:
        design, initializer = self._design, self._initializer(math.sqrt(2))
        # tanh is a layer of its own, since its input is quantised as well.
        separate_activation = design.layer_norm or design.activation == "tanh"
        activation = None if separate_activation else design.activation
        hidden = keras.layers.Dense(
            units, activation, kernel_initializer=initializer, dtype=self._dtype, name=name
        )(inputs)
        if not separate_activation:
            return hidden
        if design.layer_norm:
            norm = keras.layers.LayerNormalization(dtype=self._dtype, name=f"{name}_norm")
            hidden = norm(hidden)
        return keras.layers.Activation(
            design.activation, dtype=self._dtype, name=f"{name}_{design.activation}"
        )(hidden)

    def _linear(self, inputs: Any, units: int, name: str, gain: float) -> Any:
        initializer = self._initializer(gain)
        return keras.layers.Dense(units, kernel_initializer=initializer, name=name)(inputs)

    def _initializer(self, gain: float) -> Any:
        seed = int(self._random.integers(2**31))
        if self._design.head_gain is None:
            return keras.initializers.GlorotUniform(seed=seed)
        return keras.initializers.Orthogonal(gain, seed=seed)


def acting(network: keras.Model) -> keras.Model:
    """Return the part of a policy that chooses actions: a dueling network without its value."""
    if isinstance(network.layers[-1], ActionScaling):
        return network
    return keras.Model(network.input, network.get_layer("head").output, name=_NAME)


def unscaled(network: keras.Model) -> keras.Model:
    """Return the part of a policy before the scaling of its action, unless that is the identity."""
    scaling = network.layers[-1]
    if not isinstance(scaling, ActionScaling) or scaling.is_identity:
        return network
    return keras.Model(network.input, scaling.input, name=_NAME)


def weights(network: keras.Model) -> Weights:
    """Return copies of all variables by name, including the normaliser's."""
    return {variable.name: variable.numpy() for variable in network.variables}


def set_weights(network: keras.Model, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Set all variables by name; a QuarlError where names or shapes differ."""
    expected = {(v.name, tuple(v.shape)) for v in network.variables}
    if others := expected ^ {(name, value.shape) for name, value in values.items()}:
        raise QuarlError(
            "The weights do not fit the network, which has other observations, actions or layers; "
            f"train from scratch. Received: only in one of both {sorted(others)}"
        )
    for variable in network.variables:
        variable.assign(values[variable.name])


def save_weights(path: Path, values: Weights) -> None:
    """Write weights as `.npz`, atomically."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **values)  # type: ignore[arg-type]


def load_weights(path: Path) -> Weights:
    """Read weights written by `save_weights`."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
