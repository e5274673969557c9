"""A2C as the special case of PPO that it is (Huang et al., arXiv 2205.09123).

One epoch over one minibatch, no clipping of the ratio (which is 1 where it is differentiated),
advantages as they are, and RMSprop; TF-Agents has no A2C of its own. The preset holds all but the
optimizer, with a lambda of 1 where returns are the paper's of n steps.

Deviations from the paper (advantage actor-critic, Mnih et al., arXiv 1602.01783):

1. Synchronous: one learner and a vector of environments, instead of asynchronous actors.
2. Observations are normalised by running statistics inside both networks, and truncated episodes
   bootstrap from the value of their last observation, as in `ppo`.
3. Policy and value share layers for images only.
4. RMSprop has its epsilon under the root, as OpenAI's baselines have it; the preset says how much.
5. Rollouts may be longer than the paper's 5 steps, and advantages weighted by a lambda below 1,
   where the preset says so; the step size may fall to 0 over the training.
6. Continuous actions and the policy's last layer are as in `ppo`.
7. As of every algorithm: see `agents`.
"""

from functools import partial

from quarl_tf.agents import Change, tf_agents
from quarl_tf.agents.on_policy import ActorCritic, network_factory
from quarl_tf.environments import EnvSpec
from quarl_tf.presets import A2cPreset

__all__ = ["build", "network_factory"]


def build(spec: EnvSpec, preset: A2cPreset, seed: int, prepare: Change) -> ActorCritic:
    """Build the agent."""
    return ActorCritic(spec, preset, seed, prepare, partial(tf_agents.rmsprop, preset))
