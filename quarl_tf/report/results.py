"""Load the results of trainings from their records, one row for each scheme.

An experiment that is missing, or whose files do not belong together, is a `Missing`.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, takewhile
from statistics import median, mode
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from quarl_tf.evaluation import compare
from quarl_tf.evaluation.aggregate import Aggregate, Paired, aggregate, paired
from quarl_tf.evaluation.compare import Comparison, Interval, mean_of_all
from quarl_tf.presets import settings
from quarl_tf.report.figures.curves import Curve
from quarl_tf.report.figures.style import family, form
from quarl_tf.spec import BASELINE, GREEDY, REFERENCE, Chance, Run, Scheme
from quarl_tf.spec.cell import Cell
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import State, baseline, state
from quarl_tf.store.workspace import Workspace

#: Status of a row that has a result.
OK = "ok"

#: What is compared: a flatbuffer's sidecar and its evaluation.
_Pair = tuple[Sidecar, Evaluation]

#: Verdicts of schemes that keep the reward.
_KEEPING_VERDICTS = ("gain", compare.WITHIN_MARGIN, compare.UNSEEN)


class Missing(NamedTuple):
    """An experiment without a result, the reason, and whether its flatbuffer is there."""

    run_id: str
    scheme: str
    reason: str
    exported: bool = False


@dataclass(frozen=True)
class Source:
    """What is reported: evaluations with `chance`, `episodes` of each after `skip_episodes`."""

    workspace: Workspace
    margin_percent: float
    command: str  #: Writes the report.
    chance: Chance = GREEDY
    x: str = "step"  #: What learning curves are drawn against, a column of `progress.csv`.
    memory: bool = False  #: Whether memory is measured.
    episodes: int | None = None
    skip_episodes: int = 0
    #: Of results that are known to be missing, by run id and scheme.
    missing_reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)
    remedy: str | None = None  #: A command that makes all that is missing, if there is one.


@dataclass(frozen=True, kw_only=True)
class Row:
    """A scheme of one training or, without `run_id`, of all those of a cell; None is unknown."""

    cell: str
    label: str
    run_id: str | None
    algo: str
    env_id: str
    seed: int | None
    scheme: str
    native: bool
    weight_bits: int
    delay: int | None  #: Step at which a quantisation-aware training began to quantise.
    status: str = OK  #: Or the reason why there is no result.
    runs: int = 1
    episodes: int | None = None
    size_bytes: float | None = None
    compression: float | None = None  #: Size of fp32 over that of the scheme.
    latency_median_us: float | None = None
    latency_p95_us: float | None = None
    #: Median latency of fp32 over that of the scheme, where both were timed in turns.
    speedup: float | None = None
    returns: Interval | None = None
    difference: Interval | None = None
    reward_error_percent: float | None = None
    absolute_reward_error_percent: float | None = None
    normalised_error_percent: float | None = None
    action_agreement: float | None = None
    success_rate: float | None = None
    ties: int | None = None
    verdict: str | None = None
    #: Trainings whose own verdict is a loss, which the pooled one may leave open.
    losing: int | None = None
    #: Bound on the share of trainings, or of one's episodes, with a loss, given how many have one.
    unseen_percent: float | None = None
    more_needed: int | None = None
    weight_dtypes: dict[str, int] = field(default_factory=dict)
    sha256: str | None = None


class Result(NamedTuple):
    """One flatbuffer: its sidecar, its evaluation and the comparison with fp32."""

    sidecar: Sidecar
    evaluation: Evaluation
    comparison: Comparison
    baseline: Evaluation | None  #: Evaluation of a random policy on the same episodes.


@dataclass(frozen=True)
class CellResults:
    """The results of a cell."""

    cell: Cell
    entries: list[list[Result | Missing]]  #: For each seed, the result of each column.
    rows: list[Row]  #: One for each column, pooled over the seeds.
    trainings: list[Row]  #: One for each seed and column.
    #: Return of the random policy, over episodes for one seed, else over seeds; None if one is
    #: missing.
    baseline: Interval | None
    curves: dict[str, Curve]  #: By run id.

    @property
    def references(self) -> list[Result]:
        """Return the results of fp32."""
        return [fp32 for fp32, *_ in self.entries if isinstance(fp32, Result)]

    @property
    def results(self) -> list[Result]:
        """Return all results."""
        return [entry for entry in chain(*self.entries) if isinstance(entry, Result)]

    @property
    def missing(self) -> list[Missing]:
        """Return all that is missing, evaluations of the random policy included."""
        reason = "was not evaluated on the episodes of fp32"
        lacking = [fp32.sidecar.run_id for fp32 in self.references if fp32.baseline is None]
        return [
            *(entry for entry in chain(*self.entries) if isinstance(entry, Missing)),
            *(Missing(run_id, BASELINE, reason, exported=True) for run_id in lacking),
        ]

    def trainings_of(self, column: int) -> list[Row]:
        """Return the rows of each training of a column."""
        return self.trainings[column :: len(self.rows)]

    @property
    def episodes(self) -> int | None:
        """Return the episodes per flatbuffer."""
        return next((len(fp32.evaluation.seeds) for fp32 in self.references), None)

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of the trainings, with every value of those that differ."""
        values_by_name: dict[str, dict[str, None]] = {}
        for sidecar in (result.sidecar for result in self.results):
            for name, value in settings(Run.from_dict(sidecar.run), sidecar.preset).items():
                values_by_name.setdefault(name, {})[str(value)] = None
        return {name: " or ".join(values) for name, values in values_by_name.items()}

    @property
    def natives(self) -> list[Row]:
        """Return the rows of native schemes other than fp32."""
        return [row for row in self.rows if row.native and row.scheme != REFERENCE]

    @property
    def smallest(self) -> Row | None:
        """Return the smallest native scheme that keeps the reward."""
        keeping = (row for row in self.natives if row.verdict in _KEEPING_VERDICTS)
        smaller = [row for row in keeping if (row.compression or 0) > 1]
        return min(smaller, key=lambda row: row.size_bytes or math.inf) if smaller else None

    @property
    def fewest(self) -> list[tuple[str, Row | None]]:
        """Return the fewest bits of each simulated family down to which all keep the reward.

        Families are named with their form or the delay where there are several.
        """
        sweeps: dict[tuple[str, str, int | None], list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: -row.weight_bits):
            if row.verdict and (kind := family(Scheme.parse(row.scheme))):
                sweeps.setdefault((kind, form(row.scheme), row.delay), []).append(row)
        kinds = Counter(kind for kind, *_ in sweeps)
        fewest: list[tuple[str, Row | None]] = []
        for (kind, shape, delay), rows in sweeps.items():
            keeping = takewhile(lambda row: row.verdict in _KEEPING_VERDICTS, rows)
            several = shape if delay is None else f"{kind} from {delay:,}"
            name = kind if kinds[kind] == 1 else several
            fewest.append((name, [None, *keeping][-1]))
        return fewest


