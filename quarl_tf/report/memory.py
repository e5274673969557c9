"""Line up the memory that the native flatbuffers of a cell take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from quarl_tf.evaluation import memory
from quarl_tf.report.results import OK, CellResults, Row
from quarl_tf.store.workspace import Workspace


def memory_rows(workspace: Workspace, cell: CellResults) -> list[dict[str, Any]]:
    """Measure the flatbuffers of a cell and compare them with fp32.

    Simulated schemes are left out: theirs take what fp32 does, not what they stand for.
    """
    count = len(cell.rows)
    rows = [
        _memory_row(workspace, row, cell.trainings[place::count])
        for place, row in enumerate(cell.rows)
        if row.native
    ]
    reference = rows[0]["bytes"]
    for row in rows[1:]:
        if reference and row["bytes"]:
            row["change_percent"] = {
                what: 100 * (size - reference[what]) / reference[what]
                for what, size in row["bytes"].items()
            }
    return rows


def _memory_row(workspace: Workspace, pooled: Row, trainings: Sequence[Row]) -> dict[str, Any]:
    """Return the mean over the trainings of a column; no figures if a flatbuffer is not there."""
    paths = {str(row.run_id): workspace.artifact(str(row.run_id), row.scheme) for row in trainings}
    absent = [row.run_id for row in trainings if row.status != OK]
    # Only the hash of a flatbuffer may have been kept.
    absent += [run_id for run_id, path in paths.items() if not path.exists()]
    row: dict[str, Any] = {"cell": pooled.cell, "label": pooled.label, "scheme": pooled.scheme}
    row |= {"status": OK, "bytes": None, "change_percent": None}
    if absent:
        return row | {"status": f"missing in {', '.join(map(str, dict.fromkeys(absent)))}"}
    measured = [asdict(memory.measure(path)) for path in paths.values()]
    return row | {"bytes": {what: fmean(one[what] for one in measured) for what in measured[0]}}
