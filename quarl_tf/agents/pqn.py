"""PQN: Q-learning on rollouts without replay and target network (Gallici et al., arXiv 2407.04811).

Deviations from the paper:

1. Convolutions have no layer normalisation, and fully-connected layers only where the preset says
   so: the exported network is that of `dqn`. Observations are normalised by running statistics, or
   scaled bytes, as in `ppo`.
2. Fewer environments and longer rollouts, as the preset sets them.
3. Adam instead of rectified Adam, with the epsilon of `ppo`; the step size may fall to 0.
4. Ticks that only reset an environment are left out; repeated transitions fill the minibatches.
5. Truncated episodes bootstrap from the value of their last observation.
6. Common to all algorithms: see `agents`.
"""

from typing import Any

import numpy.typing as npt

from quarl_tf.agents import Change
from quarl_tf.agents.dqn import build_network, epsilon_greedy
from quarl_tf.agents.on_policy import OnPolicyAgent
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import tf
from quarl_tf.networks.layers import Floats
from quarl_tf.presets import PqnPreset

__all__ = ["build", "build_network"]


class PqnAgent(OnPolicyAgent):
    """Acts at random with probability epsilon; learns Peng's Q(lambda) returns of each rollout."""

    _preset: PqnPreset

    def __init__(self, spec: EnvSpec, preset: PqnPreset, seed: int, prepare: Change) -> None:
        super().__init__(spec, preset, seed)
        network = prepare(build_network(spec, preset, seed))
        self._use(network, network)
        self._optimizer = self._adam()

    def change_network(self, change: Change) -> None:
        """Replace the network by the result of `change`."""
        network = change(self.network)
        self._use(network, network)

    def _predict(self, observations: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        heads = self._snapshots[0](observations)
        return heads, heads.max(axis=1)

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose random or greedy actions."""
        heads, values = self._predict(observations)
        actions = epsilon_greedy(
            self._preset, progress, self._act_random, self._spec, lambda: self._spec.greedy(heads)
        )
        self._draws = actions, values
        return actions

    def _loss(self, observations: Any, *fields: Any) -> Any:
        actions, returns, _ = fields
        heads = self.network(observations, training=True)
        errors = tf.gather(heads, actions, batch_dims=1) - returns
        return tf.reduce_mean(tf.square(errors))


build = PqnAgent