def load_cell(source: Source, cell: Cell) -> CellResults:
    """Load the results of a cell.

    Each scheme is compared with fp32 of the same seed, on as many episodes as all of them have.
    """
    seeds, columns = range(len(cell.references)), range(len(cell.columns))
    loaded = [_load_seed(source, cell, seed) for seed in seeds]
    pairs = [pair for pair in chain(*loaded) if not isinstance(pair, Missing)]
    counts = [len(evaluation.seeds) - source.skip_episodes for _, evaluation in pairs]
    if source.episodes is not None:
        counts.append(source.episodes)
    count = min(counts, default=0)
    entries = [
        _compared(source, run, pairs_of_run, count)
        for run, pairs_of_run in zip(cell.references, loaded, strict=True)
    ]
    references = [fp32 for fp32, *_ in entries if isinstance(fp32, Result)]
    random_returns = [fp32.baseline.returns for fp32 in references if fp32.baseline is not None]
    random_mean = None
    if len(random_returns) == len(seeds) == 1:
        random_mean = compare.mean_interval(random_returns[0])
    elif len(random_returns) == len(seeds):
        random_mean = compare.student_interval([np.mean(returns) for returns in random_returns])
    runs = {run.run_id: run for column in cell.columns for run in column.runs}
    curves = {run_id: _load_curve(source.workspace, run) for run_id, run in runs.items()}
    return CellResults(
        cell,
        entries,
        rows=[_row(cell, number, entries, seeds) for number in columns],
        trainings=[_row(cell, number, entries, [seed]) for seed in seeds for number in columns],
        baseline=random_mean,
        curves={run_id: curve for run_id, curve in curves.items() if curve is not None},
    )


