"""The networks of policy and value that PPO and A2C learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from quarl_tf import execution, networks
from quarl_tf.agents import adapter
from quarl_tf.environments import EnvSpec
from quarl_tf.execution import Snapshot
from quarl_tf.keras import keras, tf
from quarl_tf.networks import Design
from quarl_tf.scaling import Floats, ObservationNormalizer, within
from quarl_tf.seeding import generator


class TwoNetworks:
    """Policy and value without a layer in common, as the papers' small networks."""

    def __init__(self, network: keras.Model, spec: EnvSpec, design: Design, seed: int) -> None:
        """Build the value network beside the policy; `design` is the former's."""
        purpose = "initial value weights"
        value = networks.policy_factory(spec, design, seed, purpose)()
        self.features_spec = spec
        self.network = network
        self.critic = adapter.ValueNetwork(lambda: value, adapter.observation_spec(spec), "Value")
        self.normalised = [network, value]
        self.variables = [*network.variables, *value.variables]
        self.trainable_variables = [*network.trainable_variables, *value.trainable_variables]
        self._head, self._value = Snapshot(network), Snapshot(value)
        #: What `refresh` takes the values of; the others change without a gradient, and rarely.
        self.read = self.trainable_variables
        self._normalisers = [
            variable
            for model in self.normalised
            for layer in map(within, model.layers)
            if isinstance(layer, ObservationNormalizer)
            for variable in layer.variables
        ]
        self._values = {id(variable): variable.numpy() for variable in self.variables}

    def features(self, observations: Any) -> Any:
        """Return what the two networks take: the observations."""
        return observations

    def predict(self, observations: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        """Return heads and values of a batch."""
        return self._head(observations), self._value(observations)[:, 0]

    def refresh(
        self, values: Sequence[npt.NDArray[Any]] | None = None, *, normalised_anew: bool = False
    ) -> None:
        """Bring predictions up to date.

        Args:
            values: Of what `read` names; all variables are read where none are given.
            normalised_anew: Whether the statistics have changed since.
        """
        stale = self._normalisers if normalised_anew else []
        if values is None:
            stale = self.variables
        else:
            self._values.update(zip(map(id, self.read), values, strict=True))
        self._values.update((id(variable), variable.numpy()) for variable in stale)
        for snapshot in (self._head, self._value):
            snapshot.refresh([self._values[id(variable)] for variable in snapshot.variables])


class SharedTorso:
    """Policy and value as two heads on the same layers, as the papers' networks for images."""

    def __init__(self, network: keras.Model, spec: EnvSpec, seed: int) -> None:
        """Put a value head beside the head of the policy network."""
        head = network.get_layer("head")
        draw = int(generator(seed, "initial value weights").integers(2**31))
        value = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.Orthogonal(1.0, seed=draw), name="value"
        )
        # bfloat16 in front of float32 heads.
        self._torso = keras.Model(network.input, tf.cast(head.input, tf.float32))
        features = keras.Input(self._torso.output_shape[1:])
        tail = keras.Model(features, _after(network, head)(features))
        critic = keras.Model(features, value(features))
        self.features_spec = EnvSpec(features.shape[1:], "float32", spec.num_actions)
        self.network = tail
        self.critic = adapter.ValueNetwork(
            lambda: critic, adapter.observation_spec(self.features_spec), "Value"
        )
        self.normalised = [network]
        both = keras.Model(network.input, [network.output, value(tf.cast(head.input, tf.float32))])
        self.variables, self.trainable_variables = both.variables, both.trainable_variables
        self._predict = execution.compiled(both, network)
        #: Predictions read the variables themselves.
        self.read: Sequence[Any] = ()

    def features(self, observations: Any) -> Any:
        """Return what the two heads take."""
        return self._torso(observations, training=True)

    def predict(self, observations: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        """Return heads and values of a batch."""
        heads, values = self._predict(observations)
        return heads.numpy(), values.numpy()[:, 0]

    def refresh(
        self, values: Sequence[npt.NDArray[Any]] | None = None, *, normalised_anew: bool = False
    ) -> None:
        """Do nothing: predictions read the variables."""


def _after(network: keras.Model, head: Any) -> Callable[[Any], Any]:
    """Return the head and, for continuous actions, the scaling behind it."""
    *_, last = network.layers
    return lambda features: head(features) if last is head else last(head(features))
