"""Every kind of environment keeps to the same rules, and those of the user's own as well."""

import os
import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from samples import python, refused

from quarl_tf.environments import EnvSpec, canonical_id, env_spec, make, make_vector
from quarl_tf.environments.acting import Tick, ticks
from quarl_tf.foundation.errors import UsageError

#: Environments, and ticks enough for some episodes to end and others to begin.
LOOPED = {"LunarLander-v3": 300, "BipedalWalker-v3": 200, "Walker2DBulletEnv-v0": 100}
GAMES = {"BreakoutNoFrameskip-v4": 120}
ALL = LOOPED | GAMES | {"CartPole-v1": 100, "AirNav-v0": 1000}


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
def test_every_kind_keeps_the_rules(env_id: str, length: int) -> None:
    """A tick after an episode is its reset; a seeded reset forgets whatever was played before."""
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
        # Games take several ticks to go on after a lost life.
        assert env_id in GAMES or not tick.done[~tick.starts].any()
    assert resets > 1
    # The same environments, stopped at no particular place, and others.
    play(envs, 2, length // 3, choices=1)
    assert_same(play(envs, 1, length), stream)
    assert_same(play(make_vector(env_id, 2, training=True), 1, length), stream)


@pytest.mark.parametrize(("env_id", "length"), (LOOPED | {"CartPole-v1": 100}).items())
def test_vectors_are_single_environments_side_by_side(env_id: str, length: int) -> None:
    envs = make_vector(env_id, 2)
    stream, choose = play(envs, 4, length), sampler(envs)
    singles = [make(env_id), make(env_id)]
    # NumPy's vectors draw their starts together.
    looped = env_id in LOOPED
    for e, env in enumerate(singles):
        observation, _ = env.reset(seed=4 + e)
        assert not looped or np.array_equal(observation, stream[0].observations[e])
    for tick in stream:
        for e, (env, action) in enumerate(zip(singles, choose(None), strict=True)):
            if not tick.starts[e]:
                observation, _ = env.reset()
                result: tuple[Any, ...] = (observation, 0.0, False, False)
            else:
                if not looped:
                    env.unwrapped.state = tuple(tick.observations[e].astype(float))
                    env.unwrapped.steps_beyond_terminated = None
                result = env.step(action)[:4]
            found = tick.following[e], tick.rewards[e], tick.terminated[e], tick.truncated[e]
            if looped or tick.starts[e]:
                for got, expected in zip(found, result, strict=True):
                    np.testing.assert_allclose(got, expected, rtol=0 if looped else 1e-5, atol=1e-6)


def test_time_limit_truncates_and_does_not_terminate() -> None:
    # Gymnasium advises against it, but it is a task of its own.
    balance = np.array([0.1, 0.2, 3, 1])
    envs = make_vector("CartPole-v0", 2)
    observations, _ = envs.reset(seed=3)
    played = ticks(envs, lambda seen: (seen @ balance > 0).astype(int), observations)
    stream = list(islice(played, 200))
    assert not any(tick.terminated.any() for tick in stream)
    assert [tick.truncated.all() for tick in stream] == [False] * 199 + [True]


def test_observations_are_not_overwritten_by_the_next_tick() -> None:
    for env_id in ("CartPole-v1", "LunarLander-v3"):
        stream = play(make_vector(env_id, 3), 0, 20)
        for before, after in pairwise(stream):
            assert before.following is after.observations
            assert not np.array_equal(before.observations, after.observations)


def test_actions_drawn_from_a_seeded_space_survive_a_reset() -> None:
    env, drawn = make("BipedalWalker-v3"), []
    for _ in range(2):
        env.action_space.seed(7)
        env.reset(seed=3)
        drawn.append(env.action_space.sample())
    np.testing.assert_array_equal(*drawn)


class Own(gym.Env[Any, Any]):
    """Shows how often it was stepped, in the type of its space."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._seen(), 1.0, self.steps == 3, False, {}

    def _seen(self) -> Any:
        shape, dtype = self.observation_space.shape, self.observation_space.dtype
        return np.full(shape, self.steps + 0.1, dtype)


@pytest.fixture
def register() -> Iterator[Callable[..., str]]:
    """Return a function that registers an environment of given spaces."""

    def add(observation: Any, action: Any, **kwargs: Any) -> str:
        gym.register("Own-v0", lambda: Own(observation, action), **kwargs)
        return "Own-v0"

    yield add
    gym.registry.pop("Own-v0", None)


BOX, TWO = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)


@pytest.mark.parametrize(
    ("observation", "action", "expected"),
    [
        (BOX, TWO, EnvSpec((3,), "float32", 2)),
        (spaces.Box(-1e300, 1e300, (3,), np.float64), TWO, EnvSpec((3,), "float32", 2)),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), TWO, EnvSpec((8, 8, 3), "uint8", 2)),
        (
            BOX,
            spaces.Box(-0.1, 2, (1,), np.float32),
            EnvSpec((3,), "float32", None, (float(np.float32(-0.1)),), (2.0,)),
        ),
    ],
)
def test_environments_are_described(
    register: Callable[..., str], observation: Any, action: Any, expected: EnvSpec
) -> None:
    assert env_spec(register(observation, action)) == expected


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (spaces.Text(3), TWO),
        (spaces.Dict(), TWO),
        (spaces.Dict(x=BOX, y=spaces.Sequence(BOX)), TWO),
        (spaces.Tuple([BOX, spaces.OneOf([BOX, TWO])]), TWO),
        (spaces.Box(-1, 1, (0,)), TWO),
        (BOX, spaces.Dict(x=TWO)),
        (BOX, spaces.MultiDiscrete([])),
        (BOX, spaces.Box(0, np.inf, (2,))),
        (BOX, spaces.Box(-1, 1, (0,))),
        (BOX, spaces.Box(0, 3, (2,), np.int64)),
        (BOX, spaces.Box(np.float32([-1, 2]), np.float32([1, 2]))),
    ],
)
def test_other_spaces_are_refused(
    register: Callable[..., str], observation: Any, action: Any
) -> None:
    env_id = register(observation, action)
    assert "Received: Own-v0 with " in refused(env_spec, env_id, error=UsageError)


def vector_of(mode: str) -> Any:
    doubles = spaces.Box(0, np.inf, (2,), np.float64)

    def create(num_envs: int, **_: Any) -> gym.vector.SyncVectorEnv:
        return gym.vector.SyncVectorEnv([lambda: Own(doubles, TWO)] * num_envs, autoreset_mode=mode)

    return create


@pytest.mark.parametrize("vectorised", [False, True])
def test_double_precision_is_shown_as_single(
    register: Callable[..., str], vectorised: bool
) -> None:
    doubles = spaces.Box(0, np.inf, (2,), np.float64)
    vector = vector_of("NextStep") if vectorised else None
    env_id = register(doubles, TWO, vector_entry_point=vector)
    env, envs = make(env_id), make_vector(env_id, 3)
    assert env.observation_space == envs.single_observation_space
    assert env.reset(seed=0)[0].dtype == np.float32
    for i, tick in enumerate(play(envs, 0, 3)):
        assert tick.observations.dtype == np.float32
        np.testing.assert_array_equal(tick.observations, np.full((3, 2), np.float32(i + 0.1)))


def test_vectors_that_reset_at_another_time_are_refused(register: Callable[..., str]) -> None:
    env_id = register(BOX, TWO, vector_entry_point=vector_of("SameStep"))
    message = refused(make_vector, env_id, 2, error=UsageError)
    assert re.search("Received: Own-v0 with .*SAME_STEP", message)


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
    for env_id in (*ALL, "CartPole-v0", "no such thing"):
        assert canonical_id(env_id) == env_id


def in_a_process(code: str) -> str:
    """Run code where nothing is loaded yet; return what it printed, which is nothing else."""
    # Buffered as it is for users: what C libraries print then comes late.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = python(code, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_missing_packages_are_named() -> None:
    wanted = {
        "ale_py": ("PongNoFrameskip-v4", "ale-py"),
        "cv2": ("PongNoFrameskip-v4", "opencv-python-headless"),
        "pybullet": ("Walker2DBulletEnv-v0", "pybullet"),
        "Box2D": ("LunarLander-v3", "Box2D"),
    }
    code = f"""
import sys
from quarl_tf import environments
for module, (env_id, package) in {wanted!r}.items():
    sys.modules[module] = None  # As if it were not installed.
    try:
        environments.make(env_id)
    except ValueError as error:
        print(f"pip install {{package}}." in str(error))
    del sys.modules[module]
"""
    assert in_a_process(code).split() == ["True"] * len(wanted)


def test_packages_are_imported_on_demand_and_kept_quiet() -> None:
    code = """
import sys
from quarl_tf import environments
def loaded():
    return {'ale_py', 'cv2', 'pybullet', 'Box2D'} & set(sys.modules)
environments.make_vector('CartPole-v1', 2).reset(seed=0)
assert not loaded(), loaded()
for env_id in ('HalfCheetahBulletEnv-v0', 'PongNoFrameskip-v4', 'LunarLander-v3'):
    for env in (environments.make(env_id), environments.make_vector(env_id, 2)):
        for seed in (0, 1):
            env.reset(seed=seed)
        env.close()
print(len(loaded()))
"""
    assert in_a_process(code) == "4\n"
