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

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Change, tf_agents
from quarl_tf.agents.off_policy import Exploration, OffPolicyAgent
from quarl_tf.environments import EnvSpec
from quarl_tf.networks import Design, NetworkFactory
from quarl_tf.presets import DdpgPreset

#: Pull of Ornstein-Uhlenbeck noise back to 0, per step (section 7 of the paper).
_OU_DAMPING = 0.15


def network_factory(spec: EnvSpec, preset: DdpgPreset, seed: int) -> NetworkFactory:
    """Return the factory of the actor."""
    return networks.actor_factory(spec, _design(preset, spec.action_size), seed)


def _design(preset: DdpgPreset, outputs: int) -> Design:
    return Design(
        preset.architecture, outputs, layer_norm=preset.layer_norm, precision=preset.precision
    )


def actor_and_critics(
    spec: EnvSpec,
    preset: DdpgPreset,
    seed: int,
    prepare: Change,
    draws: Sequence[str] = ("initial critic weights",),
) -> list[tf_agents.FactoryNetwork]:
    """Build an actor, and a critic for each draw of initial weights."""
    observed, acted = tf_agents.observation_spec(spec), tf_agents.action_spec(spec)
    factory = network_factory(spec, preset, seed)
    actor = tf_agents.FactoryNetwork(lambda: prepare(factory()), observed, "Actor")
    judges = [networks.critic_factory(spec, _design(preset, 1), seed, draw) for draw in draws]
    return [
        actor,
        *(
            tf_agents.FactoryNetwork(judge, (observed, acted), "Critic", tf_agents.value)
            for judge in judges
        ),
    ]


def optimizers(preset: DdpgPreset, learning: Sequence[tf_agents.FactoryNetwork]) -> tuple[Any, Any]:
    """Return the optimizers of an actor and of the critics behind it."""
    actor, *critics = [network.model.trainable_variables for network in learning]
    return (
        tf_agents.adam(preset.learning_rate, preset, actor),
        tf_agents.adam(preset.critic_learning_rate, preset, [v for each in critics for v in each]),
    )


def build(spec: EnvSpec, preset: DdpgPreset, seed: int, prepare: Change) -> OffPolicyAgent:
    """Build the agent: actor and critic with their targets and optimizers."""
    actor, critic = learning = actor_and_critics(spec, preset, seed, prepare)
    target_actor, target_critic = actor_and_critics(spec, preset, seed, prepare)
    of_actor, of_critic = optimizers(preset, learning)
    agent = tf_agents.build(
        tf_agents.published.DdpgAgent,
        tf_agents.observation_spec(spec),
        spec,
        actor_network=actor,
        critic_network=critic,
        target_actor_network=target_actor,
        target_critic_network=target_critic,
        actor_optimizer=of_actor,
        critic_optimizer=of_critic,
        target_update_tau=preset.target_tau,
        td_errors_loss_fn=tf_agents.squared_loss,
        gamma=preset.discount,
    )
    learner = tf_agents.Learner(
        agent,
        learning,
        [target_actor],
        [of_actor, of_critic],
        lambda result: result.extra.critic_loss,
    )
    return OffPolicyAgent(spec, preset, seed, learner, ActionNoise(spec, preset))


class ActionNoise(Exploration):
    """Adds noise to the best action; uniform actions while the replay warms up."""

    def __init__(self, spec: EnvSpec, preset: DdpgPreset) -> None:
        """Start without noise."""
        self._spec, self._scale = spec, preset.noise
        self._kept = 1.0 - _OU_DAMPING if preset.correlated_noise else 0.0
        super().__init__(noise=np.zeros((preset.num_envs, spec.action_size)))

    def act(
        self,
        greedy: Callable[[], npt.NDArray[Any]],
        random: np.random.Generator,
        progress: float,
        warming_up: bool,
    ) -> npt.NDArray[Any]:
        """Choose actions (see `off_policy.Exploration`)."""
        del progress
        (low, high), noise = self._spec.bounds, self.state["noise"]
        if warming_up:
            return random.uniform(low, high, size=noise.shape).astype(np.float32)
        noise = self._kept * noise + self._scale * random.standard_normal(noise.shape)
        self.state["noise"] = noise
        noisy = greedy() + (high - low) / 2 * noise
        return np.clip(noisy, low, high).astype(np.float32)
