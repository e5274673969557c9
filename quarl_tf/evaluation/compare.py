"""Tell what a scheme costs in reward, and how sure that is.

Within one trained policy the unit is the episode: the same seeds are replayed under every scheme,
so differences are paired and their mean has a bootstrap interval. Over several trainings the unit
is the training: the pooled interval is Student's t over their means, and never narrower than the
episodes behind those means allow. A greedy policy in a game without chance plays on alike from many
starts: episodes of equal returns are one observation (see `effective_n`). Where all observations
agree there is no interval, but a bound on how often another may occur (see `unseen_percent`).

The reward error is that of QuaRL (Krishnan et al., arXiv 1910.01055), with |R_fp32| below the line
so that a positive error is a worse policy for negative returns as well. Signed errors cancel when
averaged; the mean absolute error stands beside them.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.spec import GREEDY, Chance
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import evaluation_path, reference_path

Verdict = Literal["gain", "within margin", "no difference seen", "loss", "inconclusive"]

#: The verdict where all paired returns are equal.
UNSEEN: Verdict = "no difference seen"

#: The verdict where both a loss beyond the margin and none agree with the results.
INCONCLUSIVE: Verdict = "inconclusive"

#: The verdict where a loss beyond the margin is excluded.
WITHIN_MARGIN: Verdict = "within margin"

#: Losses up to this share of the fp32 return, in percent, are taken as none.
DEFAULT_MARGIN_PERCENT = 2.0

#: Episodes that a trained policy must have played under a scheme before a verdict is given.
MIN_EPISODES = 20

#: Share of intervals that hold the true mean.
CONFIDENCE = 0.95

_RESAMPLES = 9999
_SEED = 0
# Resampled values held at a time: 8 MB, so that 10 000 episodes fit a small board.
_BATCH_ELEMENTS = 1_000_000


@dataclass(frozen=True)
class Interval:
    """A mean and the limits of its confidence interval; infinite where nothing bounds it.

    `alike` is the number of observations where all agree, which leaves no interval; else 0.
    """

    mean: float
    low: float
    high: float
    alike: int = 0

    @property
    def bounded(self) -> bool:
        """Whether there were enough values for an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class Comparison:
    """One scheme against fp32 on the same episodes of one trained policy, or of several.

    `returns` is the scheme's mean return, `difference` the mean of scheme - fp32 over episodes
    paired by seed: negative is worse. Errors are in percent, see `reward_error` and
    `normalised_error`, None where they are unknown; the margin is in percent of the fp32 return.
    Over several policies episodes are added up and all else is a mean, each policy counting once:
    in the signed one of their reward errors gains and losses cancel, in the absolute one not.
    `more_needed` is about how many more episodes, or trainings of several, would decide it.
    """

    scheme: str
    episodes: int
    returns: Interval
    difference: Interval
    reference_mean: float
    reward_error: float | None
    normalised_error: float | None
    margin_percent: float
    verdict: Verdict
    absolute_reward_error: float | None = None
    more_needed: int | None = None


def mean_interval(values: npt.ArrayLike, observations: float | None = None) -> Interval:
    """Return the mean of finite values [n] with its interval, if there is one.

    It is a BCa bootstrap with a fixed seed, which follows the skew of returns that are capped on
    one side, or Student's t of fewer than `MIN_EPISODES` values and of repeated ones:
    `observations` is how many those are worth (`effective_n`). There is none of values that are all
    equal, and below `MIN_EPISODES` repeated ones of these are no evidence.
    """
    sample = np.asarray(values, dtype=np.float64)
    count, constant = observations or sample.size, sample.min() == sample.max()
    if constant and count < min(sample.size, MIN_EPISODES):
        return Interval(float(sample[0]), -math.inf, math.inf)
    if constant or count < max(sample.size, MIN_EPISODES):
        return student_interval(sample, count)
    result = stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH_ELEMENTS // sample.size),
        confidence_level=CONFIDENCE,
        method="BCa",
        rng=np.random.default_rng(_SEED),
    )
    limits = result.confidence_interval
    return Interval(float(sample.mean()), float(limits.low), float(limits.high))


def student_interval(values: npt.ArrayLike, observations: float | None = None) -> Interval:
    """Return the mean with Student's t interval, for few values such as means of whole trainings.

    There is none below 2 observations, or of equal values; else as `mean_interval`.
    """
    sample = np.asarray(values, dtype=np.float64)
    count = observations or sample.size
    if sample.min() == sample.max():
        # Not the mean: rounding in the sum would give equal values a mean that is none of them.
        return Interval(float(sample[0]), -math.inf, math.inf, alike=int(count) if count > 1 else 0)
    mean = float(sample.mean())
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    # Repeated values tell no more of the variance than of the mean: n / count for 1 in n - 1.
    error = sample.std(ddof=sample.size / count) / math.sqrt(count)
    low, high = stats.t.interval(CONFIDENCE, count - 1, loc=mean, scale=error)
    return Interval(mean, float(low), float(high))


