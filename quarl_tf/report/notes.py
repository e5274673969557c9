"""Find what a reader must know before believing results: keys and data, worded by a template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarl_tf.evaluation.compare import MIN_EPISODES, independent_games
from quarl_tf.foundation.errors import UsageError
from quarl_tf.report.results import CellResults, Replicate
from quarl_tf.spec import Run, Scheme
from quarl_tf.store.workspace import Workspace


@dataclass(frozen=True)
class Note:
    """What the template has a sentence for, and what goes into it."""

    key: str
    data: dict[str, Any]


def notes_on(workspace: Workspace, cell: CellResults) -> list[Note]:
    """Return what the reader must know of a cell."""
    return [
        *_notes_on_episodes(cell),
        *(note for one in cell.replicates for note in _notes_on_replicate(one)),
        *_notes_on_trainings(cell),
        *_notes_on_files(workspace, cell),
    ]


def _notes_on_episodes(cell: CellResults) -> Iterator[Note]:
    counts = {len(one.evaluation.seeds) for one in cell.references}
    if counts and min(counts) < MIN_EPISODES:
        yield Note("few_episodes", {"episodes": min(counts), "least": MIN_EPISODES})
    if len(counts) > 1:
        yield Note("unequal_episodes", {"fewest": min(counts), "most": max(counts)})


def _notes_on_replicate(one: Replicate) -> Iterator[Note]:
    if not one.references:
        return
    (reference,) = one.references
    most, least = max(one.played.values()), min(one.played.values())
    run_id, games = reference.sidecar.run_id, reference.evaluation.returns
    if least < most and len(games) == least:
        short = [scheme for (_, scheme), played in one.played.items() if played == least]
        yield Note("cut", {"run": run_id, "episodes": least, "most": most, "schemes": short})
    effective_n = independent_games(reference.evaluation)
    if effective_n is not None and effective_n < len(games):
        data = {"run": run_id, "games": len(games), "different": len(set(games))}
        yield Note("repeated_games", {**data, "effective_n": round(effective_n, 1)})
    if one.baseline is None:
        yield Note("no_baseline", {"run": run_id})
        return
    returns, baseline = reference.comparison.returns, one.baseline.returns
    low = returns.low if returns.bounded else returns.mean
    # Few games have a wide interval; but where each earns more than any random one, it is shown.
    if low <= np.mean(baseline) and min(games) <= max(baseline):
        yield Note("as_random", {"run": run_id})


def _notes_on_trainings(cell: CellResults) -> Iterator[Note]:
    """Yield what the reader must know of quantisation-aware trainings and their references."""
    seeds, elsewhere = set(), dict[int, None]()
    for one in cell.replicates:
        for result in one.results.values():
            run = Run.from_dict(result.sidecar.run)
            if run.quantization is None:
                continue
            seeds.add(run.seed)
            if result.sidecar.trained_on != one.references[0].sidecar.trained_on:
                elsewhere[run.quantization.bits] = None
    if len(seeds) == 1:
        yield Note("one_seed", {})
    if elsewhere:
        yield Note("other_processor", {"bits": list(elsewhere)})


def _notes_on_files(workspace: Workspace, cell: CellResults) -> Iterator[Note]:
    there = {result.sidecar.run_id for result in cell.results}
    for run in cell.runs:
        for path in sorted(workspace.artifact_dir(run.run_id).glob("*.tflite")):
            if not is_scheme(path.stem):
                yield Note("foreign_file", {"run": run.run_id, "file": path.name})
    without = [run_id for run_id in sorted(there) if run_id not in cell.curves]
    if without:
        yield Note("no_curve", {"runs": without})


def is_scheme(name: str) -> bool:
    """Tell whether a scheme has that name."""
    try:
        Scheme.parse(name)
    except UsageError:
        return False
    return True
