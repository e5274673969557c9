"""DDPG (Lillicrap et al., arXiv 1509.02971) by TF-Agents' `DdpgAgent`.

Deviations from the paper:

1. Observations are normalised by running statistics inside actor and critic, instead of batch
   normalisation. The targets have the same statistics.
2. Exploration noise is Gaussian or Ornstein-Uhlenbeck, as the preset says, in units of half the
   action range; before `learning_starts` actions are uniform. Episodes' ends do not reset it.
3. Gradient steps come in bursts of `gradient_steps` after every `train_frequency` environment
   steps, all in one compiled call.
4. The critic takes the action at its first layer, together with the observation.
5. Rewards of several steps may be summed before bootstrapping, where the preset says so.
6. All layers have Glorot's uniform initial weights, the last ones too (the paper's: within 0.003).
7. No weight decay; the step size may fall to 0 over the training.
8. Common to all algorithms: see `agents`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Change, tf_agents
from quarl_tf.agents.off_policy import OffPolicyAgent
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras
from quarl_tf.networks import Design
from quarl_tf.presets import DdpgPreset

#: Pull of Ornstein-Uhlenbeck noise back to 0, per step (section 7 of the paper).
_OU_DAMPING = 0.15


def build_network(spec: EnvSpec, preset: DdpgPreset, seed: int) -> keras.Model:
    """Build the actor."""
    return networks.build_actor(spec, Design.of(preset, spec.action_size), seed)


def build(spec: EnvSpec, preset: DdpgPreset, seed: int, prepare: Change) -> OffPolicyAgent:
    """Build the agent: actor and critic with their targets and optimizers."""
    observation_spec = tf_agents.observation_spec(spec)
    critic_spec = observation_spec, tf_agents.action_spec(spec)

    def actor_and_critic() -> list[tf_agents.ModelNetwork]:
        actor_model = prepare(build_network(spec, preset, seed))
        critic_model = networks.build_critic(spec, Design.of(preset, 1), seed)
        return [
            tf_agents.wrap(actor_model, observation_spec, "Actor"),
            tf_agents.wrap(critic_model, critic_spec, "Critic", lambda head: head[:, 0]),
        ]

    def optimizer(network: tf_agents.ModelNetwork, rate: float) -> Any:
        return tf_agents.adam(rate, preset, network.model.trainable_variables)

    (actor, critic), (target_actor, target_critic) = actor_and_critic(), actor_and_critic()
    agent = tf_agents.build(
        tf_agents.published.DdpgAgent,
        observation_spec,
        spec,
        actor_network=actor,
        critic_network=critic,
        target_actor_network=target_actor,
        target_critic_network=target_critic,
        target_update_tau=preset.target_tau,
        td_errors_loss_fn=tf_agents.squared_loss,
        gamma=preset.discount,
    )

    def critic_loss(batch: Any) -> Any:
        return agent.critic_loss(
            batch.time_step, batch.action_step.action, batch.next_time_step, training=True
        )

    def actor_loss(batch: Any) -> Any:
        return agent.actor_loss(batch.time_step, training=True)

    # The loss of the critic is reported; the actor, which is exported, comes last.
    steps = [
        (critic_loss, critic, optimizer(critic, preset.critic_learning_rate)),
        (actor_loss, actor, optimizer(actor, preset.learning_rate)),
    ]
    return NoisyActor(spec, preset, seed, agent, steps, target_actor)


class NoisyActor(OffPolicyAgent):
    """Acts uniformly during warm-up, then with noise on the actor's action."""

    _preset: DdpgPreset

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._arrays["noise"] = np.zeros((self._preset.num_envs, self._spec.action_size))

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose actions with noise."""
        del progress
        preset, random, noise = self._preset, self._act_random, self._arrays["noise"]
        low, high = self._spec.bounds
        # A training that goes on elsewhere has learned, though its new replay warms up.
        if self._warming_up and not self._agent.train_step_counter.numpy():
            return random.uniform(low, high, size=noise.shape).astype(np.float32)
        correlation = 1.0 - _OU_DAMPING if preset.correlated_noise else 0.0
        noise[:] = correlation * noise + preset.noise * random.standard_normal(noise.shape)
        actions = self._greedy(observations) + (high - low) / 2 * noise
        return np.clip(actions, low, high).astype(np.float32)
