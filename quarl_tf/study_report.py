"""Report on a study: one page with a table, a figure and the curves of every cell.

A precision that lacks one of its trainings has no figures of its own, only the word "missing": the
mean of those that happen to be there is never shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quarl_tf import plots
from quarl_tf.errors import QuarlError
from quarl_tf.plots import Curve, Plot, PrecisionPanel, PrecisionPoint
from quarl_tf.records import Workspace, write_csv, write_json
from quarl_tf.report import provenance, unseen_percent, write_pages
from quarl_tf.results import (
    OK,
    LoadedRun,
    Row,
    chance_interval,
    common_protocol,
    fewest_episodes,
    load_run,
    pooled_row,
    run_row,
)
from quarl_tf.spec import REFERENCE, Run
from quarl_tf.statistics import Interval
from quarl_tf.study import Cell, Precision, State, Status, Study, plan
from quarl_tf.wording import dtypes, notes_on


@dataclass(frozen=True)
class _Column:
    """One precision of a cell.

    Attributes:
        rows: A line for each seed.
        pooled: Their mean; without figures where a seed is missing.
        runs: The runs of the seeds that are there.
    """

    precision: Precision
    rows: list[Row]
    pooled: Row
    runs: list[LoadedRun]


@dataclass(frozen=True)
class _CellResults:
    """A cell with its results.

    Attributes:
        options: How its trainings are quantised, beside bits and delays.
        episodes: Episodes per flatbuffer.
        protocol: The rules that they were played by; none where nothing was played.
        notes: What the reader must know before believing the results.
        chance: Return of the random policy, if every seed has it.
    """

    cell: Cell
    columns: list[_Column]
    options: dict[str, str]
    episodes: int
    protocol: dict[str, str]
    notes: list[str]
    chance: Interval | None


class _Loader:
    """The results of a study's experiments, each run loaded once."""

    def __init__(self, workspace: Workspace, study: Study, margin_percent: float) -> None:
        self._workspace, self._margin, self._episodes = workspace, margin_percent, study.episodes
        self.statuses = {
            (one.experiment.run.run_id, one.experiment.scheme.name): one
            for one in plan(workspace, study)
        }
        self.runs: dict[str, LoadedRun] = {}
        #: Run id and scheme of an experiment without a result, to why.
        self.missing: dict[tuple[str, str], str] = {}
        for key, one in self.statuses.items():
            if (reason := self._reason(one)) is not None:
                self.missing[key] = reason

    def _reason(self, status: Status) -> str | None:
        run, scheme = status.experiment.run, status.experiment.scheme.name
        if status.state != State.EVALUATED:
            return {
                State.MISSING: "was not trained",
                State.TRAINED: "was not exported",
                State.EXPORTED: "was not evaluated",
                State.FAILED: f"failed: {status.reason}",
            }[status.state]
        if self.statuses[run.plain.run_id, REFERENCE].state != State.EVALUATED:
            return f"has nothing to compare with: fp32 of {run.plain.run_id} is missing"
        try:
            loaded = self._load(run)
        except QuarlError as error:
            return str(error)
        return loaded.missing[scheme].reason if scheme in loaded.missing else None

    def _load(self, run: Run) -> LoadedRun:
        if run.run_id not in self.runs:
            # Others may be damaged, which is their own misfortune.
            names = [
                scheme
                for (run_id, scheme), one in self.statuses.items()
                if run_id == run.run_id and one.state == State.EVALUATED
            ]
            self.runs[run.run_id] = load_run(
                self._workspace, run.run_id, names, self._margin, episodes=self._episodes
            )
        return self.runs[run.run_id]


def write_study_report(
    workspace: Workspace, study: Study, *, margin_percent: float, command: str, remedy: str
) -> Path:
    """Write `reports/<study>/`: index.html, report.md, figures/, results.csv and results.json.

    Args:
        workspace: Where the study's runs are and the report goes.
        study: The study.
        margin_percent: Loss that does not matter, in percent of the fp32 return.
        command: Command line that makes this report, shown in it.
        remedy: Command line that makes what is missing.

    Returns:
        The path of index.html. The same files in give the same bytes out.

    Raises:
        QuarlError: A file cannot be read or written.
    """
    loader = _Loader(workspace, study, margin_percent)
    cells = [_cell_results(cell, study, loader) for cell in study.cells]
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
        "total": len(loader.statuses),
        "margin": f"{margin_percent:g} %",
        "command": command,
        "remedy": remedy,
        "provenance": provenance(list(loader.runs.values())),
        "unseen_percent": unseen_percent(study.episodes),
    }
    folder = workspace.report_dir(study.name)
    columns = [(result.cell, column) for result in cells for column in result.columns]
    rows = [_values(cell, one.precision, row) for cell, one in columns for row in one.rows]
    pooled = [_values(cell, one.precision, one.pooled) for cell, one in columns]
    results = {"study": study.name, "margin_percent": margin_percent, "confidence": 0.95}
    results |= {"command": command, "pooled": pooled, "runs": rows, "missing": missing}
    write_json(folder / "results.json", results)
    flat = [row | {"weight_dtypes": dtypes(row["weight_dtypes"])} for row in rows]
    write_csv(folder / "results.csv", flat)
    figures = dict(_figures(study, cells))
    context["captions"] = {file: plot.caption for file, plot in figures.items()}
    pictures = {file: plot.png() for file, plot in figures.items()}
    return write_pages(folder, "study", context, pictures)


