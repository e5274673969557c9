"""Single games and vectors of games follow one protocol, spelt out here in plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms

from quarl_tf.environments import (
    GAME_OVER,
    RAW_REWARD,
    START,
    atari,
    make,
    make_vector,
    registry,
)

PONG, BREAKOUT, MS_PACMAN, BEAM_RIDER = (
    f"{game}NoFrameskip-v4" for game in ("Pong", "Breakout", "MsPacman", "BeamRider")
)

#: The papers' games, all but Ms. Pac-Man with FIRE, all but Pong with lives.
GAMES = {
    PONG: 6,
    BREAKOUT: 4,
    MS_PACMAN: 9,
    BEAM_RIDER: 9,
    "QbertNoFrameskip-v4": 6,
    "SeaquestNoFrameskip-v4": 18,
    "SpaceInvadersNoFrameskip-v4": 6,
}
NOOP, FIRE = 0, 1


def shrink(picture: np.ndarray, axis: int) -> np.ndarray:
    """Average over 84 equal parts of an axis, which may end within a pixel."""
    size = picture.shape[axis]
    fine = np.repeat(picture, math.lcm(size, 84) // size, axis)
    return np.stack([part.mean(axis) for part in np.split(fine, 84, axis)], axis)


class Reference:
    """The protocol on the bare emulator, but for the number of no-ops, which is given."""

    def __init__(self, env_id: str) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(roms.get_rom_path(gym.spec(env_id).kwargs["game"]))
        self.actions = self.ale.getMinimalActionSet()
        self.fires = ale_py.Action.FIRE in self.actions

    def reset(self, frames: int) -> np.ndarray:
        """Play `frames` frames of a new game, FIRE first."""
        self.ale.reset_game()
        for frame in range(frames):
            self.ale.act(self.actions[FIRE if self.fires and frame == 0 else NOOP])
        self.fire_next = False
        self.stack = [np.zeros((84, 84))] * 3 + [self.look([self.ale.getScreenGrayscale()])]
        return np.stack(self.stack, axis=-1)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        lives = self.ale.lives()
        reward, screens = 0.0, []
        for _ in range(4):
            reward += self.ale.act(self.actions[FIRE if self.fire_next else action])
            screens.append(self.ale.getScreenGrayscale())
        self.fire_next = self.fires and 0 < self.ale.lives() < lives
        self.stack = [*self.stack[1:], self.look(screens[2:])]
        return np.stack(self.stack, axis=-1), reward, self.ale.game_over()

    def look(self, screens: list[np.ndarray]) -> np.ndarray:
        return shrink(shrink(np.max(screens, axis=0), 0), 1)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def follow(env_id: str, plays: Iterator[Any], ticks: int) -> int:
    """Compare a game with the reference for some ticks; return how many games ended.

    `plays` yields (observation, frames played) for a start, (action, observation, reward,
    terminated, truncated) for a step.
    """
    reference = Reference(env_id)
    ended, over = 0, False
    for _, play in zip(range(ticks), plays, strict=False):
        if len(play) == 2:
            observation, frames = play
            # FIRE takes the place of the first no-op.
            assert 0 <= frames <= 30 + reference.fires
            expected, over = reference.reset(frames), False
        else:
            assert not over
            action, observation, reward, terminated, truncated = play
            expected, raw, over = reference.step(action)
            assert (reward, terminated, truncated) == (raw, over, False)
            ended += over
        assert observation.dtype == np.uint8
        # A frame cut short by the end of the game is shown as it was before: nobody acts on it.
        if not over:
            # OpenCV's INTER_AREA rounds to whole grey levels.
            assert np.abs(observation - expected).max() <= 0.51
    return ended


def single(env_id: str, random: np.random.Generator) -> Iterator[Any]:
    env = make(env_id)
    observation, info = env.reset(seed=3)
    yield observation, info["episode_frame_number"]
    while True:
        action = int(random.integers(GAMES[env_id]))
        observation, reward, terminated, truncated, _ = env.step(action)
        yield action, observation, reward, terminated, truncated
        if terminated or truncated:
            observation, info = env.reset()
            yield observation, info["episode_frame_number"]


def one_of_a_vector(env_id: str, random: np.random.Generator) -> Iterator[Any]:
    envs = make_vector(env_id, 3)
    observations, info = envs.reset(seed=3)
    yield observations[1], info["episode_frame_number"][1]
    over = False
    while True:
        actions = random.integers(GAMES[env_id], size=3)
        observations, rewards, terminated, truncated, info = envs.step(actions)
        if over:
            assert (rewards[1], terminated[1], truncated[1]) == (0, False, False)
            yield observations[1], info["episode_frame_number"][1]
        else:
            yield actions[1], observations[1], rewards[1], terminated[1], truncated[1]
        over = terminated[1] | truncated[1]


@pytest.mark.parametrize("kind", [single, one_of_a_vector])
@pytest.mark.parametrize("env_id", [BREAKOUT, MS_PACMAN])
def test_games_follow_the_protocol_frame_by_frame(
    env_id: str, kind: Any, random: np.random.Generator
) -> None:
    ended = follow(env_id, kind(env_id, random), ticks=700)
    # Games of these two take about a thousand steps.
    assert ended >= 1 or env_id in (PONG, BEAM_RIDER)


@pytest.mark.parametrize("env_id", [BREAKOUT, MS_PACMAN])
def test_vector_shows_what_the_single_game_shows(env_id: str, random: np.random.Generator) -> None:
    """The two draw their no-ops from generators of their own, so here there are none."""
    registered = registry.find(env_id)
    env = atari.make(registered, noop_max=0)
    envs = atari.make_vector(registered, 2, training=False, noop_max=0)
    (observation, _), (observations, _) = env.reset(seed=0), envs.reset(seed=9)
    over = False
    for _ in range(500):
        np.testing.assert_array_equal(observations[0], observation)
        actions = random.integers(GAMES[env_id], size=2)
        observations, rewards, terminated, truncated, info = envs.step(actions)
        if over:
            observation, lives = env.reset()
            reward, ended, cut = 0.0, False, False
        else:
            observation, reward, ended, cut, lives = env.step(int(actions[0]))
        assert (rewards[0], terminated[0], truncated[0]) == (reward, ended, cut)
        assert info["lives"][0] == lives["lives"]
        over = ended or cut


# What training sees.


class Scripted(gym.vector.VectorEnv[Any, Any, Any]):
    """Stands in for ale-py's vectors: rewards and lives as written, actions as they came."""

    has_fire = True
    #: (reward, lives, terminated): a life is lost, one more; the game sits at 0 lives, and ends.
    script = (
        *[(5, 3, False), (7, 2, False), (9, 2, False), (0, 1, False), (2, 1, False)],
        *[(-3, 0, False), (0, 0, True), (0, 3, False), (-4, 3, False)],
    )

    def __init__(self, game: str, num_envs: int, **options: Any) -> None:
        self.num_envs, self.ale = num_envs, self
        self.single_action_space = gym.spaces.Discrete(3)
        self.actions: list[int] = []

    def get_action_set(self) -> list[ale_py.Action]:
        Action = ale_py.Action  # noqa: N806
        return [Action.NOOP, Action.FIRE if self.has_fire else Action.UP, Action.DOWN]

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.left = iter(self.script)
        return np.zeros((1, 4, 84, 84), np.uint8), {"lives": np.array([3])}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.actions += actions.tolist()
        reward, lives, terminated = next(self.left)
        return (
            np.zeros((1, 4, 84, 84), np.uint8),
            np.array([reward], np.int32),
            np.array([terminated]),
            np.array([False]),
            {"lives": np.array([lives])},
        )


