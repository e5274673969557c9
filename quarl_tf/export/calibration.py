"""Greedy rollouts of a flatbuffer, to calibrate with and to choose recipes by.

Their seeds are used in no training and no evaluation.
"""

from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf import environments
from quarl_tf.environments.acting import play
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.runtime.policy import Policy
from quarl_tf.training.rollout import rollout

#: Most observations returned, and episodes played; images are large and games long.
_VECTORS, _IMAGES = 2000, 300
_EPISODES, _GAMES = 32, 2

_IMAGE_RANK = 3


def observations(policy: Policy) -> NDArray[Any]:
    """Return observations [n, ...] of a policy's rollouts, with the extremes of each feature."""
    sidecar = policy.sidecar
    is_image = len(sidecar.observation_shape) == _IMAGE_RANK
    episodes, keep = (_GAMES, _IMAGES) if is_image else (_EPISODES, _VECTORS)
    seed = environment_seed(int(sidecar.run["seed"]), "calibration")
    with closing(environments.make_vector(sidecar.env_id, episodes, once=True)) as envs:
        found = rollout(envs, lambda batch, _: np.array([*map(policy.act, batch)]), seed, keep)
    return found.observations


def selection_returns(policy: Policy, episodes: int) -> list[float]:
    """Return the returns of a policy in episodes that are the same for all policies of a run."""
    run, returns = policy.sidecar.run, []
    with closing(environments.make(policy.sidecar.env_id)) as env:
        for number in range(episodes):
            seed = environment_seed(int(run["seed"]), "recipe selection", number)
            observation, _ = env.reset(seed=seed)
            returns.append(play(env, policy.act, observation, seed).result)
    return returns
