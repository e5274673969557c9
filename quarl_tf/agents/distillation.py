"""Hold the network in training to the one that it started from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quarl_tf import networks
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Weights

#: Of heads in training and heads to be near to, both [n, outputs]: how far apart they are.
Distance = Callable[[Any, Any], Any]


def squared_difference(heads: Any, wanted: Any) -> Any:
    """Return the mean squared difference of values or actions."""
    return tf.reduce_mean(tf.square(heads - wanted))


class Teacher:
    """A network that does not learn, and what its head adds to the loss of the one that does.

    Distillation (Hinton et al., arXiv 1503.02531): where a training starts from a finished network
    and goes on at few bits, the head is held to what it was, on the states that are met.
    """

    def __init__(
        self, network: keras.Model, spec: EnvSpec, coefficient: float, distance: Distance
    ) -> None:
        """Take a network, whose weights may be set later, and the weight of the distance."""
        self.network, self._spec = network, spec
        self._coefficient, self._distance = coefficient, distance

    def loss(self, network: keras.Model, observations: Any) -> Any:
        """Return what is added to the loss of a network over a batch of observations [n, ...]."""
        heads, wanted = (
            networks.acting(each, self._spec)(observations, training=False)
            for each in (network, self.network)
        )
        return self._coefficient * self._distance(heads, wanted)

    def arrays(self) -> Weights:
        """Return the weights, for a checkpoint."""
        return networks.weights(self.network)

    def restore(self, arrays: Weights) -> None:
        """Take the weights of a checkpoint back."""
        networks.set_weights(self.network, arrays)
