"""Read the records of trainings and line up their results, one row a scheme.

An experiment that is missing, or whose files do not belong together, is kept as such, with the
command that fixes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from quarl_tf.evaluation.aggregate import Aggregate, Paired, aggregate
from quarl_tf.evaluation.compare import (
    Comparison,
    Interval,
    compare,
    effective_n,
    mean_interval,
    mean_of_all,
    pool,
    student_interval,
)
from quarl_tf.presets import settings
from quarl_tf.report.figures.curves import Curve
from quarl_tf.report.figures.style import family
from quarl_tf.spec import BASELINE, GREEDY, REFERENCE, Chance, Run, Scheme
from quarl_tf.store.records import Evaluation, Protocol, Sidecar
from quarl_tf.store.state import baseline, evaluate_command, export_command, state
from quarl_tf.store.workspace import Workspace

#: Run id and scheme.
_Key = tuple[str, str]
_Pair = tuple[Sidecar, Evaluation]

#: Status of a row that has a result.
OK = "ok"

#: Verdicts of what loses no reward that matters.
_KEEPING = ("gain", "within margin")


@dataclass(frozen=True)
class Column:
    """One scheme of a cell, in the training of each seed."""

    label: str
    scheme: Scheme
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is compared with one fp32: columns over the same seeds, that of fp32 first.

    `telling` is what tells it from other cells of the same algorithm and environment.
    """

    title: str
    columns: tuple[Column, ...]
    telling: str = ""
    remark: str = ""

    @property
    def references(self) -> tuple[Run, ...]:
        """Return the trainings whose fp32 all others are compared with, one a seed."""
        return self.columns[0].runs

    @property
    def task(self) -> str:
        """Return what is trained where."""
        return f"{self.references[0].algo} on {self.references[0].env_id}"


@dataclass(frozen=True)
class Missing:
    """An experiment without a result, why, and the command that fixes it."""

    run_id: str
    scheme: str
    reason: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where results are read, and which of them.

    It is the evaluations with this `chance`; `episodes` is the most to take of any,
    behind `skip_episodes` that are left out.
    `known` says, by run id and scheme, why there is known to be no result; `remedy` is the command
    that makes all that is missing, where one does.
    """

    workspace: Workspace
    margin_percent: float
    chance: Chance = GREEDY
    episodes: int | None = None
    skip_episodes: int = 0
    known: Mapping[_Key, str] = field(default_factory=dict)
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A scheme of one training, or without `run_id` of all trainings of a cell; None is unknown.

    Attributes:
        delay: Step from which on a quantisation-aware training was quantised.
        status: "ok", or why there is no result.
        compression: Size of the fp32 flatbuffer over this one's; `speedup` so of latencies.
        action_agreement: Share of states on which the scheme acts as fp32 does, 0 ... 1.
    """

    cell: str
    label: str
    run_id: str | None
    algo: str
    env_id: str
    seed: int | None
    scheme: str
    native: bool
    weight_bits: int
    delay: int | None
    status: str = OK
    runs: int = 1
    episodes: int | None = None
    size_bytes: float | None = None
    compression: float | None = None
    latency_median_us: float | None = None
    latency_p95_us: float | None = None
    speedup: float | None = None
    return_mean: float | None = None
    return_low: float | None = None
    return_high: float | None = None
    difference_mean: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    reward_error_percent: float | None = None
    absolute_reward_error_percent: float | None = None
    normalised_error_percent: float | None = None
    action_agreement: float | None = None
    ties: int | None = None
    verdict: str | None = None
    weight_dtypes: dict[str, int] = field(default_factory=dict)
    sha256: str | None = None


@dataclass(frozen=True)
class Result:
    """One flatbuffer with what it is, how it played and what that says against fp32."""

    sidecar: Sidecar
    evaluation: Evaluation
    comparison: Comparison


