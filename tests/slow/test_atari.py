"""Single games and vectors of games follow one protocol, spelt out here in plain NumPy."""

import math
from collections.abc import Iterator
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms
from samples import Patch

from quarl_tf.environments import GAME_OVER, RAW_REWARD, START, make, make_vector

#: Two games with lives and their actions; Ms. Pac-Man has no FIRE.
BREAKOUT, MS_PACMAN = "BreakoutNoFrameskip-v4", "MsPacmanNoFrameskip-v4"
GAMES = {BREAKOUT: 4, MS_PACMAN: 9}
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
        self.opening = [FIRE, 2] if ale_py.Action.FIRE in self.actions else []

    def reset(self, noops: int) -> np.ndarray:
        """Play no-ops of a new game, each for one frame, and open it."""
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
            assert 0 <= frames <= 30
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
    yield observation, info[START]
    while True:
        action = int(random.integers(GAMES[env_id]))
        observation, reward, terminated, truncated, _ = env.step(action)
        yield action, observation, reward, terminated, truncated
        if terminated or truncated:
            observation, info = env.reset()
            yield observation, info[START]


def one_of_a_vector(env_id: str, random: np.random.Generator) -> Iterator[Any]:
    """Play steps of the agent; those that are not are added to the one before them."""
    envs = make_vector(env_id, 3)
    opening = 2 if ale_py.Action.FIRE in envs.unwrapped.ale.get_action_set() else 0
    observations, info = envs.reset(seed=3)
    start = info["episode_frame_number"][1] - 4 * opening
    yield observations[1], start
    lives = info["lives"][1]
    while True:
        actions = random.integers(GAMES[env_id], size=3)
        observations, rewards, terminated, truncated, info = envs.step(actions)
        total, over = rewards[1], terminated[1] | truncated[1]
        forced = 0
        if over:
            yield actions[1], observations[1], total, terminated[1], truncated[1]
            forced = 1 + opening
        elif 0 < info["lives"][1] < lives:
            forced = 1 + opening
        for i in range(forced):
            observations, rewards, _, _, info = envs.step(random.integers(2, size=3))
            total += rewards[1]
            if over and i == 0:
                assert rewards[1] == 0
                start = info["episode_frame_number"][1]
        lives = info["lives"][1]
        if over:
            yield observations[1], start
        else:
            yield actions[1], observations[1], total, terminated[1], truncated[1]


@pytest.mark.parametrize("kind", [single, one_of_a_vector])
@pytest.mark.parametrize("env_id", GAMES)
def test_games_follow_the_protocol(env_id: str, kind: Any, random: np.random.Generator) -> None:
    assert follow(env_id, kind(env_id, random), ticks=700) >= 1