@pytest.mark.parametrize(("training", "has_fire"), [(True, True), (True, False), (False, True)])
def test_a_tick_after_a_lost_life_stands_for_a_reset(
    training: bool, has_fire: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "has_fire", has_fire)
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv", Scripted)
    envs = make_vector(BREAKOUT, 1, training=training)
    envs.reset()
    ticks = [envs.step(np.array([2])) for _ in Scripted.script]
    instead = FIRE if has_fire else NOOP
    assert envs.unwrapped.actions == [2, 2, instead, 2, instead, 2, 2, 2, 2]
    raw = [5, 7, 9, 0, 2, -3, 0, 0, -4]
    rewards, ends = raw, [6]
    if training:
        rewards, ends = [1, 1, 0, 0, 0, -1, 0, 0, -1], [1, 3, 6]
        assert [info[RAW_REWARD][0] for *_, info in ticks] == raw
        assert [info[GAME_OVER][0] for *_, info in ticks] == [i == 6 for i in range(9)]
    assert [reward[0] for _, reward, *_ in ticks] == rewards
    assert [i for i, tick in enumerate(ticks) if tick[2][0]] == ends
    # A reset forgets a life lost just before it.
    for _ in range(2):
        envs.reset()
        envs.step(np.array([2]))
        envs.step(np.array([2]))
    assert envs.unwrapped.actions[9:] == [2] * 4


def test_a_trial_goes_on_by_itself_where_there_is_no_fire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Scripted, "has_fire", False)
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv", Scripted)
    envs = make_vector(MS_PACMAN, 1)
    envs.reset()
    for _ in Scripted.script:
        envs.step(np.array([2]))
    assert set(envs.unwrapped.actions) == {2}


@pytest.mark.parametrize("training", [False, True])
def test_no_life_waits_for_a_policy_to_press_fire(training: bool) -> None:
    env, envs = make(BREAKOUT), make_vector(BREAKOUT, 1, training=training)
    _, info = env.reset(seed=0)
    over, ticks = False, 0
    while not over and ticks < 200:
        _, _, over, _, info = env.step(NOOP)
        ticks += 1
    assert (info["lives"], over) == (0, True)
    _, info = envs.reset(seed=0)
    ends, ticks = 0, 0
    while info["lives"][0] > 0 and ticks < 200:
        _, _, terminated, _, info = envs.step(np.array([NOOP]))
        ends += int(terminated[0])
        ticks += 1
    assert ends == (5 if training else 1)


# Seeds.


@pytest.mark.parametrize("env_id", [MS_PACMAN])
def test_games_from_one_start_go_alike(env_id: str, random: np.random.Generator) -> None:
    envs = make(env_id), make(env_id)
    envs[1].reset(seed=100)
    for _ in range(50):  # The other has a past.
        envs[1].step(random.integers(GAMES[env_id]))
    seeds: dict[int, int] = {}
    starts = [(seed, envs[0].reset(seed=seed)[1][START]) for seed in range(60)]
    other, start = next((seed, s) for seed, s in starts if seeds.setdefault(s, seed) != seed)
    assert len(seeds) <= 30
    first, second = envs[0].reset(seed=seeds[start])[0], envs[1].reset(seed=other)[0]
    np.testing.assert_array_equal(first, second)
    for _ in range(400):
        action = random.integers(GAMES[env_id])
        (first, *rest), (second, *others) = (env.step(action) for env in envs)
        np.testing.assert_array_equal(first, second)
        assert rest[:3] == others[:3]
        if rest[1]:
            break


# Names.
