"""Greedy rollouts are whole episodes, one an environment."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Patch, refused, register, step

from quarl_tf import environments
from quarl_tf.environments import make_vector
from quarl_tf.training.rollout import Rollout, rollout

ENV_ID, LIMIT = "LimitedCartPole-v0", 40


def lean(observations: np.ndarray, _: Any = None) -> np.ndarray:
    """Push to where the pole leans: some episodes end early, some at the limit."""
    return (observations[..., 2] > 0).astype(int)


def test_rollout_is_one_episode_of_every_environment_stepped_by_hand(monkeypatch: Patch) -> None:
    # CartPole with a time limit that some episodes reach.
    entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    register(monkeypatch, ENV_ID, entry_point, max_episode_steps=LIMIT)
    played = rollout(make_vector(ENV_ID, 12), lean, seed=3, keep=1000)
    observations = []

    def act(observation: np.ndarray) -> int:
        observations.append(observation.tolist())
        return int(lean(observation))

    returns = [step(gym.make(ENV_ID), act, seed)[0] for seed in range(3, 3 + 12)]
    assert played.returns == returns
    assert min(returns) < LIMIT == max(returns)  # Both kinds of end are among them.
    # Those acted on, each once; an episode's last observation is not acted on.
    assert sorted(played.observations.tolist()) == sorted(observations)
    # An episode without end is given up.
    monkeypatch.setattr(environments, "LONGEST_EPISODE", LIMIT - 1)
    assert "steps=40" in refused(rollout, make_vector(ENV_ID, 12), lean, seed=3, code=2)


class Ticking(gym.vector.VectorEnv[Any, Any, Any]):
    """Episodes of given lengths; an observation is the tick and the number of the environment."""

    def __init__(self, lengths: Sequence[int], *, images: bool = False) -> None:
        self.num_envs, self.lengths = len(lengths), np.array(lengths)
        self._shape = (len(lengths), *((1, 1, 2) if images else (2,)))

    def _observations(self) -> np.ndarray:
        ticks = np.full(self.num_envs, self.tick)
        return np.stack([ticks, np.arange(self.num_envs)], axis=1).reshape(self._shape)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.tick = 0
        return self._observations(), {}

    def step(self, _: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.tick += 1
        ended, never = self.tick == self.lengths, np.zeros(self.num_envs, np.bool_)
        return self._observations(), np.ones(self.num_envs), ended, never, {}


def ticked(lengths: Sequence[int], keep: int, *, images: bool) -> Rollout:
    envs = Ticking(lengths, images=images)
    return rollout(envs, lambda x, _: np.zeros(len(x), np.int64), seed=0, keep=keep)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(2, 60), st.booleans())
def test_rollouts_keep_extremes_of_features(lengths: list[int], keep: int, images: bool) -> None:
    played = ticked(lengths, keep, images=images)
    assert played.returns == lengths
    assert len(played.observations) == min(keep, sum(lengths))
    if keep >= 16 and not images:
        assert played.observations.min(axis=0).tolist() == [0, 0]
        assert played.observations.max(axis=0).tolist() == [max(lengths) - 1, len(lengths) - 1]


@settings(max_examples=50)
@given(st.integers(1, 1000), st.integers(2, 60))
def test_half_is_from_the_beginning_and_the_rest_is_spread(length: int, keep: int) -> None:
    ticks = ticked([length], keep, images=True).observations.reshape(-1, 2)[:, 0]
    half = min(keep // 2, length)
    np.testing.assert_array_equal(ticks[:half], np.arange(half))
    gaps = np.diff(ticks[half:])
    if len(gaps):
        assert length - ticks[-1] <= gaps.max() <= 2 * gaps.min()
