"""Every kind of environment keeps to the same rules, and those of the user's own as well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from quarl_tf.environments import (
    EnvSpec,
    canonical_id,
    env_spec,
    import_environments,
    make,
    make_vector,
)
from quarl_tf.foundation.errors import UsageError

#: Environments, and ticks enough for some episodes to end and others to begin.
LOOPED = {
    "MountainCarContinuous-v0": 1200,
    "Acrobot-v1": 600,
    "LunarLander-v3": 300,
    "BipedalWalker-v3": 200,
    "HalfCheetahBulletEnv-v0": 1100,
    "Walker2DBulletEnv-v0": 100,
}
SHAPED = {"BreakoutNoFrameskip-v4": 120}
NUMPY = {"CartPole-v1": 100}
ALL = LOOPED | SHAPED | NUMPY

Tick = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def sampler(space: spaces.Space[Any], num_envs: int, choices: int) -> Callable[[], np.ndarray]:
    random = np.random.default_rng(choices)
    if isinstance(space, spaces.Discrete):
        return lambda: random.integers(space.n, size=num_envs)
    assert isinstance(space, spaces.Box)
    return lambda: random.uniform(space.low, space.high, (num_envs, *space.shape)).astype("f4")


def play(
    envs: gym.vector.VectorEnv[Any, Any, Any], seed: int, ticks: int, choices: int = 0
) -> list[Tick]:
    """Act at random; return ticks of (observations, rewards, terminated, truncated)."""
    sample = sampler(envs.single_action_space, envs.num_envs, choices)
    observations, _ = envs.reset(seed=seed)
    nothing = np.zeros(envs.num_envs)
    first: Tick = (observations, nothing, nothing > 0, nothing > 0)
    return [first, *(envs.step(sample())[:4] for _ in range(ticks))]


def assert_same(left: list[Tick], right: list[Tick]) -> None:
    for x, y in zip(left, right, strict=True):
        for a, b in zip(x, y, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("env_id", "ticks"), ALL.items())
def test_every_kind_keeps_the_rules(env_id: str, ticks: int) -> None:
    """A tick after an episode is its reset; a seeded reset forgets whatever was played before."""
    envs = make_vector(env_id, 2, training=True)
    stream = play(envs, seed=1, ticks=ticks)
    spec = env_spec(env_id)
    ends = 0
    for before, (observations, rewards, terminated, truncated) in zip(
        [stream[0], *stream], stream, strict=False
    ):
        assert observations.shape == (2, *spec.observation_shape)
        assert observations.dtype == spec.observation_dtype
        assert (terminated.dtype, truncated.dtype) == (bool, bool)
        over = before[2] | before[3]
        ends += np.count_nonzero(over)
        np.testing.assert_array_equal(rewards[over], 0)
        assert not (terminated | truncated)[over].any()
    assert ends > 1
    # The same environments, stopped at no particular place, and others.
    assert_same(play(envs, seed=1, ticks=ticks), stream)
    play(envs, seed=2, ticks=ticks // 3, choices=1)
    assert_same(play(envs, seed=1, ticks=ticks), stream)
    assert_same(play(make_vector(env_id, 2, training=True), seed=1, ticks=ticks), stream)
    other = play(envs, seed=3, ticks=1)
    assert not np.array_equal(other[1][0], stream[1][0])


@pytest.mark.parametrize(("env_id", "ticks"), LOOPED.items())
def test_loops_are_single_environments_side_by_side(env_id: str, ticks: int) -> None:
    stream = play(make_vector(env_id, 2), seed=4, ticks=ticks)
    singles = [make(env_id), make(env_id)]
    sample = sampler(singles[0].action_space, 2, 0)
    for e, env in enumerate(singles):
        np.testing.assert_array_equal(env.reset(seed=4 + e)[0], stream[0][0][e])
    over = [False, False]
    for tick in stream[1:]:
        for e, (env, action) in enumerate(zip(singles, sample(), strict=True)):
            if over[e]:
                result: tuple[Any, ...] = (env.reset()[0], 0.0, False, False)
            else:
                result = env.step(action)[:4]
            for got, expected in zip(tick, result, strict=True):
                np.testing.assert_array_equal(got[e], expected)
            over[e] = result[2] or result[3]


@pytest.mark.parametrize("env_id", ["BipedalWalker-v3", "HalfCheetahBulletEnv-v0"])
def test_actions_drawn_from_a_seeded_space_survive_a_reset(env_id: str) -> None:
    env = make(env_id)
    drawn = []
    for _ in range(2):
        env.action_space.seed(7)
        env.reset(seed=3)
        drawn.append(env.action_space.sample())
    np.testing.assert_array_equal(*drawn)


def test_shaping_is_for_atari_alone() -> None:
    for env_id in ("CartPole-v1", "LunarLander-v3"):
        shaped, plain = make_vector(env_id, 2, training=True), make_vector(env_id, 2)
        assert_same(play(shaped, seed=0, ticks=40), play(plain, seed=0, ticks=40))


# Spaces.


class Doubles(gym.Env[Any, Any]):
    """Shows how often it was stepped, in double precision."""

    def __init__(self, low: float = 0.0, high: float = np.inf) -> None:
        self.observation_space = spaces.Box(low, high, (2,), np.float64)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.full(2, 0.1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(2, self.steps + 0.1), 1.0, self.steps == 3, False, {}


def make_doubles(num_envs: int, mode: str = "NextStep", **_: Any) -> gym.vector.SyncVectorEnv:
    return gym.vector.SyncVectorEnv([Doubles] * num_envs, autoreset_mode=mode)


@pytest.fixture
def register() -> Iterator[Callable[..., str]]:
    """Return a function that registers an environment for the length of a test."""

    def add(*args: Any, **kwargs: Any) -> str:
        gym.register("Own-v0", *args, **kwargs)
        return "Own-v0"

    yield add
    gym.registry.pop("Own-v0", None)


@pytest.mark.parametrize("vectorised", [False, True])
def test_double_precision_is_shown_as_single(
    register: Callable[..., str], vectorised: bool
) -> None:
    env_id = register(Doubles, vector_entry_point=make_doubles if vectorised else None)
    env, envs = make(env_id), make_vector(env_id, 3)
    assert env_spec(env_id) == EnvSpec((2,), "float32", 2)
    for space in (env.observation_space, envs.single_observation_space):
        assert space == spaces.Box(0, np.inf, (2,), np.float32)
    shown = [env.reset(seed=0)[0], *(env.step(0)[0] for _ in range(2))]
    stream = [tick[0] for tick in play(envs, seed=0, ticks=2)]
    for i, (one, many) in enumerate(zip(shown, stream, strict=True)):
        assert (one.dtype, many.dtype) == (np.float32, np.float32)
        np.testing.assert_array_equal(one, np.float32(i + 0.1))
        np.testing.assert_array_equal(many, np.full((3, 2), np.float32(i + 0.1)))


@pytest.mark.parametrize("bound", [1e300, 0.1])
def test_bounds_of_double_precision_are_rounded(register: Callable[..., str], bound: float) -> None:
    env = make(register(Doubles, kwargs={"low": -bound, "high": bound}))
    assert env.observation_space.dtype == np.float32


def test_vectors_that_reset_at_another_time_are_refused(register: Callable[..., str]) -> None:
    env_id = register(
        Doubles, vector_entry_point=lambda **kwargs: make_doubles(mode="SameStep", **kwargs)
    )
    with pytest.raises(UsageError, match=r"NEXT_STEP.*Received: Own-v0 with .*SAME_STEP"):
        make_vector(env_id, 2)


BOX = spaces.Box(-1, 1, (3,))


class Spaces(gym.Env[Any, Any]):
    """An environment of given spaces, never to be played."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Box(0, 9, (3,), np.int64), spaces.Discrete(2), "floats, or bytes"),
        (spaces.Box(0, 9, (3,), np.uint16), spaces.Discrete(2), "floats, or bytes"),
        (spaces.Box(-9, 9, (3,), np.int8), spaces.Discrete(2), "floats, or bytes"),
        (BOX, spaces.Box(-1, 1, (2, 2)), "must be a vector of floats"),
        (BOX, spaces.Box(-1, 1, ()), "must be a vector of floats"),
        (BOX, spaces.Box(0, 3, (2,), np.int64), "must be a vector of floats"),
        (BOX, spaces.MultiBinary(2), "Discrete from 0 or a bounded Box"),
    ],
)
def test_other_spaces_are_refused(
    register: Callable[..., str], observation: Any, action: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=rf"{message}.*Received: Own-v0 with .*\)") as error:
        env_spec(register(lambda: Spaces(observation, action)))
    assert "\n" not in str(error.value)


