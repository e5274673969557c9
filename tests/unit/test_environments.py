"""Every kind of environment follows the same rules, AirNav-v0 its own; rollouts are whole."""

import multiprocessing
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from samples import Drawn, Patch, python, refused, register, step

from quarl_tf import environments
from quarl_tf.environments import Rising, airnav, env_spec, loops, make, make_vector, registry
from quarl_tf.environments.acting import Tick, ticks
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.training.rollout import _Sample, rollout

#: Environments, and ticks enough for some episodes to end and others to begin.
EXACT = {"LunarLander-v3": 300, "BipedalWalker-v3": 200, "Walker2DBulletEnv-v0": 100}
EXACT |= {"AirNav-v0": 780}
BYTES = spaces.Box(0, 255, (2,), np.uint8)


def play(envs: Any, seed: int, length: int, choices: int = 0) -> list[Tick]:
    observations, _ = envs.reset(seed=seed)
    envs.action_space.seed(choices)
    return list(islice(ticks(envs, lambda _: envs.action_space.sample(), observations), length))


def assert_same(left: list[Tick], right: list[Tick]) -> None:
    for left_tick, right_tick in zip(left, right, strict=True):
        for a, b in zip(left_tick[:-1], right_tick[:-1], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("env_id", "length"), [*EXACT.items(), ("CartPole-v1", 100)])
def test_every_kind_follows_the_rules(env_id: str, length: int) -> None:
    """The tick after an episode is its reset; seeded resets do not depend on earlier episodes."""
    envs = make_vector(env_id, 2, training=True)
    stream, spec = play(envs, 1, length), env_spec(env_id)
    assert not np.array_equal(*stream[0].observations)
    for before, after in pairwise(stream):
        assert before.following is after.observations
        assert not np.array_equal(before.observations, after.observations)  # Not overwritten.
    for tick in stream:
        assert tick.following.shape == (2, *spec.observation_shape)
        assert tick.following.dtype == spec.observation_dtype
        assert (tick.terminated.dtype, tick.truncated.dtype) == (bool, bool)
        np.testing.assert_array_equal(tick.rewards[~tick.starts], 0)
        assert not tick.done[~tick.starts].any()
    assert sum(np.count_nonzero(~tick.starts) for tick in stream) > 1
    play(envs, 2, length // 3, choices=1)  # The same after other episodes, and new ones.
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
            values = tick.following[e], tick.rewards[e], tick.terminated[e], tick.truncated[e]
            for value, expected_value in zip(values, (*expected, False, False)[:4], strict=True):
                np.testing.assert_allclose(value, expected_value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "HalfCheetahBulletEnv-v0"])
def test_processes_find_what_one_loop_finds(env_id: str) -> None:
    creates = [partial(make, env_id)] * 3
    divided, loop = loops.Divided(creates, 2), gym.vector.SyncVectorEnv(creates)
    for seed in (3, 8):
        assert_same(play(divided, seed, 150), play(loop, seed, 150))
    assert divided.observation_space == loop.observation_space
    assert divided.action_space == loop.action_space


def kind(env_id: str, num_envs: int) -> str:
    return type(make_vector(env_id, num_envs)).__name__


def test_slow_environments_are_divided_but_not_by_the_workers_of_a_pool() -> None:
    several_cores = len(os.sched_getaffinity(0)) > 1
    assert kind("LunarLander-v3", 8) == ("Divided" if several_cores else "SyncVectorEnv")
    assert kind("LunarLander-v3", 7) == kind("MountainCarContinuous-v0", 8) == "SyncVectorEnv"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(kind, ("LunarLander-v3", 8)) == "SyncVectorEnv"


class Faulty(Drawn):
    """An environment whose third step may go wrong."""

    def __init__(self, third: Callable[[], Any] | None = None) -> None:
        super().__init__(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
        self._third = third

    def step(self, action: Any) -> Any:
        outcome = super().step(action)
        return self._third() if self._third and self.steps == 3 else outcome


@pytest.mark.parametrize(
    ("third", "error", "words"),
    [
        (lambda: int("no such action"), ValueError, "no such action"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), QuarlError, "was killed"),
    ],
)
def test_failures_of_other_processes_are_told(third: Any, error: Any, words: str) -> None:
    envs = loops.Divided([Faulty, partial(Faulty, third)], 2)
    with pytest.raises(error, match=words):
        play(envs, 0, 3)


