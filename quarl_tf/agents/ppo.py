"""PPO (Schulman et al., arXiv 1707.06347) by TF-Agents' `PPOAgent`, clipped, in minibatches.

Deviations from the paper:

1. Observations are normalised by running statistics inside both networks, which are updated after
   each round of learning, so that the ratio of new to old policy starts at 1.
2. Advantages are normalised in each minibatch, where the preset says so.
3. Ticks that only reset an environment are left out; repeated transitions fill the minibatches.
4. Truncated episodes bootstrap from the value of their last observation.
5. Each gradient step uses one minibatch; TF-Agents' own `train` would repeat the whole batch, so
   only its loss is used. All steps of a round run in one compiled call.
6. The clipping range of the ratio is constant (the paper's decreases in Atari).
7. Continuous actions are drawn without bounds and clipped for the environment; the probability is
   that of the unclipped action. Policy and value share layers for images only.
8. Gradients are clipped by their global norm. The policy's last layer starts near zero: discrete
   actions are about equally likely at first, continuous ones drawn around the middle.
9. Common to all algorithms: see `agents`.
"""

from quarl_tf.agents.actor_critic import ActorCritic, build_network

__all__ = ["build", "build_network"]

build = ActorCritic