def _cell_results(cell: Cell, study: Study, loader: _Loader) -> _CellResults:
    columns = [_column(cell, precision, loader) for precision in cell.precisions()]
    plain = [cell.run(seed, None).run_id for seed in cell.seeds]
    references = [loader.runs[run_id] for run_id in plain if run_id in loader.runs]
    runs = list({run.run_id: run for column in columns for run in column.runs}.values())
    return _CellResults(
        cell=cell,
        columns=columns,
        options=_options(cell),
        episodes=fewest_episodes(runs) if runs else study.episodes,
        protocol=common_protocol(runs) if runs else {},
        notes=notes_on(runs) if runs else [],
        chance=chance_interval(references) if len(references) == len(plain) else None,
    )


def _options(cell: Cell) -> dict[str, str]:
    """Return how a cell's trainings are quantised; all values of what differs between them."""
    values: dict[str, list[str]] = {}
    for quantization in cell.quantizations:
        for name, value in asdict(quantization).items():
            values.setdefault(name, []).append(str(value))
    return {
        name: ", ".join(dict.fromkeys(several))
        for name, several in values.items()
        if name not in ("bits", "delay")
    }


def _column(cell: Cell, precision: Precision, loader: _Loader) -> _Column:
    scheme = precision.scheme
    rows, runs = [], []
    for seed in cell.seeds:
        run = cell.run(seed, precision.quantization)
        reason = loader.missing.get((run.run_id, scheme.name))
        if reason is None:
            runs.append(loader.runs[run.run_id])
            rows.append(run_row(runs[-1], scheme.name))
        else:
            rows.append(
                Row(
                    run_id=run.run_id,
                    algo=run.algo,
                    env_id=run.env_id,
                    seed=seed,
                    scheme=scheme.name,
                    native=scheme.native,
                    weight_bits=scheme.weight_bits,
                    status=reason,
                )
            )
    pooled = pooled_row(runs, rows)
    absent = ", ".join(str(row.seed) for row in rows if row.status != OK)
    if absent:
        pooled = replace(pooled, status=f"missing: seed {absent}")
    return _Column(precision, rows, pooled, runs)


def _matrix(cells: Sequence[_CellResults]) -> dict[str, Any]:
    """Return the labels of all columns and, for each cell, what stands under them.

    Where two schemes of a training share a label, the simulated one stands there.
    """
    labels = list(dict.fromkeys(one.precision.label for c in cells for one in c.columns))
    lines = [(result.cell.title, [_shown(result, label) for label in labels]) for result in cells]
    return {"labels": labels, "lines": lines}


def _shown(result: _CellResults, label: str) -> Row | None:
    found = [one.pooled for one in result.columns if one.precision.label == label]
    return found[-1] if found else None


def _values(cell: Cell, precision: Precision, row: Row) -> dict[str, Any]:
    quantization = precision.quantization
    return {
        "cell": cell.title,
        "precision": precision.label,
        "bits": None if quantization is None else quantization.bits,
        "delay": None if quantization is None else quantization.delay,
        **asdict(row),
    }


# Figures.


def _figures(study: Study, cells: Sequence[_CellResults]) -> Iterator[tuple[str, Plot]]:
    panels = [
        PrecisionPanel(
            result.cell.title,
            [_point(one) for one in result.columns],
            None if result.chance is None else result.chance.mean,
        )
        for result in cells
    ]
    yield "reward_against_precision.png", plots.reward_against_precision(panels, study.name)
    for number, result in enumerate(cells, start=1):
        curves = _curves(result)
        if curves:
            yield (
                f"{number}_learning_curves.png",
                plots.learning_curves(curves, result.cell.title),
            )


def _point(column: _Column) -> PrecisionPoint:
    row, precision = column.pooled, column.precision
    known = [one for one in column.rows if one.status == OK]
    quantization = precision.quantization
    return PrecisionPoint(
        # Without the delay: that is told by the line.
        label=precision.label if quantization is None else str(quantization.bits),
        scheme=precision.scheme,
        delay=None if quantization is None else quantization.delay,
        returns=row.returns,
        runs=tuple(one.return_mean for one in known if one.return_mean is not None),
    )


def _curves(result: _CellResults) -> dict[str, list[Curve]]:
    """Return the curves of every training of a cell, by how it was trained."""
    several = len({one.delay for one in result.cell.quantizations}) > 1
    panels: dict[str, dict[str, Curve]] = {}
    for column in result.columns:
        quantization = column.precision.quantization
        heading = "full precision"
        if quantization is not None:
            heading = f"{quantization.bits} bits"
            heading += f" from {quantization.delay:,}" if several else ""
        for run, row in zip(column.runs, (r for r in column.rows if r.status == OK), strict=True):
            if run.curve is not None:
                curve = replace(run.curve, label=f"seed {row.seed}")
                panels.setdefault(heading, {})[run.run_id] = curve
    return {heading: list(curves.values()) for heading, curves in panels.items()}
