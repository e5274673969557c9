"""Greedy rollouts are whole episodes, one an environment."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quarl_tf.calibration import rollout, thin
from quarl_tf.environments import make_vector

ENV_ID = "LimitedCartPole-v0"
LIMIT = 40


@pytest.fixture(autouse=True)
def limited_cart_pole() -> Iterator[None]:
    """Register CartPole with a time limit that some episodes reach."""
    entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    gym.register(ENV_ID, entry_point, max_episode_steps=LIMIT)
    yield
    del gym.registry[ENV_ID]


def lean(observations: np.ndarray) -> np.ndarray:
    """Push to where the pole leans: some episodes end early, some at the limit."""
    return (observations @ np.array([0, 0, 1, 0]) > 0).astype(int)


def test_rollout_is_one_episode_of_every_environment_stepped_by_hand() -> None:
    found = rollout(make_vector(ENV_ID, 12), lean, seed=3)
    returns, observations = [], []
    for e in range(12):
        env = gym.make(ENV_ID)
        observation, _ = env.reset(seed=3 + e)
        rewards: list[float] = []
        over = False
        while not over:
            observations.append(tuple(observation))
            observation, reward, ended, cut, _ = env.step(int(lean(observation)))
            rewards.append(float(reward))
            over = ended or cut
        returns.append(sum(rewards))
    assert found.returns == returns
    assert min(returns) < LIMIT == max(returns)  # Both kinds of end are among them.
    # Those acted on, each once; an episode's last observation is not acted on.
    assert sorted(map(tuple, found.observations.tolist())) == sorted(
        tuple(map(float, observation)) for observation in observations
    )


@pytest.mark.parametrize("env_id", [ENV_ID, "CartPole-v1"])
def test_rollout_depends_on_its_seed_alone(env_id: str) -> None:
    envs = make_vector(env_id, 5)
    first, other, again = (rollout(envs, lean, seed) for seed in (1, 2, 1))
    np.testing.assert_array_equal(first.observations, again.observations)
    assert first.returns == again.returns
    assert not np.array_equal(first.observations[:5], other.observations[:5])


def test_each_step_of_cart_pole_is_one_observation_and_one_reward() -> None:
    found = rollout(make_vector("CartPole-v1", 7), lean, seed=0)
    assert len(found.returns) == 7
    assert sum(found.returns) == len(found.observations)
    assert found.observations.dtype == np.float32


@given(st.integers(0, 400), st.integers(2, 50))
def test_thinning_keeps_both_ends_and_even_steps(count: int, most: int) -> None:
    observations = np.arange(2 * count).reshape(count, 2)
    kept = thin(observations, most)
    assert len(kept) == min(count, most)
    indices = kept[:, 0] // 2
    np.testing.assert_array_equal(kept, observations[indices])
    if count:
        assert (indices[0], indices[-1]) == (0, count - 1)
        gaps = np.diff(indices)
        assert len(gaps) == 0 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)
