"""Compare the returns of a scheme with those of fp32: differences, intervals and verdicts.

Within one trained policy the unit is the episode, paired by seed; over several it is the training.
Where only the start is drawn, a greedy policy repeats episodes, which count as one observation
(`effective_n`). If all observations are equal there is a bound instead of an interval
(`unseen_percent`). Errors are those of QuaRL (Krishnan et al., arXiv 1910.01055), divided by
|R_fp32| so that a positive one is a worse policy for negative returns too.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy  # Its `stats`, a second of loading, at the first use.

from quarl_tf.foundation.kinds import Kind
from quarl_tf.spec import DEFAULT_MARGIN_PERCENT
from quarl_tf.store.records import Evaluation

Verdict = Literal["gain", "within margin", "no difference seen", "loss", "inconclusive"]

UNSEEN: Verdict = "no difference seen"
INCONCLUSIVE: Verdict = "inconclusive"
WITHIN_MARGIN: Verdict = "within margin"

MIN_EPISODES = 20  #: Least number of episodes of a trained policy for a verdict.
CONFIDENCE = 0.95
_MARGIN = Kind(
    "0 or more percent of the fp32 return",
    lambda value: isinstance(value, (int, float)) and 0 <= value < math.inf,
)
_MOST_NEEDED = 1e6  #: More observations than these are no plan.
_ROUNDING = 1e-9  #: Relative difference of sums of the same rewards in another order.
_RESAMPLES = 9999
_SEED = 0
_BATCH_ELEMENTS = 1_000_000  #: Resampled values held at a time: 8 MB.
#: Samples up to this size share their draws, of 32 MB at most, which take most of the time.
_MOST_KEPT = 400


@dataclass(frozen=True)
class Interval:
    """A mean and the limits of its confidence interval, infinite if there is none."""

    mean: float
    low: float = -math.inf
    high: float = math.inf
    alike: int = 0  #: Number of observations if all are equal, which have no interval; else 0.

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


#: Names of a comparison's errors.
ERRORS = ("reward_error_percent", "absolute_reward_error_percent", "normalised_error_percent")


@dataclass(frozen=True)
class Comparison:
    """One scheme and fp32 on the same episodes of one trained policy, or of several.

    Errors are those of `reward_error` and `normalised_error`. Over several policies episodes are
    added up and all else is a mean in which each counts once.
    """

    scheme: str
    episodes: int
    returns: Interval
    difference: Interval  #: Mean of scheme - fp32 over paired episodes: negative is worse.
    reference_mean: float
    reward_error_percent: float | None
    absolute_reward_error_percent: float | None
    normalised_error_percent: float | None
    margin_percent: float  #: In percent of the fp32 return.
    verdict: Verdict
    #: Estimate of how many more episodes, or trainings, would decide it.
    more_needed: int | None = None


def mean_interval(values: npt.ArrayLike, observations: float | None = None) -> Interval:
    """Return the mean of finite values [n] with its interval, if there is one.

    It reaches, between the extreme values, as far as Student's t and as a BCa bootstrap: the latter
    follows the skew of capped returns, but is too short on the side of rare large differences.
    Fewer than `MIN_EPISODES` values and repeated ones, which count as `observations`
    (`effective_n`), have Student's t alone. Fewer than `MIN_EPISODES` equal observations that were
    repeated are no evidence.
    """
    sample = np.asarray(values, dtype=np.float64)
    count, constant = observations or sample.size, is_constant(sample)
    if constant and count < min(sample.size, MIN_EPISODES):
        return Interval(float(sample[0]))
    if constant or count < max(sample.size, MIN_EPISODES):
        return student_interval(sample, count)
    settings: dict[str, Any] = {"n_resamples": _RESAMPLES, "rng": np.random.default_rng(_SEED)}
    if sample.size <= _MOST_KEPT:
        means = sample.take(_draws(sample.size)).mean(axis=-1)
        settings = {
            "n_resamples": 0,
            "bootstrap_result": SimpleNamespace(bootstrap_distribution=means),
        }
    batch = max(1, _BATCH_ELEMENTS // sample.size)
    result = scipy.stats.bootstrap(
        (sample,), np.mean, batch=batch, confidence_level=CONFIDENCE, method="BCa", **settings
    )
    by_bootstrap, by_t = result.confidence_interval, student_interval(sample)
    low = max(min(by_bootstrap.low, by_t.low), sample.min())
    high = min(max(by_bootstrap.high, by_t.high), sample.max())
    return Interval(by_t.mean, float(low), float(high))


@lru_cache(maxsize=4)
def _draws(count: int) -> npt.NDArray[np.int64]:
    """Return the indices that SciPy draws of `count` values [resamples, count]."""
    return np.random.default_rng(_SEED).integers(count, size=(_RESAMPLES, count))


def student_interval(values: npt.ArrayLike, observations: float | None = None) -> Interval:
    """Return the mean of values [n] with Student's t interval, as for means of trainings.

    There is none below 2 observations (see `mean_interval`) or for equal values.
    """
    sample = np.asarray(values, dtype=np.float64)
    count = observations or sample.size
    if is_constant(sample):
        # Not the mean, which rounding may make another value.
        return Interval(float(sample[0]), alike=int(count) if count > 1 else 0)
    mean = float(sample.mean())
    if count < 2:
        return Interval(mean)
    error = standard_error(sample, count)
    low, high = scipy.stats.t.interval(CONFIDENCE, count - 1, loc=mean, scale=error)
    return Interval(mean, float(low), float(high))


def standard_error(values: npt.ArrayLike, observations: float) -> float:
    """Return the standard error of the mean of values [n] worth so many (above 1) observations.

    It is 0 for values that differ by rounding alone.
    """
    sample = np.asarray(values, dtype=np.float64)
    if is_constant(sample):
        return 0.0
    # Repeated values add nothing to the variance either: n / observations instead of 1 in n - 1.
    return float(sample.std(ddof=sample.size / observations) / math.sqrt(observations))


def is_constant(sample: npt.NDArray[np.float64]) -> bool:
    """Tell whether values differ by no more than sums of rewards in another order."""
    return bool(np.ptp(sample) <= _ROUNDING * np.abs(sample).max())


def differences(returns: npt.ArrayLike, reference: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return returns - reference [n], 0 where they differ by rounding only."""
    first, second = np.asarray(returns, np.float64), np.asarray(reference, np.float64)
    return np.where(np.isclose(first, second, rtol=_ROUNDING, atol=0), 0.0, first - second)


