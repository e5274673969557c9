"""Aggregate the cost of a scheme over many cells, each an algorithm on an environment.

Measures are rliable's (Agarwal et al., arXiv 2108.13264), intervals by its stratified bootstrap: of
each cell its trainings, of each training its paired episodes. Errors are normalised by the returns
of fp32 and of a random policy, as percentages of returns near zero mean little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from quarl_tf.evaluation.compare import CONFIDENCE, Interval, mean_of_all, normalised_error

_RESAMPLES = 2000
_SEED = 0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """One training: returns of a scheme and of fp32 on the same episodes, and of fp32 on others.

    `baseline` is the mean return of a random policy, `observations` that of `compare.effective_n`.
    """

    scheme: Floats
    reference: Floats
    baseline: float
    observations: float
    others: Sequence[float] = ()

    @property
    def errors(self) -> Floats:
        """Return the normalised error of each episode, in percent."""
        scale = abs(self.reference.mean() - self.baseline)
        errors: Floats = 100 * (self.reference - self.scheme) / scale
        return errors

    @property
    def wins(self) -> Floats:
        """Return 100 for each episode that earns more than under fp32, 50 for the same."""
        wins: Floats = 50 * (1 + np.sign(self.scheme - self.reference))
        return wins

    @property
    def noise(self) -> float | None:
        """Return the normalised error of fp32 on other episodes, if there are any."""
        if not self.others:
            return None
        return normalised_error(self.reference.mean(), float(np.mean(self.others)), self.baseline)


@dataclass(frozen=True)
class Aggregate:
    """A scheme over all cells that have it, in percent.

    Attributes:
        errors: Normalised error of each training, in ascending order; `iqm`: interquartile mean.
        error: Mean normalised error of the cells; `absolute`: mean of its absolute values.
        improvement: Probability that an episode earns more than fp32's, ties half; mean over cells.
        noise: As `absolute`, of fp32 on other episodes; None if a training has none.
        losses: Cells with a loss at a level of 5 % after Holm's correction.
    """

    scheme: str
    cells: int
    errors: list[float]
    error: Interval
    iqm: Interval
    improvement: Interval
    absolute: float
    noise: float | None
    losses: list[str]


def aggregate(scheme: str, cells: Mapping[str, Sequence[Paired]]) -> Aggregate:
    """Aggregate a scheme over cells, given as their trainings."""
    random = np.random.default_rng(_SEED)
    means = [[(one.errors.mean(), one.wins.mean()) for one in runs] for runs in cells.values()]
    seen = [np.array(of_cell).T[:, None] for of_cell in means]
    drawn = [_resampled(runs, random) for runs in cells.values()]
    trainings = np.hstack([of_cell[0, 0] for of_cell in seen])
    error, improvement, iqm = (
        _interval(float(one), resampled, len(trainings))
        for (one,), resampled in zip(_measures(seen), _measures(drawn), strict=True)
    )
    noise = [mean_of_all([one.noise for one in runs]) for runs in cells.values()]
    return Aggregate(
        scheme,
        cells=len(cells),
        errors=np.sort(trainings).tolist(),
        error=error,
        iqm=iqm,
        improvement=improvement,
        absolute=float(np.mean([abs(of_cell[0].mean()) for of_cell in seen])),
        noise=mean_of_all([one and abs(one) for one in noise]),
        losses=holm({name: _loss_p(runs) for name, runs in cells.items()}, 1 - CONFIDENCE),
    )


def _measures(cells: Sequence[Floats]) -> Floats:
    """Return mean errors, mean wins and IQMs [3, n] of cells' errors, wins [2, n, trainings]."""
    means = np.mean([of_cell.mean(axis=2) for of_cell in cells], axis=0)
    iqm = stats.trim_mean(np.hstack([of_cell[0] for of_cell in cells]), 0.25, axis=1)
    measures: Floats = np.vstack([means, iqm])
    return measures


def _interval(mean: float, resampled: Floats, trainings: int) -> Interval:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    if low == high:
        return Interval(mean, -np.inf, np.inf, alike=trainings)
    return Interval(mean, float(low), float(high))


def holm(values: Mapping[str, float], level: float) -> list[str]:
    """Return the names of the p-values that are rejected at a familywise level (Holm 1979)."""
    rejected = []
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        if value > level / (len(values) - rank):
            break
        rejected.append(name)
    return rejected


def _resampled(runs: Sequence[Paired], random: np.random.Generator) -> Floats:
    """Return errors and wins [2, resamples, trainings] of a cell."""
    means = []
    for one in runs:
        played, worth = len(one.errors), max(1, round(one.observations))
        weights = random.multinomial(worth, np.full(played, 1 / played), size=_RESAMPLES)
        means.append(weights @ np.stack([one.errors, one.wins], axis=1) / worth)
    drawn = random.integers(len(runs), size=(_RESAMPLES, len(runs)))
    picked: Floats = np.array(means)[drawn, np.arange(_RESAMPLES)[:, None]]
    return np.moveaxis(picked, 2, 0)


def _loss_p(runs: Sequence[Paired]) -> float:
    """Return the one-sided p-value of a loss: over trainings, or the episodes of a single one."""
    values, count = runs[0].errors, runs[0].observations
    if len(runs) > 1:
        values, count = np.array([one.errors.mean() for one in runs]), len(runs)
    if count <= 1:
        return 1.0
    if values.min() == values.max():
        return float(0.5**count) if values[0] > 0 else 1.0  # By a sign test.
    # As in `compare.student_interval`.
    error = values.std(ddof=len(values) / count) / np.sqrt(count)
    return float(stats.t.sf(values.mean() / error, count - 1))
