"""Behaviour of the intervals, the errors and the verdicts."""

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from samples import EVALUATION, refused
from scipy import stats

from quarl_tf.evaluation.compare import (
    DEFAULT_MARGIN_PERCENT,
    MIN_EPISODES,
    Comparison,
    Interval,
    compare,
    effective_n,
    mean_interval,
    mean_return,
    more_needed,
    normalised_error,
    pool,
    reward_error,
    student_interval,
    unseen_percent,
    verdict,
)
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.store.records import Evaluation, Protocol

quick = settings(max_examples=20)

# Whole numbers: their sums are exact, so resampled means that tie do so however they are summed.
samples = st.lists(st.integers(-10_000, 10_000).map(float), min_size=2, max_size=30)

IntervalOf = Callable[..., Interval]

GAME = Protocol(1, "greedy", {"sticky_actions": 0.0})


def limits(interval: Interval) -> tuple[float, float, float]:
    return interval.mean, interval.low, interval.high


def evaluation(scheme: str, returns: list[float], seeds: list[int] | None = None) -> Evaluation:
    return replace(
        EVALUATION,
        scheme=scheme,
        seeds=list(range(len(returns))) if seeds is None else seeds,
        returns=returns,
        lengths=[1] * len(returns),
    )


@pytest.mark.parametrize("interval_of", [mean_interval, student_interval])
class TestBothIntervals:
    def test_equal_values_have_no_interval(self, interval_of: IntervalOf) -> None:
        # 0.1 summed three times and divided by 3 is not 0.1.
        assert interval_of([0.1] * 3) == Interval(0.1, -math.inf, math.inf, alike=3)
        assert interval_of([0.1] * 100).alike == 100
        assert interval_of([0.1, 0.2]).alike == 0

    def test_one_value_has_no_interval(self, interval_of: IntervalOf) -> None:
        interval = interval_of([7.0])
        assert limits(interval) == (7.0, -math.inf, math.inf)
        assert not interval.bounded

    @pytest.mark.parametrize("values", [[], [[1.0, 2.0]], [1.0, math.nan], [math.inf, 1.0]])
    def test_refuses_what_has_no_mean(self, interval_of: IntervalOf, values: list[float]) -> None:
        with pytest.raises(QuarlError, match="Received: "):
            interval_of(values)

    def test_values_that_repeat_others_are_no_observations(self, interval_of: IntervalOf) -> None:
        # Three games of 11, 13 and 21, each played from several starts.
        values = [11.0] * 24 + [13.0] * 23 + [21.0] * 53
        interval = interval_of(values, 2.5)
        # Variance 20.7424 of the values, 2.5 / 1.5 times that of games; 2.5 of them in the mean.
        half = stats.t.ppf(0.975, 1.5) * math.sqrt(20.7424 / 1.5)
        assert limits(interval) == pytest.approx((16.76, 16.76 - half, 16.76 + half))


def test_few_values_have_students_interval_and_many_the_bootstraps() -> None:
    values = np.random.default_rng(3).exponential(1.0, MIN_EPISODES)
    assert mean_interval(values[:-1]) == student_interval(values[:-1])
    assert mean_interval(values) != student_interval(values)
    # A bootstrap of two values ends at the values: gains of 1 and 2 would be certain gains.
    assert mean_interval([1.0, 2.0]).low < 0


def test_rare_failures_pull_the_bootstrap_interval_down_only() -> None:
    # 1 of 100 episodes falls at 480: resampled means are 500 - 0.2 k with k close to Poisson(1).
    interval = mean_interval([500.0] * 99 + [480.0])
    assert interval.mean == pytest.approx(499.8)
    assert interval.high == 500.0
    assert 498.8 <= interval.low <= 499.4


def test_student_is_scipys_t_test() -> None:
    values = [3.0, -1.0, 4.5, 2.0]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert limits(student_interval(values)) == pytest.approx((2.125, expected.low, expected.high))


