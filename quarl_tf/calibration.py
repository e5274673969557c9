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


def rollout(envs: gym.vector.VectorEnv[Any, Any, Any], act: Act, seed: int) -> Rollout:
    """Play one episode to its end in every environment.

    One each: as many as finish first would count short episodes more often than long ones.

    Args:
        envs: Environments.
        act: Observations [num_envs, ...] to actions.
        seed: Seed of the reset.
    """
    observations, _ = envs.reset(seed=seed)
    playing = np.ones(envs.num_envs, np.bool_)
    returns = np.zeros(envs.num_envs)
    seen: list[npt.NDArray[Any]] = []
    while playing.any():
        seen.append(observations[playing])
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        returns[playing] += rewards[playing]
        playing &= ~(terminated | truncated)
    return Rollout(returns.tolist(), np.concatenate(seen))


def thin(observations: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Keep at most `most` observations, evenly spread over the rollout."""
    if len(observations) <= most:
        return observations
    return observations[np.linspace(0, len(observations) - 1, most).astype(np.int64)]
