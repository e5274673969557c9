"""Every sampled transition is one that happened, summed over its steps by hand."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from quarl_tf.agents.replay import Replay, Transitions
from quarl_tf.environments import GAME_OVER, EnvSpec, env_spec, make_vector
from quarl_tf.foundation.errors import UsageError

#: The observation is a number that comes once only, so that it tells where a transition began.
SPEC = EnvSpec((1,), "float32", 3)


@dataclass
class Episode:
    """What one environment showed and did, and at which rows."""

    rows: list[int] = field(default_factory=list)
    observations: list[float] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False
    over: bool = False


class Expected(NamedTuple):
    """A transition by hand."""

    action: int
    reward: float
    discount: float
    next_observation: float


@dataclass
class Script:
    """A stream of random episodes in NEXT_STEP order, fed to replays row by row."""

    num_envs: int
    seed: int

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.count = 0
        self.rows = 0
        self.episodes: list[Episode] = []
        self.restart()

    def restart(self) -> None:
        """Start a fresh episode in every environment."""
        self.now = [self._episode() for _ in range(self.num_envs)]

    def _episode(self) -> Episode:
        episode = Episode()
        self.episodes.append(episode)
        self._show(episode)
        return episode

    def _show(self, episode: Episode) -> None:
        self.count += 1
        episode.observations.append(float(self.count))

    def _seen(self) -> np.ndarray:
        return np.array([[episode.observations[-1]] for episode in self.now], np.float32)

    def tick(self, *replays: Replay) -> None:
        """Act in every environment."""
        seen = self._seen()
        actions = self.random.integers(3, size=self.num_envs)
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, np.bool_)
        starts = np.ones(self.num_envs, np.bool_)
        for e, episode in enumerate(self.now):
            episode.rows.append(self.rows)
            if episode.over:
                starts[e] = False
                self.now[e] = self._episode()
                continue
            rewards[e] = self.random.integers(-9, 10)
            episode.actions.append(int(actions[e]))
            episode.rewards.append(float(rewards[e]))
            self._show(episode)
            fate = self.random.random()
            terminated[e] = episode.terminated = bool(fate < 0.15)
            episode.over = bool(fate < 0.3)
        for replay in replays:
            replay.add(seen, actions, rewards, terminated, starts)
        self.rows += 1

    def break_off(self, *replays: Replay) -> None:
        """Show the last observations, then start afresh everywhere."""
        for replay in replays:
            replay.add_break(self._seen())
        for episode in self.now:
            episode.rows.append(self.rows)
        self.rows += 1
        self.restart()

    def transitions(self, held: int, n_step: int, discount: float) -> dict[float, Expected]:
        """List what may be sampled from the newest `held` rows, by the first observation."""
        found = {}
        for episode in self.episodes:
            # Rows of the observations; the last may not be stored yet, nor have been acted on.
            rows, steps = episode.rows, len(episode.actions)
            for start in range(steps):
                if rows[start] < self.rows - held or start + 1 >= len(rows):
                    continue
                end = min(start + n_step, steps, len(rows) - 1)
                rewards = episode.rewards[start:end]
                ended = episode.terminated and end == steps
                found[episode.observations[start]] = Expected(
                    episode.actions[start],
                    sum(discount**i * reward for i, reward in enumerate(rewards)),
                    0.0 if ended else discount ** (len(rewards) - 1),
                    episode.observations[end],
                )
        return found


def check(sampled: Transitions, expected: dict[float, Expected]) -> set[float]:
    """Compare every transition with that by hand; return where they began."""
    begun = sampled.observation.ravel().tolist()
    wanted = [expected[first] for first in begun]
    assert sampled.action.ravel().tolist() == [w.action for w in wanted]
    np.testing.assert_allclose(
        sampled.reward.ravel(), [w.reward for w in wanted], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(sampled.discount.ravel(), [w.discount for w in wanted], rtol=1e-5)
    assert sampled.next_observation.ravel().tolist() == [w.next_observation for w in wanted]
    return set(begun)


@settings(max_examples=150)
@given(
    num_envs=st.integers(1, 4),
    rows=st.integers(4, 20),
    ticks=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    n_step=st.integers(1, 6),
    discount=st.sampled_from([1.0, 0.9, 0.5]),
    seed=st.integers(0, 2**16),
)
def test_what_is_sampled_is_what_happened(
    num_envs: int, rows: int, ticks: list[int], n_step: int, discount: float, seed: int
) -> None:
    # Capacity that is no multiple of the environments is rounded down to whole rows.
    replay = Replay(
        SPEC, rows * num_envs + num_envs - 1, num_envs, n_step=n_step, discount=discount
    )
    script = Script(num_envs, seed)
    for part, count in enumerate(ticks):
        if part:
            script.break_off(replay)
        for _ in range(count):
            script.tick(replay)
    expected = script.transitions(min(rows, script.rows), n_step, discount)
    assume(expected)
    assert len(replay) == min(rows, script.rows) * num_envs
    # Each of at most 80 is missed once in 10**13 draws of this size.
    sampled = replay.sample((30, len(expected)), np.random.default_rng(seed))
    assert sampled.reward.shape == (30, len(expected))
    assert check(sampled, expected) == set(expected)


def test_one_episode_by_hand() -> None:
    replay = Replay(SPEC, 100, 1, n_step=2, discount=0.5)
    for number, reward, terminated, starts in [
        (1, 8.0, False, True),
        (2, 4.0, True, True),  # The episode terminates with this step
        (3, 0.0, False, False),  # and shows this observation, whose action does nothing.
        (4, 2.0, False, True),
        (5, 6.0, False, True),  # This one is truncated,
        (6, 0.0, False, False),  # so that what would follow 6 still counts.
        (7, 1.0, False, True),
        (8, 3.0, False, True),  # Nobody knows yet what follows 8.
    ]:
        replay.add(
            np.array([[number]], np.float32),
            np.array([number % 3]),
            np.array([reward]),
            np.array([terminated]),
            np.array([starts]),
        )
    expected = {
        1.0: Expected(1, 8 + 0.5 * 4, 0.0, 3.0),
        2.0: Expected(2, 4, 0.0, 3.0),
        4.0: Expected(1, 2 + 0.5 * 6, 0.5, 6.0),
        5.0: Expected(2, 6, 1.0, 6.0),
        7.0: Expected(1, 1, 1.0, 8.0),
    }
    assert check(replay.sample((500,), np.random.default_rng(0)), expected) == set(expected)


def test_every_transition_is_as_likely_as_any_other() -> None:
    replay, script = Replay(SPEC, 60, 3), Script(3, seed=5)
    for _ in range(33):
        script.tick(replay)
    expected = script.transitions(20, 1, 1.0)
    sampled = replay.sample((200 * len(expected),), np.random.default_rng(1))
    _, counts = np.unique(sampled.observation, return_counts=True)
    assert len(counts) == len(expected)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_sampling_depends_on_the_generator_alone() -> None:
    replay, script = Replay(SPEC, 60, 3), Script(3, seed=5)
    for _ in range(30):
        script.tick(replay)
    draws = [replay.sample((2, 8), np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(draws[0], draws[1], strict=True))
    assert not np.array_equal(draws[0].observation, draws[2].observation)


@pytest.mark.parametrize(
    ("spec", "least"), [(SPEC, 4), (EnvSpec((2, 3, 4), "uint8", 3, frame_stack=4), 7)]
)
def test_a_replay_too_small_to_draw_from_is_refused(spec: EnvSpec, least: int) -> None:
    with pytest.raises(UsageError, match=f"must hold {least} .*: {least - 1} of each of 2"):
        Replay(spec, 2 * least - 1, 2)
    Replay(spec, 2 * least, 2)


# Checkpoints.


@given(before=st.integers(2, 30), after=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_restored_replay_goes_on_as_if_it_had_not_been_away(
    before: int, after: int, seed: int
) -> None:
    replay, restored = (Replay(SPEC, 24, 2, n_step=3, discount=0.9) for _ in range(2))
    script = Script(2, seed)
    for _ in range(before):
        script.tick(replay)
    assume(script.transitions(min(12, before), 3, 0.9))
    restored.restore({name: value.copy() for name, value in replay.arrays().items()})
    for _ in range(2):
        assert len(restored) == len(replay)
        one, other = (r.sample((4, 9), np.random.default_rng(seed)) for r in (replay, restored))
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        for _ in range(after):
            script.tick(replay, restored)
        assume(script.transitions(min(12, script.rows), 3, 0.9))


def test_checkpoint_holds_no_more_than_was_written() -> None:
    replay, script = Replay(SPEC, 1000, 2), Script(2, seed=0)
    for _ in range(5):
        script.tick(replay)
    arrays = replay.arrays()
    assert {len(array) for array in arrays.values() if array.ndim} == {5}
    for _ in range(600):
        script.tick(replay)
    assert {len(array) for array in replay.arrays().values() if array.ndim} == {500}


# Stacks of frames, each frame kept once.

DEPTH = 4


class Witness:
    """Remembers all that a replay is given, and compares what it gives back.

    The action of a tick is its number, so that it tells where a transition began.
    """

    def __init__(self, replay: Replay, num_envs: int, n_step: int) -> None:
        self.replay, self.num_envs, self.n_step = replay, num_envs, n_step
        self.seen: list[np.ndarray] = []
        self.starts: list[np.ndarray] = []
        self.terminated: list[np.ndarray] = []

    def _remember(self, seen: np.ndarray, terminated: np.ndarray, starts: np.ndarray) -> None:
        self.seen.append(seen.copy())
        self.terminated.append(terminated.copy())
        self.starts.append(starts.copy())

    def add(self, seen: np.ndarray, terminated: np.ndarray, starts: np.ndarray) -> None:
        numbers = len(self.seen) * self.num_envs + np.arange(self.num_envs)
        self.replay.add(seen, numbers, np.zeros(self.num_envs), terminated, starts)
        self._remember(seen, terminated, starts)

    def add_break(self, seen: np.ndarray) -> None:
        never = np.zeros(self.num_envs, np.bool_)
        self.replay.add_break(seen)
        self._remember(seen, never, never)

    def begun(self, oldest: int) -> set[int]:
        """Return the numbers of what began at a row or later, and has a successor."""
        rows = range(max(0, oldest), len(self.seen) - 1)
        return {
            row * self.num_envs + env
            for row in rows
            for env in range(self.num_envs)
            if self.starts[row][env]
        }

    def _end(self, row: int, env: int) -> int:
        end = row + 1
        for _ in range(self.n_step - 1):
            if (
                self.terminated[end - 1][env]
                or not self.starts[end][env]
                or end == len(self.seen) - 1
            ):
                break
            end += 1
        return end

    def check(self, draws: int, random: np.random.Generator) -> set[int]:
        """Compare every byte of drawn observations with what was seen; return where they began."""
        sampled = self.replay.sample((draws,), random)
        places = [divmod(number, self.num_envs) for number in sampled.action.tolist()]
        first = np.stack([self.seen[row][env] for row, env in places])
        last = np.stack([self.seen[self._end(row, env)][env] for row, env in places])
        np.testing.assert_array_equal(sampled.observation, first)
        np.testing.assert_array_equal(sampled.next_observation, last)
        assert sampled.observation.dtype == sampled.next_observation.dtype == np.uint8
        return set(sampled.action.tolist())


@dataclass
class Games:
    """Random games that are seen as stacks of tiny frames, many of them black."""

    witness: Witness
    seed: int
    black: float

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.restart()

    def restart(self) -> None:
        """Start a game in every environment."""
        self.stacks = np.zeros((self.witness.num_envs, 2, 3, DEPTH), np.uint8)
        self.starts = np.ones(self.witness.num_envs, np.bool_)
        self.over = ~self.starts
        self._show(np.arange(self.witness.num_envs))

    def _show(self, envs: np.ndarray) -> None:
        frames = self.random.integers(256, size=(len(envs), 2, 3), dtype=np.uint8)
        frames[self.random.random(len(envs)) < self.black] = 0
        self.stacks[envs, ..., :-1] = self.stacks[envs, ..., 1:]
        self.stacks[envs, ..., -1] = frames

    def tick(self) -> None:
        """Act in every environment: games go on, lose a life, end, or are truncated."""
        fate = self.random.random(self.witness.num_envs)
        terminated = self.starts & (fate < 0.2)
        over = self.starts & (fate > 0.1) & (fate < 0.3)
        self.witness.add(self.stacks, terminated, self.starts)
        self.stacks[self.over] = 0
        self._show(np.arange(self.witness.num_envs))
        self.starts, self.over = ~(terminated | over), over

    def break_off(self) -> None:
        """Show the last observations, then start afresh everywhere."""
        self.witness.add_break(self.stacks)
        self.restart()


def frames_spec(*shape: int) -> EnvSpec:
    return EnvSpec(shape, "uint8", 6, frame_stack=shape[-1])


@settings(max_examples=100)
@given(
    num_envs=st.integers(1, 3),
    rows=st.integers(7, 30),
    ticks=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    n_step=st.integers(1, 4),
    black=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_stacks_are_put_together_as_they_were_seen(
    num_envs: int, rows: int, ticks: list[int], n_step: int, black: float, seed: int
) -> None:
    replay = Replay(frames_spec(2, 3, DEPTH), rows * num_envs, num_envs, n_step=n_step)
    games = Games(Witness(replay, num_envs, n_step), seed, black)
    witness = games.witness
    for part, count in enumerate(ticks):
        if part:
            games.break_off()
        for _ in range(count):
            games.tick()
        # Of the oldest stacks of a full ring the frames are gone.
        oldest = len(witness.seen) - rows
        wanted = witness.begun(oldest + DEPTH - 1 if oldest > 0 else 0)
        if wanted:
            # Each of at most 90 is missed once in 10**13 draws of this size.
            assert witness.check(30 * len(wanted), np.random.default_rng(seed)) == wanted


@pytest.mark.parametrize(
    ("env_id", "ticks", "breaks"),
    [("PongNoFrameskip-v4", 2200, {1500}), ("BreakoutNoFrameskip-v4", 450, {250, 251, 300})],
)
def test_atari_stacks_are_put_together_as_they_were_seen(
    env_id: str, ticks: int, breaks: set[int]
) -> None:
    envs, random = make_vector(env_id, 2, training=True), np.random.default_rng(0)
    rows, spec = 260, env_spec(env_id)
    witness = Witness(Replay(spec, 2 * rows, 2, n_step=3), 2, 3)
    seen, _ = envs.reset(seed=0)
    starts, games, lives = np.ones(2, np.bool_), 0, 0
    for tick in range(ticks):
        following, _, terminated, truncated, info = envs.step(
            random.integers(spec.num_actions, size=2)
        )
        witness.add(seen, terminated, starts)
        seen, starts = following, ~(terminated | truncated)
        games += np.count_nonzero(info[GAME_OVER])
        lives += np.count_nonzero(terminated & ~info[GAME_OVER])
        if tick in breaks:
            witness.add_break(seen)
            seen, _ = envs.reset(seed=100 + tick)
            starts = np.ones(2, np.bool_)
        if tick % 90 == 89:
            witness.check(60, random)
    assert games > 1
    assert lives > 5 or "Pong" in env_id
    newest = len(witness.seen)
    begun, wanted = witness.check(1500, random), witness.begun(newest - rows + DEPTH - 1)
    assert begun <= wanted
    assert len(begun) > 0.8 * len(wanted)


def test_checkpoint_holds_each_frame_once() -> None:
    replay, never = Replay(frames_spec(5, 6, DEPTH), 3 * 50, 3), np.zeros(3, np.bool_)
    for rows in range(1, 70):
        frames = np.zeros((3, 5, 6, DEPTH), np.uint8)
        replay.add(frames, np.zeros(3), np.zeros(3), never, ~never)
        arrays = replay.arrays()
        assert arrays["frames"].shape == (min(rows, 50), 3, 5, 6)
        assert arrays["frames"].dtype == np.uint8
    # Beside its frame an observation costs a few bytes.
    rest = sum(array.nbytes for name, array in arrays.items() if name != "frames")
    assert rest <= 3 * 50 * 20


def test_replay_of_atari_fits_into_memory() -> None:
    spec = env_spec("PongNoFrameskip-v4")
    tracemalloc.start()
    replay = Replay(spec, 100_000, 8)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The frames themselves, and little else; NumPy reports what it asks for, used or not.
    assert 100_000 * 84 * 84 <= allocated < 1.05 * 100_000 * 84 * 84
    assert len(replay) == 0


@settings(max_examples=30)
@given(before=st.integers(5, 60), after=st.integers(1, 60), seed=st.integers(0, 2**16))
def test_restored_frames_go_on_as_if_they_had_not_been_away(
    before: int, after: int, seed: int
) -> None:
    """Checkpoints are taken at breaks of the stream."""
    spec, rows = frames_spec(2, 3, DEPTH), 20
    games = Games(Witness(Replay(spec, 2 * rows, 2, n_step=2), 2, 2), seed, 0.3)
    for _ in range(before):
        games.tick()
    games.break_off()
    restored = Replay(spec, 2 * rows, 2, n_step=2)
    restored.restore({k: v.copy() for k, v in games.witness.replay.arrays().items()})
    twin = Games(Witness(restored, 2, 2), seed, 0.3)
    twin.random = copy.deepcopy(games.random)
    games.restart(), twin.restart()
    for name in ("seen", "starts", "terminated"):
        setattr(twin.witness, name, list(getattr(games.witness, name)))
    for ticks in (0, after):
        for _ in range(ticks):
            games.tick(), twin.tick()
        assume(games.witness.begun(len(games.witness.seen) - rows + DEPTH))
        assert len(games.witness.replay) == len(restored)
        one, other = (g.witness.check(50, np.random.default_rng(seed)) for g in (games, twin))
        assert one == other


# Observations and actions of other kinds.


def test_frames_are_kept_as_bytes() -> None:
    replay = Replay(EnvSpec((4, 4, 2), "uint8", 6), 10, 1)
    frames = np.random.default_rng(0).integers(0, 256, (3, 1, 4, 4, 2), np.uint8)
    for frame in frames:
        replay.add(frame, np.array([5]), np.ones(1), np.array([False]), np.array([True]))
    sampled = replay.sample((20,), np.random.default_rng(0))
    assert sampled.observation.dtype == sampled.next_observation.dtype == np.uint8
    assert {frame.tobytes() for frame in sampled.observation} == {f.tobytes() for f in frames[:2]}
    assert {f.tobytes() for f in sampled.next_observation} == {f.tobytes() for f in frames[1:]}
    assert sampled.action.dtype == np.int32
    assert set(sampled.action.tolist()) == {5}


def test_continuous_actions_are_kept_whole() -> None:
    replay = Replay(EnvSpec((1,), "float32", None, (-1.0, -2.0), (1.0, 2.0)), 10, 1)
    for number, action in enumerate([(0.5, -1.5), (-0.25, 2.0)]):
        replay.add(
            np.array([[number]], np.float32),
            np.array([action]),
            np.ones(1),
            np.array([False]),
            np.array([True]),
        )
    replay.add_break(np.array([[2]], np.float32))
    sampled = replay.sample((50,), np.random.default_rng(0))
    pairs = zip(sampled.observation[:, 0].tolist(), sampled.action.tolist(), strict=True)
    assert {(number, *action) for number, action in pairs} == {(0, 0.5, -1.5), (1, -0.25, 2.0)}


# Real environments.

ENV_ID = "BriefCartPole-v0"


@pytest.fixture
def brief_cart_pole() -> Iterator[None]:
    """Register CartPole with a time limit that random play often reaches, and often does not."""
    entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    gym.register(ENV_ID, entry_point, max_episode_steps=15)
    yield
    del gym.registry[ENV_ID]


def by_hand(actions: np.ndarray, seed: int) -> dict[tuple[float, ...], tuple[Any, ...]]:
    """Step one environment; return its transitions by the first observation."""
    env = gym.make(ENV_ID)
    observation, _ = env.reset(seed=seed)
    over, found = False, {}
    for action in actions.tolist():
        if over:
            observation, _ = env.reset()
            over = False
            continue
        following, reward, terminated, truncated, _ = env.step(action)
        found[tuple(observation.tolist())] = (
            action,
            reward,
            0.0 if terminated else 1.0,
            tuple(following.tolist()),
        )
        observation, over = following, terminated or truncated
    return found


def test_transitions_are_those_of_stepping_gymnasium_by_hand(brief_cart_pole: None) -> None:
    envs = make_vector(ENV_ID, 3)
    replay = Replay(env_spec(ENV_ID), 3 * 70, 3)
    random = np.random.default_rng(0)
    actions = random.integers(2, size=(2, 60, 3))
    expected: dict[tuple[float, ...], tuple[Any, ...]] = {}
    for part, seed in enumerate((10, 20)):
        seen, _ = envs.reset(seed=seed)
        starts = np.ones(3, np.bool_)
        for chosen in actions[part]:
            following, rewards, terminated, truncated, _ = envs.step(chosen)
            replay.add(seen, chosen, rewards, terminated, starts)
            seen, starts = following, ~(terminated | truncated)
        replay.add_break(seen)
        for e in range(3):
            expected |= by_hand(actions[part, :, e], seed + e)
    # Terminations and truncations at the limit, and what is bootstrapped through.
    assert {value[2] for value in expected.values()} == {0.0, 1.0}

    sampled = replay.sample((5000,), random)
    begun = [tuple(observation) for observation in sampled.observation.tolist()]
    for i, first in enumerate(begun):
        assert expected[first] == (
            sampled.action[i],
            sampled.reward[i],
            sampled.discount[i],
            tuple(sampled.next_observation[i].tolist()),
        )
    # The ring's 70 rows hold all of the second part and the end of the first.
    second = {first for e in range(3) for first in by_hand(actions[1, :, e], 20 + e)}
    assert second < set(begun) < set(expected)
