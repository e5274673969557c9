"""Read what a study's experiments came to, cell by cell.

A precision that lacks one of its trainings has no figures of its own, only the word "missing": the
mean of those that happen to be there is never shown.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from quarl_tf.evaluation.compare import Interval
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.report.results import (
    OK,
    LoadedRun,
    Row,
    blank_row,
    chance_interval,
    common_protocol,
    fewest_episodes,
    load_run,
    pooled_row,
    run_row,
)
from quarl_tf.report.wording import notes_on
from quarl_tf.spec import REFERENCE, Quantization, Run
from quarl_tf.store.workspace import Workspace
from quarl_tf.study import Cell, Precision, State, Status, Study, plan


@dataclass(frozen=True)
class Column:
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
class CellResults:
    """A cell with its results.

    Attributes:
        options: How its trainings are quantised, beside bits and delays.
        episodes: Episodes per flatbuffer.
        protocol: The rules that they were played by; none where nothing was played.
        notes: What the reader must know before believing the results.
        chance: Return of the random policy, if every seed has it.
    """

    cell: Cell
    columns: list[Column]
    options: dict[str, str]
    episodes: int
    protocol: dict[str, str]
    notes: list[str]
    chance: Interval | None


class Loader:
    """The results of a study's experiments, each run loaded once.

    Attributes:
        statuses: How far an experiment is, by run id and scheme.
        runs: The runs of experiments with a result, by id.
        missing: Why an experiment has none, by run id and scheme.
    """

    def __init__(self, workspace: Workspace, study: Study, margin_percent: float) -> None:
        """Load all that is there."""
        self._workspace, self._margin, self._episodes = workspace, margin_percent, study.episodes
        self.statuses = {
            (one.experiment.run.run_id, one.experiment.scheme.name): one
            for one in plan(workspace, study)
        }
        self.runs: dict[str, LoadedRun] = {}
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


def cell_results(cell: Cell, study: Study, loader: Loader) -> CellResults:
    """Return what the experiments of a cell came to."""
    columns = [_column(cell, precision, loader) for precision in cell.precisions()]
    plain = [cell.run(seed, None).run_id for seed in cell.seeds]
    references = [loader.runs[run_id] for run_id in plain if run_id in loader.runs]
    runs = list({run.run_id: run for column in columns for run in column.runs}.values())
    return CellResults(
        cell=cell,
        columns=columns,
        options=_options(cell),
        episodes=fewest_episodes(runs) if runs else study.episodes,
        protocol=common_protocol(runs) if runs else {},
        notes=notes_on(runs) if runs else [],
        chance=chance_interval(references) if len(references) == len(plain) else None,
    )


def _options(cell: Cell) -> dict[str, str]:
    """Return how a cell's trainings are quantised, beside bits and delay."""
    names = [field.name for field in fields(Quantization) if field.name not in ("bits", "delay")]
    return {name: _option(cell, name) for name in names} if cell.quantizations else {}


def _option(cell: Cell, name: str) -> str:
    """Return the value of an option; where it differs between trainings, each with its bits."""
    widths: dict[str, dict[str, None]] = {}
    for one in cell.quantizations:
        widths.setdefault(str(getattr(one, name)), {})[str(one.bits)] = None
    if len(widths) == 1:
        return next(iter(widths))
    return ", ".join(f"{value} at {'/'.join(bits)} bits" for value, bits in widths.items())


def _column(cell: Cell, precision: Precision, loader: Loader) -> Column:
    scheme = precision.scheme
    rows, runs = [], []
    for seed in cell.seeds:
        run = cell.run(seed, precision.quantization)
        reason = loader.missing.get((run.run_id, scheme.name))
        if reason is None:
            runs.append(loader.runs[run.run_id])
            rows.append(run_row(runs[-1], scheme.name))
        else:
            rows.append(replace(blank_row(run, scheme), status=reason))
    pooled = pooled_row(runs, rows)
    absent = ", ".join(str(row.seed) for row in rows if row.status != OK)
    if absent:
        pooled = replace(pooled, status=f"missing: seed {absent}")
    return Column(precision, rows, pooled, runs)