def unseen_percent(observations: int, seen: int = 0) -> float:
    """Return the 95 % bound in percent on the rate of what `seen` of the observations show.

    It is that of Clopper and Pearson (1934), one-sided.
    """
    if seen == observations:
        return 100.0
    return 100 * float(scipy.stats.beta.ppf(CONFIDENCE, seen + 1, observations - seen))


def mean_return(evaluation: Evaluation) -> Interval:
    """Return the mean return of an evaluation with its interval."""
    return mean_interval(evaluation.returns, effective_n(evaluation))


def is_as_random(evaluation: Evaluation, random: Evaluation) -> bool:
    """Return whether a policy is not shown to earn more than the random one in its episodes."""
    returns = mean_return(evaluation)
    low = returns.low if returns.bounded else returns.mean
    # If each game earns more than all random ones, even a wide interval is no doubt.
    is_better = min(evaluation.returns) > max(random.returns)
    return low <= float(np.mean(random.returns)) and not is_better


def reward_error(reference_mean: float, other_mean: float) -> float | None:
    """Return (R_fp32 - R_other) / |R_fp32| * 100, positive if worse; None when R_fp32 is 0."""
    return normalised_error(reference_mean, other_mean, 0)


def normalised_error(
    reference_mean: float, other_mean: float, baseline_mean: float | None
) -> float | None:
    """Return (R_fp32 - R_other) / |R_fp32 - R_random| * 100; 100 is as bad as a random policy.

    None when R_random is unknown or equals R_fp32.
    """
    if baseline_mean is None or reference_mean == baseline_mean:
        return None
    return (reference_mean - other_mean) / abs(reference_mean - baseline_mean) * 100


