"""A scheme is summed up over cells by what its trainings and episodes allow."""

import numpy as np
import pytest

from quarl_tf.evaluation.aggregate import Paired, aggregate, holm


def pair(difference: np.ndarray | float, others: float | None = None) -> Paired:
    reference = np.full(50, 200.0)
    return Paired(reference + difference, reference, 0.0, 50, () if others is None else [others])


def test_means_are_over_cells_and_absolute_values_do_not_cancel() -> None:
    cells = {"a": [pair(-4.0), pair(-8.0)], "b": [pair(6.0)]}
    found = aggregate("int8", cells)
    assert found.error.mean == pytest.approx(0)  # 3 % lost, 3 % gained.
    assert found.absolute == pytest.approx(3)
    assert (found.cells, found.noise) == (2, None)
    # Of the first cell the trainings are resampled: 2, 3 or 4 %.
    assert (found.error.low, found.error.high) == pytest.approx((-0.5, 0.5))


def test_measures_by_hand() -> None:
    cells = {"a": [pair(-4.0), pair(-8.0)], "b": [pair(6.0), pair(0.0)]}
    found = aggregate("int8", cells)
    assert found.errors == pytest.approx([-3, 0, 2, 4])
    # The lowest and the highest quarter are left out.
    assert found.iqm.mean == pytest.approx(1.0)
    # More than fp32 never in a, and in b in one of two; equal counts half.
    assert found.improvement.mean == pytest.approx((0 + 75) / 2)
    assert (found.improvement.low, found.improvement.high) == pytest.approx((25, 50))


def test_errors_are_shares_of_what_a_policy_earns_above_a_random_one() -> None:
    near_zero = Paired(np.full(20, -9.0), np.full(20, 1.0), -99.0, 20)
    assert near_zero.errors == pytest.approx(np.full(20, 10.0))


def test_cells_that_all_agree_have_no_interval() -> None:
    found = aggregate("fp16", {"a": [pair(0.0)] * 2, "b": [pair(0.0)]})
    for of in (found.error, found.iqm, found.improvement):
        assert not of.bounded
        assert of.alike == 3
    assert found.improvement.mean == 50


def test_noise_is_what_fp32_differs_by_from_itself() -> None:
    found = aggregate("int8", {"a": [pair(0.0, 190.0)], "b": [pair(0.0, 220.0)]})
    assert found.noise == pytest.approx((5 + 10) / 2)
    assert found.losses == []


def test_intervals_hold_the_true_mean_as_often_as_they_say() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(40):
        cells = {
            f"{i}": [pair(rng.normal(rng.normal(-2, 2), 20, 50)) for _ in range(3)]
            for i in range(8)
        }
        found = aggregate("x", cells)
        held += found.error.low <= 1.0 <= found.error.high
    assert held >= 38


def test_only_losses_that_survive_the_correction_are_told() -> None:
    assert holm({"a": 0.04, "b": 0.001, "c": 0.02}, 0.05) == ["b", "c", "a"]
    assert holm({"a": 0.04, "b": 0.001, "c": 0.03}, 0.05) == ["b"]
    # A game that was played again and again is one observation.
    again = Paired(np.full(50, 18.0), np.full(50, 20.0), 0.0, 1.0)
    assert aggregate("x", {"a": [again], "b": [pair(0.0)]}).losses == []
    sure = [pair(np.linspace(-11, -9, 50)) for _ in range(1)]
    assert aggregate("x", {"a": sure, "b": [pair(0.0)]}).losses == ["a"]