def unseen_percent(observations: int) -> float:
    """Return the percentage of what was not seen that n observations leave possible, at 95 %.

    It is the one-sided bound of Clopper and Pearson (1934) on a probability, at 0 of n.
    """
    return 100 * (1 - math.pow(1 - CONFIDENCE, 1 / observations))


def mean_return(evaluation: Evaluation) -> Interval:
    """Return the mean return of an evaluation with its interval."""
    return mean_interval(evaluation.returns, effective_n(evaluation))


def reward_error(reference_mean: float, other_mean: float) -> float | None:
    """Return (R_fp32 - R_other) / |R_fp32| * 100, in percent; positive is worse.

    None when R_fp32 is 0. Near 0 the percentage is large and says little: read the difference.
    """
    return normalised_error(reference_mean, other_mean, 0)


def normalised_error(
    reference_mean: float, other_mean: float, baseline_mean: float | None
) -> float | None:
    """Return (R_fp32 - R_other) / |R_fp32 - R_random| * 100, in percent; positive is worse.

    100 is a policy no better than a random one. None when fp32 earns exactly what a random policy
    earns, or that is not known.
    """
    if baseline_mean is None or reference_mean == baseline_mean:
        return None
    return (reference_mean - other_mean) / abs(reference_mean - baseline_mean) * 100


def verdict(
    difference: Interval, reference_mean: float, margin_percent: float, episodes: int
) -> Verdict:
    """Say in words what a difference shows, with the margin m = margin_percent / 100 * |R_fp32|.

    The first that holds, where [low, high] is the 95 % interval of scheme - fp32:

    * "inconclusive", fewer than `MIN_EPISODES` episodes (of the training that has fewest): their
      interval may be narrow by chance.
    * "no difference seen": all observations are 0; one that is not may occur in up to
      `unseen_percent` of them. Where all are another number there is a gain or a loss if
      that bound leaves it to most.
    * "gain", low > 0: the scheme earns more.
    * "within margin", low >= -m: a loss beyond the margin is excluded, a non-inferiority test at
      one-sided 2.5 %. An fp32 return of 0 gives the margin no size, so it is not given then.
    * "loss", high < 0: the scheme earns less, and by how much beyond the margin is open.
    * "inconclusive": both a loss beyond the margin and no loss at all agree with the episodes.

    Raises:
        UsageError: The margin is negative or not finite.
    """
    if not 0 <= margin_percent < math.inf:
        raise UsageError(
            "The margin must be 0 % or more of the fp32 return. "
            f"Received: margin_percent={margin_percent}"
        )
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
    """Compare a scheme with fp32 on the same episodes, else a QuarlError.

    Without a baseline no error is normalised.
    """
    if (reference.env_id, reference.seeds) != (scheme.env_id, scheme.seeds):
        received = " and ".join(
            f"{one.run_id}/{one.scheme} with {len(one.seeds)} episodes from seed "
            f"{next(iter(one.seeds), 'none')}"
            for one in (reference, scheme)
        )
        raise QuarlError(
            f"{reference.scheme} and {scheme.scheme} were not evaluated on the same episodes; run "
            f"`quarl evaluate` on both with the same --episodes. Received: {received}"
        )
    worth = effective_n(reference, scheme)
    difference = mean_interval(np.subtract(scheme.returns, reference.returns), worth)
    returns, episodes = mean_return(scheme), len(scheme.returns)
    reference_mean = float(np.mean(reference.returns))
    baseline_mean = None if baseline is None else float(np.mean(baseline.returns))
    error = reward_error(reference_mean, returns.mean)
    found = Comparison(
        scheme=scheme.scheme,
        episodes=episodes,
        returns=returns,
        difference=difference,
        reference_mean=reference_mean,
        reward_error=error,
        normalised_error=normalised_error(reference_mean, returns.mean, baseline_mean),
        margin_percent=margin_percent,
        verdict=verdict(difference, reference_mean, margin_percent, episodes),
        absolute_reward_error=None if error is None else abs(error),
    )
    # More episodes of a game that repeats itself are no more observations.
    enough = MIN_EPISODES <= episodes <= (worth or episodes)
    return replace(found, more_needed=more_needed(found, episodes) if enough else None)