# Names.


def test_old_versions_have_a_new_name() -> None:
    assert canonical_id("BipedalWalker-v2") == "BipedalWalker-v3"
    assert canonical_id("LunarLander-v2") == "LunarLander-v3"
    for env_id in ("LunarLanderContinuous-v2", "BipedalWalkerHardcore-v2"):
        assert env_spec(canonical_id(env_id)).num_actions is None
    for env_id in (*ALL, "CartPole-v0", "no such thing"):
        assert canonical_id(env_id) == env_id


@pytest.mark.parametrize(
    ("env_id", "module", "package"),
    [
        ("PongNoFrameskip-v4", "ale_py", "ale-py"),
        ("PongNoFrameskip-v4", "cv2", "opencv-python-headless"),
        ("Walker2DBulletEnv-v0", "pybullet_envs_gymnasium", "pybullet_envs_gymnasium"),
        ("Walker2DBulletEnv-v0", "pybullet", "pybullet"),
        ("LunarLander-v3", "Box2D", "Box2D"),
    ],
)
def test_missing_packages_are_named(env_id: str, module: str, package: str) -> None:
    """In a process of its own: loaded libraries cannot be unloaded."""
    code = (
        "import sys\n"
        f"sys.modules[{module!r}] = None  # As if it were not installed.\n"
        "from quarl_tf import environments\nfrom quarl_tf.foundation import errors\n"
        "try:\n"
        f"    environments.make({env_id!r})\n"
        "except errors.UsageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == (
        f"{env_id} needs a package that is not installed: pip install {package}. "
        f"Received: environment={env_id!r}\n"
    ), done.stderr


