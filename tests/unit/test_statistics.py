"""Intervals, errors and verdicts, and schemes aggregated over cells."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from samples import EVALUATION
from scipy import stats

from quarl_tf.evaluation import aggregate as aggregating
from quarl_tf.evaluation import compare
from quarl_tf.evaluation.aggregate import Paired, aggregate, holm
from quarl_tf.evaluation.compare import Interval, effective_n, mean_interval, student_interval
from quarl_tf.store.records import Evaluation, Protocol

GAME = Protocol(1, "greedy", {"sticky_actions": 0.0})


def limits(interval: Interval) -> tuple[float, float, float]:
    return interval.mean, interval.low, interval.high


def evaluation(scheme: str, returns: Iterable[float], seeds: list[int] | None = None) -> Evaluation:
    earned = list(returns)
    seeds, lengths = seeds or list(range(len(earned))), [1] * len(earned)
    return replace(EVALUATION, scheme=scheme, seeds=seeds, returns=earned, lengths=lengths)


def pair(before: Iterable[float], after: Iterable[float]) -> tuple[Evaluation, Evaluation]:
    return evaluation("fp32", before), evaluation("int8", after)


@pytest.mark.parametrize("interval_of", [mean_interval, student_interval])
def test_what_both_intervals_have_in_common(interval_of: Callable[..., Interval]) -> None:
    # 0.1 summed three times and divided by 3 is not 0.1. Equal values have no interval.
    assert interval_of([0.1] * 3) == Interval(0.1, -math.inf, math.inf, alike=3)
    assert interval_of([0.1, 0.2]).alike == 0
    assert interval_of([0.1 + 0.2, 0.3] * 15).alike == 30  # Sums in another order.
    assert limits(interval_of([7.0])) == (7.0, -math.inf, math.inf)  # Nor has one value.
    # Three games of 11, 13 and 21, which are repeated.
    interval = interval_of([11.0] * 24 + [13.0] * 23 + [21.0] * 53, 2.5)
    # Variance 20.7424 of the values, 2.5 / 1.5 times that of games; 2.5 of them in the mean.
    half = stats.t.ppf(0.975, 1.5) * math.sqrt(20.7424 / 1.5)
    assert limits(interval) == pytest.approx((16.76, 16.76 - half, 16.76 + half))


def test_few_values_have_students_interval_and_many_a_wider_one() -> None:
    values = np.random.default_rng(3).exponential(1.0, compare.MIN_EPISODES)
    assert mean_interval(values[:-1]) == student_interval(values[:-1])
    assert mean_interval(values) != student_interval(values)
    # A bootstrap of two values ends at the values: gains of 1 and 2 would be certain gains.
    assert mean_interval([1.0, 2.0]).low < 0
    # 1 of 100 episodes falls at 480: resampled means are 500 - 0.2 k with k close to Poisson(1).
    interval = mean_interval([500.0] * 99 + [480.0])
    assert (interval.mean, interval.high) == (pytest.approx(499.8), 500.0)
    assert 498.8 <= interval.low <= 499.4
    four = [3.0, -1.0, 4.5, 2.0]
    expected = stats.ttest_1samp(four, 0.0).confidence_interval(0.95)
    assert limits(student_interval(four)) == pytest.approx((2.125, expected.low, expected.high))


def test_errors_are_percentages_of_fp32_or_of_its_distance_to_a_random_policy() -> None:
    for reference, other, baseline, expected in (
        (214, 78, 0, 63.55),  # DQN on Breakout, QuaRL's table of rewards
        (1433, 2024, 0, -41.24),  # DQN on MsPacman, the same table
        (-100, -150, 0, 50.0),  # worse is positive for negative returns as well
        (0, 1, 0, None),  # a percentage of nothing
        (200, -200, -200, 100.0),
        (-300, -400, -200, 100.0),  # fp32 below the random policy
        (20, 30, 20, None),
        (20, 30, None, None),
    ):
        error = compare.normalised_error(reference, other, baseline)
        assert error == pytest.approx(expected, abs=0.005)
        assert baseline != 0 or compare.reward_error(reference, other) == error


@pytest.mark.parametrize(
    ("low", "high", "reference", "margin", "expected"),
    [
        (-10, 0, 500, 2, "within margin"),  # just within 2 %
        (-10.01, 0, 500, 2, "inconclusive"),
        (-5, -1, 500, 2, "within margin"),  # a certain loss within the margin
        (-20, -1, 500, 2, "loss"),
        (0.1, 30, 500, 2, "gain"),
        (-1, 1, -100, 2, "within margin"),  # of the absolute return
        (0, 0, 0, 2, "inconclusive"),  # no margin
        (-5, -1, 0, 2, "loss"),
        (-0.2, 0.0, 500, 0, "inconclusive"),
        (0.0, 0.0, 500, 0, "within margin"),
    ],
)
def test_verdict(low: float, high: float, reference: float, margin: float, expected: str) -> None:
    interval = Interval((low + high) / 2, low, high)
    assert compare.verdict(interval, reference, margin, 100) == expected


def test_compare_by_hand() -> None:
    played = pair([10.0, 20.0, 30.0] * 7, [9.0, 18.0, 27.0] * 7)
    result = compare.compare(*played, evaluation("random", [0.0, 4.0], seeds=[100, 101]))
    assert (result.scheme, result.episodes) == ("int8", 21)
    assert (result.returns.mean, result.reference_mean) == (18.0, 20.0)
    figures = result.difference.mean, result.reward_error_percent, result.normalised_error_percent
    assert figures == pytest.approx((-2.0, 10.0, 100 * 2 / 18))
    assert result.verdict == "loss"


def test_a_policy_is_as_random_unless_its_interval_says_otherwise() -> None:
    random = evaluation("random", [0.0, 100.0] * 15)
    for low, as_random in ((0.0, True), (90.0, False)):  # The mean of 55 has an interval from 35.
        assert compare.is_as_random(evaluation("fp32", [low, 110.0] * 15), random) == as_random


def test_sums_of_rewards_in_another_order_are_no_difference() -> None:
    rewards, draws = [0.1] * 30 + [0.2] * 30, np.random.default_rng(0)
    before, after = ([sum(draws.permutation(rewards)) for _ in range(25)] for _ in range(2))
    assert len({*before, *after}) > 2
    assert compare.compare(*pair(before, after), None).verdict == "no difference seen"
    loss = compare.compare(*pair(before, [value - 3 for value in after]), None)
    assert (loss.verdict, loss.difference.alike) == ("loss", 25)


def test_repeated_games_are_few_observations() -> None:
    # Pong: three games, one of which int8 plays better.
    before, after = [13.0, 11.0, 21.0] * 33, [13.0, 18.0, 21.0] * 33
    chance = compare.compare(*pair(before, after), None)
    assert chance.verdict == "gain"
    played = [replace(record, protocol=GAME) for record in pair(before, after)]
    result = compare.compare(*played, None)
    assert result.difference == mean_interval(np.subtract(after, before), 3)
    assert result.returns == mean_interval(after, 3)
    assert (result.difference.mean, result.verdict) == (chance.difference.mean, "inconclusive")
    assert effective_n(*played) == 3  # Games differ if they do under either scheme.
    assert effective_n(replace(played[0], returns=[1.0] * 99), played[1]) == 3
    lost = replace(played[1], returns=[-21.0] * 99)
    assert compare.compare(played[0], lost, None).verdict == "loss"
    # A few equal games are no evidence.
    same = compare.compare(played[0], replace(played[0], scheme="int8"), None)
    assert (same.difference.bounded, same.verdict) == (False, "inconclusive")
    # With chance in the actions all games are independent.
    drawn = [replace(record, protocol=replace(GAME, actions="sampled")) for record in played]
    assert effective_n(*drawn) is None
    assert compare.compare(*drawn, None).difference == chance.difference
    game = replace(evaluation("fp32", [20.0] * 90 + [21.0] * 10), protocol=GAME)
    assert effective_n(game) == pytest.approx(100**2 / (90**2 + 10**2))
    # 1.2 games are no evidence of a mean.
    assert limits(compare.mean_return(game)) == pytest.approx((20.1, -math.inf, math.inf))


def test_episodes_that_start_alike_are_one_unless_they_differ() -> None:
    played = pair([1.0, 2.0] * 20, [2.0] * 40)
    fp32, int8 = (replace(record, starts=[7, 8] * 20) for record in played)
    assert effective_n(fp32) == effective_n(fp32, int8) == 2
    assert compare.compare(fp32, int8, None).verdict == "inconclusive"
    # Without starts, as in records where all differ, or with chance after the start all count.
    assert effective_n(replace(fp32, starts=None)) is None
    assert effective_n(replace(fp32, lengths=[*range(40)])) is None


@pytest.mark.parametrize("different", [5, 20])
def test_intervals_of_repeated_games_hold_the_true_mean(different: int) -> None:
    random = np.random.default_rng(0)
    covering = unbounded = 0
    for _ in range(1000):
        returns = random.normal(size=different)[random.integers(different, size=100)]
        interval = compare.mean_return(replace(evaluation("fp32", list(returns)), protocol=GAME))
        covering += interval.low <= 0 <= interval.high
        unbounded += not interval.bounded
    assert (covering - unbounded) / (1000 - unbounded) >= 0.93


@pytest.mark.parametrize("episodes", [1, 2, compare.MIN_EPISODES - 1])
@pytest.mark.parametrize("change", [-5.0, 0.0, 5.0])
def test_few_episodes_are_inconclusive(episodes: int, change: float) -> None:
    before = 10.0 + np.arange(episodes)
    result = compare.compare(*pair(before, before + change + 0.01 * np.arange(episodes)), None)
    assert result.verdict == "inconclusive"
    assert compare.pool([result]).verdict == "inconclusive"  # Pooled, alone or with others, too.
    assert compare.pool([result, comparison(change), comparison(change)]).verdict == "inconclusive"


def comparison(difference: float, reference: float = 100.0) -> compare.Comparison:
    """Compare 100 episodes, all of which differ by so much."""
    played = pair([reference] * 100, [reference + difference] * 100)
    return compare.compare(*played, evaluation("random", [0.0]))


def pooled_of(*differences: tuple[float, float, float]) -> compare.Comparison:
    return compare.pool([replace(comparison(0.0), difference=Interval(*d)) for d in differences])


def test_pool_takes_the_training_as_the_unit() -> None:
    pooled = compare.pool([comparison(d) for d in (-4.0, 0.0, 1.0)])
    assert pooled.difference == student_interval([-4.0, 0.0, 1.0])
    assert (pooled.returns, pooled.episodes) == (student_interval([96.0, 100.0, 101.0]), 300)
    # Each training alone is decided; between them the interval is wide.
    assert pooled.verdict == "inconclusive"
    # Signed errors cancel, absolute ones do not.
    pooled = compare.pool([comparison(-10.0), comparison(10.0)])
    assert [getattr(pooled, name) for name in compare.ERRORS] == pytest.approx([0.0, 10.0, 0.0])
    # No mean over the known ones alone.
    pooled = compare.pool([comparison(-10.0), comparison(-10.0, reference=0.0)])
    assert pooled.reward_error_percent is pooled.absolute_reward_error_percent is None


def test_pooled_intervals_are_no_narrower_than_episodes_allow() -> None:
    # As dynamic_int8 of DQN on LunarLander: means within 0.1, with intervals of 9 to each side.
    pooled = pooled_of((-2.2, -11.2, 3.8), (-2.3, -14.3, 3.7), (-2.25, -10.25, 3.75))
    low, high = -2.25 - math.sqrt(81 + 144 + 64) / 3, -2.25 + math.sqrt(3 * 36) / 3
    assert limits(pooled.difference) == pytest.approx((-2.25, low, high))
    assert pooled.verdict == "inconclusive"
    # Two alike trainings, whose episodes reach 20 to each side of 0 beside a margin of 2.
    pooled = pooled_of((-0.01, -20.0, 20.0), (0.01, -20.0, 20.0))
    assert pooled.verdict == "inconclusive"
    assert pooled.more_needed == pytest.approx(100 - 2, abs=1)  # Half the width is 20 / sqrt(n).


def test_trainings_that_all_agree_have_a_bound_and_no_interval() -> None:
    same = comparison(0.0)
    pooled = compare.pool([same] * 3)
    assert pooled.difference == replace(same.difference, alike=3)
    assert pooled.verdict == "no difference seen"
    # With one that varies, the interval is what its episodes allow.
    varies = replace(same, difference=Interval(0.0, -6.0, 3.0))
    assert compare.pool([same, same, varies]).difference == Interval(0.0, -2.0, 1.0)
    unknown = replace(same, difference=replace(same.difference, alike=0))  # Too few games.
    assert compare.pool([same, unknown]).verdict == "inconclusive"


def test_bound_and_verdict_of_equal_observations() -> None:
    assert compare.unseen_percent(3) == pytest.approx(100 * stats.beta.ppf(0.95, 1, 3))
    assert [round(compare.unseen_percent(n)) for n in (1, 3, 6, 100)] == [95, 63, 39, 3]
    assert [round(compare.unseen_percent(6, cases)) for cases in (1, 6)] == [58, 100]
    for value, alike, expected in (
        (0.0, 3, "no difference seen"),
        (-50.0, 4, "inconclusive"),  # The bound is above half.
        (-50.0, 5, "loss"),
        (50.0, 100, "gain"),
        (-1.0, 100, "loss"),  # Though within the margin: there is no interval.
    ):
        difference = Interval(value, -math.inf, math.inf, alike)
        assert compare.verdict(difference, 500, 2.0, 100) == expected


def test_how_many_more_observations_decide() -> None:
    half = stats.t.ppf(0.975, 8) * 30 / 3  # s = 30, 9 trainings, t = 2.306: 23.06 each side of -1.
    between = Interval(-1.0, -1.0 - half, -1.0 + half)
    undecided = replace(comparison(-1.0), verdict="inconclusive", difference=between)
    more = compare.more_needed(undecided, 9)
    # A reach of 1, from -1 to the margin at -2 and to 0.
    for count, short in ((9 + more, True), (8 + more, False)):
        assert (stats.t.ppf(0.975, count - 1) * 30 / math.sqrt(count) <= 1.0) == short
    decided = replace(undecided, verdict="loss")
    unbounded = replace(undecided, difference=Interval(-1.0))
    # Without a margin, a mean of rounding errors would take more than there are.
    tiny = replace(undecided, margin_percent=0.0, difference=replace(between, mean=1e-17))
    assert [compare.more_needed(c, 9) for c in (decided, unbounded, tiny)] == [None] * 3
    # Only for enough episodes that are independent.
    played = pair(*(np.random.default_rng(i).normal(100 - i, 20, 40) for i in (0, 1)))
    result = compare.compare(*played, None)
    assert (result.verdict, result.more_needed is not None) == ("inconclusive", True)
    short = [record.first(9) for record in played]
    repeated = [replace(record, returns=record.returns[:5] * 8, protocol=GAME) for record in played]
    for few in (short, repeated):
        assert compare.compare(*few, None).more_needed is None
    pooled = compare.pool([comparison(d) for d in (-4.0, 0.0, 1.0)])
    assert pooled.more_needed == compare.more_needed(pooled, 3) > 3


def covers(difference: Interval, chance: float, mean: float) -> bool:
    """Tell whether the interval of failures covers their mean, or else the bound their chance."""
    if difference.alike:
        return compare.unseen_percent(difference.alike) >= 100 * chance
    return difference.low <= chance * mean <= difference.high


@pytest.mark.parametrize("chance", [0.005, 0.01, 0.02, 0.1, 0.3])
def test_rare_failures_are_held_by_the_interval_or_the_bound(chance: float) -> None:
    random, covering, claimed = np.random.default_rng(0), 0, 0
    for _ in range(100):
        fails = random.random(100) < chance
        difference = mean_interval(np.where(fails, -random.uniform(10, 490, 100), 0.0))
        covering += covers(difference, chance, -250)
        within = compare.verdict(difference, 500, 2.0, 100) == "within margin"
        claimed += within and chance * 250 > 10
    assert covering >= 88
    assert claimed <= 5


def test_rare_failures_among_small_differences_are_held() -> None:
    random, covering = np.random.default_rng(0), 0
    for _ in range(300):
        fails = random.random(100) < 0.05
        values = random.normal(0, 2, 100) - np.where(fails, random.uniform(0, 200, 100), 0)
        covering += covers(mean_interval(values), 0.05, -100)
    assert covering >= 0.92 * 300


@pytest.mark.parametrize("trainings", [3, 6])
def test_failed_trainings_are_held_by_the_interval_or_the_bound(trainings: int) -> None:
    random = np.random.default_rng(0)
    for chance in (0.1, 0.2, 0.3):
        covering = 0
        for _ in range(400):
            fails = random.random(trainings) < chance
            difference = student_interval(np.where(fails, -random.uniform(100, 490, trainings), 0))
            assert compare.verdict(difference, 500, 2.0, 100) != "within margin"
            covering += covers(difference, chance, -295)
        assert covering >= 0.95 * 400
    missed = 0  # Trainings that nearly agree are within the margin, though others may fail.
    for _ in range(1000):
        fails = random.random(trainings) < compare.unseen_percent(trainings) / 100
        differences = np.where(fails, -300.0, random.normal(size=trainings))
        missed += compare.verdict(student_interval(differences), 500, 2.0, 100) == "within margin"
    assert missed <= 65


def cell(difference: np.ndarray | float) -> Paired:
    reference = np.full(50, 200.0)
    return Paired.of(reference + difference, reference, 0.0, 50)


def test_aggregates_by_hand() -> None:
    cells = {"a": [cell(-4.0), cell(-8.0)], "b": [cell(6.0)]}
    result = aggregate("int8", cells)
    # Means are over cells; absolute values do not cancel: 3 % lost, 3 % gained.
    assert (result.error.mean, result.absolute) == pytest.approx((0, 3))
    assert (result.cells, result.noise) == (2, 0)  # All games of fp32 earn the same.
    # Errors of 2 and 4 % in one of two cells: a standard error of 1 / 2, one degree of freedom.
    reach = 12.706 * 0.5
    assert (result.error.low, result.error.high) == pytest.approx((-reach, reach), rel=1e-4)
    # Episodes of each cell agree, and the cells do not.
    assert aggregate("int8", {"a": [cell(-4.0)], "b": [cell(6.0)]}).improvement.alike == 0
    result = aggregate("int8", {**cells, "b": [cell(6.0), cell(0.0)]})
    assert result.errors == pytest.approx([-3, 0, 2, 4])
    assert result.iqm.mean == pytest.approx(1.0)  # Without the lowest and the highest quarter.
    # More than fp32: never in a, in one of two in b; ties count half.
    assert result.improvement.mean == pytest.approx((0 + 75) / 2)
    # A standard error of 12.5 and one degree of freedom reach beyond what a probability can be.
    assert (result.improvement.low, result.improvement.high) == (0, 100)
    near_zero = Paired.of(np.full(20, -9.0), np.full(20, 1.0), -99.0, 20)
    assert near_zero.errors == pytest.approx(np.full(20, 10.0))
    result = aggregate("fp16", {"a": [cell(0.0)] * 2, "b": [cell(0.0)]})
    for interval in (result.error, result.iqm, result.improvement):
        assert (interval.bounded, interval.alike) == (False, 3)
    assert (result.improvement.mean, result.losses) == (50, [])
    # One of many trainings differs, which the interquartile mean leaves out.
    others = {str(i): [cell(0.0)] * 3 for i in range(5)}
    result = aggregate("int8", {**others, "a": [cell(0.0), cell(0.0), cell(-150.0)]})
    assert (result.iqm.mean, result.iqm.alike, result.iqm.bounded) == (0, 0, False)


def test_noise_is_what_fp32_differs_from_itself_on_other_episodes() -> None:
    run = Paired.of(np.zeros(50), np.tile([70.0, 130.0], 25), 0.0, 50)
    draws = np.random.default_rng(0).normal(0, 30 / 7, size=(2, 100_000))  # Its standard error.
    for trainings, differences in ((1, draws[0] - draws[1]), (4, (draws[0] - draws[1]) / 2)):
        noise = aggregate("fp16", {"a": [run] * trainings, "b": [run] * trainings}).noise
        assert noise == pytest.approx(np.abs(differences).mean(), rel=0.01)


def test_each_draw_of_a_training_has_new_episodes() -> None:
    """Means of two trainings of the same two equally likely values vary as those of a pool."""
    run = np.array([0.0, 1.0] * 50), 100.0
    means = aggregating._resampled_means([run, run], np.random.default_rng(0)).mean(axis=1)
    assert means.std() == pytest.approx(np.sqrt(0.25 / 200), rel=0.05)


def test_freedom_is_that_of_the_cells_together() -> None:
    # Standard errors of 3 and 4.472 % with one and four degrees of freedom (Welch, Satterthwaite).
    pairs, five = [cell(-4.0), cell(8.0)], [cell(2 * x) for x in (-12.65, -6.325, 0, 6.325, 12.65)]
    error = aggregate("x", {"a": pairs, "b": five}).error
    degrees = (3**2 + 4.472**2) ** 2 / (3**4 / 1 + 4.472**4 / 4)
    reach = stats.t.ppf(0.975, degrees) * np.hypot(3, 4.472) / 2
    assert (error.high - error.low) / 2 == pytest.approx(reach, rel=1e-3)


def test_intervals_over_cells_hold_the_true_mean() -> None:
    # Trainings of a few cells differ far more than those of the others.
    rng, covering, spreads = np.random.default_rng(0), 0, (0.1, 0.1, 0.3, 0.5, 1, 2, 5, 20)
    for _ in range(1000):
        cells = [[(rng.normal(rng.normal(1, s), 2, 50), 50) for _ in range(2)] for s in spreads]
        interval = aggregating._mean_over_cells(cells)
        covering += interval.low <= 1 <= interval.high
    assert 930 <= covering <= 980


def test_losses_are_corrected_for_the_number_of_cells() -> None:
    assert holm({"a": 0.04, "b": 0.001, "c": 0.02}, 0.05) == ["b", "c", "a"]
    assert holm({"a": 0.04, "b": 0.001, "c": 0.03}, 0.05) == ["b"]
    repeated = Paired.of(np.full(50, 18.0), np.full(50, 20.0), 0.0, 1.0)  # It is one observation.
    assert aggregate("x", {"a": [repeated], "b": [cell(0.0)]}).losses == []
    assert aggregate("x", {"a": [cell(np.linspace(-11, -9, 50))], "b": [cell(0.0)]}).losses == ["a"]
    # Where episodes of each training agree, many trainings that lose are certain, too.
    losing, gaining = [cell(-9.0)] * 6, [cell(9.0)] * 6
    assert aggregate("x", {"a": losing, "b": gaining}).losses == ["a"]
    # Two trainings that end alike, but for rounding, or whose episodes vary, are no certain loss.
    alike = [cell(-200.0), cell(-200.0 * (1 + 1e-15))]
    assert aggregate("x", {"a": alike, "b": [cell(0.0)]}).losses == []
    alike = [cell(np.linspace(-50, 46, 50)), cell(np.linspace(-50, 45.99, 50))]
    assert aggregate("x", {"a": alike, "b": [cell(0.0)]}).losses == []