def verdict(
    difference: Interval, reference_mean: float, margin_percent: float, episodes: int
) -> Verdict:
    """Return the verdict on a difference: the first that holds in docs/start/reports.md.

    A UsageError where the margin is no number, negative or not finite.
    """
    _MARGIN.require("margin_percent", margin_percent)
    if episodes < MIN_EPISODES:
        return INCONCLUSIVE
    if difference.alike and difference.mean == 0:
        return UNSEEN
    if difference.alike and unseen_percent(difference.alike) < 50:
        return "gain" if difference.mean > 0 else "loss"
    if difference.low > 0:
        return "gain"
    if reference_mean != 0 and difference.low >= -margin_percent / 100 * abs(reference_mean):
        return WITHIN_MARGIN
    return "loss" if difference.high < 0 else INCONCLUSIVE


def compare(
    reference: Evaluation,
    scheme: Evaluation,
    baseline: Evaluation | None,
    margin_percent: float = DEFAULT_MARGIN_PERCENT,
) -> Comparison:
    """Compare a scheme with fp32 on the same episodes and, if there is one, a random policy."""
    observations = effective_n(reference, scheme)
    difference = mean_interval(differences(scheme.returns, reference.returns), observations)
    returns, episodes = mean_return(scheme), len(scheme.returns)
    reference_mean = float(np.mean(reference.returns))
    baseline_mean = None if baseline is None else float(np.mean(baseline.returns))
    # Of equal returns, means may differ by rounding.
    mean = reference_mean if difference.alike and not difference.mean else returns.mean
    error = reward_error(reference_mean, mean)
    comparison = Comparison(
        scheme=scheme.scheme,
        episodes=episodes,
        returns=returns,
        difference=difference,
        reference_mean=reference_mean,
        reward_error_percent=error,
        absolute_reward_error_percent=None if error is None else abs(error),
        normalised_error_percent=normalised_error(reference_mean, mean, baseline_mean),
        margin_percent=margin_percent,
        verdict=verdict(difference, reference_mean, margin_percent, episodes),
    )
    # More episodes of a game that repeats itself are no more observations.
    enough = MIN_EPISODES <= episodes <= (observations or episodes)
    return replace(comparison, more_needed=more_needed(comparison, episodes) if enough else None)


def more_needed(comparison: Comparison, observations: int) -> int | None:
    """Estimate how many more observations decide an inconclusive comparison of so many, else None.

    With the same mean d and standard deviation s, Student's t_{n-1} s / sqrt(n) has to shrink below
    max(d + m, -d) with the margin m, which excludes a loss beyond m or excludes none. None for
    more than a million, too.
    """
    difference, bound = comparison.difference, max(_reaches(comparison))
    if comparison.verdict != INCONCLUSIVE or not difference.bounded or bound <= 0:
        return None

    def half_width(count: int) -> float:
        """Return half the width of an interval, in standard deviations."""
        return float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) / math.sqrt(count)

    deviation = (difference.high - difference.low) / 2 / half_width(observations)
    # Start from the normal distribution, whose tails are lighter.
    estimate = (float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2)) * deviation / bound) ** 2
    if estimate > _MOST_NEEDED:
        return None
    count = max(observations + 1, math.ceil(estimate))
    while half_width(count) * deviation > bound:
        count += 1
    return count - observations


def _reaches(comparison: Comparison) -> tuple[float, float]:
    """Return how far a difference is from a loss beyond the margin, and from none."""
    mean = comparison.difference.mean
    return mean + comparison.margin_percent / 100 * abs(comparison.reference_mean), -mean


