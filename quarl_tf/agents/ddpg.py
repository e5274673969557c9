"""DDPG (Lillicrap et al., arXiv 1509.02971) by TF-Agents' `DdpgAgent`.

Deviations from the paper:

1. Observations are normalised by running statistics inside actor and critic, instead of batch
   normalisation. The targets get the statistics as they are.
2. Exploration noise is Gaussian or Ornstein-Uhlenbeck as the preset says, in units of half the
   action range; before `learning_starts` actions are uniform. It runs on over episodes' ends.
3. Gradient steps come in bursts of `gradient_steps` after every `train_frequency` environment
   steps, all in one compiled call.
4. The critic takes the action at its first layer, together with the observation.
5. Rewards of several steps may be summed before bootstrapping, where the preset says so.
6. All layers start from Glorot's uniform weights, the last ones too (the paper's: within 0.003).
7. No weight decay; the step size may fall to 0 over the training.
8. As of every algorithm: see `agents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Arrays, Prepare, tf_agents
from quarl_tf.agents.off_policy import OffPolicyAgent, decay_steps
from quarl_tf.environments import EnvSpec, require_actions
from quarl_tf.foundation.keras import tf
from quarl_tf.networks.build import Design, NetworkFactory
from quarl_tf.presets import DdpgPreset


def head(spec: EnvSpec) -> str:
    """Return what the head's numbers are."""
    del spec
    return "action"


#: Pull of Ornstein-Uhlenbeck noise back to 0, per step (section 7 of the paper).
_OU_DAMPING = 0.15


def network_factory(spec: EnvSpec, preset: DdpgPreset, seed: int) -> NetworkFactory:
    """Return the factory of the actor.

    Raises:
        UsageError: The actions are not continuous.
    """
    require_actions("ddpg", spec)
    return networks.actor_factory(spec, _design(preset, spec.action_size), seed)


def _design(preset: DdpgPreset, outputs: int) -> Design:
    return Design(
        preset.architecture, outputs, layer_norm=preset.layer_norm, precision=preset.precision
    )


def build(spec: EnvSpec, preset: DdpgPreset, seed: int, prepare: Prepare) -> DdpgAgent:
    """Build the agent."""
    return DdpgAgent(spec, preset, seed, prepare)


class DdpgAgent(OffPolicyAgent):
    """Acts with noise (see `agents.Agent`)."""

    _preset: DdpgPreset

    def __init__(self, spec: EnvSpec, preset: DdpgPreset, seed: int, prepare: Prepare) -> None:
        """Create actor and critic, their targets and optimizers, and an empty replay."""
        super().__init__(spec, preset, seed)
        factory = network_factory(spec, preset, seed)
        self._low = np.array(spec.action_low, np.float32)
        self._high = np.array(spec.action_high, np.float32)
        self._noise = np.zeros((preset.num_envs, len(self._low)))
        observed = tf_agents.observation_spec(spec)
        actor = tf_agents.FactoryNetwork(lambda: prepare(factory()), observed, name="Actor")
        critic = tf_agents.ValueNetwork(
            networks.critic_factory(spec, _design(preset, 1), seed),
            (observed, tf_agents.action_spec(spec)),
            name="Critic",
        )
        decay = decay_steps(preset)
        self._agent = tf_agents.ddpg_agent.DdpgAgent(
            tf_agents.time_step_spec(spec),
            tf_agents.action_spec(spec),
            actor_network=actor,
            critic_network=critic,
            actor_optimizer=tf_agents.adam(
                preset.learning_rate, actor.model.trainable_variables, decay
            ),
            critic_optimizer=tf_agents.adam(
                preset.critic_learning_rate, critic.model.trainable_variables, decay
            ),
            target_update_tau=preset.target_tau,
            td_errors_loss_fn=tf_agents.element_wise_squared_loss,
            gamma=preset.discount,
            train_step_counter=tf.Variable(0, dtype=tf.int64),
        )
        self._agent.initialize()
        self._critic = critic.model
        self.targets = [self._agent._target_actor_network.model]
        self._start(actor.model, actor.model, critic.model)

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[np.float32]:
        """Act with noise, uniformly while the replay warms up."""
        del progress
        shape = (len(observations), len(self._low))
        half = (self._high - self._low) / 2
        if self._warming_up:
            uniform = self._explore.uniform(self._low, self._high, size=shape)
            return uniform.astype(np.float32)
        fresh = self._preset.noise * self._explore.standard_normal(shape)
        kept = 1.0 - _OU_DAMPING if self._preset.correlated_noise else 0.0
        self._noise = kept * self._noise + fresh
        noisy = self._greedy(observations) + half * self._noise
        return np.clip(noisy, self._low, self._high).astype(np.float32)

    # It has no Python control flow on tensors: AutoGraph would only take seconds to convert it.
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _gradient_step(self, batch: Any) -> Any:
        # `train` would wrap each step in a function of its own.
        return self._agent._train(batch).extra.critic_loss

    def _variables(self) -> list[Any]:
        agent = self._agent
        return [
            *agent._actor_network.variables,
            *agent._critic_network.variables,
            *agent._target_actor_network.variables,
            *agent._target_critic_network.variables,
            *agent._actor_optimizer.variables(),
            *agent._critic_optimizer.variables(),
            agent.train_step_counter,
        ]

    def arrays(self) -> Arrays:
        """Return the noise, beside what all off-policy agents keep."""
        return {"noise": self._noise, **super().arrays()}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take all of it back."""
        self._noise = arrays["noise"]
        super().restore(arrays)
