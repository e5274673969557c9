"""Read the records of some runs and line up their results, one row a scheme.

An experiment that is missing, or whose files do not belong together, is kept as such, with the
command that mends it.
"""

from __future__ import annotations

import csv
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf.evaluation.compare import (
    Comparison,
    Interval,
    Pooled,
    compare,
    mean_interval,
    mean_of_all,
    pool,
    student_interval,
)
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import sha256
from quarl_tf.report.figures import Curve
from quarl_tf.spec import BASELINE, DEFAULT_SCHEMES, REFERENCE, Quantization, Run, Scheme
from quarl_tf.store.records import Evaluation, Sidecar, settings
from quarl_tf.store.state import export_command
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path

#: Status of a row that has a result.
OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the results: a scheme of one run, or of all runs of a section; None is unknown.

    Attributes:
        run_id: The run, or None for a line that pools runs.
        status: "ok", or why there is no result.
        compression: Size of the fp32 flatbuffer over this one's.
        action_agreement: Share of states on which the scheme acts as fp32 does, 0 ... 1.
        absolute_reward_error_percent: Mean over runs of |reward error|, in pooled lines.
        verdict: As in `statistics.verdict`; "reference" for fp32.
        weight_dtypes: Weights in the file by dtype.
    """

    run_id: str | None
    algo: str
    env_id: str
    seed: int | None
    scheme: str
    native: bool
    weight_bits: int
    status: str = OK
    runs: int = 1
    episodes: int | None = None
    size_bytes: float | None = None
    compression: float | None = None
    latency_median_us: float | None = None
    latency_p95_us: float | None = None
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

    @property
    def returns(self) -> Interval | None:
        """Return the mean return with its interval, if there is a result."""
        if self.return_mean is None:
            return None
        low = -math.inf if self.return_low is None else self.return_low
        high = math.inf if self.return_high is None else self.return_high
        return Interval(self.return_mean, low, high)


@dataclass(frozen=True)
class Missing:
    """An experiment without a result, why, and the command that mends it."""

    run_id: str
    scheme: str
    reason: str
    command: str


@dataclass(frozen=True)
class Result:
    """One flatbuffer with what it is, how it played and what that says against fp32."""

    sidecar: Sidecar
    evaluation: Evaluation
    comparison: Comparison


_Pair = tuple[Sidecar, Evaluation]


@dataclass(frozen=True)
class LoadedRun:
    """The results of one run.

    Attributes:
        own: A sidecar of the run's own; a quantisation-aware run's fp32 is of its plain twin.
        results: Scheme to result, all on the same episodes; fp32 is always among them.
        played: Scheme to the episodes it has, of which `results` may hold the first alone.
        missing: Scheme, or `BASELINE`, to why there is no result.
        chance: Evaluation of the random policy, if it is sound.
        curve: Learning curve of the training, if it was exported.
        foreign: Names of flatbuffers in the run's folder that are named after no scheme.
        sample: Whether actions were drawn from the policy's distribution.
    """

    run_id: str
    own: Sidecar
    results: dict[str, Result]
    played: dict[str, int]
    missing: dict[str, Missing]
    chance: Evaluation | None
    curve: Curve | None
    foreign: list[str]
    sample: bool

    @property
    def reference(self) -> Result:
        """Return the result that all others are compared with."""
        return self.results[REFERENCE]

    @property
    def run(self) -> Run:
        """Return what was trained."""
        return Run.from_dict(self.own.run)

    @property
    def command(self) -> str:
        """Return the command line that trains, exports and evaluates all that is here.

        Without `--import` and `--presets`, which a run of the user's own environment needs and no
        record keeps.
        """
        # The fp32 of a quantisation-aware run is its plain twin's.
        schemes = [n for n in self.results if self.run.quantization is None or n != REFERENCE]
        episodes = len(self.reference.evaluation.returns)
        command = f"{self.run.command('run')} --schemes {','.join(schemes)} --episodes {episodes}"
        return command + (" --sample" if self.sample else "")

    @property
    def settings(self) -> dict[str, Any]:
        """Return all that the training went by."""
        return settings(self.run, self.own.preset)


# Reading.


def scheme_names(workspace: Workspace, run_ids: Sequence[str]) -> list[str]:
    """Return the schemes that any run was exported in, and fp32: native ones and many bits first.

    A large flatbuffer may have been left out, and its sidecar kept.
    """
    folders = [workspace.artifact_dir(run_id) for run_id in run_ids]
    files = [path for folder in folders for path in folder.glob("*")]
    stems = [path.stem for path in files if path.suffix in (".tflite", ".json")]
    found = filter(_is_scheme, stems)

    def place(scheme: Scheme) -> tuple[bool, bool, int, int]:
        known = scheme.name in DEFAULT_SCHEMES
        order = DEFAULT_SCHEMES.index(scheme.name) if known else len(DEFAULT_SCHEMES)
        return (not scheme.native, scheme.rounding == "floor", -scheme.weight_bits, order)

    parsed = [Scheme.parse(name) for name in {REFERENCE, *found}]
    return [scheme.name for scheme in sorted(parsed, key=place)]


def _is_scheme(name: str) -> bool:
    try:
        Scheme.parse(name)
    except UsageError:
        return False
    return True


def load_run(
    workspace: Workspace,
    run_id: str,
    schemes: Sequence[str],
    margin_percent: float,
    *,
    episodes: int | None = None,
    sample: bool = False,
) -> LoadedRun:
    """Load a run's results and compare each with fp32, on the episodes that all have played.

    Args:
        workspace: Where the run's flatbuffers and evaluations are.
        run_id: The run.
        schemes: The schemes to load.
        margin_percent: Loss that does not matter, in percent of the fp32 return.
        episodes: The most episodes to take of any.
        sample: Load the evaluations by sampled actions instead of the greedy ones.

    Raises:
        UsageError: The run id is no name of a folder.
        QuarlError: There is no fp32 result, or a file cannot be read.
    """
    own, reference = _own_and_reference(workspace, run_id, sample)
    pairs = {REFERENCE: reference} | {
        name: _load_comparable(workspace, name, own, reference, sample)
        for name in schemes
        if name != REFERENCE
    }
    missing = {name: pair for name, pair in pairs.items() if isinstance(pair, Missing)}
    found = {
        name: (pair[0], pair[1].first(episodes))
        for name, pair in pairs.items()
        if not isinstance(pair, Missing)
    }
    played = {name: len(evaluation.seeds) for name, (_, evaluation) in found.items()}
    count = min(played.values())
    against = reference[1].first(count)
    chance: Evaluation | Missing | None = _load_baseline(workspace, against, sample)
    if isinstance(chance, Missing):
        missing[BASELINE], chance = chance, None
    results = {}
    for name, (sidecar, whole) in found.items():
        evaluation = whole.first(count)
        comparison = compare(against, evaluation, chance, margin_percent)
        results[name] = Result(sidecar, evaluation, comparison)
    curve = _load_curve(workspace, run_id, Run.from_dict(own.run).quantization)
    files = workspace.artifact_dir(run_id).glob("*.tflite")
    foreign = sorted(path.name for path in files if not _is_scheme(path.stem))
    return LoadedRun(run_id, own, results, played, missing, chance, curve, foreign, sample)


def require_reference(workspace: Workspace, run_id: str, *, sample: bool = False) -> None:
    """Refuse a run that has no fp32 result to compare with.

    Raises:
        UsageError: The run id is no name of a folder.
        QuarlError: There is none, or a file cannot be read.
    """
    _own_and_reference(workspace, run_id, sample)


def _own_and_reference(workspace: Workspace, run_id: str, sample: bool) -> tuple[Sidecar, _Pair]:
    """Return a sidecar of the run's own, and its fp32.

    Raises:
        QuarlError: There is no fp32 result, or a file cannot be read.
    """
    if not workspace.artifact_dir(run_id).is_dir():
        raise QuarlError(
            "There are no flatbuffers of this run; make them with "
            f"`{export_command(workspace, run_id)}`. Received: run={run_id!r}"
        )
    aware = _aware_sidecar(workspace.artifact_dir(run_id))
    reference_id = run_id if aware is None else Run.from_dict(aware.run).plain.run_id
    reference = _load_pair(workspace, reference_id, REFERENCE, sample)
    if isinstance(reference, Missing):
        raise QuarlError(
            f"{run_id} has nothing to compare with: fp32 {reference.reason}; run "
            f"`{reference.command}`. Received: run={run_id!r}"
        )
    return aware or reference[0], reference


def _aware_sidecar(folder: Path) -> Sidecar | None:
    """Return a sidecar of the run that a folder is of, if that is a quantisation-aware one."""
    paths = [path for path in sorted(folder.glob("qat_*.json")) if _is_scheme(path.stem)]
    sidecars = [Sidecar.load(path) for path in paths]
    return next((sidecar for sidecar in sidecars if sidecar.run_id == folder.name), None)


def _load_baseline(
    workspace: Workspace, reference: Evaluation, sample: bool
) -> Evaluation | Missing:
    """Load the random policy's evaluation, or tell why it is none for the run's fp32.

    Of more episodes than fp32 has, those that fp32 has are taken.
    """
    run_id, count = reference.run_id, len(reference.seeds)
    path = evaluation_path(workspace.artifact(run_id, BASELINE))
    reason = "was not evaluated"
    if path.exists():
        found = Evaluation.load(path).first(count)
        expected = (BASELINE, run_id, reference.env_id, reference.seeds)
        if (found.scheme, found.run_id, found.env_id, found.seeds) == expected:
            return found
        reason = "has an evaluation of another run or on other episodes than fp32"
    evaluate = _evaluate_command(workspace, run_id, REFERENCE, sample)
    return Missing(run_id, BASELINE, reason, f"{evaluate} --episodes {count}")


def _load_pair(workspace: Workspace, run_id: str, scheme: str, sample: bool) -> _Pair | Missing:
    """Load a sidecar and its evaluation, or tell why one cannot stand for the other.

    A large flatbuffer need not be kept once it was evaluated: the hash in both says what it was.
    """
    artifact = workspace.artifact(run_id, scheme)
    export = export_command(workspace, run_id, f" --schemes {scheme}")
    path = evaluation_path(artifact, sample=sample)
    kept = artifact.exists()
    if not sidecar_path(artifact).exists() or not (kept or path.exists()):
        return Missing(run_id, scheme, "was not exported", export)
    sidecar = Sidecar.load(sidecar_path(artifact))
    found = sha256(artifact) if kept else sidecar.sha256
    if (sidecar.run_id, sidecar.scheme, sidecar.sha256) != (run_id, scheme, found):
        return Missing(run_id, scheme, "has a flatbuffer that does not match its sidecar", export)
    evaluate = _evaluate_command(workspace, run_id, scheme, sample)
    if not path.exists():
        reason = "was not evaluated" + (" by sampled actions" if sample else "")
        return Missing(run_id, scheme, reason, evaluate)
    evaluation = Evaluation.load(path)
    if evaluation.artifact_sha256 != sidecar.sha256:
        reason = "has a stale evaluation, made with another flatbuffer"
        return Missing(run_id, scheme, reason, evaluate)
    return sidecar, evaluation


def _load_comparable(
    workspace: Workspace, scheme: str, own: Sidecar, reference: _Pair, sample: bool
) -> _Pair | Missing:
    """Load a scheme of the run that `own` is of, or tell why it cannot be compared with fp32."""
    run_id, (fp32, against) = own.run_id, reference
    pair = _load_pair(workspace, run_id, scheme, sample)
    if isinstance(pair, Missing):
        return pair
    sidecar, evaluation = pair
    if sidecar.network_sha256 != own.network_sha256:
        reason = f"was exported from another network than {own.scheme}"
        both = f" --schemes {own.scheme},{scheme}"
        return Missing(run_id, scheme, reason, export_command(workspace, run_id, both))
    evaluate = _evaluate_command(workspace, run_id, scheme, sample)
    if evaluation.reference_sha256 not in (None, fp32.sha256):
        return Missing(run_id, scheme, "was compared with another fp32 flatbuffer", evaluate)
    count = min(len(evaluation.seeds), len(against.seeds))
    if (evaluation.seeds[:count], evaluation.protocol) == (against.seeds[:count], against.protocol):
        return pair
    reason = "was evaluated on other episodes than fp32, or by other rules"
    return Missing(run_id, scheme, reason, f"{evaluate} --episodes {len(against.seeds)}")


def _evaluate_command(workspace: Workspace, run_id: str, scheme: str, sample: bool) -> str:
    artifact = shlex.quote(str(workspace.artifact(run_id, scheme)))
    return f"quarl evaluate {artifact}" + (" --sample" if sample else "")


def _load_curve(
    workspace: Workspace, run_id: str, quantization: Quantization | None
) -> Curve | None:
    path = workspace.artifact_dir(run_id) / "progress.csv"
    if not path.exists():
        return None
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        columns = {
            name: np.array([float(row[name] or "nan") for row in rows])
            for name in ("step", "episode_return", "greedy_return")
        }
        # Not every algorithm has it, and older trainings did not record it.
        variance = np.array([float(row.get("action_variance") or "nan") for row in rows])
        counted = bool(rows) and "episodes" in rows[0]
        episodes = np.array([float(row["episodes"]) for row in rows]) if counted else None
    except (KeyError, TypeError, ValueError) as error:
        raise QuarlError(
            f"The training curve cannot be read ({error}); copy it again with "
            f"`{export_command(workspace, run_id)}`. Received: path={str(path)!r}"
        ) from error
    if not rows:
        return None
    delay = None if quantization is None else quantization.delay
    return Curve(
        label=run_id,
        steps=columns["step"],
        episode_return=columns["episode_return"],
        greedy_return=columns["greedy_return"],
        action_variance=variance,
        delay=delay,
        episodes=episodes,
    )


# Lines of the results.


def blank_row(run: Run, scheme: Scheme) -> Row:
    """Return a line that tells what was run in which scheme, and no results."""
    return Row(
        run_id=run.run_id,
        algo=run.algo,
        env_id=run.env_id,
        seed=run.seed,
        scheme=scheme.name,
        native=scheme.native,
        weight_bits=scheme.weight_bits,
    )


def run_row(run: LoadedRun, name: str) -> Row:
    """Return the line of one scheme of one run."""
    scheme = Scheme.parse(name)
    row = blank_row(run.run, scheme)
    result = run.results.get(name)
    if result is None:
        return replace(row, status=run.missing[name].reason)
    sidecar, evaluation = result.sidecar, result.evaluation
    row = replace(
        row,
        ties=evaluation.ties,
        action_agreement=None if evaluation.agreement is None else evaluation.agreement["fraction"],
        weight_dtypes=sidecar.weight_dtypes,
        sha256=sidecar.sha256,
        **_statistics(name, result.comparison),
    )
    if not scheme.native:
        return row
    latency = evaluation.latency_us or {}
    return replace(
        row,
        size_bytes=sidecar.size_bytes,
        compression=run.reference.sidecar.size_bytes / sidecar.size_bytes,
        latency_median_us=latency.get("median"),
        latency_p95_us=latency.get("p95"),
    )


def pooled_row(runs: Sequence[LoadedRun], rows: Sequence[Row]) -> Row:
    """Return one line for the rows of a scheme, one a run; without figures if one is missing."""
    first = rows[0]
    row = Row(
        run_id=None,
        algo=first.algo,
        env_id=first.env_id,
        seed=None,
        scheme=first.scheme,
        native=first.native,
        weight_bits=first.weight_bits,
        runs=len(rows),
    )
    absent = [str(r.run_id) for r in rows if r.status != OK]
    if absent:
        several = len(rows) > 1
        status = f"missing in {', '.join(absent)}" if several else first.status
        return replace(row, status=status)
    pooled = pool([run.results[row.scheme].comparison for run in runs])
    row = replace(
        row,
        size_bytes=mean_of_all([r.size_bytes for r in rows]),
        compression=mean_of_all([r.compression for r in rows]),
        latency_median_us=_least([r.latency_median_us for r in rows]),
        latency_p95_us=_least([r.latency_p95_us for r in rows]),
        action_agreement=mean_of_all([r.action_agreement for r in rows]),
        ties=sum(r.ties or 0 for r in rows),
        weight_dtypes=first.weight_dtypes,
        **_statistics(row.scheme, pooled),
    )
    if row.scheme == REFERENCE:
        return row
    return replace(row, absolute_reward_error_percent=pooled.absolute_reward_error)


def _least(latencies: Sequence[float | None]) -> float | None:
    """Return the least: networks of one shape take as long, and what else ran only adds to it."""
    known = [latency for latency in latencies if latency is not None]
    return min(known) if len(known) == len(latencies) else None


def _statistics(name: str, result: Comparison | Pooled) -> dict[str, Any]:
    values: dict[str, Any] = {
        "episodes": result.episodes,
        "return_mean": result.returns.mean,
        "return_low": _finite(result.returns.low),
        "return_high": _finite(result.returns.high),
    }
    if name == REFERENCE:
        return values | {"verdict": "reference"}
    return values | {
        "difference_mean": result.difference.mean,
        "difference_low": _finite(result.difference.low),
        "difference_high": _finite(result.difference.high),
        "reward_error_percent": result.reward_error,
        "normalised_error_percent": result.normalised_error,
        "verdict": result.verdict,
    }


def _finite(limit: float) -> float | None:
    return limit if math.isfinite(limit) else None


def common_protocol(runs: Sequence[LoadedRun]) -> dict[str, str]:
    """Return the rules that the episodes of all runs were played by.

    Raises:
        QuarlError: They were played by different ones.
    """
    first = runs[0]
    for run in runs:
        if run.reference.evaluation.protocol != first.reference.evaluation.protocol:
            raise QuarlError(
                "Runs evaluated by different rules cannot be pooled; evaluate both again. "
                f"Received: runs={[first.run_id, run.run_id]}"
            )
    return first.reference.evaluation.protocol


def fewest_episodes(runs: Sequence[LoadedRun]) -> int:
    """Return the number of episodes per flatbuffer, of the run that has fewest."""
    return min(len(run.reference.evaluation.seeds) for run in runs)


def chance_interval(runs: Sequence[LoadedRun]) -> Interval | None:
    """Return the random policy's return: over episodes for one run, over the runs for several."""
    returns = [run.chance.returns for run in runs if run.chance is not None]
    if len(returns) < len(runs):
        return None
    if len(returns) == 1:
        return mean_interval(returns[0])
    return student_interval([float(np.mean(values)) for values in returns])
