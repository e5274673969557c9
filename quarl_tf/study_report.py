"""Report on a study: one page with a table, a figure and the curves of every cell.

A precision that lacks one of its trainings has no figures of its own, only the word "missing": the
mean of those that happen to be there is never shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from quarl_tf import memory, plots
from quarl_tf.errors import QuarlError
from quarl_tf.plots import Curve, Plot, PrecisionCurves, PrecisionPanel, PrecisionPoint
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
from quarl_tf.spec import REFERENCE, Quantization, Run
from quarl_tf.statistics import Interval
from quarl_tf.study import Cell, Precision, State, Status, Study, plan, telling_settings
from quarl_tf.wording import dtypes, notes_on, percent

#: What Li published of memory before and after quantisation-aware training, by game.
_MEMORY_BY_LI = {"CartPole": (1197, 1136), "LunarLander": (1504, 1447)}


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
        The path of index.html. The same files in give the same bytes out, but for the memory of
        processes, which is measured anew.

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
    if study.memory:
        measured = [_memory_rows(workspace, result) for result in cells]
        results["memory"] = [row for rows in measured for row in rows]
        context["memory"] = measured
        context["memory_by_li"] = [_memory_by_li(result.cell) for result in cells]
    write_json(folder / "results.json", results)
    flat = [row | {"weight_dtypes": dtypes(row["weight_dtypes"])} for row in rows]
    write_csv(folder / "results.csv", flat)
    overview = dict(_overview_figures(study, cells, loader.runs))
    figures = overview | dict(_cell_figures(study, cells))
    context["overview"] = list(overview)
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


# Memory.


def _memory_rows(workspace: Workspace, result: _CellResults) -> list[dict[str, Any]]:
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


def _memory_row(workspace: Workspace, cell: Cell, column: _Column) -> dict[str, Any]:
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


def _memory_by_li(cell: Cell) -> str:
    """Write what Li published of a game's memory; nothing for other games."""
    published = _MEMORY_BY_LI.get(cell.env_id.partition("-")[0])
    if published is None or cell.algo != "dqn":
        return ""
    before, after = published
    return f"{percent(100 * (after - before) / before)} ({before} before, {after} after)"


# Figures.


def _overview_figures(
    study: Study, cells: Sequence[_CellResults], runs: Mapping[str, LoadedRun]
) -> Iterator[tuple[str, Plot]]:
    """Yield the figures of more than one cell."""
    panels = [
        PrecisionPanel(
            result.cell.title,
            [_point(one) for one in result.columns],
            None if result.chance is None else result.chance.mean,
        )
        for result in cells
    ]
    yield "reward_against_precision.png", plots.reward_against_precision(panels, study.name)
    for algo, env_id in dict.fromkeys((cell.algo, cell.env_id) for cell in study.cells):
        alike = [cell for cell in study.cells if (cell.algo, cell.env_id) == (algo, env_id)]
        precisions = _precision_curves(alike, runs)
        drawn = sum(bool(one.curves) for one in precisions)
        if drawn >= 2 and len(precisions) <= plots.MOST_PRECISIONS:
            file = f"action_variance_{algo}_{env_id.replace('/', '_')}.png"
            yield file, plots.action_variance(precisions, f"{algo} on {env_id}")


def _cell_figures(study: Study, cells: Sequence[_CellResults]) -> Iterator[tuple[str, Plot]]:
    for number, result in enumerate(cells, start=1):
        curves, title = _curves(result), result.cell.title
        file = f"{number}_learning_curves.png"
        if study.x == "episodes":
            precisions = _counted(curves, len(result.cell.seeds))
            if any(one.curves for one in precisions):
                yield file, plots.reward_trend(precisions, title)
        elif curves:
            yield file, plots.learning_curves(curves, title)


def _counted(curves: Mapping[str, Sequence[Curve]], seeds: int) -> list[PrecisionCurves]:
    """Return curves by precision; none of one that lacks a seed, or in which none were counted."""
    return [
        PrecisionCurves(
            heading,
            any(curve.delay is not None for curve in several),
            several if len(several) == seeds and _all_counted(several) else [],
        )
        for heading, several in curves.items()
    ]


def _all_counted(curves: Sequence[Curve]) -> bool:
    return all(curve.episodes is not None for curve in curves)


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


def _precision_curves(
    cells: Sequence[Cell], runs: Mapping[str, LoadedRun]
) -> list[PrecisionCurves]:
    """Return the curves of cells of the same algorithm and environment, plain ones first.

    There are none unless every training that is there recorded its action variance.
    """
    # Cells may share plain trainings, which come once.
    trainings: dict[tuple[bool, str], set[str]] = {}
    for cell in cells:
        for quantization in (None, *cell.quantizations):
            key = quantization is not None, _training_label(cell, quantization, cells)
            run_ids = {cell.run(seed, quantization).run_id for seed in cell.seeds}
            trainings.setdefault(key, set()).update(run_ids)
    precisions = []
    for (quantised, label), run_ids in sorted(trainings.items(), key=lambda item: item[0][0]):
        there = [runs[run_id].curve for run_id in sorted(run_ids) if run_id in runs]
        curves = [c for c in there if c is not None and np.isfinite(c.action_variance).any()]
        if len(curves) < len(there):
            return []
        complete = len(curves) == len(run_ids)
        precisions.append(PrecisionCurves(label, quantised, curves if complete else []))
    return precisions


def _training_label(cell: Cell, quantization: Quantization | None, cells: Sequence[Cell]) -> str:
    """Name trainings, with what tells them from those of other cells."""
    if quantization is None:
        name = "layer norm" if cell.overrides.get("layer_norm") else REFERENCE
        settings = [_without(one.overrides, "layer_norm") for one in cells]
        telling = telling_settings(_without(cell.overrides, "layer_norm"), settings)
    else:
        aware = [one for one in cells if one.quantizations]
        delays = {each.delay for one in aware for each in one.quantizations}
        name = f"QAT {quantization.bits} bits"
        name += f" from {quantization.delay:,}" if len(delays) > 1 else ""
        settings = [{**one.overrides, **one.options} for one in aware]
        telling = telling_settings({**cell.overrides, **cell.options}, settings)
    return f"{name} ({telling})" if telling else name


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
