"""Random streams differ by purpose and seed; evaluation seeds are distinct from all others."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from quarl_tf.foundation.seeding import environment_seed, evaluation_seeds, generator

SEEDS = st.integers(0, 2**32 - 1)
PURPOSES = ["training", "selection", "calibration", "evaluation", "exploration", "replay"]


@given(SEEDS)
def test_purposes_seeds_and_indices_have_streams_of_their_own(seed: int) -> None:
    names: list[tuple[Any, ...]] = [*((seed, purpose) for purpose in PURPOSES)]
    names += [(seed + 1, "training"), *((seed, "training", index) for index in (1, 2, 1000))]
    first, again = (
        [tuple(generator(*name).integers(2**62, size=2).tolist()) for name in names]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == len(names)


@given(SEEDS, st.sampled_from(PURPOSES), st.integers(0, 10**9))
def test_environment_seeds_are_below_evaluation_seeds(seed: int, purpose: str, step: int) -> None:
    assert 0 <= environment_seed(seed, purpose, step) < 2**30


@given(SEEDS, st.integers(0, 300), st.integers(0, 200))
# 100 000 draws from 2**30 hold five pairs on average.
@example(0, 100_000, 0)
@example(0, 1000, 99_000)
def test_evaluation_seeds_are_distinct_and_extended(seed: int, episodes: int, more: int) -> None:
    seeds = evaluation_seeds(seed, episodes)
    assert len(seeds) == len(set(seeds)) == episodes
    # Gymnasium and JSON need Python's integers.
    assert all(type(s) is int and 2**30 <= s < 2**31 for s in seeds)
    assert evaluation_seeds(seed, episodes + more)[:episodes] == seeds