def compare_saved(
    artifact: Path,
    sidecar: Sidecar,
    margin_percent: float = DEFAULT_MARGIN_PERCENT,
    chance: Chance = GREEDY,
    episodes: int | None = None,
) -> Comparison | None:
    """Compare a flatbuffer's first episodes with its fp32's; None if those are by other rules."""
    paths = [evaluation_path(p, chance) for p in (artifact, reference_path(artifact, sidecar))]
    if not all(path.exists() for path in paths):
        return None
    scheme, reference = (Evaluation.load(path).first(episodes) for path in paths)
    if (reference.seeds, reference.protocol) != (scheme.seeds, scheme.protocol):
        return None
    return compare(reference, scheme, None, margin_percent)


def more_needed(comparison: Comparison, observations: int) -> int | None:
    """Return about how many more observations decide an inconclusive comparison of so many.

    With the same mean d and standard deviation s, t_{n-1} s / sqrt(n) of Student's interval has to
    shrink below max(d + m, -d) with the margin m, which excludes a loss beyond it or no loss.
    None where it is decided, there are too few to tell, or d is 0 and the margin too.
    """
    difference, mean = comparison.difference, comparison.difference.mean
    reach = max(mean + comparison.margin_percent / 100 * abs(comparison.reference_mean), -mean)
    if comparison.verdict != INCONCLUSIVE or not difference.bounded or reach <= 0:
        return None

    def half(count: int) -> float:
        return float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) / math.sqrt(count)

    deviation = (difference.high - difference.low) / 2 / half(observations)
    # No fewer than by the normal distribution, whose tails are lighter.
    fewest = (float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * deviation / reach) ** 2
    count = max(observations + 1, math.ceil(fewest))
    while half(count) * deviation > reach:
        count += 1
    return count - observations


def effective_n(*played: Evaluation) -> float | None:
    """Return what evaluations on the same seeds are worth in independent games; see `different_n`.

    None where each episode is its own.
    """
    rules = played[0].protocol
    greedy = rules.actions == "greedy"
    return different_n(rules.game, *(one.returns for one in played)) if greedy else None


def different_n(game: Mapping[str, Any] | None, *returns: Sequence[float]) -> float | None:
    """Return what greedy games are worth in independent ones; None where each is its own.

    Games differ where any of the `returns`, on the same seeds, tells them apart. Without chance in
    the game (its rules; None is no game), greedy games of equal returns are mostly one game played
    again. A mean in which each different one weighs as often as it was played is as certain as the
    plain mean of n^2 / (sum of squared counts) games (Kish, Survey Sampling, 1965, section 11.7).
    """
    if game is None or game["sticky_actions"]:
        return None
    counts = Counter(zip(*returns, strict=True)).values()
    return sum(counts) ** 2 / sum(count**2 for count in counts)


def pool(comparisons: Sequence[Comparison]) -> Comparison:
    """Summarise one scheme, by one margin, over the trained policies of a task.

    Each counts once. Of 2 or more the intervals speak about trainings not yet made.
    """
    first, *others = comparisons
    if not others:
        return first
    difference = _over_trainings([c.difference for c in comparisons])
    reference_mean = float(np.mean([c.reference_mean for c in comparisons]))
    fewest = min(c.episodes for c in comparisons)
    pooled = replace(
        first,
        episodes=sum(c.episodes for c in comparisons),
        returns=_over_trainings([c.returns for c in comparisons]),
        difference=difference,
        reference_mean=reference_mean,
        reward_error=mean_of_all([c.reward_error for c in comparisons]),
        absolute_reward_error=mean_of_all([c.absolute_reward_error for c in comparisons]),
        normalised_error=mean_of_all([c.normalised_error for c in comparisons]),
        verdict=verdict(difference, reference_mean, first.margin_percent, fewest),
    )
    enough = fewest >= MIN_EPISODES
    return replace(pooled, more_needed=more_needed(pooled, len(comparisons)) if enough else None)


def _over_trainings(each: Sequence[Interval]) -> Interval:
    """Return the mean over trainings, with the wider of the two intervals that bound it."""
    between = student_interval([one.mean for one in each])
    varying = [one for one in each if not one.alike]
    if not varying:
        return between
    mean = between.mean
    low, high = (mean, mean) if between.alike else (between.low, between.high)
    # As the means are independent, the squares of what they may be off by add up.
    below = math.hypot(*(one.mean - one.low for one in varying)) / len(each)
    above = math.hypot(*(one.high - one.mean for one in varying)) / len(each)
    return Interval(mean, min(low, mean - below), max(high, mean + above))


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if one is missing: never the mean of what happens to be there."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None
