"""Rollouts of a network in a vector environment, to select networks and to calibrate.

Their seeds (`seeding.environment_seed`) are never evaluation seeds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from quarl_tf import environments
from quarl_tf.environments.acting import ticks
from quarl_tf.environments.spaces import VectorEnv
from quarl_tf.foundation.seeding import generator

#: Maps observations [num_envs, ...], and whether each one's episode is unfinished, to actions.
Act = Callable[[npt.NDArray[Any], npt.NDArray[np.bool_]], npt.NDArray[Any]]

IMAGE_RANK = 3  #: Dimensions of an observation that is an image: height, width and channels.

#: Share of random actions while images are kept.
_EXPLORING = 0.05


class Rollout(NamedTuple):
    """Returns of whole episodes, and observations from them."""

    returns: list[float]
    observations: npt.NDArray[Any]


def rollout(envs: VectorEnv, act: Act, seed: int, keep: int = 0) -> Rollout:
    """Play one episode in every environment; return at most `keep` observations.

    One each, since the episodes that finish first would over-represent short ones. While images are
    kept, some of the actions of a `Discrete` space are random: games are deterministic, and greedy
    ones show few states.
    """
    observations, _ = envs.reset(seed=seed)
    if keep and _are_images(observations):
        act = _exploring(act, envs.single_action_space, seed)
    playing = np.ones(envs.num_envs, np.bool_)
    returns = np.zeros(envs.num_envs)
    sample = _Sample(keep)
    stream = ticks(envs, lambda observations: act(observations, playing), observations)
    for steps, tick in enumerate(stream, start=1):
        environments.require_end(steps)
        sample.add(tick.observations[playing])
        returns[playing] += tick.rewards[playing]
        playing &= ~tick.done
        if not playing.any():
            break
    for number, episode_return in enumerate(returns.tolist()):
        environments.require_finite(episode_return, f"seed={seed}, environment={number}")
    return Rollout(returns.tolist(), sample.observations())


def _are_images(observations: npt.NDArray[Any]) -> bool:
    return bool(observations.ndim == 1 + IMAGE_RANK)


def _exploring(act: Act, space: gym.Space[Any], seed: int) -> Act:
    if not isinstance(space, gym.spaces.Discrete):
        return act
    random = generator(seed, "exploring actions")

    def explore(observations: npt.NDArray[Any], playing: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        actions = act(observations, playing)
        others = random.integers(int(space.n), size=actions.size)
        return np.where(random.random(actions.size) < _EXPLORING, others, actions)

    return explore


class _Sample:
    """Keeps at most `size` of the observations it is given.

    Images are evenly spread. Of others these are the observations with the smallest or largest
    value of a feature (up to a quarter, if there is room for those of all features), half of all
    from the beginning, and others evenly spread over the rest. A trained policy spends most time
    near its goal; the way there, with the largest observations, is short.
    """

    def __init__(self, size: int) -> None:
        #: After the beginning, every `_stride`th of so many batches is kept.
        self._size, self._stride, self._batch_count = size, 1, 0
        self._beginning: list[npt.NDArray[Any]] = []
        self._batches: list[npt.NDArray[Any]] = []
        self._extremes: list[npt.NDArray[Any]] = []

    def add(self, observations: npt.NDArray[Any]) -> None:
        if not self._size:
            return
        if observations[0].ndim == 1 and 2 * observations.shape[1] <= self._size // 4:
            rows = np.concatenate([*self._extremes, observations])
            self._extremes = [rows[np.concatenate([rows.argmin(axis=0), rows.argmax(axis=0)])]]
        if not _are_images(observations) and _count(self._beginning) < self._size // 2:
            self._beginning.append(observations)
            return
        if self._batch_count % self._stride == 0:
            self._batches.append(observations)
        self._batch_count += 1
        if _count(self._batches) > 2 * self._size and len(self._batches) > 1:
            self._batches, self._stride = self._batches[::2], 2 * self._stride

    def observations(self) -> npt.NDArray[Any]:
        batches = [*self._beginning, *self._batches]
        if not batches:
            return np.empty(0)
        if _count(batches) <= self._size and self._stride == 1:
            return np.concatenate(batches)
        chosen = np.concatenate([*self._extremes, *self._beginning, batches[0][:0]])[: self._size]
        spread = np.concatenate([chosen[:0], *self._batches])
        count = min(len(spread), self._size - len(chosen))
        index = np.linspace(0, len(spread) - 1, count).astype(np.int64)
        return np.concatenate([chosen, spread[index]])


def _count(batches: list[npt.NDArray[Any]]) -> int:
    return sum(map(len, batches))
