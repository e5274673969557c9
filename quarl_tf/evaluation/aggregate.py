"""Aggregate the cost of a scheme over many cells, each an algorithm on an environment.

Measures are those of rliable (Agarwal et al., arXiv 2108.13264), but of paired episodes. Means over
cells have Student's t interval, which holds for the two or three trainings that a cell has; the
interquartile mean has rliable's stratified bootstrap: of each cell its trainings, of each training
its paired episodes. Errors are normalised by the returns of fp32 and of a random policy, as
percentages of returns near zero mean little.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import scipy  # Its `stats`, a second of loading, at the first use.
from numpy.typing import NDArray

from quarl_tf.evaluation import compare
from quarl_tf.evaluation.compare import CONFIDENCE, Interval, differences, standard_error
from quarl_tf.store.records import Evaluation

_RESAMPLES = 2000
_SEED = 0

Floats = NDArray[np.float64]
#: Values of the episodes of each training of a cell, and their effective number.
_Runs = Sequence[tuple[Floats, float]]


class Paired(NamedTuple):
    """One training: a scheme and its reference, fp32, on the same episodes, in percent."""

    errors: Floats  #: Normalised error of each episode.
    wins: Floats  #: 100 for each episode that earns more than under fp32, 50 for the same.
    reference_error: float  #: Standard error of the reference's mean return, as `errors`.
    observations: float  #: Effective number of the episodes, of `compare.effective_n`.

    @classmethod
    def of(cls, scheme: Floats, reference: Floats, baseline: float, observations: float) -> Self:
        """Compare returns of episodes; `baseline` is the mean return of a random policy."""
        scale = abs(float(reference.mean()) - baseline)
        wins = 50 * (1 + np.sign(differences(scheme, reference)))
        error = 100 * standard_error(reference, observations) / scale
        return cls(100 * differences(reference, scheme) / scale, wins, error, observations)


def paired(reference: Evaluation, scheme: Evaluation, random: Evaluation) -> Paired | None:
    """Pair the returns of a scheme with those of its reference, on the same episodes.

    None where there are too few different episodes, as of games without chance, or where the
    reference earns no more than the random policy.
    """
    count, random_mean = len(reference.returns), float(np.mean(random.returns))
    different = compare.effective_n(reference) or count
    if different < compare.MIN_EPISODES or np.mean(reference.returns) <= random_mean:
        return None
    returns = np.array(scheme.returns), np.array(reference.returns)
    return Paired.of(*returns, random_mean, compare.effective_n(reference, scheme) or count)


@dataclass(frozen=True)
class Aggregate:
    """A scheme over all cells that have it, in percent."""

    scheme: str
    cells: int
    errors: list[float]  #: Normalised error of each training, in ascending order.
    error: Interval  #: Mean normalised error of the cells.
    iqm: Interval  #: Interquartile mean of `errors`.
    #: Probability that an episode earns more than fp32's, ties half; mean over cells.
    improvement: Interval
    absolute: float  #: Mean of the cells' absolute errors.
    noise: float  #: As `absolute`, expected of fp32 against itself on other episodes.
    losses: list[str]  #: Cells with a loss at a level of 5 % after Holm's correction.


def aggregate(scheme: str, cells: Mapping[str, Sequence[Paired]]) -> Aggregate:
    """Aggregate a scheme over cells, given as their trainings."""
    errors = [[(run.errors, run.observations) for run in runs] for runs in cells.values()]
    wins = [[(run.wins, run.observations) for run in runs] for runs in cells.values()]
    improvement = _mean_over_cells(wins)
    if improvement.bounded:
        low, high = max(improvement.low, 0.0), min(improvement.high, 100.0)
        improvement = replace(improvement, low=low, high=high)
    mean_errors = np.array([values.mean() for runs in errors for values, _ in runs])
    standard_errors = [
        math.hypot(*(run.reference_error for run in runs)) / len(runs) for runs in cells.values()
    ]
    return Aggregate(
        scheme,
        cells=len(cells),
        errors=np.sort(mean_errors).tolist(),
        error=_mean_over_cells(errors),
        iqm=_iqm(errors, mean_errors),
        improvement=improvement,
        absolute=float(np.mean([abs(_mean(runs)) for runs in errors])),
        # The mean absolute difference of two normal means with such a standard error.
        noise=2 / math.sqrt(math.pi) * float(np.mean(standard_errors)),
        losses=holm({name: _loss_p(runs) for name, runs in cells.items()}, 1 - CONFIDENCE),
    )


def _mean(runs: _Runs) -> float:
    return float(np.mean([values.mean() for values, _ in runs]))


def _mean_over_cells(cells: Sequence[_Runs]) -> Interval:
    """Return the mean over cells with Student's t interval (Welch 1947, Satterthwaite 1946)."""
    means = [_mean(runs) for runs in cells]
    mean = float(np.mean(means))
    # The larger of the two: a few trainings may be alike by chance.
    variances, freedom = np.array([max(_variances(runs)) for runs in cells]).T
    if not variances.any():
        alike = sum(map(len, cells)) if compare.is_constant(np.array(means)) else 0
        return Interval(mean, alike=alike)
    degrees = variances.sum() ** 2 / (variances**2 / freedom).sum()
    error = np.sqrt(variances.sum()) / len(cells)
    low, high = scipy.stats.t.interval(CONFIDENCE, degrees, loc=mean, scale=error)
    return Interval(mean, float(low), float(high))


