"""What PPO and A2C act and learn with: networks of policy and value, and distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import adapter
from quarl_tf.environments import EnvSpec
from quarl_tf.keras import keras, tf
from quarl_tf.networks import Design, Floats
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
        self._head, self._value = networks.Snapshot(network), networks.Snapshot(value)
        #: What `refresh` takes the values of; the others change without a gradient, and rarely.
        self.read = self.trainable_variables
        self._normalisers = [
            variable
            for model in self.normalised
            for layer in map(networks.within, model.layers)
            if isinstance(layer, networks.ObservationNormalizer)
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
        self._predict = networks.compiled(both, network)
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


class Categorical:
    """The distribution of a discrete action; the head is its logits."""

    def actor(self, model: TwoNetworks | SharedTorso) -> Any:
        """Return the network as TF-Agents sees it."""
        return adapter.CategoricalNetwork(
            lambda: model.network, adapter.observation_spec(model.features_spec), "Actor"
        )

    def draw(
        self, logits: Floats, random: np.random.Generator
    ) -> tuple[npt.NDArray[np.int32], Floats]:
        """Draw actions (Gumbel-max); return them with the logarithms of their probabilities."""
        logits = logits - logits.max(axis=1, keepdims=True)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        noise = random.gumbel(size=logits.shape)
        actions = (log_probabilities + noise).argmax(axis=1).astype(np.int32)
        return actions, log_probabilities[np.arange(len(actions)), actions]

    def variance(self, logits: Floats) -> Floats:
        """Return the variance over the actions' probabilities: 0 where all are alike."""
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        variances: Floats = (odds / odds.sum(axis=1, keepdims=True)).var(axis=1)
        return variances

    def within_bounds(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the actions: all are possible."""
        return actions

    def refresh(self) -> None:
        """Do nothing: all depends on the head."""


class Gaussian:
    """Independent normal distributions around the head; their widths are learned."""

    def __init__(self, spec: EnvSpec, network: keras.Model) -> None:
        """Draw around the head of a policy network, within the bounds of the specification."""
        # Else the actions would be float64, which spaces of float32 refuse.
        self._low = np.array(spec.action_low, np.float32)
        self._high = np.array(spec.action_high, np.float32)
        self._logarithm = network.get_layer("action").log_deviation
        self.refresh()

    def actor(self, model: TwoNetworks | SharedTorso) -> Any:
        """Return the network as TF-Agents sees it."""
        return adapter.GaussianNetwork(
            lambda: model.network,
            adapter.observation_spec(model.features_spec),
            self._logarithm,
        )

    def draw(self, means: Floats, random: np.random.Generator) -> tuple[Floats, Floats]:
        """Draw actions; return them with the logarithms of their probability densities."""
        noise = random.standard_normal(means.shape).astype(np.float32)
        constant = np.log(self._deviation) + np.float32(0.5 * np.log(2 * np.pi))
        return means + self._deviation * noise, -(noise * noise / 2 + constant).sum(axis=1)

    def variance(self, means: Floats) -> Floats:
        """Return the variance of an action, the mean over its components; the same everywhere."""
        return np.full(len(means), (self._deviation**2).mean(), np.float32)

    def within_bounds(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the nearest possible actions."""
        return np.clip(actions, self._low, self._high)

    def refresh(self) -> None:
        """Bring the widths up to date."""
        self._deviation: Floats = np.exp(self._logarithm.numpy())