@pytest.mark.parametrize(
    ("interval_of", "episodes", "draw"),
    [
        (mean_interval, 50, lambda g, n: g.exponential(1.0, n)),
        (mean_interval, 50, lambda g, n: g.normal(1.0, 1.0, n)),
        (mean_interval, 5, lambda g, n: g.normal(1.0, 1.0, n)),
        (student_interval, 3, lambda g, n: g.normal(1.0, 1.0, n)),
    ],
    ids=["skewed episodes", "normal episodes", "few episodes", "three trainings"],
)
def test_19_of_20_intervals_hold_the_true_mean(
    interval_of: IntervalOf, episodes: int, draw: Callable[..., np.ndarray]
) -> None:
    generator = np.random.default_rng(11)
    intervals = [interval_of(draw(generator, episodes)) for _ in range(200)]
    covered = np.mean([interval.low <= 1.0 <= interval.high for interval in intervals])
    assert 0.88 <= covered <= 0.99


def test_many_episodes_do_not_need_much_memory() -> None:
    # All resamples of 4000 values at once take 320 MB.
    values = np.random.default_rng(0).normal(size=4000)
    tracemalloc.start()
    mean_interval(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


def test_pairing_removes_what_episodes_share() -> None:
    generator = np.random.default_rng(0)
    easy_or_hard = generator.normal(0, 100, 50)
    other = easy_or_hard - 1 + generator.normal(0, 0.1, 50)
    played = [evaluation(name, list(x)) for name, x in (("fp32", easy_or_hard), ("int8", other))]
    difference = compare(*played, None).difference
    assert -1.1 < difference.low < difference.mean < difference.high < -0.9


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        (214, 78, 63.55),  # DQN on Breakout, QuaRL's table of rewards
        (1433, 2024, -41.24),  # DQN on MsPacman, the same table
        (-100, -150, 50.0),  # worse is positive for negative returns as well
        (-100, -50, -50.0),
        (5, 5, 0.0),
        (0, 1, None),  # a percentage of nothing
    ],
)
def test_reward_error(reference: float, other: float, expected: float | None) -> None:
    assert reward_error(reference, other) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
    ("reference", "other", "baseline", "expected"),
    [
        (200, 200, -200, 0.0),
        (200, -200, -200, 100.0),
        (200, 0, -200, 50.0),
        (200, 300, -200, -25.0),
        (1200, 1000, 800, 50.0),  # zero may be anywhere
        (-300, -400, -200, 100.0),  # a policy below chance
        (20, 30, 20, None),  # no scale
        (20, 30, None, None),
    ],
)
def test_normalised_error_runs_from_fp32_to_chance(
    reference: float, other: float, baseline: float | None, expected: float | None
) -> None:
    assert normalised_error(reference, other, baseline) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "reference", "expected"),
    [
        (0, 0, 500, "within margin"),
        (-10, 0, 500, "within margin"),  # just within 2 %
        (-10.01, 0, 500, "inconclusive"),
        (-5, -1, 500, "within margin"),  # sure, and within what the user does not mind
        (-20, -1, 500, "loss"),
        (-400, -300, 500, "loss"),
        (-20, 30, 500, "inconclusive"),
        (0.1, 30, 500, "gain"),
        (0, 30, 500, "within margin"),
        (-1, 1, -100, "within margin"),  # the margin is of the absolute return
        (-3, -2.5, -100, "loss"),
        (0, 0, 0, "inconclusive"),  # 2 % of nothing is no margin
        (-5, 5, 0, "inconclusive"),
        (1, 5, 0, "gain"),  # needs no margin
        (-5, -1, 0, "loss"),
        (-math.inf, math.inf, 500, "inconclusive"),
    ],
)
def test_verdict(low: float, high: float, reference: float, expected: str) -> None:
    middle = 0.0 if math.isinf(low) else (low + high) / 2
    assert verdict(Interval(middle, low, high), reference, 2.0, 100) == expected


def test_a_margin_of_zero_forgives_nothing() -> None:
    assert verdict(Interval(-0.1, -0.2, 0.0), 500, 0.0, 100) == "inconclusive"
    assert verdict(Interval(0.0, 0.0, 0.0), 500, 0.0, 100) == "within margin"


@pytest.mark.parametrize("margin", [-1.0, math.nan, math.inf])
def test_refuses_a_margin_that_is_none(margin: float) -> None:
    with pytest.raises(UsageError, match=f"Received: margin_percent={margin}"):
        verdict(Interval(0, 0, 0), 500, margin, 100)