def _variances(runs: _Runs) -> list[tuple[float, float]]:
    """Return a cell's variances with degrees of freedom: of episodes and between trainings."""
    count = len(runs)
    varying_runs = [(values, n) for values, n in runs if n > 1]
    within = sum(standard_error(values, n) ** 2 for values, n in varying_runs) / count**2
    variances = [(within, max(sum(n - 1 for _, n in varying_runs), 1.0))]
    if count > 1:
        between = standard_error([values.mean() for values, _ in runs], count) ** 2
        variances.append((between, count - 1.0))
    return variances


def _iqm(cells: Sequence[_Runs], mean_errors: Floats) -> Interval:
    """Return the interquartile mean of all trainings with its stratified bootstrap interval."""
    random = np.random.default_rng(_SEED)
    samples = np.hstack([_resampled_means(runs, random) for runs in cells])
    tail = 100 * (1 - CONFIDENCE) / 2
    iqms = scipy.stats.trim_mean(samples, 0.25, axis=1)
    low, high = np.percentile(iqms, [tail, 100 - tail])
    mean = float(scipy.stats.trim_mean(mean_errors, 0.25))
    if compare.is_constant(np.array([low, high])):
        return Interval(mean, alike=len(mean_errors) if compare.is_constant(mean_errors) else 0)
    return Interval(mean, float(low), float(high))


def _resampled_means(runs: _Runs, random: np.random.Generator) -> Floats:
    """Return means [resamples, trainings] of a cell; each draw of a training has new episodes."""
    indices = random.integers(len(runs), size=(_RESAMPLES, len(runs)))
    samples = np.empty(indices.shape)
    for i, (values, n) in enumerate(runs):
        is_drawn, count = indices == i, max(1, round(n))
        weights = np.full(len(values), 1 / len(values))
        draws = random.multinomial(count, weights, size=np.count_nonzero(is_drawn))
        samples[is_drawn] = draws @ values / count
    return samples


def holm(values: Mapping[str, float], level: float) -> list[str]:
    """Return the names of the p-values that are rejected at a familywise level (Holm 1979)."""
    rejected_names = []
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        if value > level / (len(values) - rank):
            break
        rejected_names.append(name)
    return rejected_names


def _loss_p(runs: Sequence[Paired]) -> float:
    """Return the one-sided p-value of a loss: the larger of those by both variances."""
    errors = [(run.errors, run.observations) for run in runs]
    mean, variances = _mean(errors), [pair for pair in _variances(errors) if pair[0] > 0]
    if not variances:
        count = len(runs) if len(runs) > 1 else runs[0].observations
        return float(0.5**count) if mean > 0 else 1.0  # By a sign test.
    return max(float(scipy.stats.t.sf(mean / np.sqrt(v), freedom)) for v, freedom in variances)
