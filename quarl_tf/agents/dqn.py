"""DQN and Double DQN (van Hasselt et al., arXiv 1509.06461) by TF-Agents' agents.

Deviations from the paper:

1. Observations are normalised by running statistics inside the network, so that one int8 scale can
   serve all features. The target network gets the statistics together with its weights.
2. Gradient steps come in bursts of `gradient_steps` after every `train_frequency` environment
   steps, all in one compiled call; the target period counts gradient steps.
3. Adam instead of RMSprop, gradients clipped by norm, and the squared loss instead of errors
   clipped at 1: with values near 100, clipped errors weigh a rare failure no more than a small
   misjudgement (they fit the median), and values climb past what the discount allows.
4. Rewards of several steps may be summed before bootstrapping, without a correction for actions
   that the policy would not take; the head may be dueling. Both where the preset says so.
5. The step size may fall to 0 over the training; many environments are acted in at once.
6. As of every algorithm: see `agents`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Prepare, tf_agents
from quarl_tf.agents.off_policy import OffPolicyAgent, decay_steps
from quarl_tf.environments import EnvSpec, require_actions
from quarl_tf.foundation.keras import tf
from quarl_tf.networks.build import Design, NetworkFactory
from quarl_tf.presets import DqnPreset


def head(spec: EnvSpec) -> str:
    """Return what the head's numbers are."""
    del spec
    return "q_values"


def network_factory(spec: EnvSpec, preset: DqnPreset, seed: int) -> NetworkFactory:
    """Return the factory of the Q-network.

    Raises:
        UsageError: The actions are not discrete.
    """
    require_actions("dqn", spec)
    design = Design(
        preset.architecture,
        spec.action_size,
        layer_norm=preset.layer_norm,
        precision=preset.precision,
        dueling=preset.dueling,
    )
    return networks.policy_factory(spec, design, seed)


def build(spec: EnvSpec, preset: DqnPreset, seed: int, prepare: Prepare) -> DqnAgent:
    """Build the agent."""
    return DqnAgent(spec, preset, seed, prepare)


class _PlainDqnAgent(tf_agents.dqn_agent.DqnAgent):  # type: ignore[misc]
    """TF-Agents' DQN with one pass of the target network instead of two to find its best value."""

    def _compute_next_q_values(self, next_time_steps: Any, info: Any) -> Any:
        del info
        values, _ = self._target_q_network(next_time_steps.observation)
        return tf.reduce_max(values, axis=-1)


class DqnAgent(OffPolicyAgent):
    """Acts epsilon-greedily (see `agents.Agent`)."""

    _preset: DqnPreset

    def __init__(self, spec: EnvSpec, preset: DqnPreset, seed: int, prepare: Prepare) -> None:
        """Create the networks, the optimizer and an empty replay."""
        super().__init__(spec, preset, seed)
        self._num_actions = spec.action_size
        factory = network_factory(spec, preset, seed)
        q_network = tf_agents.FactoryNetwork(
            lambda: prepare(factory()), tf_agents.observation_spec(spec), name="QNetwork"
        )
        kind = tf_agents.dqn_agent.DdqnAgent if preset.double else _PlainDqnAgent
        self._agent = kind(
            tf_agents.time_step_spec(spec),
            tf_agents.action_spec(spec),
            q_network=q_network,
            optimizer=tf_agents.adam(
                preset.learning_rate, q_network.model.trainable_variables, decay_steps(preset)
            ),
            target_update_period=preset.target_update,
            gamma=preset.discount,
            td_errors_loss_fn=tf_agents.element_wise_squared_loss,
            gradient_clipping=preset.gradient_clip,
            train_step_counter=tf.Variable(0, dtype=tf.int64),
        )
        self._agent.initialize()
        self.targets = [self._agent._target_q_network.model]
        self._start(q_network.model, networks.chooser(q_network.model))

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[np.int64]:
        """Act greedily, but at random with a probability that falls linearly."""
        p = self._preset
        done = min(1.0, progress / p.exploration_fraction)
        epsilon = 1.0 + done * (p.exploration_final - 1.0)
        shape = len(observations)
        exploring = self._explore.random(shape) < epsilon
        actions = self._explore.integers(self._num_actions, size=shape)
        if not exploring.all():
            greedy = self._greedy(observations).argmax(axis=1)
            actions = np.where(exploring, actions, greedy)
        return actions

    # It has no Python control flow on tensors: AutoGraph would only take seconds to convert it.
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _gradient_step(self, batch: Any) -> Any:
        # `train` would wrap each step in a function of its own.
        return self._agent._train(batch, weights=None).loss

    def _variables(self) -> list[Any]:
        agent = self._agent
        return [
            *agent._q_network.variables,
            *agent._target_q_network.variables,
            *agent._optimizer.variables(),
            agent.train_step_counter,
            agent._update_target._counter,
        ]
