"""Every kind of environment follows the same rules."""

import os
import re
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from samples import python, refused

from quarl_tf.environments import canonical_id, env_spec, make, make_vector
from quarl_tf.environments.acting import Tick, ticks
from quarl_tf.foundation.errors import UsageError

#: Environments, and ticks enough for some episodes to end and others to begin.
EXACT = {"LunarLander-v3": 300, "BipedalWalker-v3": 200, "Walker2DBulletEnv-v0": 100}
EXACT |= {"AirNav-v0": 1000}
GAMES = {"BreakoutNoFrameskip-v4": 120}
ALL = EXACT | GAMES | {"CartPole-v1": 100}


def sampler(env: Any, choices: int = 0) -> Callable[[Any], np.ndarray]:
    random = np.random.default_rng(choices)
    space, num_envs = env.single_action_space, env.num_envs
    if isinstance(space, spaces.Discrete):
        return lambda _: random.integers(space.n, size=num_envs)
    return lambda _: random.uniform(space.low, space.high, (num_envs, *space.shape)).astype("f4")


def play(envs: Any, seed: int, length: int, choices: int = 0) -> list[Tick]:
    """Act at random."""
    observations, _ = envs.reset(seed=seed)
    return list(islice(ticks(envs, sampler(envs, choices), observations), length))


def assert_same(left: list[Tick], right: list[Tick]) -> None:
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one[:-1], other[:-1], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("env_id", "length"), ALL.items())
def test_every_kind_follows_the_rules(env_id: str, length: int) -> None:
    """The tick after an episode is its reset; seeded resets do not depend on earlier episodes."""
    envs = make_vector(env_id, 2, training=True)
    stream, spec = play(envs, 1, length), env_spec(env_id)
    assert not np.array_equal(*stream[0].observations)
    resets = 0
    for tick in stream:
        assert tick.following.shape == (2, *spec.observation_shape)
        assert tick.following.dtype == spec.observation_dtype
        assert (tick.terminated.dtype, tick.truncated.dtype) == (bool, bool)
        resets += np.count_nonzero(~tick.starts)
        np.testing.assert_array_equal(tick.rewards[~tick.starts], 0)
        # Games take several ticks after a lost life.
        assert env_id in GAMES or not tick.done[~tick.starts].any()
    assert resets > 1
    # The same environments after other episodes, and new ones.
    play(envs, 2, length // 3, choices=1)
    assert_same(play(envs, 1, length), stream)
    assert_same(play(make_vector(env_id, 2, training=True), 1, length), stream)


@pytest.mark.parametrize(("env_id", "length"), EXACT.items())
def test_vectors_equal_single_environments(env_id: str, length: int) -> None:
    envs, singles = make_vector(env_id, 2), [make(env_id), make(env_id)]
    starts = [env.reset(seed=4 + e)[0] for e, env in enumerate(singles)]
    stream = play(envs, 4, length)
    np.testing.assert_array_equal(stream[0].observations, starts)
    for tick in stream:
        for e, env in enumerate(singles):
            expected: Any = env.step(tick.actions[e]) if tick.starts[e] else (env.reset()[0], 0.0)
            found = tick.following[e], tick.rewards[e], tick.terminated[e], tick.truncated[e]
            for one, other in zip(found, (*expected, False, False)[:4], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_cart_pole_s_vector_steps_as_the_single_environment() -> None:
    env: Any = make("CartPole-v1")
    env.reset()
    for tick in play(make_vector("CartPole-v1", 1), 4, 100):
        if tick.starts[0]:
            env.unwrapped.state = tuple(tick.observations[0].astype(float))
            env.unwrapped.steps_beyond_terminated = None
            found = tick.following[0], tick.rewards[0], tick.terminated[0], tick.truncated[0]
            for one, other in zip(found, env.step(tick.actions[0])[:4], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_time_limit_truncates_and_does_not_terminate() -> None:
    balance, envs = np.array([0.1, 0.2, 3, 1]), make_vector("CartPole-v0", 2)
    observations, _ = envs.reset(seed=3)
    played = ticks(envs, lambda seen: (seen @ balance > 0).astype(int), observations)
    stream = list(islice(played, 200))
    assert not any(tick.terminated.any() for tick in stream)
    assert [tick.truncated.all() for tick in stream] == [False] * 199 + [True]


def test_observations_are_not_overwritten_by_the_next_tick() -> None:
    for env_id in ("CartPole-v1", "LunarLander-v3"):
        for before, after in pairwise(play(make_vector(env_id, 3), 0, 20)):
            assert before.following is after.observations
            assert not np.array_equal(before.observations, after.observations)


def test_actions_drawn_from_a_seeded_space_survive_a_reset() -> None:
    env, drawn = make("BipedalWalker-v3"), []
    for _ in range(2):
        env.action_space.seed(7)
        env.reset(seed=3)
        drawn.append(env.action_space.sample())
    np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v9", "did you mean .*CartPole-v1"),
        ("breakout", "did you mean .*BreakoutNoFrameskip-v4"),
        ("", "Received: environment=''"),
        ("no_such_module:CartPole-v1", "Unknown environment"),
        ("HalfCheetah-v2", "Received: environment='HalfCheetah-v2'"),
        ("ALE/Pong-v5", "ends in NoFrameskip-v4"),
    ],
)
def test_unknown_environments_are_refused_naming_the_closest(env_id: str, message: str) -> None:
    for function in (make, env_spec, lambda name: make_vector(name, 2)):
        assert re.search(message, refused(function, env_id, error=UsageError))


def test_old_versions_have_a_new_name() -> None:
    assert canonical_id("BipedalWalker-v2") == "BipedalWalker-v3"
    assert env_spec(canonical_id("LunarLanderContinuous-v2")).num_actions is None
    kept = [*ALL, "CartPole-v0", "no such thing"]
    assert [canonical_id(env_id) for env_id in kept] == kept


def test_packages_are_imported_on_demand_silenced_and_named_if_missing() -> None:
    wanted = {
        "ale_py": ("PongNoFrameskip-v4", "ale-py"),
        "cv2": ("PongNoFrameskip-v4", "opencv-python-headless"),
        "pybullet": ("Walker2DBulletEnv-v0", "pybullet"),
        "Box2D": ("LunarLander-v3", "Box2D"),
    }
    code = f"""
import sys
from quarl_tf import environments
def loaded():
    return {{module for module in {wanted!r} if sys.modules.get(module)}}
environments.make_vector('CartPole-v1', 2).reset(seed=0)
assert not loaded(), loaded()
for module, (env_id, package) in {wanted!r}.items():
    sys.modules[module] = None  # As if it were not installed.
    try:
        environments.make(env_id)
    except ValueError as error:
        print(f"pip install {{package}}." in str(error))
    del sys.modules[module]
for env_id in ('HalfCheetahBulletEnv-v0', 'PongNoFrameskip-v4', 'LunarLander-v3'):
    for env in (environments.make(env_id), environments.make_vector(env_id, 2)):
        for seed in (0, 1):
            env.reset(seed=seed)
        env.close()
print(len(loaded()))
"""
    # Buffered as it is for users: what C libraries print then comes late.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = python(code, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True"] * len(wanted) + ["4"]
