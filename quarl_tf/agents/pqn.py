"""PQN: parallelised Q-learning without replay or target network (arXiv 2407.04811).

Deviations from the paper:

1. Observations are normalised by running statistics or, bytes, by the preset, instead of layer
   normalisation, so that the exported network is that of `dqn`.
2. Adam instead of rectified Adam; the step size falls to 0 as the preset sets it.
3. Truncated episodes bootstrap from the value of their last observation.
4. Common to all algorithms: see `agents`.
"""

from typing import Any

import numpy.typing as npt

from quarl_tf.agents import Change, tf_agents
from quarl_tf.agents.dqn import build_network, epsilon_greedy
from quarl_tf.agents.on_policy import Model, OnPolicyAgent
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.inference import Snapshot
from quarl_tf.networks.layers import Floats
from quarl_tf.presets import PqnPreset

__all__ = ["build", "build_network"]


class _QNetwork(Model):
    """A Q-network; the value of a state is that of its best action."""

    def __init__(self, network: keras.Model) -> None:
        self.take(network)

    def take(self, network: keras.Model) -> None:
        self.network = network
        self.normalised_networks = [network]
        self.trainable_variables = network.trainable_variables
        self._snapshot = Snapshot(network)
        self.variables = self._snapshot.variables
        self.read_variables = self._snapshot.read_variables

    def predict(self, observations: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        heads = self._snapshot(observations)
        return heads, heads.max(axis=1)

    def refresh(self, values: Any = None) -> None:
        self._snapshot.refresh(values)


class QLearner(OnPolicyAgent):
    """Acts at random with probability epsilon; learns Peng's Q(lambda) from each rollout."""

    _preset: PqnPreset
    _model: _QNetwork

    def __init__(self, spec: EnvSpec, preset: PqnPreset, seed: int, prepare: Change) -> None:
        super().__init__(spec, preset, seed)
        self._take(_QNetwork(prepare(build_network(spec, preset, seed))))
        optimizer = tf_agents.adam(
            preset.learning_rate, preset, self._model.trainable_variables, epsilon=1e-5
        )
        self._step = tf_agents.clipped_step(optimizer, preset.gradient_clip)

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose random or greedy actions."""
        heads, values = self._model.predict(observations)
        actions = epsilon_greedy(
            self._preset, progress, self._act_random, self._spec, lambda: self._spec.greedy(heads)
        )
        self._draws = actions, values
        return actions

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _gradient_step(self, observations: Any, actions: Any, returns: Any, advantages: Any) -> Any:
        del advantages

        def loss() -> Any:
            heads = self._model.network(observations, training=True)
            errors = tf.gather(heads, actions, batch_dims=1) - returns
            return self._with_distillation(tf.reduce_mean(tf.square(errors)), observations)

        return self._step(loss, self._model.trainable_variables)


build = QLearner