def _load_seed(source: Source, cell: Cell, seed: int) -> list[_Pair | Missing]:
    """Load one training of each column; what fp32 cannot be compared with is missing."""
    pairs = [load(source, column.runs[seed], column.scheme.name) for column in cell.columns]
    fp32 = pairs[0]
    first_sidecars: dict[str, Sidecar] = {}
    for number, pair in enumerate(pairs):
        if isinstance(pair, Missing):
            continue
        sidecar, evaluation = pair
        key = sidecar.run_id, sidecar.scheme
        first = first_sidecars.setdefault(sidecar.run_id, sidecar)
        if isinstance(fp32, Missing):
            reason = f"has nothing to compare with: fp32 of {fp32.run_id} is missing"
            pairs[number] = Missing(*key, reason, exported=True)
        elif sidecar.network_sha256 != first.network_sha256:
            pairs[number] = Missing(*key, f"was exported from another network than {first.scheme}")
        elif not evaluation.shares_environment(fp32[1]):
            reason = "was evaluated in another version of the environment than fp32"
            pairs[number] = Missing(*key, reason, exported=True)
        elif any(map(operator.ne, evaluation.seeds, fp32[1].seeds)):
            reason = "was evaluated on other episodes than fp32"
            pairs[number] = Missing(*key, reason, exported=True)
    return pairs


def _compared(
    source: Source, run: Run, pairs: Sequence[_Pair | Missing], count: int
) -> list[Result | Missing]:
    """Compare the schemes of a training with fp32, on so many episodes."""
    if isinstance(pairs[0], Missing):
        return [pair for pair in pairs if isinstance(pair, Missing)]
    skip = source.skip_episodes
    fp32 = pairs[0][1].first(count, skip=skip)
    random = baseline(source.workspace.artifact(run.run_id, REFERENCE), run, fp32.seeds)

    def result(sidecar: Sidecar, full: Evaluation) -> Result:
        evaluation = full.first(count, skip=skip)
        comparison = compare.compare(fp32, evaluation, random, source.margin_percent)
        return Result(sidecar, evaluation, comparison, random)

    return [pair if isinstance(pair, Missing) else result(*pair) for pair in pairs]


def load(source: Source, run: Run, scheme: str) -> _Pair | Missing:
    """Load a sidecar and its evaluation."""
    status = state(source.workspace, run, scheme, chance=source.chance)
    reason = source.missing_reasons.get((run.run_id, scheme), status.reason)
    if not reason and status.sidecar is not None and status.evaluation is not None:
        return status.sidecar, status.evaluation
    return Missing(run.run_id, scheme, reason, exported=status.state == State.EXPORTED)


def _load_curve(workspace: Workspace, run: Run) -> Curve | None:
    """Load a learning curve; None if it is missing or unreadable."""
    path = workspace.artifact_dir(run.run_id) / "progress.csv"
    try:
        values = pd.read_csv(path, dtype=float)
    except (OSError, ValueError):
        return None
    if values.empty or not {"step", "episode_return", "greedy_return"} <= set(values):
        return None
    delay = None if run.quantization is None else run.quantization.delay
    return Curve(values, delay)


def _row(
    cell: Cell, number: int, entries: Sequence[Sequence[Result | Missing]], seeds: Sequence[int]
) -> Row:
    """Return the row of a column, pooled over seeds; without figures if one is missing."""
    column, single = cell.columns[number], len(seeds) == 1
    first, scheme = column.runs[seeds[0]], column.scheme
    row = Row(
        cell=cell.title,
        label=column.label,
        run_id=first.run_id if single else None,
        algo=first.algo,
        env_id=first.env_id,
        seed=first.seed if single else None,
        scheme=scheme.name,
        native=scheme.native,
        weight_bits=scheme.weight_bits,
        delay=None if first.quantization is None else first.quantization.delay,
        runs=len(seeds),
    )
    column_entries = [entries[seed][number] for seed in seeds]
    if missing := [entry for entry in column_entries if isinstance(entry, Missing)]:
        names = ", ".join(entry.run_id for entry in missing)
        return replace(row, status=missing[0].reason if single else f"no result of {names}")
    results = [entry for entry in column_entries if isinstance(entry, Result)]
    references = [fp32 for seed in seeds if isinstance(fp32 := entries[seed][0], Result)]
    pooled = compare.pool([result.comparison for result in results])
    agreements = [result.evaluation.agreement or {} for result in results]
    successes = [result.evaluation.successes for result in results]
    row = replace(
        row,
        **(_costs(results, references) if scheme.native else {}),
        episodes=pooled.episodes,
        returns=pooled.returns,
        verdict="reference",
        action_agreement=mean_of_all([agreement.get("fraction") for agreement in agreements]),
        success_rate=mean_of_all([None if s is None else float(np.mean(s)) for s in successes]),
        ties=sum(result.evaluation.ties for result in results),
        weight_dtypes=results[0].sidecar.weight_dtypes,
        sha256=results[0].sidecar.sha256 if single else None,
    )
    if scheme.name == REFERENCE:
        return row
    losses = 0 if single else sum(result.comparison.verdict == "loss" for result in results)
    observations = 0 if pooled.difference.mean < 0 else pooled.difference.alike
    if not observations and pooled.verdict == compare.WITHIN_MARGIN:
        observations = len(seeds)
    unseen = compare.unseen_percent(observations, losses) if observations > 1 else None
    shared = ("difference", *compare.ERRORS, "verdict", "more_needed")
    compared: dict[str, Any] = {name: getattr(pooled, name) for name in shared}
    return replace(row, **compared, losing=None if single else losses, unseen_percent=unseen)