@dataclass(frozen=True)
class Replicate:
    """One seed of a cell.

    Results are by run id and scheme, all on the same episodes, none without fp32; what is missing
    by run id and scheme or `BASELINE`.
    """

    results: dict[_Key, Result]
    missing: dict[_Key, Missing]
    baseline: Evaluation | None
    #: Returns of fp32 in the episodes that are left out.
    skipped: Sequence[float] = ()

    @property
    def references(self) -> list[Result]:
        """Return the result of fp32, if there is one."""
        return list(self.results.values())[:1]


@dataclass(frozen=True)
class CellResults:
    """A cell with its results.

    Attributes:
        rows: A row for each column, pooled over the seeds.
        trainings: A row for each column and seed.
        baseline: Return of the random policy, if every seed has it.
        curves: By run id, of what was trained, where there is one.
    """

    cell: Cell
    rows: list[Row]
    trainings: list[Row]
    replicates: list[Replicate]
    baseline: Interval | None
    curves: dict[str, Curve]

    @property
    def references(self) -> list[Result]:
        """Return the results of fp32 that are there."""
        return [reference for one in self.replicates for reference in one.references]

    @property
    def results(self) -> list[Result]:
        """Return all results that are there."""
        return [result for one in self.replicates for result in one.results.values()]

    @property
    def episodes(self) -> int | None:
        """Return the episodes per flatbuffer, of the seed that has fewest."""
        return min((len(one.evaluation.seeds) for one in self.references), default=None)

    @property
    def protocol(self) -> Protocol | None:
        """Return the rules that all episodes were played by; None where none were."""
        return next((one.evaluation.protocol for one in self.references), None)

    @property
    def settings(self) -> dict[str, str]:
        """Return all that the trainings went by; where they differ, every value."""
        found: dict[str, dict[str, None]] = {}
        for result in self.results:
            run = Run.from_dict(result.sidecar.run)
            for key, value in settings(run, result.sidecar.preset).items():
                found.setdefault(key, {})[str(value)] = None
        return {key: " or ".join(values) for key, values in found.items()}

    @property
    def smallest(self) -> Row | None:
        """Return the smallest native scheme that keeps the reward."""
        kept = [row for row in self.rows if row.native and row.verdict in _KEEPING]
        return min(kept, key=lambda row: row.size_bytes or math.inf) if kept else None

    @property
    def fewest(self) -> list[tuple[str, Row | None]]:
        """Return the fewest bits of each simulated family that keep the reward, as all wider do."""
        sweeps: dict[tuple[str, int | None], list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: -row.weight_bits):
            if kind := family(Scheme.parse(row.scheme)):
                sweeps.setdefault((kind, row.delay), []).append(row)
        kept = [list(takewhile(lambda row: row.verdict in _KEEPING, of)) for of in sweeps.values()]
        return [(kind, [None, *rows][-1]) for (kind, _), rows in zip(sweeps, kept, strict=True)]


def load_cell(source: Source, cell: Cell) -> CellResults:
    """Load what the experiments of a cell came to.

    Each scheme is compared with fp32 of the same seed, on the episodes that all have played.
    """
    seeds = range(len(cell.references))
    replicates = [_load_replicate(source, cell, seed) for seed in seeds]
    rows = [_row(cell, column, seeds, replicates) for column in cell.columns]
    trainings = [_row(cell, column, [s], replicates) for s in seeds for column in cell.columns]
    runs = {run.run_id: run for column in cell.columns for run in column.runs}
    found = {run_id: _load_curve(source.workspace, run) for run_id, run in runs.items()}
    curves = {run_id: curve for run_id, curve in found.items() if curve is not None}
    return CellResults(cell, rows, trainings, replicates, _baseline_return(replicates), curves)


