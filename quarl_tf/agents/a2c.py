"""A2C as a special case of PPO (Huang et al., arXiv 2205.09123).

One epoch over one minibatch, a ratio that is not clipped (it is 1 where it is differentiated),
advantages that are not normalised, and RMSprop; TF-Agents has no A2C. The preset holds all but the
optimizer; a lambda of 1 gives the paper's n-step returns.

Deviations from the paper (advantage actor-critic, Mnih et al., arXiv 1602.01783):

1. Synchronous: one learner and a vector of environments, instead of asynchronous actors.
2. Observations are normalised by running statistics inside both networks, and truncated episodes
   bootstrap from the value of their last observation, as in `ppo`.
3. Policy and value share layers for images only.
4. RMSprop has its epsilon under the root, as in OpenAI's baselines; the preset sets it. Its mean
   square starts at 0, there at 1: the first updates are larger.
5. Rollouts may be longer than the paper's 5 steps, lambda below 1, and the step size may fall to 0,
   as the preset sets them.
6. Continuous actions and the policy's last layer are as in `ppo`.
7. Common to all algorithms: see `agents`.
"""

from quarl_tf.agents.actor_critic import ActorCritic, build_network

__all__ = ["build", "build_network"]

build = ActorCritic
