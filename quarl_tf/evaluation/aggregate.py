"""Sum up what a scheme costs over many cells, each an algorithm on an environment.

Resampling is stratified, as rliable's (Agarwal et al., arXiv 2108.13264): of each cell its
trainings, of each training its paired episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from quarl_tf.evaluation.compare import CONFIDENCE, Interval

_RESAMPLES = 2000
_SEED = 0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """One training under a scheme: returns of the same episodes, and fp32's of other ones.

    `worth` is how many independent ones the episodes are, see `compare.effective_n`.
    """

    scheme: Floats
    reference: Floats
    others: Floats | None = None
    worth: float | None = None

    @property
    def observations(self) -> float:
        """Return how many independent episodes were played."""
        return self.worth or len(self.reference)

    @property
    def errors(self) -> Floats:
        """Return each episode's share of the reward error, in percent; their mean is the error."""
        errors: Floats = 100 * (self.reference - self.scheme) / abs(self.reference.mean())
        return errors


@dataclass(frozen=True)
class Aggregate:
    """A scheme over all cells that have it.

    Attributes:
        cells: Number of cells.
        error: Mean over the cells of the signed reward error, in percent.
        absolute: Mean over the cells of its absolute value.
        noise: The same of fp32 against itself on other episodes; None where there are none.
        losses: Cells with a certain loss, at 5 % after Holm's correction.
    """

    scheme: str
    cells: int
    error: Interval
    absolute: float
    noise: float | None
    losses: list[str]


def aggregate(scheme: str, cells: Mapping[str, Sequence[Paired]]) -> Aggregate:
    """Sum up a scheme; `cells` has the trainings of each, none with a mean return of 0."""
    errors = [float(np.mean([one.errors.mean() for one in runs])) for runs in cells.values()]
    random = np.random.default_rng(_SEED)
    resampled = np.mean([_resampled(runs, random) for runs in cells.values()], axis=0)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    others = [_noise(runs) for runs in cells.values()]
    known = [abs(noise) for noise in others if noise is not None]
    values = {name: _loss_p(runs) for name, runs in cells.items()}
    return Aggregate(
        scheme,
        cells=len(cells),
        error=Interval(float(np.mean(errors)), float(low), float(high)),
        absolute=float(np.mean(np.abs(errors))),
        noise=float(np.mean(known)) if len(known) == len(cells) else None,
        losses=holm(values, 1 - CONFIDENCE),
    )


def holm(values: Mapping[str, float], level: float) -> list[str]:
    """Return what is rejected of several p-values at a level for all of them (Holm 1979)."""
    rejected = []
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        if value > level / (len(values) - rank):
            break
        rejected.append(name)
    return rejected


def _resampled(runs: Sequence[Paired], random: np.random.Generator) -> Floats:
    """Return the cell's error in each resample."""
    means = []
    for one in runs:
        played, worth = len(one.errors), max(1, round(one.observations))
        weights = random.multinomial(worth, np.full(played, 1 / played), size=_RESAMPLES)
        means.append(weights @ one.errors / worth)
    drawn = random.integers(len(runs), size=(_RESAMPLES, len(runs)))
    picked: Floats = np.array(means)[drawn, np.arange(_RESAMPLES)[:, None]].mean(axis=1)
    return picked


def _noise(runs: Sequence[Paired]) -> float | None:
    errors = [
        100 * (one.reference.mean() - one.others.mean()) / abs(one.reference.mean())
        for one in runs
        if one.others is not None and len(one.others)
    ]
    return float(np.mean(errors)) if len(errors) == len(runs) else None


def _loss_p(runs: Sequence[Paired]) -> float:
    """Return the one-sided p-value of a loss: over trainings, or episodes where there is one."""
    several = len(runs) > 1
    values = np.array([one.errors.mean() for one in runs]) if several else runs[0].errors
    count = len(runs) if several else runs[0].observations
    if count <= 1:
        return 1.0
    if values.min() == values.max():
        return 0.0 if values[0] > 0 else 1.0
    # As `compare.student_interval` has it.
    error = values.std(ddof=len(values) / count) / np.sqrt(count)
    return float(stats.t.sf(values.mean() / error, count - 1))
