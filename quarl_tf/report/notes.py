"""Collect what a report shows beside a cell's rows: notes, last networks and memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from quarl_tf.evaluation import compare, memory
from quarl_tf.evaluation.compare import MIN_EPISODES
from quarl_tf.report.results import OK, CellResults, Row
from quarl_tf.spec import Run
from quarl_tf.store.workspace import Workspace


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
        if game.get("sticky_actions") and len(set(returns)) == 1 and len(returns) >= MIN_EPISODES:
            yield {"key": "one_return", "run": run_id, "value": returns[0]}
        random = reference.baseline
        if random is not None and compare.is_as_random(reference.evaluation, random):
            yield {"key": "as_random", "run": run_id}
    seeds, bits = set(), dict[int, None]()
    trained_on = {fp32.sidecar.run_id: fp32.sidecar.trained_on for fp32 in cell.references}
    for result in cell.results:
        run = Run.from_dict(result.sidecar.run)
        if run.quantization is not None:
            seeds.add(run.seed)
            if result.sidecar.trained_on != trained_on[run.plain.run_id]:
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


def memory_rows(workspace: Workspace, cells: Sequence[CellResults]) -> list[list[dict[str, Any]]]:
    """Measure the native flatbuffers of each cell, and compare them with fp32."""
    measure = cache(memory.measure)  # Cells may share their references.
    memories = []
    for cell in cells:
        rows = [
            _memory_row(workspace, row, cell.trainings_of(column), measure)
            for column, row in enumerate(cell.rows)
            if row.native
        ]
        reference = rows[0]["bytes"]
        for row in rows[1:]:
            if reference and row["bytes"]:
                row["change_percent"] = {
                    key: 100 * (size - reference[key]) / reference[key]
                    for key, size in row["bytes"].items()
                }
        memories.append(rows)
    return memories


def _memory_row(
    workspace: Workspace,
    pooled: Row,
    trainings: Sequence[Row],
    measure: Callable[[Path], dict[str, int]],
) -> dict[str, Any]:
    """Return the mean over the trainings of a column; no figures if a flatbuffer is missing."""
    paths = {str(row.run_id): workspace.artifact(str(row.run_id), row.scheme) for row in trainings}
    missing = [str(row.run_id) for row in trainings if row.status != OK]
    # Only the hash of a flatbuffer may have been kept.
    missing += [run_id for run_id, path in paths.items() if not path.exists()]
    status = f"missing in {', '.join(dict.fromkeys(missing))}" if missing else OK
    row = {"cell": pooled.cell, "label": pooled.label, "scheme": pooled.scheme, "status": status}
    sizes = [] if missing else [measure(path) for path in paths.values()]
    means = {key: fmean(size[key] for size in sizes) for key in (*sizes, {})[0]}
    return row | {"bytes": means or None, "change_percent": None}
