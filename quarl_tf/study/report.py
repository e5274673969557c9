"""Report on a study: one page with a table, a figure and the curves of every cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from quarl_tf.evaluation import memory
from quarl_tf.evaluation.compare import CONFIDENCE
from quarl_tf.foundation.files import write_csv, write_json
from quarl_tf.report.pages import provenance, write_pages
from quarl_tf.report.results import OK, Row
from quarl_tf.report.wording import dtypes
from quarl_tf.store.workspace import Workspace
from quarl_tf.study import Cell, Precision, Study
from quarl_tf.study.figures import cell_figures, overview_figures
from quarl_tf.study.results import CellResults, Column, Loader, cell_results


def write_study_report(
    workspace: Workspace, study: Study, *, margin_percent: float, command: str, remedy: str
) -> Path:
    """Write `reports/<study>/`: index.html, report.md, figures/, results.csv and results.json.

    Args:
        workspace: Where the study's runs are and the report goes.
        study: The study.
        margin_percent: Loss that does not matter, in percent of the fp32 return.
        command: Command line that makes this report, shown in it.
        remedy: Command line that makes what is missing, as it made what is there.

    Returns:
        The path of index.html. The same files in give the same bytes out, but for the memory of
        processes, which is measured anew.

    Raises:
        QuarlError: A file cannot be read or written.
    """
    loader = Loader(workspace, study, margin_percent)
    cells = [cell_results(cell, study, loader) for cell in study.cells]
    missing = [
        {"run_id": run_id, "scheme": scheme, "reason": reason}
        for (run_id, scheme), reason in loader.missing.items()
    ]
    context = {
        "study": study,
        "cells": cells,
        "matrix": _matrix(cells),
        "schemes": [one.precision.scheme.name for cell in cells for one in cell.columns],
        "missing": missing,
        "tasks": dict.fromkeys(cell.task for cell in study.cells),
        "total": len(loader.statuses),
        "margin": f"{margin_percent:g} %",
        "command": command,
        "remedy": remedy,
        "provenance": provenance(list(loader.runs.values())),
        "fewest_episodes": study.episodes,
    }
    folder = workspace.report_dir(study.name)
    columns = [(result.cell, column) for result in cells for column in result.columns]
    rows = [_values(cell, one.precision, row) for cell, one in columns for row in one.rows]
    pooled = [_values(cell, one.precision, one.pooled) for cell, one in columns]
    results = {"study": study.name, "margin_percent": margin_percent, "confidence": CONFIDENCE}
    results |= {"command": command, "pooled": pooled, "runs": rows, "missing": missing}
    if study.memory:
        measured = [_memory_rows(workspace, result) for result in cells]
        results["memory"] = [row for rows in measured for row in rows]
        context["memory"] = measured
    write_json(folder / "results.json", results)
    flat = [row | {"weight_dtypes": dtypes(row["weight_dtypes"])} for row in rows]
    write_csv(folder / "results.csv", flat)
    overview = dict(overview_figures(study, cells, loader.runs))
    figures = overview | dict(cell_figures(study, cells))
    context["overview"] = list(overview)
    context["captions"] = {file: plot.caption for file, plot in figures.items()}
    pictures = {file: plot.png() for file, plot in figures.items()}
    return write_pages(folder, "study", context, pictures)


def _matrix(cells: Sequence[CellResults]) -> dict[str, Any]:
    """Return the labels of all columns and, for each cell, what stands under them and by chance.

    Where two schemes of a training share a label, the native one stands there if it is evaluated.
    """
    labels = list(dict.fromkeys(one.precision.label for c in cells for one in c.columns))
    lines = [
        {
            "title": result.cell.title,
            "chance": None if result.chance is None else result.chance.mean,
            "rows": [_shown(result, label) for label in labels],
        }
        for result in cells
    ]
    return {"labels": labels, "lines": lines}


def _shown(result: CellResults, label: str) -> Row | None:
    found = [one.pooled for one in result.columns if one.precision.label == label]
    return next((row for row in found if row.status == OK), next(iter(found), None))


def _values(cell: Cell, precision: Precision, row: Row) -> dict[str, Any]:
    quantization = precision.quantization
    return {
        "cell": cell.title,
        "precision": precision.label,
        "bits": None if quantization is None else quantization.bits,
        "delay": None if quantization is None else quantization.delay,
        **asdict(row),
    }


def _memory_rows(workspace: Workspace, result: CellResults) -> list[dict[str, Any]]:
    """Measure the flatbuffers of a cell and compare them with fp32.

    Simulated schemes are left out: theirs take what fp32 does, not what they stand for.
    """
    native = [column for column in result.columns if column.precision.scheme.native]
    rows = [_memory_row(workspace, result.cell, column) for column in native]
    reference = rows[0]["bytes"]
    for row in rows[1:]:
        if reference and row["bytes"]:
            row["change_percent"] = {
                what: 100 * (size - reference[what]) / reference[what]
                for what, size in row["bytes"].items()
            }
    return rows


def _memory_row(workspace: Workspace, cell: Cell, column: Column) -> dict[str, Any]:
    """Return the mean over the trainings of a column; no figures if a flatbuffer is not there."""
    paths = {
        row.seed: workspace.artifact(str(row.run_id), row.scheme)
        for row in column.rows
        if row.status == OK
    }
    # A large flatbuffer need not be kept once it was evaluated.
    kept = {seed: path for seed, path in paths.items() if path.exists()}
    absent = [str(seed) for seed in cell.seeds if seed not in kept]
    row: dict[str, Any] = {
        "cell": cell.title,
        "precision": column.precision.label,
        "scheme": column.precision.scheme.name,
        "status": f"missing: seed {', '.join(absent)}" if absent else OK,
        "bytes": None,
        "change_percent": None,
    }
    if not absent:
        measured = [asdict(memory.measure(path)) for path in kept.values()]
        row["bytes"] = {what: fmean(one[what] for one in measured) for what in measured[0]}
    return row
