"""Layers that scale the inputs and outputs of networks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.keras import keras, tf

Floats = npt.NDArray[np.float32]
Forward = Callable[[npt.NDArray[Any]], Floats]
Read = Callable[[Any], Floats]  #: Returns the value of a variable.

#: Normalised observations are clipped to this many standard deviations (as in the papers' DDPG),
#: which also bounds the range of the first int8 tensor.
CLIP_DEVIATIONS = 5.0


def unwrap(layer: Any) -> Any:
    """Return the layer inside a wrapper, or the layer itself."""
    return getattr(layer, "layer", layer)


class ObservationNormalizer(keras.layers.Layer):  # type: ignore[misc]
    """Map every feature to (x − mean) · inverse_deviation, clipped to ±5.

    The statistics are variables that `RunningStatistics` sets, not gradient descent. They are
    exported with the network, so that a flatbuffer takes raw observations.
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

    def in_numpy(self, read: Read) -> Forward:
        """Return the function of arrays."""
        mean, scale = read(self.mean), read(self.inverse_deviation)
        return lambda x: np.clip((x - mean) * scale, -CLIP_DEVIATIONS, CLIP_DEVIATIONS)


class ByteScaling(keras.layers.Layer):  # type: ignore[misc]
    """Map bytes x to (x − zero) / unit, by default to 0 ... 1."""

    def __init__(self, zero: int = 0, unit: float = 255.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.zero, self.unit = zero, unit

    @property
    def ends(self) -> tuple[float, float]:
        """What the least and the greatest byte become."""
        return -self.zero / self.unit, (255 - self.zero) / self.unit

    def get_config(self) -> dict[str, Any]:
        """Return what a copy is made of."""
        return {**super().get_config(), "zero": self.zero, "unit": self.unit}

    def call(self, inputs: Any) -> Any:
        """Scale a batch of observations."""
        numbers = tf.cast(inputs, self.compute_dtype)
        # Differences of bytes are exact, in bfloat16 as well.
        return (numbers - self.zero if self.zero else numbers) * (1.0 / self.unit)

    def in_numpy(self, read: Read) -> Forward:
        """Return the function of arrays."""
        del read
        zero, factor = np.float32(self.zero), np.float32(1.0 / self.unit)
        return lambda x: (x.astype(np.float32) - zero) * factor


class ActionScaling(keras.layers.Layer):  # type: ignore[misc]
    """Map ±1 to the bounds of an action.

    The action of a stochastic policy is the mean of a normal distribution; the layer also holds the
    logarithm of its standard deviation, in units of the action.
    """

    def __init__(self, low: Floats, high: Floats, *, stochastic: bool, name: str) -> None:
        super().__init__(name=name)
        self.half: Floats = (high - low) / np.float32(2)
        self.middle: Floats = (high + low) / np.float32(2)
        self._stochastic = stochastic

    @property
    def is_identity(self) -> bool:
        """Whether the bounds are ±1."""
        return bool((self.half == 1).all() and (self.middle == 0).all())

    def build(self, input_shape: Any) -> None:
        """Create the deviation, half the action's range at first."""
        del input_shape
        if self._stochastic:
            self.log_deviation = self.add_weight(
                name="log_deviation",
                shape=self.half.shape,
                initializer=keras.initializers.Constant(np.log(self.half)),
            )

    def call(self, inputs: Any) -> Any:
        """Scale a batch."""
        return inputs * self.half + self.middle

    def in_numpy(self, read: Read) -> Forward:
        """Return the function of arrays."""
        del read
        return lambda x: x * self.half + self.middle
