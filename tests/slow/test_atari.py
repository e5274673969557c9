"""Single games and vectors follow one protocol, written out here in plain NumPy."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms

from quarl_tf import presets
from quarl_tf.environments import GAME_OVER, RAW_REWARD, START, make, make_vector
from quarl_tf.environments.atari import _life_lost

#: Two games with lives and their actions; Ms. Pac-Man has no FIRE.
BREAKOUT, MS_PACMAN = "BreakoutNoFrameskip-v4", "MsPacmanNoFrameskip-v4"
GAMES = {BREAKOUT: 4, MS_PACMAN: 9}
NOOP, FIRE = 0, 1


def shrink(picture: np.ndarray, axis: int) -> np.ndarray:
    """Average over 84 equal parts of an axis, which may end inside a pixel."""
    size = picture.shape[axis]
    fine = np.repeat(picture, np.lcm(size, 84) // size, axis)
    return np.stack([part.mean(axis) for part in np.split(fine, 84, axis)], axis)


class Reference:
    """The protocol on the bare emulator; the number of no-ops is given."""

    def __init__(self, env_id: str) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(roms.get_rom_path(gym.spec(env_id).kwargs["game"]))
        self.actions = self.ale.getMinimalActionSet()
        self.opening = [FIRE, 2] if ale_py.Action.FIRE in self.actions else []

    def reset(self, noops: int) -> np.ndarray:
        """Start a new game with no-ops of one frame each, and the forced steps."""
        self.ale.reset_game()
        for _ in range(noops):
            self.ale.act(self.actions[NOOP])
        frame = self.look([self.ale.getScreenGrayscale()])
        for action in self.opening:
            frame, _ = self.act(action)
        return self.begin(frame)

    def begin(self, frame: np.ndarray) -> np.ndarray:
        self.stack = [np.zeros((84, 84))] * 3 + [frame]
        return np.stack(self.stack, axis=-1)

    def act(self, action: int) -> tuple[np.ndarray, float]:
        reward, screens = 0.0, []
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            screens.append(self.ale.getScreenGrayscale())
        return self.look(screens[2:]), reward

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        lives = self.ale.lives()
        frame, reward = self.act(action)
        if not self.ale.game_over() and 0 < self.ale.lives() < lives:
            for forced in (NOOP, *self.opening):
                frame, more = self.act(forced)
                reward += more
            return self.begin(frame), reward, self.ale.game_over()
        self.stack = [*self.stack[1:], frame]
        return np.stack(self.stack, axis=-1), reward, self.ale.game_over()

    def look(self, screens: list[np.ndarray]) -> np.ndarray:
        return shrink(shrink(np.max(screens, axis=0), 0), 1)


def single(env_id: str, random: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield (observation, frames played) for a start, (observation, action, reward, over) after."""
    env = make(env_id)
    while True:
        observation, info = env.reset(seed=3)
        yield observation, info[START]
        over = False
        while not over:
            action = int(random.integers(GAMES[env_id]))
            observation, reward, over, truncated, _ = env.step(action)
            assert not truncated
            yield observation, action, reward, over


