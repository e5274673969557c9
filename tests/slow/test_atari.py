"""Single games and vectors follow one protocol, written out here in plain NumPy."""

import math
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms
from samples import Patch

from quarl_tf.environments import GAME_OVER, RAW_REWARD, START, make, make_vector

#: Two games with lives; Ms. Pac-Man has no FIRE.
GAMES = "BreakoutNoFrameskip-v4", "MsPacmanNoFrameskip-v4"
NOOP, FIRE = 0, 1


def shrink(picture: np.ndarray, axis: int) -> np.ndarray:
    """Average over 84 equal parts of an axis, which may end inside a pixel."""
    size = picture.shape[axis]
    fine = np.repeat(picture, math.lcm(size, 84) // size, axis)
    return np.stack([part.mean(axis) for part in np.split(fine, 84, axis)], axis)


class Reference:
    """The protocol on the bare emulator; the number of no-ops is given."""

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id
        self.reset(0)

    def reset(self, noops: int) -> None:
        """Start a game on a new emulator by no-ops of one frame each; then steps are forced."""
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(roms.get_rom_path(gym.spec(self.env_id).kwargs["game"]))
        self.ale.reset_game()
        self.actions = self.ale.getMinimalActionSet()
        self.opening = [FIRE, 2] if ale_py.Action.FIRE in self.actions else []
        for _ in range(noops):
            self.ale.act(self.actions[NOOP])
        self.forced, self.stack = list(self.opening), []
        self.show([self.ale.getScreenGrayscale()])

    def tick(self, action: int) -> tuple[float, bool]:
        """Play an action or a forced one; return the reward, and whether the game is over."""
        reward, screens, lives = 0.0, [], self.ale.lives()
        if self.forced:
            action, self.stack = self.forced.pop(0), []
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            screens.append(self.ale.getScreenGrayscale())
        self.show(screens[2:])
        if not self.ale.game_over() and 0 < self.ale.lives() < lives:
            self.forced = [NOOP, *self.opening]
        return reward, self.ale.game_over()

    def play_forced(self, reward: float = 0.0, over: bool = False) -> tuple[float, bool]:
        """Play what is forced; return the reward and the end, after those of a tick before."""
        while self.forced and not over:
            more, over = self.tick(NOOP)
            reward += more
        return reward, over

    def show(self, screens: list[np.ndarray]) -> None:
        frame = shrink(shrink(np.max(screens, axis=0), 0), 1)
        self.stack = [*([np.zeros((84, 84))] * 4), *self.stack, frame][-4:]

    def compare(self, observation: np.ndarray) -> None:
        assert observation.dtype == np.uint8
        # OpenCV's INTER_AREA rounds to whole grey levels.
        assert np.abs(observation - np.stack(self.stack, axis=-1)).max() <= 0.51


@pytest.mark.parametrize("env_id", GAMES)
def test_games_follow_the_protocol_from_their_start_alone(env_id: str) -> None:
    env, reference, random = make(env_id), Reference(env_id), np.random.default_rng(0)
    for seed in range(2):
        observation, info = env.reset(seed=seed)
        assert 0 <= info[START] <= 30
        reference.reset(info[START])
        _, over = reference.play_forced()
        # The last frame of a game is incomplete and not shown, as nobody acts on it.
        while not over:
            reference.compare(observation)
            action = random.integers(len(reference.actions))
            observation, reward, over, truncated, _ = env.step(action)
            assert not truncated
            assert (reward, over) == reference.play_forced(*reference.tick(action))


@pytest.mark.parametrize("env_id", GAMES)
def test_one_of_a_vector_follows_the_protocol(env_id: str) -> None:
    envs, reference, random = make_vector(env_id, 3), Reference(env_id), np.random.default_rng(0)
    observations, info = envs.reset(seed=3)
    reference.reset(info["episode_frame_number"][1] - 4 * len(reference.opening))
    _, over = reference.play_forced()
    ends = 0
    for _ in range(1000):
        if not over:
            reference.compare(observations[1])
        actions = random.integers(len(reference.actions), size=3)
        observations, rewards, terminated, truncated, info = envs.step(actions)
        assert not truncated[1]
        if over:
            assert 0 <= info["episode_frame_number"][1] <= 30
            reference.reset(info["episode_frame_number"][1])
        expected = (0, False) if over else reference.tick(actions[1])
        assert (rewards[1], terminated[1]) == expected
        over = terminated[1]
        ends += over
    assert ends


class Scripted(gym.vector.VectorEnv[Any, Any, Any]):
    """Replaces ale-py's vectors: has scripted rewards and lives, and records actions."""

    has_fire = True
    #: (reward, lives, terminated): a life is lost; the game stays at 0 lives, ends and restarts.
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
        second = ale_py.Action.FIRE if self.has_fire else ale_py.Action.UP
        return [ale_py.Action.NOOP, second, ale_py.Action.DOWN]

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.remaining = iter([(0, 3, False)] * 2 * self.has_fire + list(self.script))
        return np.zeros((1, 4, 84, 84), np.uint8), {"lives": np.array([3])}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.actions += actions.tolist()
        reward, lives, terminated = (np.array([value]) for value in next(self.remaining))
        planes = np.zeros((1, 4, 84, 84), np.uint8)
        return planes, reward, terminated, np.array([False]), {"lives": lives}


@pytest.mark.parametrize(
    ("expected", "ends"),
    [([NOOP, FIRE, 2], [1, 2, 3, 6, 7, 8]), ([NOOP], [1, 6])],  # The second game has no FIRE.
)
def test_ticks_after_a_lost_life_act_as_a_reset_in_training(
    expected: list[int], ends: list[int], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Scripted, "has_fire", FIRE in expected)
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv", Scripted)
    envs = make_vector(GAMES[0], 1, training=True)
    envs.reset()
    ticks = [envs.step(np.array([8])) for _ in Scripted.script]
    _, rewards, terminated, _, info = zip(*ticks, strict=True)
    actions, opening = [8] * 11, expected[1:]
    for start in (2, 7):
        actions[start : start + len(expected)] = expected
    assert envs.unwrapped.actions == opening + actions
    raw = [reward for reward, *_ in Scripted.script]
    assert [tick[RAW_REWARD][0] for tick in info] == raw
    assert [tick[GAME_OVER][0] for tick in info] == [i == 6 for i in range(11)]
    # Forced actions earn nothing.
    assert np.ravel(rewards).tolist() == (np.sign(raw) * (np.array(actions) == 8)).tolist()
    assert np.flatnonzero(terminated).tolist() == ends
    # A reset forgets a life lost just before it.
    for _ in range(2):
        envs.reset()
        envs.step(np.array([8]))
        envs.step(np.array([8]))
    assert envs.unwrapped.actions[len(opening) + 11 :] == [*opening, 8, 8] * 2


def test_sticky_games_repeat_actions_by_the_seed_alone() -> None:
    def play(sticky: float, actions: np.ndarray) -> np.ndarray:
        env = make(GAMES[0], sticky=sticky)
        return np.stack([env.reset(seed=5)[0], *(env.step(action)[0] for action in actions)])

    choices, other_choices = np.random.default_rng(0).integers(4, size=(2, 80))
    np.testing.assert_array_equal(play(0.25, choices), play(0.25, choices))
    assert not np.array_equal(play(0.25, choices), play(0.0, choices))
    # An action that is always repeated stays the same.
    np.testing.assert_array_equal(play(1.0, choices), play(1.0, other_choices))
