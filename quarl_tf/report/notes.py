"""Find what a reader must know before believing results: keys and data, worded by a template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quarl_tf.evaluation import compare
from quarl_tf.evaluation.compare import MIN_EPISODES
from quarl_tf.report.results import CellResults, Replicate
from quarl_tf.spec import Run


def notes_on(cell: CellResults) -> Iterator[dict[str, Any]]:
    """Yield what the reader must know of a cell: a key and what goes into its sentence."""
    if cell.episodes is not None and cell.episodes < MIN_EPISODES:
        yield {"key": "few_episodes", "episodes": cell.episodes, "least": MIN_EPISODES}
    for one in cell.replicates:
        yield from _notes_on_games(one)
    seeds, elsewhere = set(), dict[int, None]()
    for one in cell.replicates:
        for result in one.results.values():
            run = Run.from_dict(result.sidecar.run)
            if run.quantization is not None:
                seeds.add(run.seed)
                if result.sidecar.trained_on != one.references[0].sidecar.trained_on:
                    elsewhere[run.quantization.bits] = None
    if len(seeds) == 1:
        yield {"key": "one_seed"}
    if elsewhere:
        yield {"key": "other_processor", "bits": list(elsewhere)}


def _notes_on_games(one: Replicate) -> Iterator[dict[str, Any]]:
    for reference in one.references:
        run_id, games = reference.sidecar.run_id, reference.evaluation.returns
        effective_n = compare.effective_n(reference.evaluation)
        if effective_n is not None and effective_n < len(games):
            told = {"run": run_id, "games": len(games), "different": len(set(games))}
            yield {"key": "repeated_games", **told, "effective_n": round(effective_n, 1)}
        if one.baseline is not None:
            returns, baseline = reference.comparison.returns, one.baseline.returns
            low = returns.low if returns.bounded else returns.mean
            # Few games have a wide interval; but where each earns more than any random one, it is
            # shown.
            if low <= np.mean(baseline) and min(games) <= max(baseline):
                yield {"key": "as_random", "run": run_id}
