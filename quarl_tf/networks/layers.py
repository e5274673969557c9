"""The layers that scale what a network takes and gives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.keras import keras, tf

Floats = npt.NDArray[np.float32]
Forward = Callable[[npt.NDArray[Any]], Floats]

#: Normalised observations beyond this many standard deviations are cut off (as the papers' DDPG
#: does); it also bounds the range that the first int8 tensor must cover.
CLIP_DEVIATIONS = 5.0


def unwrap(layer: Any) -> Any:
    """Return the layer inside a wrapper, or the layer itself."""
    return getattr(layer, "layer", layer)


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

    def __init__(self, low: Floats, high: Floats, *, stochastic: bool, name: str) -> None:
        super().__init__(name=name)
        self.half: Floats = (high - low) / np.float32(2)
        self._middle: Floats = (high + low) / np.float32(2)
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