def _load_replicate(source: Source, cell: Cell, seed: int) -> Replicate:
    found: dict[_Key, _Pair] = {}
    missing: dict[_Key, Missing] = {}
    reference: _Pair | Missing | None = None
    networks: dict[str, Sidecar] = {}
    for column in cell.columns:
        run, scheme = column.runs[seed], column.scheme.name
        key = run.run_id, scheme
        pair = load(source, run, scheme, reference, networks)
        reference = reference or pair
        if isinstance(pair, Missing):
            missing[key] = pair
        else:
            found[key] = pair
    if reference is None or isinstance(reference, Missing):
        return Replicate({}, missing, None)
    skip = source.skip_episodes
    counts = [max(0, len(evaluation.seeds) - skip) for _, evaluation in found.values()]
    count = min(counts) if source.episodes is None else min(*counts, source.episodes)
    fp32 = reference[1].first(count, skip=skip)
    played = baseline(source.workspace, cell.references[seed], fp32.seeds)
    if played is None:
        artifact = source.workspace.artifact(fp32.run_id, REFERENCE)
        command = f"{evaluate_command(artifact, source.chance)} --episodes {count + skip}"
        reason = "was not evaluated on the episodes of fp32"
        absent = Missing(fp32.run_id, BASELINE, reason, source.remedy or command)
        missing[fp32.run_id, BASELINE] = absent
    results = {}
    for key, (sidecar, whole) in found.items():
        evaluation = whole.first(count, skip=skip)
        comparison = compare(fp32, evaluation, played, source.margin_percent)
        results[key] = Result(sidecar, evaluation, comparison)
    return Replicate(results, missing, played, reference[1].returns[:skip])


def aggregates(cells: Sequence[CellResults]) -> list[Aggregate]:
    """Sum up every scheme of plain trainings that several cells have whole."""
    found: dict[str, dict[str, list[Paired]]] = {}
    for cell in cells:
        for number, row in enumerate(cell.rows):
            if row.status == OK and row.scheme != REFERENCE and row.delay is None:
                paired = _paired(cell, cell.cell.columns[number])
                if all(one.reference.mean() for one in paired):
                    found.setdefault(row.scheme, {})[cell.cell.title] = paired
    return [aggregate(scheme, of) for scheme, of in found.items() if len(of) > 1]


def _paired(cell: CellResults, column: Column) -> list[Paired]:
    found = []
    for run, one in zip(column.runs, cell.replicates, strict=True):
        evaluation = one.results[run.run_id, column.scheme.name].evaluation
        fp32 = one.references[0].evaluation
        found.append(
            Paired(
                np.array(evaluation.returns),
                np.array(fp32.returns),
                np.array(one.skipped),
                effective_n(fp32, evaluation),
            )
        )
    return found


def load(
    source: Source,
    run: Run,
    scheme: str,
    reference: _Pair | Missing | None,
    networks: dict[str, Sidecar],
) -> _Pair | Missing:
    """Load a sidecar and its evaluation, comparable with a reference, or tell why there are none.

    `networks` is, by run id, the sidecar whose network its others must have; it is added to.
    """
    key = run.run_id, scheme
    status = state(source.workspace, run, scheme, chance=source.chance)
    sidecar, evaluation = status.sidecar, status.evaluation
    evaluate = evaluate_command(source.workspace.artifact(*key), source.chance)
    reason, command = source.known.get(key, status.reason), status.command or evaluate
    if not reason and sidecar is not None and evaluation is not None:
        first = networks.setdefault(run.run_id, sidecar)
        if sidecar.network_sha256 != first.network_sha256:
            reason = f"was exported from another network than {first.scheme}"
            both = f" --schemes {first.scheme},{scheme}"
            command = export_command(source.workspace, run.run_id, both)
        elif isinstance(reference, Missing):
            reason = f"has nothing to compare with: fp32 of {reference.run_id} is missing"
            command = reference.command
        elif reference is None or all(
            one == other for one, other in zip(evaluation.seeds, reference[1].seeds, strict=False)
        ):
            return sidecar, evaluation
        else:
            reason = "was evaluated on other episodes than fp32"
            command = f"{evaluate} --episodes {len(reference[1].seeds)}"
    return Missing(*key, reason, source.remedy or command)


