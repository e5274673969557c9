"""Sampled transitions are those that happened, their rewards summed by hand."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quarl_tf.agents.replay import Replay
from quarl_tf.environments import GAME_OVER, EnvSpec, env_spec, make_vector
from quarl_tf.environments.acting import Tick, ticks

DEPTH = 4
VECTORS = EnvSpec((1,), "float32", 10**6)
STACKS = EnvSpec((2, 3, DEPTH), "uint8", 10**6, frame_stack=DEPTH)


class Witness:
    """Records all ticks that replays are given, whose actions number them, and checks samples."""

    def __init__(self, num_envs: int, n_step: int, discount: float, *replays: Replay) -> None:
        self.replays = list(replays)
        self.num_envs, self.n_step, self.discount = num_envs, n_step, discount
        self.ticks: list[Tick] = []

    def add(self, observations: Any, rewards: Any, terminated: Any, starts: Any) -> None:
        numbers = len(self.ticks) * self.num_envs + np.arange(self.num_envs)
        self.ticks.append(Tick(observations.copy(), numbers, rewards, terminated, starts))
        for replay in self.replays:
            replay.add(self.ticks[-1])

    def add_break(self, observations: Any) -> None:
        never = np.zeros(self.num_envs, np.bool_)
        self.ticks.append(Tick(observations.copy(), None, never, never, never))
        for replay in self.replays:
            replay.add_break(observations)

    def begun(self, count: int) -> set[int]:
        """Return the numbers of the transitions that start in the newest `count` rows."""
        rows = range(max(0, len(self.ticks) - count), len(self.ticks) - 1)
        pairs = itertools.product(rows, range(self.num_envs))
        return {row * self.num_envs + env for row, env in pairs if self.ticks[row].starts[env]}

    def expected(self, number: int) -> tuple[Any, float, float, Any]:
        """Return observation, reward, discount and next observation of a transition."""
        first, env = divmod(number, self.num_envs)
        reward, weight, row = 0.0, 1.0, first
        for step in range(self.n_step):
            tick = self.ticks[row]
            reward += self.discount**step * float(tick.rewards[env])
            weight = 0.0 if tick.terminated[env] else self.discount**step
            row += 1
            is_last = row == len(self.ticks) - 1 or not self.ticks[row].starts[env]
            if is_last or not weight:
                break
        before, after = (self.ticks[i].observations[env] for i in (first, row))
        return before, reward, weight, after

    def check(self, draws: int, seed: int) -> set[int]:
        """Check the samples of each replay; return the numbers of their first ticks."""
        samples = [r.sample((draws,), np.random.default_rng(seed)) for r in self.replays]
        for sampled in samples:
            by_hand = map(np.stack, zip(*map(self.expected, sampled.action.tolist()), strict=True))
            fields = sampled.observation, sampled.reward, sampled.discount, sampled.next_observation
            for field, expected in zip(fields, by_hand, strict=True):
                np.testing.assert_allclose(field, expected, rtol=1e-5, atol=1e-5)
        return set(samples[0].action.tolist())


def stream(spec: EnvSpec, num_envs: int, random: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield ticks of random episodes in NEXT_STEP order, some terminated, some truncated."""
    observations = np.zeros((num_envs, *spec.observation_shape), spec.observation_dtype)
    starts = np.ones(num_envs, np.bool_)
    while True:  # Show a new number, or add a new frame, often black, to each stack.
        observations[..., :-1] = observations[..., 1:]
        observations[..., -1] = random.integers(1, 256, size=observations.shape[:-1])
        if spec is STACKS:
            observations[random.random(num_envs) < 0.5, ..., -1] = 0
        fate = random.random(num_envs)
        terminated, truncated = starts & (fate < 0.15), starts & (fate > 0.85)
        rewards = np.where(starts, random.integers(-9, 10, size=num_envs), 0)
        yield observations, rewards, terminated, starts
        observations[~starts] = 0
        starts = ~(terminated | truncated)


@pytest.mark.parametrize("spec", [VECTORS, STACKS], ids=["vectors", "stacks"])
@settings(max_examples=60)
@given(
    num_envs=st.integers(1, 3),
    rows=st.integers(9, 25),
    parts=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    n_step=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_what_is_sampled_is_what_happened(
    spec: EnvSpec, num_envs: int, rows: int, parts: list[int], n_step: int, seed: int
) -> None:
    # Capacity that is no multiple of the environments is rounded down to whole rows.
    capacity = rows * num_envs + num_envs - 1
    ring, twin = (Replay(spec, capacity, num_envs, n_step=n_step, discount=0.5) for _ in range(2))
    witness, random = Witness(num_envs, n_step, 0.5, ring), np.random.default_rng(seed)
    played, reach = stream(spec, num_envs, random), spec.frame_stack - 1
    for part, count in enumerate(parts):
        if part:
            witness.add_break(next(played)[0])
            played = stream(spec, num_envs, random)
        if part == 1:
            # A replay restored from a checkpoint, which is saved at a break, draws the same.
            arrays = ring.arrays()
            written = {len(array) for array in arrays.values() if array.ndim}
            assert written == {min(rows, len(witness.ticks))}
            assert spec is VECTORS or arrays["observations"].shape[1:] == (num_envs, 2, 3)
            twin.restore({name: array.copy() for name, array in arrays.items()})
            witness.replays.append(twin)
        for tick in itertools.islice(played, count):
            witness.add(*tick)
        # The oldest stacks of a full ring have overwritten frames.
        expected = witness.begun(rows - (reach if len(witness.ticks) > rows else 0))
        assert len(ring) == min(rows, len(witness.ticks)) * num_envs
        if expected:  # Each of at most 75 is missed once in 10**13 draws of this size.
            assert witness.check(30 * len(expected), seed) == expected


def test_every_transition_is_as_likely_as_any_other_and_depends_on_the_generator() -> None:
    witness = Witness(3, 1, 1.0, replay := Replay(VECTORS, 60, 3))
    for tick in itertools.islice(stream(VECTORS, 3, np.random.default_rng(5)), 33):
        witness.add(*tick)
    expected = witness.begun(20)
    draws = (200 * len(expected),)
    first, again = (replay.sample(draws, np.random.default_rng(0)) for _ in range(2))
    _, counts = np.unique(first.action, return_counts=True)
    assert len(counts) == len(expected)
    assert stats.chisquare(counts).pvalue > 1e-4
    np.testing.assert_array_equal(first.action, again.action)


def test_transitions_of_a_game_are_those_seen() -> None:
    env_id, length = "BreakoutNoFrameskip-v4", 300
    spec, random = env_spec(env_id), np.random.default_rng(0)
    envs, rows = make_vector(env_id, 2, training=True), length // 2
    numbered = replace(spec, num_actions=10**6)
    witness = Witness(2, 3, 0.9, Replay(numbered, 2 * rows, 2, n_step=3, discount=0.9))
    games = terminations = 0
    for seed in (0, 1):
        observations, _ = envs.reset(seed=seed)
        played = ticks(envs, lambda _: random.integers(spec.num_actions, size=2), observations)
        for _, tick in zip(range(length), played, strict=False):
            witness.add(tick.observations, tick.rewards, tick.terminated, tick.starts)
            terminations += np.count_nonzero(tick.terminated)
            games += np.count_nonzero(tick.info.get(GAME_OVER, tick.terminated))
        witness.add_break(tick.following)
    assert terminations > games > 1
    sampled, possible = witness.check(2 * rows, 0), witness.begun(rows - spec.frame_stack + 1)
    assert sampled <= possible
    assert len(sampled) > 0.5 * len(possible)