def test_packages_are_imported_on_demand_and_kept_quiet() -> None:
    code = (
        "import sys\n"
        "from quarl_tf import environments\n"
        "def loaded():\n"
        "    return {'ale_py', 'cv2', 'pybullet', 'Box2D'} & set(sys.modules)\n"
        "environments.make_vector('CartPole-v1', 2).reset(seed=0)\n"
        "assert not loaded(), loaded()\n"
        "for env_id in ('HalfCheetahBulletEnv-v0', 'PongNoFrameskip-v4', 'LunarLander-v3'):\n"
        "    for env in (environments.make(env_id), environments.make_vector(env_id, 2)):\n"
        "        for seed in (0, 1):\n"
        "            env.reset(seed=seed)\n"
        "            print(env_id)\n"
        "        env.close()\n"
        "assert len(loaded()) == 4, loaded()\n"
    )
    # Buffered as it is for users: what C libraries print then comes late.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [
        *["HalfCheetahBulletEnv-v0"] * 4,
        *["PongNoFrameskip-v4"] * 4,
        *["LunarLander-v3"] * 4,
    ]


# The user's own.

CORRIDOR = """
import gymnasium as gym
import numpy as np


class Corridor(gym.Env):
    observation_space = gym.spaces.Box(0, 3, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(2))
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place = min(max(self.place + 2 * int(action) - 1, 0), 3)
        return np.array([self.place], np.float32), float(action), self.place == 3, False, {}


gym.register("Corridor-v0", Corridor, max_episode_steps=20)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Return a function that writes a module into a package in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    (tmp_path / "corridors").mkdir()
    (tmp_path / "corridors" / "__init__.py").touch()

    def write(content: str) -> str:
        (tmp_path / "corridors" / "envs.py").write_text(content)
        return "corridors.envs"

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "corridors"]:
        del sys.modules[name]
    gym.registry.pop("Corridor-v0", None)


def test_own_environments_are_registered_by_their_import(package: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="Unknown environment"):
        env_spec("Corridor-v0")
    import_environments([package(CORRIDOR)])
    assert env_spec("Corridor-v0") == EnvSpec((1,), "float32", 2)
    stream = play(make_vector("Corridor-v0", 3), seed=0, ticks=40)
    assert any(terminated.any() for _, _, terminated, _ in stream)
    import_environments(["corridors.envs"])  # Twice does no harm.


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("corridors.enws", "is neither installed nor in the current folder"),
        ("coridors.envs", "is neither installed nor in the current folder"),
        ("coridors", "is neither installed nor in the current folder"),
        ("corridors.envs", "imports no_such_physics, which is not installed"),
        # Files instead of modules.
        ("corridors/envs.py", "name it as an import statement would"),
        ("./corridors/envs.py", "name it as an import statement would"),
        ("", "name it as an import statement would"),
    ],
)
def test_missing_modules_are_named(
    package: Callable[[str], str], module: str, message: str
) -> None:
    package("import no_such_physics.engine\n")
    with pytest.raises(UsageError) as error:
        import_environments([module])
    assert str(error.value).startswith("The module ")
    assert message in str(error.value)
    assert str(error.value).endswith(f". Received: --import {module!r}")
    assert "\n" not in str(error.value)