def test_compare_by_hand() -> None:
    result = compare(
        evaluation("fp32", [10.0, 20.0, 30.0] * 7),
        evaluation("int8", [9.0, 18.0, 27.0] * 7),
        evaluation("random", [0.0, 4.0], seeds=[100, 101]),
        DEFAULT_MARGIN_PERCENT,
    )
    assert (result.scheme, result.episodes) == ("int8", 21)
    assert result.returns.mean == 18.0
    assert result.reference_mean == 20.0
    assert result.difference.mean == pytest.approx(-2.0)
    assert result.reward_error == pytest.approx(10.0)
    assert result.normalised_error == pytest.approx(100 * 2 / 18)
    assert result.verdict == "loss"


def test_games_played_alike_from_many_starts_are_few_observations() -> None:
    # Pong: three games, one of which int8 plays better.
    before, after = ([11.0, *more, 21.0] * 33 for more in ([13.0], [18.0]))
    chance = compare(evaluation("fp32", before), evaluation("int8", after), None)
    assert chance.verdict == "gain"
    played = [
        replace(evaluation(name, returns), protocol=GAME)
        for name, returns in (("fp32", before), ("int8", after))
    ]
    result = compare(*played, None)
    assert result.difference == mean_interval(np.subtract(after, before), 3)
    assert result.returns == mean_interval(after, 3)
    assert (result.difference.mean, result.verdict) == (chance.difference.mean, "inconclusive")
    # Two schemes tell more games apart than either.
    assert effective_n(*played) == 3
    assert effective_n(replace(played[0], returns=[1.0] * 99), played[1]) == 3
    lost = replace(played[1], returns=[-21.0] * 99)
    assert compare(played[0], lost, None).verdict == "loss"
    # That all are equal is no evidence when they are few.
    same = compare(played[0], replace(played[0], scheme="int8"), None)
    assert (same.difference.bounded, same.verdict) == (False, "inconclusive")
    # Chance in the actions makes each game its own.
    drawn = [replace(one, protocol=replace(GAME, actions="sampled")) for one in played]
    assert effective_n(*drawn) is None
    assert compare(*drawn, None).difference == chance.difference


def test_rarely_played_games_weigh_little() -> None:
    game = replace(evaluation("fp32", [20.0] * 90 + [21.0] * 10), protocol=GAME)
    assert effective_n(game) == pytest.approx(100**2 / (90**2 + 10**2))
    # 1.2 games are no evidence of a mean, however often they are played.
    assert not mean_return(game).bounded
    assert mean_return(game).mean == pytest.approx(20.1)


@pytest.mark.parametrize("different", [2, 5, 20, 30])
def test_intervals_of_repeated_games_hold_the_true_mean_as_often_as_they_say(
    different: int,
) -> None:
    random = np.random.default_rng(0)
    held = unbounded = 0
    for _ in range(1000):
        returns = random.normal(size=different)[random.integers(different, size=100)]
        interval = mean_return(replace(evaluation("fp32", list(returns)), protocol=GAME))
        held += interval.low <= 0 <= interval.high
        unbounded += not interval.bounded
    assert (held - unbounded) / (1000 - unbounded) >= 0.93


def test_equal_returns_are_no_difference_seen() -> None:
    same = evaluation("fp32", [10.0, 20.0] * 10)
    result = compare(same, replace(same, scheme="fp16"), None)
    assert result.verdict == "no difference seen"
    assert result.difference == Interval(0.0, -math.inf, math.inf, alike=20)


@pytest.mark.parametrize("episodes", [1, 2, MIN_EPISODES - 1])
@pytest.mark.parametrize("change", [-5.0, 0.0, 5.0])
def test_few_episodes_cannot_tell_however_alike_they_are(episodes: int, change: float) -> None:
    before = [10.0 + i for i in range(episodes)]
    after = [value + change + 0.01 * i for i, value in enumerate(before)]
    result = compare(evaluation("fp32", before), evaluation("int8", after), None)
    assert result.verdict == "inconclusive"
    # No way around it through a report on one run, or on several of which one is short.
    assert pool([result]).verdict == "inconclusive"
    assert pool([result, comparison(change), comparison(change)]).verdict == "inconclusive"


def test_compare_refuses_other_episodes_and_names_both() -> None:
    pair = evaluation("fp32", [1.0, 2.0]), evaluation("int8", [1.0, 2.0], [5, 6])
    message = refused(compare, *pair, None)
    assert "fp32 with 2 episodes from seed 0" in message
    assert "int8 with 2 episodes from seed 5" in message
    assert "--episodes" in message


