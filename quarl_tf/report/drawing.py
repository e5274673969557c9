"""Choose and draw the figures of a report."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from quarl_tf.evaluation.aggregate import Aggregate
from quarl_tf.report.figures import curves, layers, returns
from quarl_tf.report.figures.curves import Curve
from quarl_tf.report.notes import blamed
from quarl_tf.report.results import OK, CellResults, Result
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import REFERENCE, Run
from quarl_tf.store.workspace import Workspace

#: Largest number of cells of a report that draws single episodes and weights.
_MOST_DETAILED = 3


class Picture(NamedTuple):
    """A figure of a report."""

    kind: str  #: Selects its caption.
    cell: int  #: From 1 on, or 0 for what compares cells or if there is only one.
    figure: Figure
    suffix: str = ""  #: Tells figures of one kind apart.

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return "_".join(filter(None, (str(self.cell or ""), self.kind, self.suffix))) + ".png"


def draw(
    workspace: Workspace, cells: Sequence[CellResults], aggregates: Sequence[Aggregate], x: str
) -> Iterator[Picture]:
    """Yield the figures of a report, with learning curves against `x`, a column of theirs."""
    if any(len(cell.rows) > 1 for cell in cells):
        yield Picture("return_against_bits", 0, returns.return_against_bits(cells))
    if aggregates:
        kept = {aggregate.scheme: 100 - np.array(aggregate.errors) for aggregate in aggregates}
        yield Picture("performance_profile", 0, returns.performance_profile(kept))
    for task in dict.fromkeys(cell.cell.task for cell in cells):
        groups = _groups([cell for cell in cells if cell.cell.task == task])
        comparable = sum(map(bool, groups.values())) > 1 and len(groups) <= curves.MOST_LINES
        if comparable and _all_have(groups, "action_variance"):
            figure = curves.mean_curves(groups, curves.VARIANCE, "step", task)
            yield Picture("action_variance", 0, figure, task.replace(" on ", "_").replace("/", "_"))
    for number, cell in enumerate(cells, start=0 if len(cells) == 1 else 1):
        if len(cells) <= _MOST_DETAILED:
            yield from _detailed(workspace, cell, number)
        groups = _groups([cell])
        if any(groups.values()):
            axis = x if _all_have(groups, x) else "step"
            kind = "learning_curves" if axis == "step" else f"return_against_{axis}"
            figure = curves.mean_curves(groups, curves.RETURNS, axis, cell.cell.title)
            yield Picture(kind, number, figure)


def _detailed(workspace: Workspace, cell: CellResults, number: int) -> Iterator[Picture]:
    """Yield the figures of single episodes, and of the layers of the first training."""
    pairs = {}
    reference_returns = [fp32.evaluation.returns for fp32 in cell.references]
    for row, entries in list(zip(cell.rows, zip(*cell.entries, strict=True), strict=True))[1:]:
        if row.status == OK:
            scheme_returns = [e.evaluation.returns for e in entries if isinstance(e, Result)]
            pairs[row.label] = np.concatenate(reference_returns), np.concatenate(scheme_returns)
    if pairs:
        yield Picture("paired_returns", number, returns.paired_returns(pairs, cell.cell.title))
    if not cell.references:
        return
    run_id = cell.references[0].sidecar.run_id
    path = workspace.artifact(run_id, REFERENCE)
    # Only its hash may have been kept.
    if path.exists() and (kernels := flatbuffer.weights(path.read_bytes())):
        figure = layers.weight_histograms(kernels, f"fp32 weights of {run_id}")
        yield Picture("weight_histograms", number, figure)
    if (table := blamed(workspace, cell)) is not None:
        figure = layers.blamed_layers(table, f"int8 of {run_id}, layer by layer")
        yield Picture("blamed_layers", number, figure)


def _groups(cells: Sequence[CellResults]) -> dict[str, list[Curve]]:
    """Return the curves of cells, grouped by what differs in the seed alone, fp32 first.

    A group that lacks a training is empty. Cells may share their references.
    """
    trainings: dict[tuple[str, ...], tuple[Run, list[CellResults]]] = {}
    for cell in cells:
        for runs in {column.runs[0].run_id: column.runs for column in cell.cell.columns}.values():
            ids = tuple(run.run_id for run in runs)
            trainings.setdefault(ids, (runs[0], []))[1].append(cell)
    groups = {}
    plain_first = sorted(trainings.items(), key=lambda item: bool(item[1][0].quantization))
    for ids, (run, cells_of_run) in plain_first:
        cell, name = cells_of_run[0], REFERENCE
        if run.quantization is not None:
            quantizations = (column.runs[0].quantization for column in cell.cell.columns)
            delays = {quantization.delay for quantization in quantizations if quantization}
            suffix = f" from {run.quantization.delay:,}" if len(delays) > 1 else ""
            name = f"{run.quantization.bits} bits{suffix}"
        if cell.cell.distinction and len(cells) > 1 and len(cells_of_run) == 1:
            name += f" ({cell.cell.distinction})"
        for run_id in ids:  # Of other settings or seeds.
            name += f" ({run_id})" if name in groups else ""
        complete = all(run_id in cell.curves for run_id in ids)
        groups[name] = [cell.curves[run_id] for run_id in ids] if complete else []
    return groups


def _all_have(groups: dict[str, list[Curve]], column: str) -> bool:
    return all(curve.has(column) for group in groups.values() for curve in group)