def effective_n(*evaluations: Evaluation) -> float | None:
    """Return the effective number of independent episodes on the same seeds; None where all are.

    Of games it is `_effective_games`. Greedy episodes of another environment repeat if they start
    alike, unless episodes of one start differ, as where an environment draws later, too.
    """
    rules, returns = evaluations[0].protocol, [evaluation.returns for evaluation in evaluations]
    starts = next((e.starts for e in evaluations if e.starts is not None), None)
    if rules.actions != "greedy":
        return None
    if rules.game is not None or starts is None:
        return _effective_games(rules.game, *returns)
    episodes = set(zip(starts, *returns, *(e.lengths for e in evaluations), strict=True))
    return _effective_count(starts) if len(episodes) == len(set(starts)) else None


def _effective_games(game: Mapping[str, Any] | None, *returns: Sequence[float]) -> float | None:
    """Return the effective number of independent games; None where all are.

    Without chance in the game (its rules; None is no game), greedy games with equal `returns` on
    the same seeds are mostly one game repeated. Their mean is as certain as that of
    n^2 / (sum of squared counts) games (Kish, Survey Sampling, 1965, section 11.7).
    """
    if game is None or game["sticky_actions"]:
        return None
    return _effective_count(zip(*returns, strict=True))


def _effective_count(values: Iterable[Hashable]) -> float:
    counts = Counter(values).values()
    return sum(counts) ** 2 / sum(count**2 for count in counts)


def pool(comparisons: Sequence[Comparison]) -> Comparison:
    """Pool the comparisons of one scheme over trained policies, each of which counts once."""
    first, *others = comparisons
    if not others:
        return first
    differences = [c.difference for c in comparisons]
    difference = _over_trainings(differences)
    reference_mean = float(np.mean([c.reference_mean for c in comparisons]))
    fewest = min(c.episodes for c in comparisons)
    errors: Any = {name: mean_of_all([getattr(c, name) for c in comparisons]) for name in ERRORS}
    pooled = replace(
        first,
        episodes=sum(c.episodes for c in comparisons),
        returns=_over_trainings([c.returns for c in comparisons]),
        difference=difference,
        reference_mean=reference_mean,
        **errors,
        verdict=verdict(difference, reference_mean, first.margin_percent, fewest),
    )
    enough = fewest >= MIN_EPISODES
    return replace(pooled, more_needed=_more_trainings(pooled, differences) if enough else None)


def _more_trainings(pooled: Comparison, differences: Sequence[Interval]) -> int | None:
    """Estimate how many more trainings decide a comparison, by both intervals of a pooled one."""
    reaches, between = _reaches(pooled), student_interval([d.mean for d in differences])
    more = more_needed(replace(pooled, difference=between), len(differences))
    is_open = pooled.verdict == INCONCLUSIVE and pooled.difference.bounded and max(reaches) > 0
    if not is_open or (more is None and not between.alike):
        return None
    # Each further training has the same errors of its episodes.
    widths = zip(_within(differences), reaches, strict=True)
    share = min(width / reach for width, reach in widths if reach > 0)
    more = max(more or 1, math.ceil(len(differences) * share**2) - len(differences))
    return more if more <= _MOST_NEEDED else None


def _over_trainings(intervals: Sequence[Interval]) -> Interval:
    """Return the mean over trainings, with the wider interval: between them, or within them."""
    between = student_interval([interval.mean for interval in intervals])
    if all(interval.alike for interval in intervals):
        return between
    mean = between.mean
    low, high = (mean, mean) if between.alike else (between.low, between.high)
    below, above = _within(intervals)
    return Interval(mean, min(low, mean - below), max(high, mean + above))


def _within(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Return the reach of the mean's interval within trainings, to each side."""
    varying = [interval for interval in intervals if not interval.alike]
    # The means are independent: squared errors add up.
    below = math.hypot(*(interval.mean - interval.low for interval in varying)) / len(intervals)
    above = math.hypot(*(interval.high - interval.mean for interval in varying)) / len(intervals)
    return below, above


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is missing."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if len(numbers) == len(values) else None
