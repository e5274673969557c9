"""Vector environments are single ones side by side; the tick after an episode is its reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from quarl_tf.environments import EnvSpec, env_spec, make, make_vector
from quarl_tf.foundation.errors import UsageError

#: One that Gymnasium has vectorised, one that it has not.
VECTORISED, LOOPED = "CartPole-v1", "ShortCartPole-v0"
LIMIT = 15


class Spaces(gym.Env[Any, Any]):
    """An environment of given spaces, never to be played."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space


@pytest.fixture(autouse=True)
def short_cart_pole() -> Iterator[None]:
    """Register CartPole with a time limit that random play often reaches, and often does not."""
    entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    gym.register(LOOPED, entry_point, max_episode_steps=LIMIT)
    yield
    del gym.registry[LOOPED]


@pytest.fixture
def register() -> Iterator[Callable[[spaces.Space, spaces.Space], str]]:
    """Return a function that registers an environment of given spaces."""

    def add(observation: spaces.Space, action: spaces.Space) -> str:
        gym.register("Spaces-v0", lambda: Spaces(observation, action))
        return "Spaces-v0"

    yield add
    gym.registry.pop("Spaces-v0", None)


# Spaces.


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"])
def test_discrete_environments_are_described(env_id: str) -> None:
    env = gym.make(env_id)
    assert isinstance(env.action_space, spaces.Discrete)
    assert env_spec(env_id) == EnvSpec(
        env.observation_space.shape or (), "float32", int(env.action_space.n)
    )


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_continuous_environments_are_described(env_id: str) -> None:
    action = gym.make(env_id).action_space
    spec = env_spec(env_id)
    assert isinstance(action, spaces.Box)
    assert spec.num_actions is None
    np.testing.assert_array_equal(np.array(spec.action_low, np.float32), action.low)
    np.testing.assert_array_equal(np.array(spec.action_high, np.float32), action.high)


def test_frames_keep_their_bytes(
    register: Callable[[spaces.Space, spaces.Space], str],
) -> None:
    frames = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert env_spec(register(frames, spaces.Discrete(4))) == EnvSpec((8, 8, 3), "uint8", 4)


def test_double_precision_becomes_single(
    register: Callable[[spaces.Space, spaces.Space], str],
) -> None:
    numbers = spaces.Box(-1, 1, (3,), np.float64)
    assert env_spec(register(numbers, spaces.Discrete(2))).observation_dtype == "float32"


BOX = spaces.Box(-1, 1, (3,), np.float32)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Discrete(5), spaces.Discrete(2), r"Observations must be a Box.*Discrete\(5\)"),
        (spaces.Dict(x=BOX), spaces.Discrete(2), "Observations must be a Box"),
        (BOX, spaces.MultiDiscrete([2, 2]), "Actions must be Discrete from 0 or a bounded Box"),
        (BOX, spaces.Discrete(2, start=1), "Actions must be Discrete from 0"),
        (BOX, spaces.Box(-np.inf, np.inf, (2,)), "a bounded Box"),
        (BOX, spaces.Box(0, np.inf, (2,)), "a bounded Box"),
        (spaces.Box(-1, 1, ()), spaces.Discrete(2), r"a vector or an image.*Box\(-1.0, 1.0, \(\)"),
        (spaces.Box(-1, 1, (0,)), spaces.Discrete(2), "with at least one number"),
        (BOX, spaces.Box(-1, 1, (0,)), "a lowest value below its highest"),
        (BOX, spaces.Box(np.float32([-1, 2]), np.float32([1, 2])), "below its highest"),
    ],
)
def test_other_spaces_are_refused(
    register: Callable[[spaces.Space, spaces.Space], str],
    observation: spaces.Space,
    action: spaces.Space,
    message: str,
) -> None:
    env_id = register(observation, action)
    with pytest.raises(UsageError, match=message) as error:
        env_spec(env_id)
    assert env_id in str(error.value)


# Names.


