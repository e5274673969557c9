"""Collect what a report shows beside a cell's rows: notes, last networks, blame and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from math import isnan
from statistics import fmean
from typing import Any

import pandas as pd

from quarl_tf.evaluation import compare, memory
from quarl_tf.evaluation.blame import Blame
from quarl_tf.evaluation.compare import MIN_EPISODES, Interval
from quarl_tf.report.results import OK, CellResults
from quarl_tf.spec import REFERENCE, Run
from quarl_tf.store.workspace import Workspace, blame_path

#: Share of different games from which on chance changes them: few then have one return and length.
_CHANGED = 0.75


def notes_on(cell: CellResults) -> Iterator[dict[str, Any]]:
    """Yield warnings about a cell: the key of a sentence in `words.j2` and its values."""
    if cell.episodes is not None and cell.episodes < MIN_EPISODES:
        yield {"key": "few_episodes", "episodes": cell.episodes, "least": MIN_EPISODES}
    for reference in cell.references:
        run_id, returns = reference.sidecar.run_id, reference.evaluation.returns
        effective_n = compare.effective_n(reference.evaluation)
        if effective_n is not None and effective_n < len(returns):
            counts = {"run": run_id, "games": len(returns), "different": len(set(returns))}
            yield {"key": "repeated_games", **counts, "effective_n": round(effective_n, 1)}
        game = reference.evaluation.protocol.game or {}
        different = len({*zip(returns, reference.evaluation.lengths, strict=True)})
        is_repeated = len(returns) >= MIN_EPISODES and different < _CHANGED * len(returns)
        if game.get("sticky_actions") and is_repeated:
            counts = {"games": len(returns), "different": different}
            yield {"key": "repeated_sticky_games", "run": run_id, **counts}
        random = reference.baseline
        if random is not None and compare.is_as_random(reference.evaluation, random):
            yield {"key": "as_random", "run": run_id}
    seeds, bits = set(), dict[int, None]()
    trained_on = {fp32.sidecar.run_id: fp32.sidecar.trained_on for fp32 in cell.references}
    for result in cell.results:
        run = Run.from_dict(result.sidecar.run)
        if run.quantization is not None:
            seeds.add(run.seed)
            elsewhere = result.sidecar.trained_on != trained_on[run.plain.run_id]
            if elsewhere and run.origin is None:  # Others start from their reference.
                bits[run.quantization.bits] = None
    if len(seeds) == 1:
        yield {"key": "one_seed"}
    if bits:
        yield {"key": "other_processor", "bits": list(bits)}


def last_networks(cell: CellResults) -> list[dict[str, Any]]:
    """Return mean greedy returns in training, of the best and the last network of each kind.

    There are none for a cell without quantisation-aware trainings.
    """
    columns = cell.cell.columns
    if not any(column.runs[0].quantization for column in columns):
        return []
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    firsts = {result.sidecar.run_id: result.sidecar.quantized_from for result in cell.results}
    for column in columns:
        ids = tuple(run.run_id for run in column.runs)
        lines = [
            cell.curves[run_id].line("greedy_return").loc[firsts[run_id] :]
            for run_id in ids
            if run_id in cell.curves and run_id in firsts
        ]
        if len(lines) == len(ids) and all(map(len, lines)):
            best, last = fmean(line.max() for line in lines), fmean(line.iloc[-1] for line in lines)
            rows.setdefault(ids, {"label": column.label, "best": best, "last": last})
    return list(rows.values())


def blamed(workspace: Workspace, cell: CellResults) -> pd.DataFrame | None:
    """Return the table of `quarl blame` on a cell's first training, if it is of its network."""
    if not cell.references:
        return None
    reference = cell.references[0].sidecar
    columns = [*(f.name for f in fields(Blame)[1:]), "gain_low", "gain_high", "gain_alike"]
    try:
        table = pd.read_csv(blame_path(workspace.artifact(reference.run_id, REFERENCE)))
        table = table.astype(dict.fromkeys(columns, float))
        networks = set(table["network_sha256"])
    except (OSError, KeyError, ValueError):  # Missing, or not such a table.
        return None
    return table if networks == {reference.network_sha256} else None


def blame_rows(workspace: Workspace, cell: CellResults) -> list[dict[str, Any]]:
    """Return the rows of `blamed`, with the gain of the layers that have one as an interval."""
    table = blamed(workspace, cell)
    rows: list[dict[str, Any]] = [] if table is None else table.to_dict("records")
    for row in rows:
        values = [row[name] for name in ("gain", "gain_low", "gain_high", "gain_alike")]
        row["gain"] = None if isnan(row["gain"]) else Interval(*values)
    return rows


def memory_rows(workspace: Workspace, cells: Sequence[CellResults]) -> list[list[dict[str, Any]]]:
    """Measure the native flatbuffers of each cell, and compare them with fp32.

    Sizes are means over the trainings of a column; there are none if a flatbuffer is missing.
    """
    measure = cache(memory.measure)  # Cells may share their references.
    memories = []
    for cell in cells:
        rows: list[dict[str, Any]] = []
        for column, row in enumerate(cell.rows):
            if not row.native:
                continue
            statuses = {str(t.run_id): t.status for t in cell.trainings_of(column)}
            paths = {run_id: workspace.artifact(run_id, row.scheme) for run_id in statuses}
            # Only the hash of a flatbuffer may have been kept.
            missing = [k for k, path in paths.items() if statuses[k] != OK or not path.exists()]
            sizes = [] if missing else [measure(path) for path in paths.values()]
            means = {key: fmean(size[key] for size in sizes) for key in (*sizes, {})[0]}
            reference = (rows[0]["bytes"] if rows and means else None) or {}
            change = {key: 100 * (means[key] - size) / size for key, size in reference.items()}
            status = f"missing in {', '.join(missing)}" if missing else OK
            names = {"cell": row.cell, "label": row.label, "scheme": row.scheme, "status": status}
            rows.append(names | {"bytes": means or None, "change_percent": change or None})
        memories.append(rows)
    return memories
