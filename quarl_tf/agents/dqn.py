"""DQN and Double DQN (van Hasselt et al., arXiv 1509.06461) by TF-Agents' agents.

Deviations from the paper:

1. Observations are normalised by running statistics inside the network, so that one int8 scale
   suits all features. The target network gets the statistics together with its weights.
2. Gradient steps come in bursts of `gradient_steps` after every `train_frequency` environment
   steps, all in one compiled call; the target period counts gradient steps.
3. Adam instead of RMSprop, gradients clipped by norm, and the squared loss instead of errors
   clipped at 1: with values near 100, clipped errors fit the median, in which rare failures have no
   weight, and values rise above what the discount allows.
4. Where the preset says so, rewards of several steps are summed before bootstrapping, without an
   off-policy correction, and the head is dueling.
5. The step size may fall to 0 over the training; many environments are used at once.
6. Common to all algorithms: see `agents`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Change, tf_agents
from quarl_tf.agents.off_policy import OffPolicyAgent
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras
from quarl_tf.networks import Design
from quarl_tf.presets import DqnPreset, EpsilonGreedyPreset


def build_network(spec: EnvSpec, preset: EpsilonGreedyPreset, seed: int) -> keras.Model:
    """Build the Q-network."""
    dueling = isinstance(preset, DqnPreset) and preset.dueling
    design = Design.of(preset, spec.action_size, dueling=dueling)
    return networks.build_policy(spec, design, seed)


def build(spec: EnvSpec, preset: DqnPreset, seed: int, prepare: Change) -> OffPolicyAgent:
    """Build the agent."""
    observation_spec = tf_agents.observation_spec(spec)
    network, target = (
        tf_agents.wrap(prepare(build_network(spec, preset, seed)), observation_spec, name)
        for name in ("QNetwork", "TargetQNetwork")
    )
    rate, variables = preset.learning_rate, network.model.trainable_variables
    optimizer = tf_agents.adam(rate, preset, variables, clipnorm=preset.gradient_clip)
    agent = tf_agents.build(
        tf_agents.published.dqn.dqn_agent.DdqnAgent if preset.double else tf_agents.SingleDqnAgent,
        observation_spec,
        spec,
        q_network=network,
        target_q_network=target,
        optimizer=None,
        target_update_period=preset.target_update,
        td_errors_loss_fn=tf_agents.squared_loss,
    )

    def loss(batch: Any) -> Any:
        return agent._loss(batch, gamma=preset.discount, training=True).loss

    return DqnAgent(spec, preset, seed, agent, [(loss, network, optimizer)], target)


class DqnAgent(OffPolicyAgent):
    """Acts at random with probability epsilon."""

    _preset: DqnPreset

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose random or greedy actions."""
        greedy = partial(self._greedy, observations)
        return epsilon_greedy(self._preset, progress, self._act_random, self._spec, greedy)


def epsilon_greedy(
    preset: EpsilonGreedyPreset,
    progress: float,
    random: np.random.Generator,
    spec: EnvSpec,
    greedy: Callable[[], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    """Return greedy actions, each random with probability epsilon, which falls linearly from 1."""
    share = min(1.0, progress / preset.exploration_fraction)
    epsilon = 1.0 + share * (preset.exploration_final - 1.0)
    exploring = random.random(preset.num_envs) < epsilon
    actions = random.integers(spec.action_size, size=preset.num_envs)
    return actions if exploring.all() else np.where(exploring, actions, greedy())