@pytest.mark.parametrize("function", [make, env_spec, lambda env_id: make_vector(env_id, 2)])
@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v9", "did you mean .*CartPole-v1"),
        ("cart-pole", "did you mean .*CartPole"),
        ("CartPole", "did you mean .*CartPole-v"),
        ("Carpole-v1", "did you mean CartPole-v1"),
        ("", "choose from .*CartPole-v1"),
        ("no_such_module:CartPole-v1", "Unknown environment"),
        ("a/b/c", "Unknown environment"),
    ],
)
def test_unknown_environments_are_refused_naming_the_closest(
    function: Callable[[str], Any], env_id: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        function(env_id)
    assert "\n" not in str(error.value)


def test_an_environment_of_a_version_that_needs_another_package_is_refused_by_its_advice() -> None:
    with pytest.raises(UsageError, match=r"v2.*Received: environment='HalfCheetah-v2'") as error:
        make("HalfCheetah-v2")
    assert "\n" not in str(error.value)


# Streams.


Collector = list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


def play(
    envs: gym.vector.VectorEnv[Any, Any, Any], seed: int, ticks: int, choices: int = 0
) -> Collector:
    """Act at random; return ticks of (seen, action, reward, terminated, truncated, following)."""
    random = np.random.default_rng(choices)
    seen, _ = envs.reset(seed=seed)
    stream = []
    for _ in range(ticks):
        actions = random.integers(2, size=envs.num_envs)
        following, rewards, terminated, truncated, _ = envs.step(actions)
        stream.append((seen, actions, rewards, terminated, truncated, following))
        seen = following
    return stream


def same(left: Collector, right: Collector) -> bool:
    return all(
        np.array_equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("env_id", [VECTORISED, LOOPED])
def test_every_tick_is_a_step_or_a_reset(env_id: str) -> None:
    stream = play(make_vector(env_id, 4), seed=1, ticks=150)
    single = gym.make(VECTORISED).unwrapped
    single.reset(seed=0)
    over = np.zeros(4, np.bool_)
    resets = 0
    for seen, actions, rewards, terminated, truncated, following in stream:
        for e in range(4):
            if over[e]:
                resets += 1
                assert (rewards[e], terminated[e], truncated[e]) == (0, False, False)
                assert np.abs(following[e]).max() <= 0.05  # CartPole starts episodes there.
                continue
            single.state = tuple(seen[e].astype(float))
            single.steps_beyond_terminated = None
            expected, reward, ended, _, _ = single.step(int(actions[e]))
            np.testing.assert_allclose(following[e], expected, rtol=1e-5, atol=1e-6)
            assert (rewards[e], terminated[e]) == (reward, ended)
        over = terminated | truncated
    assert resets > 10


def test_looped_environments_are_single_ones_seeded_one_after_the_other() -> None:
    stream = play(make_vector(LOOPED, 3), seed=7, ticks=80)
    for e in range(3):
        single = gym.make(LOOPED)
        observation, _ = single.reset(seed=7 + e)
        over = False
        for seen, actions, rewards, terminated, truncated, following in stream:
            np.testing.assert_array_equal(seen[e], observation)
            reward, ended, cut = 0.0, False, False
            if over:
                observation, _ = single.reset()
            else:
                observation, reward, ended, cut, _ = single.step(int(actions[e]))
            np.testing.assert_array_equal(following[e], observation)
            assert (rewards[e], terminated[e], truncated[e]) == (reward, ended, cut)
            over = ended or cut


@pytest.mark.parametrize(
    ("env_id", "limit"),
    # Gymnasium advises against the oldest, which is a task of its own.
    [(VECTORISED, 500), ("CartPole-v0", 200), (LOOPED, LIMIT)],
)
def test_time_limit_truncates_and_does_not_terminate(env_id: str, limit: int) -> None:
    assert gym.spec(env_id).max_episode_steps == limit
    envs, single = make_vector(env_id, 2), make(env_id)
    balance = np.array([0.1, 0.2, 3, 1])
    seen, _ = envs.reset(seed=3)
    for tick in range(limit):
        seen, _, terminated, truncated, _ = envs.step((seen @ balance > 0).astype(int))
        assert not terminated.any()
        assert truncated.all() == truncated.any() == (tick == limit - 1)
    observation, _ = single.reset(seed=3)
    for tick in range(limit):
        observation, _, ended, cut, _ = single.step(int(observation @ balance > 0))
        assert (ended, cut) == (False, tick == limit - 1)


@pytest.mark.parametrize("env_id", [VECTORISED, LOOPED])
def test_seeded_reset_forgets_everything_before_it(env_id: str) -> None:
    fresh = play(make_vector(env_id, 4), seed=5, ticks=60)
    assert not same(fresh, play(make_vector(env_id, 4), seed=6, ticks=60))
    used = make_vector(env_id, 4)
    # Whatever went on before, an episode that had just ended above all.
    stopped_after_an_end = 0
    for ticks in range(20, 40):
        before = play(used, seed=ticks, ticks=ticks, choices=ticks)
        stopped_after_an_end += bool((before[-1][3] | before[-1][4]).any())
        assert same(play(used, seed=5, ticks=60), fresh)
    assert stopped_after_an_end > 0


@pytest.mark.parametrize("env_id", [VECTORISED, LOOPED])
def test_environments_of_a_vector_differ(env_id: str) -> None:
    first, _ = make_vector(env_id, 8).reset(seed=0)
    assert len({tuple(observation) for observation in first.tolist()}) == 8


@pytest.mark.parametrize("env_id", [VECTORISED, LOOPED])
def test_observations_are_not_overwritten_by_the_next_tick(env_id: str) -> None:
    envs = make_vector(env_id, 3)
    seen, _ = envs.reset(seed=0)
    kept = [(seen, seen.copy())]
    for _ in range(20):
        seen, *_ = envs.step(np.ones(3, int))
        kept.append((seen, seen.copy()))
    assert all(np.array_equal(now, then) for now, then in kept)
