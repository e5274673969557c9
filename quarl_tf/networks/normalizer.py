"""Running statistics of observations, for their normalisation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras
from quarl_tf.networks.layers import unwrap

_GROWTH = 1.01  #: Of the number of observations, after which networks' statistics are updated.
_LEAST_DEVIATION = 1e-2  #: By which features are normalised that hardly vary.


class RunningStatistics:
    """Mean and variance of the observations it was given, by Chan's parallel update.

    Bytes have none: `ByteScaling` knows their range.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._enabled = spec.observation_dtype != "uint8"
        shape = spec.observation_shape if self._enabled else ()
        self.count = self._applied_count = 0.0
        self.mean = np.zeros(shape, np.float64)
        self.squares = np.zeros(shape, np.float64)

    def start_from(self, network: keras.Model, count: int) -> None:
        """Take the statistics of a network's normaliser, as those of `count` observations."""
        if self._enabled:
            layer = unwrap(network.get_layer("normalizer"))
            self.count, self.mean = float(count), layer.mean.numpy().astype(np.float64)
            self.squares = count / layer.inverse_deviation.numpy().astype(np.float64) ** 2

    def update(self, observations: npt.NDArray[np.float32]) -> None:
        """Add a batch [n, ...]."""
        if not self._enabled:
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
        """Set the normalisers of networks if there is 1 % more; tell whether they were set."""
        if not self._enabled or self.count < _GROWTH * self._applied_count:
            return False
        self._applied_count = self.count
        deviation = np.sqrt(self.squares / max(self.count, 1.0))
        mean = self.mean.astype(np.float32)
        scale = (1.0 / np.maximum(deviation, _LEAST_DEVIATION)).astype(np.float32)
        for network in networks:
            layer = unwrap(network.get_layer("normalizer"))
            layer.mean.assign(mean)
            layer.inverse_deviation.assign(scale)
        return True

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state for a checkpoint."""
        counts = {"count": np.array(self.count), "applied": np.array(self._applied_count)}
        return {**counts, "mean": self.mean, "squares": self.squares}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the state of a checkpoint."""
        self.count, self._applied_count = float(arrays["count"]), float(arrays["applied"])
        self.mean, self.squares = arrays["mean"].copy(), arrays["squares"].copy()