def _costs(results: Sequence[Result], references: Sequence[Result]) -> dict[str, Any]:
    """Return mean sizes and least latencies of native files; other processes add to latencies.

    Latencies are of one processor: that which timed most of the references.
    """
    # Old files do not name theirs.
    processors = [fp32.evaluation.processor for fp32 in references if fp32.evaluation.processor]
    processor = mode(processors) if processors else None

    evaluations = [r.evaluation for r in results if r.evaluation.processor == processor]
    timed = [evaluation.latency_us for evaluation in evaluations if evaluation.latency_us]
    speedups = [times["fp32"] / times["median"] for times in timed if "fp32" in times]
    sizes = np.array([result.sidecar.size_bytes for result in results])
    fp32_sizes = np.array([fp32.sidecar.size_bytes for fp32 in references])
    costs = {
        "size_bytes": float(sizes.mean()),
        "compression": float((fp32_sizes / sizes).mean()),
        "latency_median_us": min((times["median"] for times in timed), default=math.nan),
        "latency_p95_us": min((times["p95"] for times in timed), default=math.nan),
        "speedup": median(speedups) if speedups else math.nan,
    }
    return finite(costs.items())


def finite(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict with None for infinities and NaN, which JSON lacks."""
    return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in pairs}


def flat(row: Row) -> dict[str, Any]:
    """Return a row for CSV and JSON, with intervals as `return_mean`, `return_low` and so on."""
    columns: dict[str, Any] = {}
    for key, value in asdict(row, dict_factory=finite).items():
        if key in ("returns", "difference"):
            for part in fields(Interval):
                columns[f"{key.removesuffix('s')}_{part.name}"] = value and value[part.name]
        else:
            columns[key] = value
    return columns


def aggregates(cells: Sequence[CellResults]) -> list[Aggregate]:
    """Aggregate each scheme of plain trainings that has normalised errors in many cells.

    Trainings that several cells have count once; left out are those that `paired` leaves out.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.cell.references[0].seedless_id, []).append(cell.cell)
    # What several cells share is of none of their quantisations.
    titles = {
        key: first.task if others else first.title for key, (first, *others) in groups.items()
    }
    counts = Counter(titles.values())
    pairs: dict[str, dict[str, dict[str, Paired]]] = {}  # By scheme, cell and run.
    for cell in cells:
        key = cell.cell.references[0].seedless_id
        name = titles[key]
        if counts[name] > 1:
            name += f" ({groups[key][0].references[0].run_id})"
        for row, entries in zip(cell.rows, zip(*cell.entries, strict=True), strict=True):
            if row.delay is None and row.normalised_error_percent is not None:
                trainings = pairs.setdefault(row.scheme, {}).setdefault(name, {})
                for fp32, entry in zip(cell.references, entries, strict=True):
                    if isinstance(entry, Missing) or fp32.baseline is None:
                        continue
                    pair = paired(fp32.evaluation, entry.evaluation, fp32.baseline)
                    if pair is not None:
                        trainings[fp32.sidecar.run_id] = pair
    judged = {
        scheme: {name: list(runs.values()) for name, runs in by_cell.items() if runs}
        for scheme, by_cell in pairs.items()
    }
    return [aggregate(scheme, by_cell) for scheme, by_cell in judged.items() if len(by_cell) > 1]
