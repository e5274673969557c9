"""PPO (Schulman et al., arXiv 1707.06347) by TF-Agents' `PPOAgent`, clipped, in minibatches.

Deviations from the paper:

1. Observations are normalised by running statistics inside both networks. They are brought up to
   date after each round of learning, so that the ratio of new to old policy starts at 1.
2. Advantages are normalised per minibatch, over the transitions in it, where the preset says so.
3. The tick that resets an environment is no transition and is left out; a round of learning still
   has the same number of minibatches, topped up with transitions drawn a second time.
4. Truncated episodes bootstrap from the value of their last observation.
5. Each gradient step sees one minibatch; TF-Agents' own `train` would repeat the whole batch, so
   only its loss is used. All steps of a round run in one compiled call.
6. The ratio is clipped by the same share throughout (the paper's falls in Atari).
7. Continuous actions are drawn without bounds and clipped on their way to the environment; the
   probability is that of the action as drawn. Policy and value share layers for images only.
8. Gradients are clipped by their global norm; the policy's last layer starts near zero, so that
   discrete actions are about equally likely at first, continuous ones drawn around the middle.
9. As of every algorithm: see `agents`.
"""

from functools import partial

from quarl_tf.agents import Change, tf_agents
from quarl_tf.agents.on_policy import ActorCritic, network_factory
from quarl_tf.environments import EnvSpec
from quarl_tf.presets import PpoPreset

__all__ = ["build", "network_factory"]


def build(spec: EnvSpec, preset: PpoPreset, seed: int, prepare: Change) -> ActorCritic:
    """Build the agent."""
    optimizer = partial(tf_agents.adam, preset.learning_rate, preset, epsilon=1e-5)
    return ActorCritic(spec, preset, seed, prepare, optimizer)
