"""Greedy rollouts of a network in a vector environment: to choose networks and to calibrate.

These rollouts use seeds of their own (`seeding.environment_seed`), never evaluation seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

Act = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


class Rollout(NamedTuple):
    """Whole episodes: their returns, and every observation acted on in them."""

    returns: list[float]
    observations: npt.NDArray[Any]


def rollout(
    envs: gym.vector.VectorEnv[Any, Any, Any], act: Act, episodes: int, seed: int
) -> Rollout:
    """Play `episodes` episodes to their end, an equal share in every environment.

    An equal share keeps short episodes from being counted more often than long ones.

    Args:
        envs: Environments; `episodes` is rounded up to a multiple of their number.
        act: Observations [num_envs, ...] to actions.
        episodes: Episodes to play.
        seed: Seed of the first reset.
    """
    share = -(-episodes // envs.num_envs)
    observations, _ = envs.reset(seed=seed)
    starts = np.ones(envs.num_envs, np.bool_)
    running = np.zeros(envs.num_envs)
    finished = np.zeros(envs.num_envs, np.int64)
    returns: list[float] = []
    seen: list[npt.NDArray[Any]] = []
    while (finished < share).any():
        seen.append(observations[starts & (finished < share)])
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        running += rewards
        done = terminated | truncated
        returns += running[done & (finished < share)].tolist()
        finished += done
        running[done] = 0.0
        starts = ~done
    return Rollout(returns, np.concatenate(seen))


def thin(observations: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Keep at most `most` observations, evenly spread over the rollout."""
    if len(observations) <= most:
        return observations
    return observations[np.linspace(0, len(observations) - 1, most).astype(np.int64)]
