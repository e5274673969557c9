"""Choose and draw the figures of a report from its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from quarl_tf.report import figures
from quarl_tf.report.figures import Curve, Panel, Point
from quarl_tf.report.results import OK, Cell, CellResults
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import REFERENCE, Run
from quarl_tf.store.workspace import Workspace

#: Cells up to which a report draws single episodes and weights.
_MOST_DETAILED = 3


@dataclass(frozen=True)
class Picture:
    """A figure of a report.

    Attributes:
        kind: What it shows; the templates have a caption for each kind.
        cell: Number of its cell from 1 on; 0 for what compares cells, or if there is only one.
    """

    kind: str
    cell: int
    figure: Figure
    what: str = ""

    @property
    def file(self) -> str:
        """Return the name of its file."""
        parts = [str(self.cell) if self.cell else "", self.kind, self.what]
        return "_".join(part for part in parts if part) + ".png"


def draw(workspace: Workspace, cells: Sequence[CellResults], x: str) -> Iterator[Picture]:
    """Yield the figures of a report.

    Args:
        workspace: Where the flatbuffers are.
        cells: The results.
        x: "step" or "episodes", what returns in training are drawn against.
    """
    only = len(cells) == 1
    panels = [_panel(cell) for cell in cells]
    if any(len(panel.points) > 1 for panel in panels):
        yield Picture("return_against_bits", 0, figures.return_against_bits(panels))
    for task in dict.fromkeys(cell.cell.task for cell in cells):
        groups = _trainings_of_task([cell for cell in cells if cell.cell.task == task])
        drawn = [curves for curves in groups.values() if curves]
        if (
            len(drawn) >= 2
            and len(groups) <= figures.MOST_LINES
            and _all_have(drawn, "action_variance")
        ):
            columns = {"action_variance": "action variance", "greedy_return": "greedy return"}
            figure = figures.mean_curves(groups, columns, "step", task)
            yield Picture("action_variance", 0, figure, task.replace(" on ", "_").replace("/", "_"))
    for number, cell in enumerate(cells, start=0 if only else 1):
        if len(cells) <= _MOST_DETAILED:
            yield from _detailed(workspace, cell, number)
        groups = {_training(cell.cell, runs[0]): _curves(cell, runs) for runs in _runs(cell.cell)}
        drawn = [curves for curves in groups.values() if curves]
        if x == "episodes" and drawn and _all_have(drawn, x):
            columns = {"episode_return": "return per episode"}
            figure = figures.mean_curves(groups, columns, x, cell.cell.title)
            yield Picture("return_against_episodes", number, figure)
        elif there := _there(cell):
            yield Picture(
                "learning_curves", number, figures.learning_curves(there, cell.cell.title)
            )


def _panel(cell: CellResults) -> Panel:
    points = []
    columns = cell.cell.columns
    for place, (column, row) in enumerate(zip(columns, cell.rows, strict=True)):
        means = [one.return_mean for one in cell.trainings[place :: len(columns)]]
        known = tuple(mean for mean in means if mean is not None)
        points.append(Point(column.scheme, row.delay, row.returns, known))
    baseline = None if cell.baseline is None else cell.baseline.mean
    return Panel(cell.cell.title, cell.cell.task, points, baseline)


def _detailed(workspace: Workspace, cell: CellResults, number: int) -> Iterator[Picture]:
    pairs = {}
    for column, row in list(zip(cell.cell.columns, cell.rows, strict=True))[1:]:
        if row.status == OK:
            results = [
                one.results[run.run_id, column.scheme.name]
                for one, run in zip(cell.replicates, column.runs, strict=True)
            ]
            other = np.concatenate([one.evaluation.returns for one in results])
            reference = np.concatenate([one.evaluation.returns for one in cell.references])
            pairs[column.label] = (reference, other)
    if pairs:
        yield Picture("paired_returns", number, figures.paired_returns(pairs, cell.cell.title))
    run_id = cell.cell.references[0].run_id
    path = workspace.artifact(run_id, REFERENCE)
    # Only its hash may have been kept.
    layers = flatbuffer.weights(path.read_bytes()) if cell.references and path.exists() else {}
    if layers:
        figure = figures.weight_histograms(layers, f"fp32 weights of {run_id}")
        yield Picture("weight_histograms", number, figure)


def _runs(cell: Cell) -> list[tuple[Run, ...]]:
    """Return the trainings of a cell, those that differ in their seeds together."""
    return list({_ids(column.runs): column.runs for column in cell.columns}.values())


def _ids(runs: Sequence[Run]) -> tuple[str, ...]:
    return tuple(run.run_id for run in runs)


def _training(cell: Cell, run: Run) -> str:
    """Name a training, with the delay where the cell has several."""
    quantization = run.quantization
    if quantization is None:
        return REFERENCE
    delays = {one[0].quantization.delay for one in _runs(cell) if one[0].quantization}
    return f"{quantization.bits} bits" + (
        f" from {quantization.delay:,}" if len(delays) > 1 else ""
    )


def _curves(cell: CellResults, runs: Sequence[Run]) -> list[Curve]:
    """Return the curves of trainings; none if one is missing."""
    curves = [cell.curves[run.run_id] for run in runs if run.run_id in cell.curves]
    return curves if len(curves) == len(runs) else []


def _there(cell: CellResults) -> dict[str, list[Curve]]:
    """Return all curves of a cell that are there, by how it was trained."""
    found = {
        _training(cell.cell, runs[0]): [
            cell.curves[run.run_id] for run in runs if run.run_id in cell.curves
        ]
        for runs in _runs(cell.cell)
    }
    return {name: curves for name, curves in found.items() if curves}


def _trainings_of_task(cells: Sequence[CellResults]) -> dict[str, list[Curve]]:
    """Return the curves of all trainings of a task; cells may share those in full precision."""
    sharing: dict[tuple[str, ...], list[CellResults]] = {}
    trainings = {}
    for cell in cells:
        for runs in _runs(cell.cell):
            sharing.setdefault(_ids(runs), []).append(cell)
            trainings[_ids(runs)] = runs
    groups = {}
    for ids, runs in sorted(
        trainings.items(), key=lambda item: item[1][0].quantization is not None
    ):
        cell, *others = sharing[ids]
        name = _training(cell.cell, runs[0])
        telling = "" if others else cell.cell.telling
        groups[f"{name} ({telling})" if telling else name] = _curves(cell, runs)
    return groups


def _all_have(groups: Sequence[Sequence[Curve]], column: str) -> bool:
    return all(curve.has(column) for curves in groups for curve in curves)
