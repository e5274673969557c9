"""Draw a study: what is compared across its cells, and the trainings of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quarl_tf.report import figures
from quarl_tf.report.figures import Curve, Plot, PrecisionCurves, PrecisionPanel, PrecisionPoint
from quarl_tf.report.results import OK, LoadedRun
from quarl_tf.spec import REFERENCE, Quantization, file_name
from quarl_tf.study import Cell, Study, differing_settings
from quarl_tf.study.results import CellResults, Column

#: Cells from which on those that differ in settings alone share figures.
_COMPARED = 3


def overview_figures(
    study: Study, cells: Sequence[CellResults], runs: Mapping[str, LoadedRun]
) -> Iterator[tuple[str, Plot]]:
    """Yield the figures of more than one cell, each with the name of its file.

    Args:
        study: The study.
        cells: Results of its cells.
        runs: All runs that are there, by id.
    """
    groups = _compared(study, cells)
    if groups:
        yield "reward_by_setting.png", figures.reward_by_setting(_panels(groups), study.title)
    grouped = _grouped(groups)
    if alone := [result for result in cells if id(result) not in grouped]:
        panels = [_panel(result, result.cell.title) for result in alone]
        yield "reward_against_precision.png", figures.reward_against_precision(panels, study.title)
    for task in dict.fromkeys(cell.task for cell in study.cells):
        alike = [cell for cell in study.cells if cell.task == task]
        precisions = _precision_curves(alike, runs)
        drawn = sum(bool(one.curves) for one in precisions)
        if drawn >= 2 and len(precisions) <= figures.MOST_PRECISIONS:
            file = f"action_variance_{_file_name(alike[0])}.png"
            yield file, figures.action_variance(precisions, task)
    for group in groups:
        if curves := _curves_by_setting(group):
            cell = next(iter(group.values())).cell
            file = f"learning_curves_{_file_name(cell)}.png"
            yield file, figures.learning_curves(curves, cell.task)


def cell_figures(study: Study, cells: Sequence[CellResults]) -> Iterator[tuple[str, Plot]]:
    """Yield the figures of one cell each, with the name of the file, which begins by its number."""
    grouped = _grouped(_compared(study, cells))
    for number, result in enumerate(cells, start=1):
        if id(result) in grouped:
            continue
        curves, title = _curves(result), result.cell.title
        file = f"{number}_learning_curves.png"
        if study.x == "episodes":
            precisions = _counted(curves, len(result.cell.seeds))
            if any(one.curves for one in precisions):
                yield file, figures.reward_trend(precisions, title)
        elif curves:
            yield file, figures.learning_curves(curves, title)


#: Results of cells that differ in their settings alone, by what tells them apart.
_Group = Mapping[str, CellResults]


def _compared(study: Study, cells: Sequence[CellResults]) -> list[_Group]:
    """Return the groups of cells that differ in how they are quantised in training alone."""
    if study.x == "episodes":
        return []  # Their figures are drawn by precision.
    tasks: dict[str, list[CellResults]] = {}
    for result in cells:
        if result.cell.quantizations:
            tasks.setdefault(result.cell.task, []).append(result)
    groups = [_by_setting(of_task) for of_task in tasks.values() if _alike(of_task)]
    return [group for group in groups if len(group) >= _COMPARED]


def _alike(results: Sequence[CellResults]) -> bool:
    """Tell whether cells of a task share all but their settings, among it a single delay."""
    first, *others = (
        (cell.overrides, cell.seeds, cell.schemes, {one.delay for one in cell.quantizations})
        for cell in (result.cell for result in results)
    )
    return len(first[-1]) == 1 and all(other == first for other in others)


def _by_setting(results: Sequence[CellResults]) -> _Group:
    """Return cells by their settings; none if some have the same."""
    options = [result.cell.options for result in results]
    names = [differing_settings(one, options) or "defaults" for one in options]
    return dict(zip(names, results, strict=True)) if len(set(names)) == len(names) else {}


def _grouped(groups: Sequence[_Group]) -> set[int]:
    return {id(result) for group in groups for result in group.values()}


def _panels(groups: Sequence[_Group]) -> dict[str, list[PrecisionPanel]]:
    return {
        next(iter(group.values())).cell.task: [
            _panel(result, setting) for setting, result in group.items()
        ]
        for group in groups
    }


def _panel(result: CellResults, title: str) -> PrecisionPanel:
    chance = None if result.chance is None else result.chance.mean
    return PrecisionPanel(title, [_point(one) for one in result.columns], chance)


def _file_name(cell: Cell) -> str:
    return f"{cell.algo}_{file_name(cell.env_id)}"


def _curves_by_setting(group: _Group) -> dict[str, list[Curve]]:
    """Return the curves of every training of a group, plain ones, which all share, once."""
    found: dict[str, list[Curve]] = {}
    for setting, result in group.items():
        for precision, curves in _curves(result).items():
            quantised = any(curve.delay is not None for curve in curves)
            found[f"{setting}\n{precision}" if quantised else precision] = curves
    return found


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


def _point(column: Column) -> PrecisionPoint:
    row, precision = column.pooled, column.precision
    known = [one for one in column.rows if one.status == OK]
    quantization = precision.quantization
    return PrecisionPoint(
        # Without the delay: that is told by the line.
        label=precision.label if quantization is None else str(quantization.bits),
        scheme=precision.scheme,
        delay=None if quantization is None else quantization.delay,
        returns=row.returns,
        training_means=tuple(one.return_mean for one in known if one.return_mean is not None),
    )


def _curves(result: CellResults) -> dict[str, list[Curve]]:
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
        telling = differing_settings(_without(cell.overrides, "layer_norm"), settings)
    else:
        aware = [one for one in cells if one.quantizations]
        delays = {each.delay for one in aware for each in one.quantizations}
        name = f"QAT {quantization.bits} bits"
        name += f" from {quantization.delay:,}" if len(delays) > 1 else ""
        settings = [{**one.overrides, **one.options} for one in aware]
        telling = differing_settings({**cell.overrides, **cell.options}, settings)
    return f"{name} ({telling})" if telling else name


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
