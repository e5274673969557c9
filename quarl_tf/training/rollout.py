"""Greedy rollouts of a network in a vector environment, to select networks and to calibrate.

Their seeds (`seeding.environment_seed`) are never evaluation seeds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from quarl_tf import environments
from quarl_tf.environments.acting import ticks

#: Maps observations [num_envs, ...], and whether each one's episode is unfinished, to actions.
Act = Callable[[npt.NDArray[Any], npt.NDArray[np.bool_]], npt.NDArray[Any]]


class Rollout(NamedTuple):
    """Returns of whole episodes, and observations from them."""

    returns: list[float]
    observations: npt.NDArray[Any]


def rollout(
    envs: gym.vector.VectorEnv[Any, Any, Any], act: Act, seed: int, keep: int = 0
) -> Rollout:
    """Play one episode in every environment; return at most `keep` observations.

    One each, since the episodes that finish first would over-represent short ones.
    """
    observations, _ = envs.reset(seed=seed)
    playing = np.ones(envs.num_envs, np.bool_)
    returns = np.zeros(envs.num_envs)
    seen = _Thinned(keep)
    played = ticks(envs, lambda observations: act(observations, playing), observations)
    for steps, tick in enumerate(played, start=1):
        environments.require_end(steps)
        seen.add(tick.observations[playing])
        returns[playing] += tick.rewards[playing]
        playing &= ~tick.done
        if not playing.any():
            break
    for episode_return in returns.tolist():
        environments.require_finite(episode_return, f"seed={seed}")
    return Rollout(returns.tolist(), seen.observations())


class _Thinned:
    """Keeps at most `most` of the observations it is given.

    These are the observations with the smallest or largest value of a feature (up to a quarter),
    half of all from the beginning, and others evenly spread over the rest. A trained policy spends
    most time near its goal; the way there, with the largest observations, is short.
    """

    def __init__(self, most: int) -> None:
        self._most, self._every, self._given = most, 1, 0
        self._beginning: list[npt.NDArray[Any]] = []
        self._batches: list[npt.NDArray[Any]] = []
        self._extremes: npt.NDArray[Any] | None = None

    def add(self, observations: npt.NDArray[Any]) -> None:
        if not self._most:
            return
        if observations[0].ndim == 1:
            extremes = observations[:0] if self._extremes is None else self._extremes
            known = np.concatenate([extremes, observations])
            self._extremes = known[np.concatenate([known.argmin(axis=0), known.argmax(axis=0)])]
        if _count(self._beginning) < self._most // 2:
            self._beginning.append(observations)
            return
        if self._given % self._every == 0:
            self._batches.append(observations)
        self._given += 1
        if _count(self._batches) > 2 * self._most and len(self._batches) > 1:
            self._batches, self._every = self._batches[::2], 2 * self._every

    def observations(self) -> npt.NDArray[Any]:
        whole = [*self._beginning, *self._batches]
        if not whole:
            return np.empty(0)
        if _count(whole) <= self._most and self._every == 1:
            return np.concatenate(whole)
        extremes = [] if self._extremes is None else [thin(self._extremes, self._most // 4)]
        first = np.concatenate([*extremes, *self._beginning, whole[0][:0]])[: self._most]
        rest = thin(np.concatenate([first[:0], *self._batches]), self._most - len(first))
        return np.concatenate([first, rest])


def _count(batches: list[npt.NDArray[Any]]) -> int:
    return sum(map(len, batches))


def thin(observations: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Return at most `most` of the observations, evenly spread."""
    if len(observations) <= most:
        return observations
    index = np.linspace(0, len(observations) - 1, most).astype(np.int64)
    return np.take(observations, index, axis=0)