def comparison(difference: float, reference: float = 100.0, scheme: str = "int8") -> Comparison:
    mean = reference + difference
    interval = Interval(difference, difference - 0.1, difference + 0.1)
    error = reward_error(reference, mean)
    return Comparison(
        scheme=scheme,
        episodes=100,
        returns=Interval(mean, mean - 1, mean + 1),
        difference=interval,
        reference_mean=reference,
        reward_error=error,
        normalised_error=normalised_error(reference, mean, 0.0),
        margin_percent=2.0,
        verdict=verdict(interval, reference, 2.0, 100),
        absolute_reward_error=None if error is None else abs(error),
    )


def test_a_single_run_keeps_its_own_interval() -> None:
    one = comparison(-5.0)
    assert pool([one]) == one
    assert one.verdict == "loss"


def test_pool_takes_the_training_as_the_unit() -> None:
    pooled = pool([comparison(d) for d in (-4.0, 0.0, 1.0)])
    assert pooled.difference == student_interval([-4.0, 0.0, 1.0])
    assert pooled.returns == student_interval([96.0, 100.0, 101.0])
    assert pooled.episodes == 300
    # Each run alone is sure of its own difference; what the next training loses is another matter.
    assert pooled.verdict == "inconclusive"


def test_trainings_that_agree_by_luck_are_no_surer_than_their_episodes() -> None:
    # As dynamic_int8 of DQN on LunarLander: means within 0.1 of each other, each sure to 9 or so.
    each = [
        replace(comparison(0.0), difference=Interval(mean, mean - below, mean + 6.0))
        for mean, below in ((-2.2, 9.0), (-2.3, 12.0), (-2.25, 8.0))
    ]
    difference = pool(each).difference
    assert difference.mean == pytest.approx(-2.25)
    assert difference.low == pytest.approx(-2.25 - math.sqrt(81 + 144 + 64) / 3)
    assert difference.high == pytest.approx(-2.25 + math.sqrt(3 * 36) / 3)
    assert pool(each).verdict == "inconclusive"


def test_trainings_that_all_agree_have_a_bound_and_no_interval() -> None:
    alike = Interval(0.0, -math.inf, math.inf, alike=100)
    same = replace(comparison(0.0), difference=alike)
    pooled = pool([same] * 3)
    assert pooled.difference == replace(alike, alike=3)
    assert pooled.verdict == "no difference seen"
    # One that varies has what its episodes allow: the others add nothing to it.
    varies = replace(same, difference=Interval(0.0, -6.0, 3.0))
    assert pool([same, same, varies]).difference == Interval(0.0, -2.0, 1.0)
    # Games that are too few for evidence leave open what they might have shown.
    unknown = replace(same, difference=replace(alike, alike=0))
    assert pool([same, unknown]).verdict == "inconclusive"


def test_the_bound_is_that_of_clopper_and_pearson() -> None:
    assert unseen_percent(3) == pytest.approx(100 * stats.beta.ppf(0.95, 1, 3))
    assert [round(unseen_percent(n)) for n in (1, 3, 6, 100)] == [95, 63, 39, 3]


@pytest.mark.parametrize(
    ("value", "alike", "expected"),
    [
        (0.0, 3, "no difference seen"),
        (-50.0, 4, "inconclusive"),  # Others may be more than half.
        (-50.0, 5, "loss"),
        (50.0, 100, "gain"),
        (-1.0, 100, "loss"),  # That it is within the margin is not shown of all.
    ],
)
def test_verdict_where_all_agree(value: float, alike: int, expected: str) -> None:
    difference = Interval(value, -math.inf, math.inf, alike)
    assert verdict(difference, 500, 2.0, 100) == expected


def test_what_an_undecided_comparison_needs_more() -> None:
    # s = 30 of 9 trainings, t = 2.306: 23.06 to each side of -1.
    undecided = replace(comparison(-1.0), verdict="inconclusive")
    half = stats.t.ppf(0.975, 8) * 30 / 3
    undecided = replace(undecided, difference=Interval(-1.0, -1.0 - half, -1.0 + half))
    more = more_needed(undecided, 9)
    # A reach of 1, from -1 to the margin at -2 and to 0: (1.96 * 30)^2 trainings, a few for t.
    assert more == pytest.approx(58.8**2 - 9, abs=3)
    assert more is not None
    for count, short in ((9 + more, True), (8 + more, False)):
        assert (stats.t.ppf(0.975, count - 1) * 30 / math.sqrt(count) <= 1.0) == short
    assert more_needed(replace(undecided, verdict="loss"), 9) is None
    wide = replace(undecided, difference=Interval(-1.0, -math.inf, math.inf))
    assert more_needed(wide, 9) is None