def _load_curve(workspace: Workspace, run: Run) -> Curve | None:
    """Load a run's learning curve; None if there is none that can be read."""
    path = workspace.artifact_dir(run.run_id) / "progress.csv"
    try:
        values = pd.read_csv(path, dtype=float)
    except (OSError, ValueError):
        return None
    if values.empty or not {"step", "episode_return", "greedy_return"} <= set(values):
        return None
    delay = None if run.quantization is None else run.quantization.delay
    return Curve(f"seed {run.seed}", values, delay)


def _row(cell: Cell, column: Column, seeds: Sequence[int], replicates: Sequence[Replicate]) -> Row:
    """Return the row of a scheme, pooled over some seeds; without figures if one is missing."""
    runs = [column.runs[seed] for seed in seeds]
    first, one, scheme = runs[0], len(seeds) == 1, column.scheme
    row = Row(
        cell=cell.title,
        label=column.label,
        run_id=first.run_id if one else None,
        algo=first.algo,
        env_id=first.env_id,
        seed=first.seed if one else None,
        scheme=scheme.name,
        native=scheme.native,
        weight_bits=scheme.weight_bits,
        delay=None if first.quantization is None else first.quantization.delay,
        runs=len(runs),
    )
    keys = [(run.run_id, scheme.name) for run in runs]
    missing = [replicates[s].missing.get(key) for s, key in zip(seeds, keys, strict=True)]
    if absent := [each for each in missing if each is not None]:
        names = ", ".join(each.run_id for each in absent)
        return replace(row, status=absent[0].reason if one else f"missing in {names}")
    results = [replicates[s].results[key] for s, key in zip(seeds, keys, strict=True)]
    pooled = pool([each.comparison for each in results])
    agreements = [each.evaluation.agreement or {} for each in results]
    row = replace(
        row,
        episodes=pooled.episodes,
        **_limits("return", pooled.returns),
        verdict="reference",
        action_agreement=mean_of_all([each.get("fraction") for each in agreements]),
        ties=sum(each.evaluation.ties for each in results),
        weight_dtypes=results[0].sidecar.weight_dtypes,
        sha256=results[0].sidecar.sha256 if one else None,
    )
    if scheme.native:
        references = [replicates[seed].references[0] for seed in seeds]
        row = replace(row, **_costs(results, references))
    if scheme.name == REFERENCE:
        return row
    return replace(
        row,
        **_limits("difference", pooled.difference),
        reward_error_percent=pooled.reward_error,
        absolute_reward_error_percent=pooled.absolute_reward_error,
        normalised_error_percent=pooled.normalised_error,
        verdict=pooled.verdict,
    )


def _costs(results: Sequence[Result], references: Sequence[Result]) -> dict[str, Any]:
    """Return sizes and latencies of native files.

    Of several latencies it is the least: networks of one shape take as long, and what else ran
    only adds to it.
    """

    def least(measured: Sequence[Result], name: str) -> float:
        latencies = [each.evaluation.latency_us or {} for each in measured]
        return float(np.min([latency.get(name, math.nan) for latency in latencies]))

    sizes = [float(each.sidecar.size_bytes) for each in results]
    smaller = [r.sidecar.size_bytes / size for r, size in zip(references, sizes, strict=True)]
    median = least(results, "median")
    return {
        "size_bytes": float(np.mean(sizes)),
        "compression": float(np.mean(smaller)),
        "latency_median_us": _known(median),
        "latency_p95_us": _known(least(results, "p95")),
        "speedup": _known(least(references, "median") / median),
    }


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _limits(name: str, interval: Interval) -> dict[str, Any]:
    return {f"{name}_{end}": _known(value) for end, value in asdict(interval).items()}


def _baseline_return(replicates: Sequence[Replicate]) -> Interval | None:
    """Return the random policy's return: over episodes for one training, else over trainings."""
    returns = [one.baseline.returns for one in replicates if one.baseline is not None]
    if len(returns) < len(replicates):
        return None
    if len(returns) == 1:
        return mean_interval(returns[0])
    return student_interval([float(np.mean(values)) for values in returns])