class Scripted(gym.vector.VectorEnv[Any, Any, Any]):
    """Stands in for ale-py's vectors: rewards and lives as written, actions as they came."""

    has_fire = True
    #: (reward, lives, terminated): a life is lost; the game sits at 0 lives, ends and goes anew.
    script = (
        *[(5, 3, False), (7, 2, False), (9, 2, False), (0, 2, False), (2, 2, False)],
        *[(-3, 0, False), (0, 0, True), (0, 3, False), (4, 3, False), (0, 3, False)],
        (-4, 3, False),
    )

    def __init__(self, game: str, num_envs: int, **options: Any) -> None:
        self.num_envs, self.ale = num_envs, self
        self.single_action_space = gym.spaces.Discrete(9)
        self.actions: list[int] = []

    def get_action_set(self) -> list[ale_py.Action]:
        Action = ale_py.Action  # noqa: N806
        return [Action.NOOP, Action.FIRE if self.has_fire else Action.UP, Action.DOWN]

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.left = iter([(0, 3, False)] * 2 * self.has_fire + list(self.script))
        self.frame = 0
        return self.planes(), {"lives": np.array([3])}

    def planes(self) -> np.ndarray:
        """Return the last four frames, each of which shows its number from 101 on."""
        self.frame += 1
        numbers = self.frame + np.arange(97, 101).reshape(1, 4, 1, 1)
        return np.broadcast_to(numbers, (1, 4, 84, 84)).astype(np.uint8)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.actions += actions.tolist()
        reward, lives, terminated = next(self.left)
        return (
            self.planes(),
            np.array([reward], np.int32),
            np.array([terminated]),
            np.array([False]),
            {"lives": np.array([lives])},
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("expected", "ends", "frames"),
    [
        ([NOOP, FIRE, 2], [1, 2, 3, 6, 7, 8], [1, 2, 3, 1, 1, 1, 2, 3, 1, 1, 1, 2]),
        ([NOOP], [1, 6], [1, 2, 3, 1, 2, 3, 4, 4, 1, 2, 3, 4]),  # A game without FIRE.
    ],
)
def test_ticks_after_a_lost_life_stand_for_a_reset(
    training: bool, expected: list[int], ends: list[int], frames: list[int], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Scripted, "has_fire", FIRE in expected)
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv", Scripted)
    envs = make_vector(BREAKOUT, 1, training=training)
    first, _ = envs.reset()
    ticks = [envs.step(np.array([8])) for _ in Scripted.script]
    actions = [8] * 11
    for start in (2, 7):
        actions[start : start + len(expected)] = expected
    opening = expected[1:]
    assert envs.unwrapped.actions == opening + actions
    # Of the frames of a life that is over, or was never the agent's, nothing is shown.
    stacks = [first, *(tick[0] for tick in ticks)]
    assert [np.count_nonzero(stack[0, 0, 0]) for stack in stacks] == frames
    rewards = raw = [reward for reward, *_ in Scripted.script]
    if training:
        # Forced actions earn nothing.
        rewards = [int(np.sign(r)) if a == 8 else 0 for r, a in zip(raw, actions, strict=True)]
        assert [info[RAW_REWARD][0] for *_, info in ticks] == raw
        assert [info[GAME_OVER][0] for *_, info in ticks] == [i == 6 for i in range(11)]
    assert [tick[1][0] for tick in ticks] == rewards
    assert [i for i, tick in enumerate(ticks) if tick[2][0]] == (ends if training else [6])
    # A reset forgets a life lost just before it.
    for _ in range(2):
        envs.reset()
        envs.step(np.array([8]))
        envs.step(np.array([8]))
    assert envs.unwrapped.actions[len(opening) + 11 :] == [*opening, 8, 8] * 2


def test_games_from_one_start_go_alike(random: np.random.Generator) -> None:
    envs = make(MS_PACMAN), make(MS_PACMAN)
    envs[1].reset(seed=100)
    for _ in range(50):  # The other has a past.
        envs[1].step(random.integers(9))
    seeds: dict[int, int] = {}
    starts = [(seed, envs[0].reset(seed=seed)[1][START]) for seed in range(60)]
    other, start = next((seed, s) for seed, s in starts if seeds.setdefault(s, seed) != seed)
    assert len(seeds) <= 30
    first, second = envs[0].reset(seed=seeds[start])[0], envs[1].reset(seed=other)[0]
    np.testing.assert_array_equal(first, second)
    for _ in range(400):
        action = random.integers(9)
        (first, *rest), (second, *others) = (env.step(action) for env in envs)
        np.testing.assert_array_equal(first, second)
        assert rest[:3] == others[:3]
        if rest[1]:
            break


def test_sticky_games_repeat_actions_by_the_seed_alone(random: np.random.Generator) -> None:
    def play(sticky: float, actions: np.ndarray) -> np.ndarray:
        env = make(BREAKOUT, sticky=sticky)
        return np.stack([env.reset(seed=5)[0], *(env.step(action)[0] for action in actions)])

    some, others = random.integers(4, size=(2, 80))
    np.testing.assert_array_equal(play(0.25, some), play(0.25, some))
    assert not np.array_equal(play(0.25, some), play(0.0, some))
    # Whoever always repeats an action never takes another.
    np.testing.assert_array_equal(play(1.0, some), play(1.0, others))