def test_more_is_asked_of_what_varies_and_may_be_repeated() -> None:
    before = list(np.random.default_rng(0).normal(100, 20, 40))
    after = list(np.random.default_rng(1).normal(99, 20, 40))
    played = [evaluation(name, x) for name, x in (("fp32", before), ("int8", after))]
    result = compare(*played, None)
    assert (result.verdict, result.more_needed is not None) == ("inconclusive", True)
    short = [replace(one, seeds=one.seeds[:9], returns=one.returns[:9]) for one in played]
    assert compare(*short, None).more_needed is None
    repeated = [replace(one, returns=one.returns[:5] * 8, protocol=GAME) for one in played]
    assert compare(*repeated, None).more_needed is None
    pooled = pool([comparison(d) for d in (-4.0, 0.0, 1.0)])
    assert pooled.more_needed == more_needed(pooled, 3) > 3


@pytest.mark.parametrize("chance", [0.005, 0.01, 0.02, 0.1, 0.3])
def test_rare_failures_of_capped_returns_are_held_by_the_interval_or_the_bound(
    chance: float,
) -> None:
    random, held, claimed = np.random.default_rng(0), 0, 0
    for _ in range(100):
        fails = random.random(100) < chance
        difference = mean_interval(np.where(fails, -random.uniform(10, 490, 100), 0.0))
        if difference.alike:
            held += unseen_percent(difference.alike) >= 100 * chance
        else:
            held += difference.low <= -250 * chance <= difference.high
        claimed += verdict(difference, 500, 2.0, 100) == "within margin" and chance * 250 > 10
    assert held >= 88
    assert claimed <= 5


@pytest.mark.parametrize("trainings", [3, 6])
@pytest.mark.parametrize("chance", [0.1, 0.2, 0.3])
def test_collapses_of_trainings_are_held_by_the_interval_or_the_bound(
    trainings: int, chance: float
) -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(400):
        fails = random.random(trainings) < chance
        each = np.where(fails, -random.uniform(100, 490, trainings), 0.0)
        difference = student_interval(each)
        assert verdict(difference, 500, 2.0, 100) != "within margin"
        if difference.alike:
            held += unseen_percent(trainings) >= 100 * chance
        else:
            held += difference.low <= -295 * chance <= difference.high
    assert held >= 0.95 * 400


@pytest.mark.parametrize("trainings", [3, 6])
def test_collapses_more_frequent_than_the_bound_are_rarely_all_missed(trainings: int) -> None:
    # Trainings that nearly agree are within the margin, though a collapse may have been missed.
    random, missed = np.random.default_rng(0), 0
    for _ in range(1000):
        fails = random.random(trainings) < unseen_percent(trainings) / 100
        each = np.where(fails, -300.0, random.normal(size=trainings))
        missed += verdict(student_interval(each), 500, 2.0, 100) == "within margin"
    assert missed <= 65


def test_signed_errors_cancel_and_absolute_ones_do_not() -> None:
    pooled = pool([comparison(-10.0), comparison(10.0)])
    assert pooled.reward_error == pytest.approx(0.0)
    assert pooled.absolute_reward_error == pytest.approx(10.0)
    assert pooled.normalised_error == pytest.approx(0.0)


def test_pool_does_not_average_over_what_happens_to_be_known() -> None:
    pooled = pool([comparison(-10.0), comparison(-10.0, reference=0.0)])
    assert pooled.reward_error is None
    assert pooled.absolute_reward_error is None


@pytest.mark.parametrize(
    "comparisons",
    [
        [],
        [comparison(0.0), comparison(0.0, scheme="fp16")],
        [comparison(0.0), replace(comparison(0.0), margin_percent=5.0)],
    ],
)
def test_pool_refuses_what_does_not_belong_together(comparisons: list[Comparison]) -> None:
    with pytest.raises(QuarlError, match="Received: "):
        pool(comparisons)