def one_of_a_vector(env_id: str, random: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield as `single`; rewards of forced steps are added to the step before them."""
    envs = make_vector(env_id, 3)
    opening = 2 if ale_py.Action.FIRE in envs.unwrapped.ale.get_action_set() else 0
    observations, info = envs.reset(seed=3)
    yield observations[1], info["episode_frame_number"][1] - 4 * opening
    while True:
        actions, lives = random.integers(GAMES[env_id], size=3), info["lives"][1]
        observations, (_, total, _), (_, over, _), truncated, info = envs.step(actions)
        assert not truncated[1]
        if over:
            yield observations[1], actions[1], total, over
        start = None
        for _ in range((1 + opening) * (over or 0 < info["lives"][1] < lives)):
            observations, (_, reward, _), *_, info = envs.step(random.integers(2, size=3))
            total += reward
            if over and start is None:
                assert reward == 0
                start = info["episode_frame_number"][1]
        yield (observations[1], start) if over else (observations[1], actions[1], total, over)


def test_the_background_of_pong_is_0_to_its_preset_and_closed_games_keep_no_emulators() -> None:
    envs, preset = make_vector("PongNoFrameskip-v4", 1), presets.load("ppo", "PongNoFrameskip-v4")
    frame = envs.reset(seed=0)[0][..., -1]
    assert np.bincount(frame.ravel()).argmax() == preset.byte_zero > 0
    envs.close()
    assert not hasattr(envs.unwrapped, "ale")


@pytest.mark.parametrize("plays", [single, one_of_a_vector])
@pytest.mark.parametrize("env_id", GAMES)
def test_games_follow_the_protocol(env_id: str, plays: Any) -> None:
    reference, ended, over, random = Reference(env_id), 0, False, np.random.default_rng(0)
    for observation, *play in islice(plays(env_id, random), 700):
        if len(play) == 1:
            assert 0 <= play[0] <= 30
            expected, over = reference.reset(play[0]), False
        else:
            assert not over
            expected, reward, over = reference.step(play[0])
            assert play[1:] == [reward, over]
            ended += over
        assert observation.dtype == np.uint8
        if not over:  # The last frame of a game is incomplete and not shown, as nobody acts on it.
            # OpenCV's INTER_AREA rounds to whole grey levels.
            assert np.abs(observation - expected).max() <= 0.51
    assert ended


@pytest.mark.parametrize("env_id", GAMES)
def test_trainings_clip_rewards_and_end_an_episode_with_each_life(env_id: str) -> None:
    vectors = make_vector(env_id, 2), make_vector(env_id, 2, training=True)
    random, forced_steps = np.random.default_rng(0), 3 if env_id == BREAKOUT else 1
    for plays_on in (False, True):  # A reset forgets a life lost just before it.
        (_, info), _ = (envs.reset(seed=3) for envs in vectors)
        forced, games = np.zeros(2, int), 0
        while games < 2 if plays_on else not forced.any():
            actions, lives = random.integers(GAMES[env_id], size=2), info["lives"]
            ticks = [envs.step(actions) for envs in vectors]
            (frames, raw, over, _, info), (seen, rewards, ends, _, told) = ticks
            np.testing.assert_array_equal(seen, frames)
            np.testing.assert_array_equal(told[RAW_REWARD], raw)
            np.testing.assert_array_equal(told[GAME_OVER], over)
            # Forced actions earn nothing.
            np.testing.assert_array_equal(rewards, np.where(forced > 0, 0, np.sign(raw)))
            lost = over | ((info["lives"] > 0) & (info["lives"] < lives))
            forced = np.where(lost, forced_steps, np.maximum(forced - 1, 0))
            np.testing.assert_array_equal(ends, forced > 0)
            games += over.sum()
    # Some games stay at 0 lives before they end, where none is lost.
    assert not _life_lost(np.array([1]), np.array([0])).any()


def test_games_from_one_start_are_equal() -> None:
    envs, random = (make(MS_PACMAN), make(MS_PACMAN)), np.random.default_rng(0)
    envs[1].reset(seed=100)
    for _ in range(50):  # The other has played before.
        envs[1].step(random.integers(9))
    seeds: dict[int, int] = {}
    starts = ((seed, envs[0].reset(seed=seed)[1][START]) for seed in range(60))
    other, start = next((seed, s) for seed, s in starts if seeds.setdefault(s, seed) != seed)
    first, second = envs[0].reset(seed=seeds[start])[0], envs[1].reset(seed=other)[0]
    np.testing.assert_array_equal(first, second)
    for _ in range(400):
        action = random.integers(9)
        (first, *outcome), (second, *other_outcome) = (env.step(action) for env in envs)
        np.testing.assert_array_equal(first, second)
        assert outcome[:3] == other_outcome[:3]
        if outcome[1]:
            break


def test_sticky_games_repeat_actions_by_the_seed_alone() -> None:
    def play(sticky: float, actions: np.ndarray) -> np.ndarray:
        env = make(BREAKOUT, sticky=sticky)
        return np.stack([env.reset(seed=5)[0], *(env.step(action)[0] for action in actions)])

    choices, other_choices = np.random.default_rng(0).integers(4, size=(2, 80))
    np.testing.assert_array_equal(play(0.25, choices), play(0.25, choices))
    assert not np.array_equal(play(0.25, choices), play(0.0, choices))
    # An action that is always repeated stays the same.
    np.testing.assert_array_equal(play(1.0, choices), play(1.0, other_choices))
    for sticky, forced_steps in ((0.0, 2), (0.25, 3)):  # FIRE twice, as a game may miss the first.
        _, info = make(BREAKOUT, sticky=sticky).reset(seed=5)
        assert info["episode_frame_number"] - info[START] == 4 * forced_steps