def test_processes_end_with_their_vector() -> None:
    before = set(multiprocessing.active_children())
    vectors = [loops.Divided([partial(make, "Acrobot-v1")] * 4, 2) for _ in range(2)]
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    vectors[0].close()  # The processes of the other one must not keep its pipe open.
    del vectors[1]
    for process in started:
        process.join(10)
        assert process.exitcode == 0


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
        ("HalfCheetah-v2", "Received: environment='HalfCheetah-v2'"),
        ("ALE/Pong-v5", "name PongNoFrameskip-v4 .*--sticky 0.25"),
        ("ALE/Tetris-v5", "has no id TetrisNoFrameskip-v4"),
    ],
)
def test_unknown_environments_are_refused_naming_the_closest(env_id: str, message: str) -> None:
    for function in (make, env_spec, lambda name: make_vector(name, 2)):
        assert re.search(message, refused(function, env_id, code=2))


def test_packages_are_imported_on_demand_silenced_and_named_if_missing() -> None:
    packages = {
        "ale_py": ("PongNoFrameskip-v4", "ale-py"),
        "cv2": ("PongNoFrameskip-v4", "opencv-python-headless"),
        "pybullet": ("Walker2DBulletEnv-v0", "pybullet"),
        "Box2D": ("LunarLander-v3", "Box2D"),
    }
    code = f"""
import sys
from quarl_tf import environments
def loaded():
    return {{module for module in {packages!r} if sys.modules.get(module)}}
environments.make_vector('CartPole-v1', 2).reset(seed=0)
assert not loaded(), loaded()
for module, (env_id, package) in {packages!r}.items():
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
    process = python("-c", code, env=env)
    assert (process.stderr, process.stdout.split()) == ("", ["True"] * len(packages) + ["4"])


def observing(patch: Patch, space: Any, observation: Any) -> list[Any]:
    """Return an environment whose episodes begin with this observation, and a vector of two."""

    class Observing(Drawn):
        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return observation, {}

    env_id = register(patch, "Observing-v0", partial(Observing, space, spaces.Discrete(2)))
    return [make(env_id), make_vector(env_id, 2)]


@pytest.mark.parametrize(("kind", "drawn"), [(np.float32, np.float64), (np.uint8, np.int64)])
def test_observations_have_their_space_s_type(kind: Any, drawn: Any, monkeypatch: Patch) -> None:
    space, observation = spaces.Box(0, 255, (3,), kind), np.arange(3, dtype=drawn)
    for envs in observing(monkeypatch, space, observation):
        observations = envs.reset(seed=0)[0]
        assert (observations.dtype, observations.reshape(-1, 3)[0].tolist()) == (kind, [0, 1, 2])


@pytest.mark.parametrize(
    ("space", "observation", "words"),
    [
        (spaces.Box(0, 9, (2,), np.int32), [0.7, 1.9], "of floats, its space has integers"),
        (BYTES, np.zeros(2), "floats, its space has integers"),
        (spaces.Dict(image=BYTES), {"image": np.array([300, 0])}, "integers beyond uint8"),
        (spaces.Dict(image=BYTES), {"picture": np.zeros(2)}, "without parts of its space"),
        (spaces.Tuple([spaces.Discrete(2)]), (0, 1), "more parts than its space"),
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), [1e300], "not finite"),
        (spaces.Discrete(5), -1, "beyond its space, Discrete(5)"),
    ],
)
def test_misfits_are_refused(space: Any, observation: Any, words: str, monkeypatch: Patch) -> None:
    for envs in observing(monkeypatch, space, observation):
        assert words in refused(envs.reset, seed=0)


def test_the_code_of_an_environment_is_its_package_and_registration(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("one", "two"):
        module = tmp_path / f"package_{name}" / "envs.py"
        module.parent.mkdir()
        (module.parent / "__init__.py").touch()
        for path in (module, tmp_path / "alone.py"):
            path.write_text("from samples import Drawn as Env")
    helper = tmp_path / "package_one" / "dynamics.py"

    def hashed(entry_point: str = "package_one.envs:Env", **options: Any) -> Any:
        registry._code_sha256.cache_clear()
        return registry.source_sha256(register(monkeypatch, "Mine-v0", entry_point, **options))

    same = [hashed() for _ in range(2)]
    kwargs = {(0, 0): 1}, {0: 1, "a": 2}, np.zeros(2), np.ones(2), {"f": partial(max, key=0)}
    others = [hashed(kwargs={"gain": value}) for value in (*kwargs, min, max, Drawn, Faulty)]
    others += [hashed(max_episode_steps=9), hashed("package_two.envs:Env")]
    (helper.parent / ".#envs.py").symlink_to("nowhere")  # An editor's lock.
    assert hashed() == same[0]
    helper.write_text("GAIN = 1")
    others.append(hashed())
    assert len({*same, *others}) == 1 + len(others)
    assert registry.source_sha256("CartPole-v1") is None
    # A user's registration of Gymnasium's class is another environment.
    assert len({hashed("gymnasium.envs.classic_control:CartPoleEnv"), None, *others}) > len(others)
    alone = hashed("alone:Env")
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "alone.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert hashed("__main__:Env") == alone
    script.__file__ = None  # As of a notebook.
    assert hashed("__main__:Env") is None
    assert not registry.is_identified("Mine-v0")


def test_flags_may_be_numbers_and_infos_anything(monkeypatch: Patch) -> None:
    third = (np.zeros(3), np.float32(1), np.float32(1), None, None)
    register(monkeypatch, "Faulty-v0", partial(Faulty, lambda: third), max_episode_steps=9)
    env = make("Faulty-v0")
    env.reset(seed=1)
    *_, last = (env.step(0)[2:] for _ in range(3))
    assert last == (True, False, {})
    monkeypatch.setattr(Faulty, "close", lambda _: {}["viewer"])
    assert "raised KeyError in close" in refused(env.close)


@pytest.mark.parametrize(
    ("third", "words"),
    [
        (lambda: (np.zeros(3), 1.0, False, {}), "raised ValueError in step .*expected 5, got 4"),
        (lambda: (np.zeros(4), 1.0, False, False, {}), r"another shape .*\(4,\), the space has"),
        (lambda: ([0, [1], 0], 1.0, False, False, {}), "in step .*no array of numbers"),
        (lambda: (np.zeros(3), None, False, False, {}), "raised TypeError in step .*NoneType"),
        (sys.exit, "raised SystemExit in step"),
        (lambda: random.choice([]), r"raised IndexError in step \(.*test_environments.py:\d+\)"),
    ],
)
def test_mistakes_of_users_are_named(third: Any, words: str, monkeypatch: Patch) -> None:
    register(monkeypatch, "Faulty-v0", partial(Faulty, third), max_episode_steps=9)
    for create in (make, partial(make_vector, num_envs=2)):
        envs = create("Faulty-v0")
        envs.reset(seed=1)
        actions = envs.action_space.sample()
        for _ in range(2):
            envs.step(actions)
        assert re.search(f"^Faulty-v0 .*{words}", refused(envs.step, actions))


class Vector(gym.vector.VectorEnv[Any, Any, Any]):
    """Two environments of a user, whose steps return what they are told."""

    metadata: ClassVar = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    num_envs = 2
    single_observation_space, single_action_space = spaces.Box(-9, 9, (3,)), spaces.Discrete(2)
    observation_space, action_space = spaces.Box(-9, 9, (2, 3)), spaces.MultiDiscrete([2, 2])
    starts = count()

    def __init__(self, returned: Any = None) -> None:
        self.returned = returned

    def reset(self, **_: Any) -> Any:
        return np.full((2, 3), next(self.starts)), {}

    def step(self, _: Any) -> Any:
        return self.returned()

    def train_from(self, _: Any) -> None: ...

    def training_state(self) -> Any:
        return [np.int64(3)]


def vectorised(patch: Patch, returned: Any) -> Any:
    options = {"vector_entry_point": lambda **_: Vector(returned)}
    register(patch, "Faulty-v0", partial(Faulty, returned), **options)
    return make_vector("Faulty-v0", 2)


def test_vectors_of_users_are_checked(monkeypatch: Patch) -> None:
    fields = np.ones((2, 3)), [1, 0.5], [0, 1], (False, None), None
    vector = vectorised(monkeypatch, lambda: fields)
    observations, rewards, terminated, truncated, info = vector.step([0, 1])
    assert (observations.dtype, rewards.dtype, rewards.sum()) == (np.float32, np.float64, 1.5)
    assert (terminated.tolist(), truncated.any(), info) == ([False, True], False, {})
    for returned, words in (
        (lambda: (np.full((2, 3), np.nan), *fields[1:]), "not finite"),
        (lambda: (np.ones((2, 4)), *fields[1:]), "of another shape"),
        (lambda: (fields[0], [1], *fields[2:]), "raised ValueError in step"),
        (sys.exit, "raised SystemExit in step"),
    ):
        assert words in refused(vectorised(monkeypatch, returned).step, [0, 1])
    assert "the same seed in two ways" in refused(environments.require_seeded, "Faulty-v0", code=2)
    create = partial(make_vector, "Faulty-v0", 2, training=True)
    assert "int64 is not JSON serializable" in refused(create, code=2)


@pytest.mark.parametrize(
    ("action", "changes", "reward", "reached", "hit"),
    [
        (0, {}, 0.0, False, False),  # 1 m nearer, -1 for the step.
        (0, {"goal": [6.5, 0.0]}, -0.01875, False, False),
        (4, {"goal": [5.0, 0.0]}, -0.8 + 3 * 0.01875, False, False),
        (0, {"goal": [3.9, 0.0]}, 1000.0, True, False),
        (4, {"goal": [3.9, 0.0]}, -0.8 + 3 * 0.01875, False, False),
        (0, {"obstacles": [[3.4, 0.0, 2.0]]}, -100.0, False, True),
        (0, {"obstacles": [[3.6, 0.0, 2.0]]}, 0.0, False, False),
        # Thinner than a step is long: hit on the way.
        (0, {"obstacles": [[0.5, 0.3, 0.1]]}, -100.0, False, True),
        (0, {"position": [28.6, 0.0], "goal": [20.0, 0.0]}, -100.0, False, True),
        # As in its source, the goal takes precedence.
        (0, {"goal": [3.9, 0.0], "obstacles": [[3.4, 0.0, 2.0]]}, 1000.0, True, False),
    ],
)
def test_rewards(action: int, changes: Any, reward: float, reached: bool, hit: bool) -> None:
    # In the middle, at rest, heading north, one obstacle far away.
    still: dict[str, Any] = {"position": [0.0, 0.0], "velocity": [0.0, 0.0], "heading": 0.0}
    task = {"goal": [20.0, 0.0], "obstacles": [[-20.0, -20.0, 2.0]], "steps": 0}
    values = (still | task | changes).items()
    before = airnav.Missions(**{name: np.array([value]) for name, value in values})
    outcome = airnav.judge(before, airnav.fly(before, np.array([action])), airnav.ARENAS["hard"])
    assert [values[0] for values in outcome] == [pytest.approx(reward), reached, hit]


@pytest.mark.parametrize("name", airnav.ARENAS)
@pytest.mark.parametrize("zone", range(1, 5))
def test_missions_have_their_zone_and_leave_room(name: str, zone: int) -> None:
    arena, draws = airnav.ARENAS[name], np.random.default_rng(0).random((300, airnav._DRAWS))
    missions = airnav.plan(draws, arena, zone)
    width, distances = (arena.half - 8) / 4, np.abs(missions.goal)
    assert (7 + (zone - 1) * width <= distances).all()
    assert (distances < 7 + zone * width).all()
    for goal, obstacles in zip(missions.goal, missions.obstacles, strict=True):
        centres, radii = np.split(obstacles[obstacles[:, 2] > 0], [2], axis=1)
        assert arena.obstacles[0] <= len(radii) <= arena.obstacles[1]
        gaps = np.hypot(*(centres[:, None] - centres).T) - radii - radii.T
        assert gaps[~np.eye(len(radii), dtype=bool)].min() > 1.9  # The body is 1 m wide.
        for point in (np.zeros(2), goal):
            assert (np.hypot(*(centres - point).T) - radii[:, 0]).min() >= 3.5


def test_options_choose_arena_and_zone() -> None:
    env, keyed = make("AirNav-v0"), make("AirNav-v0", arena="easy", zone=1)
    observation, _ = env.reset(seed=2, options={"arena": "easy", "zone": 1})
    np.testing.assert_array_equal(observation, keyed.reset(seed=2)[0])
    assert not np.array_equal(observation, make("AirNav-v0").reset(seed=2)[0])
    np.testing.assert_array_equal(env.reset()[0], keyed.reset()[0])
    assert "zone=5" in refused(env.reset, options={"zone": 5}, code=2)
    assert "did you mean zone?" in refused(env.reset, options={"zon": 5}, code=2)
    assert "did you mean hard?" in refused(make, "AirNav-v0", arena="hrd", code=2)


def test_gymnasium_accepts_it_and_a_mission_is_cut_after_750_steps_and_drawn() -> None:
    check_env(gym.make("AirNav-v0", arena="easy", zone=2, render_mode="rgb_array").unwrapped)
    env = make("AirNav-v0", render_mode="rgb_array")
    env.reset(seed=0)
    *ends, last = [env.step(19)[1:4] for _ in range(750)]
    assert not any(late for *_, late in ends)
    assert last == (-1.0, False, True)  # Without a penalty.
    picture: Any = env.render()
    assert (picture.shape, picture.dtype) == ((480, 480, 3), np.uint8)


def test_training_begins_in_the_nearest_zone_and_rises_at_30_percent_of_a_window() -> None:
    distances = []
    for training, state in ((True, [1, 0, 0]), (False, [4])):
        envs: Any = make_vector("AirNav-v0", 2, training=training)
        assert isinstance(envs.unwrapped, Rising)
        assert envs.unwrapped.training_state() == state
        distances.append(envs.reset(seed=0)[0][:, -1])
    assert distances[0].max() < 18 / 30 < 33 / 30 < distances[1].min()
    envs = airnav.AirNavVector(2)
    for before, successes, missions, after in (
        ([1, 298, 500], 1, 3, [1, 299, 503]),
        ([1, 299, 500], 1, 3, [2, 0, 0]),
        ([4, 299, 500], 1, 3, [4, 0, 0]),
        ([2, 100, 799], 0, 1, [2, 100, 800]),  # 300 of 1000 can no longer be reached.
        ([2, 100, 800], 0, 1, [2, 0, 0]),
    ):
        envs.train_from(before)
        envs._rise(successes, missions)
        assert envs.training_state() == after


def lean(observations: np.ndarray, _: Any = None) -> np.ndarray:
    """Push to where the pole leans: some episodes end early, some at the limit."""
    return (observations[..., 2] > 0).astype(int)


def test_rollout_is_one_episode_of_every_environment_stepped_by_hand(monkeypatch: Patch) -> None:
    # CartPole with a time limit that some episodes reach.
    env_id = register(monkeypatch, "LimitedCartPole-v0", CartPoleEnv, max_episode_steps=40)
    envs = make_vector(env_id, 12, once=True)
    rollout(envs, lean, seed=20)
    with patch.object(CartPoleEnv, "step", autospec=True, side_effect=CartPoleEnv.step) as stepped:
        played = rollout(envs, lean, seed=3, keep=1000)
    # Where its episode is over, an environment stands still.
    assert stepped.call_count == sum(played.returns)
    observations = []

    def act(observation: np.ndarray) -> int:
        observations.append(observation.tolist())
        return int(lean(observation))

    returns = [step(gym.make(env_id), act, seed)[0] for seed in range(3, 3 + 12)]
    assert played.returns == returns
    assert min(returns) < 40 == max(returns)  # Both kinds of end are among them.
    # Those acted on, each once; an episode's last observation is not acted on.
    assert sorted(played.observations.tolist()) == sorted(observations)
    monkeypatch.setattr(environments, "LONGEST_EPISODE", 39)  # An episode without end is given up.
    assert "steps=40" in refused(rollout, make_vector(env_id, 12), lean, seed=3, code=2)


def kept(lengths: Sequence[int], keep: int, *, images: bool) -> np.ndarray:
    """Sample from episodes of given lengths; an observation is the tick and the episode."""
    sample = _Sample(keep)
    for tick in range(max(lengths)):
        rows = [(tick, episode) for episode, length in enumerate(lengths) if tick < length]
        sample.add(np.reshape(rows, (-1, 1, 1, 2) if images else (-1, 2)))
    return sample.observations()


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(2, 60), st.booleans())
def test_rollouts_keep_extremes_of_features(lengths: list[int], keep: int, images: bool) -> None:
    observations = kept(lengths, keep, images=images)
    assert len(observations) == min(keep, sum(lengths))
    if keep >= 16 and not images:
        assert observations.min(axis=0).tolist() == [0, 0]
        assert observations.max(axis=0).tolist() == [max(lengths) - 1, len(lengths) - 1]


@given(st.integers(1, 1000), st.integers(2, 15), st.booleans())
def test_vectors_are_half_early_and_all_else_spread(length: int, keep: int, images: bool) -> None:
    ticks = kept([length], keep, images=images).reshape(-1, 2)[:, 0]
    half = 0 if images else min(keep // 2, length)
    np.testing.assert_array_equal(ticks[:half], np.arange(half))
    gaps = np.diff(ticks[half:])
    if len(gaps):
        assert length - ticks[-1] <= gaps.max() <= 2 * gaps.min()


def test_some_actions_are_random_while_images_are_kept(monkeypatch: Patch) -> None:
    single, several = spaces.Discrete(4), spaces.MultiDiscrete([4, 4])
    for space, keep, least, most in ((single, 0, 0, 0), (single, 9, 3, 30), (several, 9, 0, 0)):
        create = partial(Drawn, spaces.Box(0, 255, (2, 2, 1), np.uint8), space)
        envs = make_vector(register(monkeypatch, "Images-v0", create), 100, once=True)
        still = np.zeros_like(envs.action_space.sample())
        with patch.object(Drawn, "step", autospec=True, side_effect=Drawn.step) as stepped:
            rollout(envs, lambda *_, still=still: still, seed=0, keep=keep)
        actions = [call.args[1] for call in stepped.call_args_list]
        assert len(actions) == 300
        assert least <= np.count_nonzero(actions) <= most
