"""Report what quantisation costs: one page from the sidecars and evaluations of some runs.

Nothing is averaged over what happens to be there: an experiment that is missing, or whose files do
not belong together, is named with the command that makes it, and its scheme has no pooled figures.
Sizes and latencies of simulated schemes are those of a float file and are left out everywhere.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from quarl_tf import flatbuffer, plots
from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.plots import BitsPoint, Curve, Plot
from quarl_tf.records import (
    Evaluation,
    Sidecar,
    Workspace,
    evaluation_path,
    sha256,
    sidecar_path,
    write_bytes,
    write_csv,
    write_json,
    write_text,
)
from quarl_tf.spec import DEFAULT_SCHEMES, Scheme
from quarl_tf.statistics import (
    DEFAULT_MARGIN_PERCENT,
    Comparison,
    Interval,
    Pooled,
    compare,
    mean_interval,
    pool,
    student_interval,
)

_REFERENCE = "fp32"
#: Fewer episodes than this make bootstrap intervals too narrow; the report says so.
_FEW_EPISODES = 20
_OK = "ok"
#: How to begin a sentence on a simulated sweep, by the quantiser's rule.
_SWEEPS = {"code": "In simulation", "paper": "In simulation by the formula as published"}
_TIMES = "\N{MULTIPLICATION SIGN}"
_UNKNOWN = "\N{EN DASH}"


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
    status: str = _OK
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


@dataclass(frozen=True)
class _Missing:
    """An experiment without a result, why, and the command that mends it."""

    run_id: str
    scheme: str
    reason: str
    command: str


@dataclass(frozen=True)
class _Experiment:
    sidecar: Sidecar
    evaluation: Evaluation
    comparison: Comparison


@dataclass(frozen=True)
class _LoadedRun:
    run_id: str
    experiments: dict[str, _Experiment]
    missing: dict[str, _Missing]
    chance: Evaluation | None
    curve: Curve | None

    @property
    def reference(self) -> _Experiment:
        return self.experiments[_REFERENCE]

    @property
    def spec(self) -> dict[str, Any]:
        return self.reference.sidecar.run


@dataclass(frozen=True)
class _Section:
    """The runs of one algorithm, environment and set of overrides, as the templates show them.

    Attributes:
        episodes: Episodes per flatbuffer, of the run that has fewest.
        protocol: The rules that the episodes were played by.
        headline: Sentences that say what came out.
        notes: What the reader must know before believing it.
        rows: One line per scheme, pooled over the runs.
        by_run: The lines of each run.
        chance: Return of the random policy over the runs, if every run has it.
        figures: File stem to figure.
    """

    title: str
    runs: list[_LoadedRun]
    episodes: int
    protocol: dict[str, str]
    headline: list[str]
    notes: list[str]
    rows: list[Row]
    by_run: dict[str, list[Row]]
    chance: Interval | None
    figures: dict[str, Plot]


def write_report(
    workspace: Workspace,
    run_ids: Sequence[str],
    *,
    command: str,
    name: str | None = None,
    schemes: Sequence[str] | None = None,
    margin_percent: float = DEFAULT_MARGIN_PERCENT,
) -> Path:
    """Write `reports/<name>/`: index.html, report.md, figures/, results.csv and results.json.

    Args:
        workspace: Where the runs are and the report goes.
        run_ids: Runs to report on, exported and evaluated.
        command: Command line that makes this report, shown in it.
        name: Name of the report; by default the run's, or the algorithm and environment that all
            runs share.
        schemes: Schemes to report on; by default all that any of the runs was exported in. fp32,
            the reference, is always among them.
        margin_percent: Loss that does not matter, in percent of the fp32 return.

    Returns:
        The path of index.html. The same files in give the same bytes out.

    Raises:
        UsageError: No run is given, a scheme or the name is unfit, or several runs share no name.
        QuarlError: A run has no fp32 result, or its files cannot be read or do not belong together.
    """
    if not run_ids:
        raise UsageError("A report needs at least one run; name one (quarl list). Received: none")
    unique = list(dict.fromkeys(run_ids))
    names = _scheme_names(workspace, unique, schemes)
    runs = [_load_run(workspace, run_id, names, margin_percent) for run_id in unique]
    folder = workspace.report_dir(_report_name(name, runs))
    sections = [_section(workspace, group, names) for group in _groups(runs)]
    missing = [run.missing[scheme] for run in runs for scheme in names if scheme in run.missing]
    context = {
        "sections": sections,
        "missing": missing,
        "margin_percent": margin_percent,
        "margin": f"{margin_percent:g} %",
        "command": command,
    }
    _write_results(folder, sections, context)
    return _write_pages(folder, sections, context)


# Reading.


def _scheme_names(
    workspace: Workspace, run_ids: Sequence[str], schemes: Sequence[str] | None
) -> list[str]:
    """Return the schemes to report on: native ones first, and from many bits to few."""
    found = schemes
    if found is None:
        folders = [workspace.artifact_dir(run_id) for run_id in run_ids]
        found = [path.stem for folder in folders for path in folder.glob("*.tflite")]

    def place(scheme: Scheme) -> tuple[str, int, int]:
        known = scheme.name in DEFAULT_SCHEMES
        order = DEFAULT_SCHEMES.index(scheme.name) if known else len(DEFAULT_SCHEMES)
        return (scheme.mode or "", -scheme.weight_bits, order)

    parsed = [Scheme.parse(name) for name in {_REFERENCE, *found}]
    return [scheme.name for scheme in sorted(parsed, key=place)]


def _load_run(
    workspace: Workspace, run_id: str, schemes: Sequence[str], margin_percent: float
) -> _LoadedRun:
    folder = workspace.artifact_dir(run_id)
    if not folder.is_dir():
        raise QuarlError(
            f"There are no flatbuffers of this run; make them with `quarl export {run_id}`. "
            f"Received: run={run_id!r}"
        )
    chance_path = evaluation_path(workspace.artifact(run_id, "random"))
    chance = Evaluation.load(chance_path) if chance_path.exists() else None
    reference = _load_pair(workspace, run_id, _REFERENCE)
    if isinstance(reference, _Missing):
        raise QuarlError(
            f"{run_id} has nothing to compare with: fp32 {reference.reason}; run "
            f"`{reference.command}`. Received: run={run_id!r}"
        )
    experiments: dict[str, _Experiment] = {}
    missing: dict[str, _Missing] = {}
    for name in schemes:
        pair = _load_pair(workspace, run_id, name)
        if not isinstance(pair, _Missing):
            pair = _require_same_episodes(pair, reference[1])
        if isinstance(pair, _Missing):
            missing[name] = pair
            continue
        comparison = compare(reference[1], pair[1], chance, margin_percent)
        experiments[name] = _Experiment(*pair, comparison)
    curve = _load_curve(folder / "progress.csv", run_id)
    return _LoadedRun(run_id, experiments, missing, chance, curve)


def _load_pair(
    workspace: Workspace, run_id: str, scheme: str
) -> tuple[Sidecar, Evaluation] | _Missing:
    """Load a sidecar and its evaluation, or tell why one cannot stand for the other."""
    artifact = workspace.artifact(run_id, scheme)
    export = f"quarl export {run_id} --schemes {scheme}"
    if not artifact.exists() or not sidecar_path(artifact).exists():
        return _Missing(run_id, scheme, "was not exported", export)
    sidecar = Sidecar.load(sidecar_path(artifact))
    if (sidecar.run_id, sidecar.scheme, sidecar.sha256) != (run_id, scheme, sha256(artifact)):
        return _Missing(run_id, scheme, "has a flatbuffer that does not match its sidecar", export)
    evaluate = _evaluate_command(run_id, scheme)
    if not evaluation_path(artifact).exists():
        return _Missing(run_id, scheme, "was not evaluated", evaluate)
    evaluation = Evaluation.load(evaluation_path(artifact))
    if evaluation.artifact_sha256 != sidecar.sha256:
        reason = "has a stale evaluation, made with another flatbuffer"
        return _Missing(run_id, scheme, reason, evaluate)
    return sidecar, evaluation


def _require_same_episodes(
    pair: tuple[Sidecar, Evaluation], reference: Evaluation
) -> tuple[Sidecar, Evaluation] | _Missing:
    _, evaluation = pair
    if (evaluation.seeds, evaluation.protocol) == (reference.seeds, reference.protocol):
        return pair
    return _Missing(
        evaluation.run_id,
        evaluation.scheme,
        f"was evaluated on other episodes than fp32 ({len(evaluation.seeds)} against "
        f"{len(reference.seeds)}, or other seeds or rules)",
        f"{_evaluate_command(evaluation.run_id, evaluation.scheme)} "
        f"--episodes {len(reference.seeds)}",
    )


def _evaluate_command(run_id: str, scheme: str) -> str:
    return f"quarl evaluate tflite_models/{run_id}/{scheme}.tflite"


def _load_curve(path: Path, run_id: str) -> Curve | None:
    if not path.exists():
        return None
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        columns = {
            name: np.array([float(row[name] or "nan") for row in rows])
            for name in ("step", "episode_return", "greedy_return")
        }
    except (KeyError, TypeError, ValueError) as error:
        raise QuarlError(
            f"The training curve cannot be read ({error}); copy it again with `quarl export "
            f"{run_id}`. Received: path={str(path)!r}"
        ) from error
    if not rows:
        return None
    return Curve(run_id, columns["step"], columns["episode_return"], columns["greedy_return"])


# Grouping.


def _groups(runs: Sequence[_LoadedRun]) -> list[list[_LoadedRun]]:
    """Group runs that differ in their seed alone; only those may be pooled."""
    groups: dict[str, list[_LoadedRun]] = {}
    for run in runs:
        key = run.spec | {"seed": None, "preset": run.reference.sidecar.preset}
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    return list(groups.values())


def _report_name(name: str | None, runs: Sequence[_LoadedRun]) -> str:
    if name is None and len(runs) == 1:
        return runs[0].run_id
    kinds = {f"{run.spec['algo']}-{run.spec['env_id'].replace('/', '_')}" for run in runs}
    if name is None and len(kinds) == 1:
        return kinds.pop()
    if name is None:
        raise UsageError(
            "A report on several algorithms or environments needs a name; give --name NAME. "
            f"Received: runs={[run.run_id for run in runs]}"
        )
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(
            "The name of a report is a folder's: letters, digits, '.', '_' and '-', beginning with "
            f"a letter or digit. Received: name={name!r}"
        )
    return name


def _section(workspace: Workspace, runs: list[_LoadedRun], schemes: Sequence[str]) -> _Section:
    first = runs[0]
    spec = first.spec
    for run in runs:
        if run.reference.evaluation.protocol != first.reference.evaluation.protocol:
            raise QuarlError(
                "Runs evaluated by different rules cannot be pooled; evaluate both again. "
                f"Received: runs={[first.run_id, run.run_id]}"
            )
    overrides = ", ".join(f"{key}={value}" for key, value in spec["overrides"].items())
    title = f"{spec['algo']} on {spec['env_id']}" + (f" ({overrides})" if overrides else "")
    by_run = {run.run_id: [_run_row(run, name) for name in schemes] for run in runs}
    rows = [_pooled_row(runs, of_scheme) for of_scheme in zip(*by_run.values(), strict=True)]
    chance = _chance(runs)
    return _Section(
        title=title,
        runs=runs,
        episodes=_fewest_episodes(runs),
        protocol=first.reference.evaluation.protocol,
        headline=_headline(rows),
        notes=_notes(runs, chance),
        rows=rows,
        by_run=by_run,
        chance=chance,
        figures=_figures(workspace, runs, rows, title),
    )


def _fewest_episodes(runs: Sequence[_LoadedRun]) -> int:
    return min(len(run.reference.evaluation.seeds) for run in runs)


def _chance(runs: Sequence[_LoadedRun]) -> Interval | None:
    """Return the random policy's return: over episodes for one run, over the runs for several."""
    returns = [run.chance.returns for run in runs if run.chance is not None]
    if len(returns) < len(runs):
        return None
    if len(returns) == 1:
        return mean_interval(returns[0])
    return student_interval([float(np.mean(values)) for values in returns])


# Lines of the results.


def _run_row(run: _LoadedRun, name: str) -> Row:
    scheme = Scheme.parse(name)
    row = Row(
        run_id=run.run_id,
        algo=run.spec["algo"],
        env_id=run.spec["env_id"],
        seed=run.spec["seed"],
        scheme=name,
        native=scheme.native,
        weight_bits=scheme.weight_bits,
    )
    experiment = run.experiments.get(name)
    if experiment is None:
        return replace(row, status=run.missing[name].reason)
    sidecar, evaluation = experiment.sidecar, experiment.evaluation
    row = replace(
        row,
        ties=evaluation.ties,
        action_agreement=None if evaluation.agreement is None else evaluation.agreement["fraction"],
        weight_dtypes=sidecar.weight_dtypes,
        sha256=sidecar.sha256,
        **_statistics(name, experiment.comparison),
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


def _pooled_row(runs: Sequence[_LoadedRun], rows: Sequence[Row]) -> Row:
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
    absent = [str(r.run_id) for r in rows if r.status != _OK]
    if absent:
        several = len(rows) > 1
        status = f"missing in {', '.join(absent)}" if several else first.status
        return replace(row, status=status)
    pooled = pool([run.experiments[row.scheme].comparison for run in runs])
    row = replace(
        row,
        size_bytes=_mean(r.size_bytes for r in rows),
        compression=_mean(r.compression for r in rows),
        latency_median_us=_mean(r.latency_median_us for r in rows),
        latency_p95_us=_mean(r.latency_p95_us for r in rows),
        action_agreement=_mean(r.action_agreement for r in rows),
        ties=sum(r.ties or 0 for r in rows),
        weight_dtypes=first.weight_dtypes,
        **_statistics(row.scheme, pooled),
    )
    if row.scheme == _REFERENCE:
        return row
    return replace(row, absolute_reward_error_percent=pooled.absolute_reward_error)


def _statistics(name: str, result: Comparison | Pooled) -> dict[str, Any]:
    values: dict[str, Any] = {
        "episodes": result.episodes,
        "return_mean": result.returns.mean,
        "return_low": _finite(result.returns.low),
        "return_high": _finite(result.returns.high),
    }
    if name == _REFERENCE:
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


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    present = [value for value in known if value is not None]
    return float(np.mean(present)) if len(present) == len(known) else None


# Words.


def _headline(rows: Sequence[Row]) -> list[str]:
    """Say what came out: the smallest flatbuffer that keeps the reward, losses, the bits needed."""
    natives = [r for r in rows if r.native and r.status == _OK and r.scheme != _REFERENCE]
    natives.sort(key=lambda row: row.size_bytes or math.inf)
    safe = [row for row in natives if _keeps_reward(row)]
    reference = next(row for row in rows if row.scheme == _REFERENCE)
    first = [*safe[:1], *(row for row in natives[:1] if not _keeps_reward(row))]
    sentences = [f"{r.scheme} is {_cheaper(r, reference)} than fp32{_cost(r)}." for r in first]
    sentences += [
        f"The return of {row.scheme} is {_amount(row)} lower."
        for row in natives[1:]
        if row.verdict == "loss"
    ]
    simulated = {mode: [r for r in rows if Scheme.parse(r.scheme).mode == mode] for mode in _SWEEPS}
    return [
        *sentences,
        *(_bits_needed(how, simulated[mode]) for mode, how in _SWEEPS.items() if simulated[mode]),
    ]


def _keeps_reward(row: Row) -> bool:
    return row.verdict in ("gain", "no loss shown")


def _cheaper(row: Row, reference: Row) -> str:
    words = [_ratio(row.compression, "smaller", "larger")]
    if row.latency_median_us and reference.latency_median_us:
        words.append(
            _ratio(reference.latency_median_us / row.latency_median_us, "faster", "slower")
        )
    return " and ".join(words)


def _ratio(ratio: float | None, above: str, below: str) -> str:
    if ratio is None:
        return f"no {above}"
    if ratio >= 1:
        return f"{ratio:.1f}{_TIMES} {above}" if ratio >= 1.05 else f"no {above}"
    return f"{1 / ratio:.1f}{_TIMES} {below}" if ratio <= 1 / 1.05 else f"no {below}"


def _evidence(row: Row) -> str:
    if row.runs == 1:
        return f"{row.episodes} paired episodes"
    return f"{row.runs} trainings with {row.episodes} paired episodes in all"


def _cost(row: Row) -> str:
    if row.verdict == "gain":
        return f", and its return is {_amount(row)} higher"
    if row.verdict == "loss":
        return f", but its return is {_amount(row)} lower"
    if row.verdict == "cannot tell":
        return f"; whether it loses reward, {_evidence(row)} cannot tell"
    if row.difference_high is not None and row.difference_high < 0:
        return f"; its return is {_amount(row)} lower, within the margin"
    return f" and loses no reward that {_evidence(row)} could show"


def _amount(row: Row) -> str:
    """Say how far a return is from that of fp32: in percent, or plainly where that is 0."""
    if row.reward_error_percent is not None:
        return percent(abs(row.reward_error_percent))
    return f"{number_text(abs(row.difference_mean or 0.0))} per episode"


def _bits_needed(how: str, rows: Sequence[Row]) -> str:
    """Say down to how many bits simulated weights keep the reward, from many to few."""
    kept = 0
    while kept < len(rows) and _keeps_reward(rows[kept]):
        kept += 1
    keeping = f"{how}, weights of {rows[kept - 1].weight_bits} bits keep the reward"
    if kept == len(rows):
        return f"{keeping}, the fewest tried."
    stop = rows[kept]
    what = {
        None: "the result is missing",
        "loss": f"the return is {_amount(stop)} lower",
        "cannot tell": "the episodes cannot tell",
    }[stop.verdict]
    if kept == 0:
        return f"{how}, at {stop.weight_bits} bits {what}."
    return f"{keeping}; at {stop.weight_bits} bits {what}."


def _notes(runs: Sequence[_LoadedRun], chance: Interval | None) -> list[str]:
    notes = []
    episodes = _fewest_episodes(runs)
    if episodes < _FEW_EPISODES:
        notes.append(
            f"Only {episodes} episodes: intervals from so few are too narrow and the verdicts are "
            "provisional. Evaluate with --episodes 100."
        )
    for run in runs:
        if run.chance is None:
            notes.append(
                f"{run.run_id} has no evaluation of a random policy, so the normalised error is "
                f"unknown. Run `{_evaluate_command(run.run_id, _REFERENCE)}`."
            )
        elif run.reference.comparison.returns.low <= np.mean(run.chance.returns):
            notes.append(
                f"The fp32 policy of {run.run_id} is not shown to earn more than a random one: it "
                "has little to lose, and its verdicts say little. Train it longer."
            )
    without = [run.run_id for run in runs if run.curve is None]
    if without:
        notes.append(f"No training curve was exported for {', '.join(without)}.")
    return notes


# Figures.


def _figures(
    workspace: Workspace, runs: Sequence[_LoadedRun], rows: Sequence[Row], title: str
) -> dict[str, Plot]:
    figures: dict[str, Plot] = {}
    complete = [row for row in rows if row.status == _OK]
    others = [row.scheme for row in complete if row.scheme != _REFERENCE]
    if others:
        points = [
            BitsPoint(
                Scheme.parse(row.scheme),
                _row_interval(row),
                tuple(run.experiments[row.scheme].comparison.returns.mean for run in runs),
            )
            for row in complete
        ]
        chance = _chance(runs)
        figures["reward_against_bits"] = plots.reward_against_bits(
            points, None if chance is None else chance.mean, title
        )
        reference = _all_returns(runs, _REFERENCE)
        figures["paired_returns"] = plots.paired_returns(
            {name: (reference, _all_returns(runs, name)) for name in others}, title
        )
    content = workspace.artifact(runs[0].run_id, _REFERENCE).read_bytes()
    layers = flatbuffer.weights(content)
    if layers:
        figures["weight_histograms"] = plots.weight_histograms(
            layers, f"fp32 weights of {runs[0].run_id}"
        )
    curves = [run.curve for run in runs if run.curve is not None]
    if curves:
        figures["learning_curve"] = plots.learning_curve(curves, title)
    return figures


def _row_interval(row: Row) -> Interval:
    mean = row.return_mean if row.return_mean is not None else math.nan
    low = -math.inf if row.return_low is None else row.return_low
    high = math.inf if row.return_high is None else row.return_high
    return Interval(mean, low, high)


def _all_returns(runs: Sequence[_LoadedRun], name: str) -> plots.Floats:
    return np.concatenate([run.experiments[name].evaluation.returns for run in runs])


# Writing.


def _write_results(folder: Path, sections: Sequence[_Section], context: Mapping[str, Any]) -> None:
    rows = [asdict(row) for s in sections for lines in s.by_run.values() for row in lines]
    results = {
        "margin_percent": context["margin_percent"],
        "confidence": 0.95,
        "command": context["command"],
        "sections": [
            {
                "title": section.title,
                "runs": [run.run_id for run in section.runs],
                "protocol": section.protocol,
                "headline": section.headline,
                "notes": section.notes,
                "pooled": [asdict(row) for row in section.rows],
            }
            for section in sections
        ],
        "runs": rows,
        "missing": [asdict(one) for one in context["missing"]],
    }
    write_json(folder / "results.json", results)
    write_csv(
        folder / "results.csv",
        [row | {"weight_dtypes": dtypes(row["weight_dtypes"])} for row in rows],
    )


def _write_pages(folder: Path, sections: Sequence[_Section], context: Mapping[str, Any]) -> Path:
    """Write the figures and both pages, and remove the figures of an earlier report."""
    pictures: dict[str, bytes] = {}
    figures = []
    for number, section in enumerate(sections, start=1):
        prefix = f"{number}_" if len(sections) > 1 else ""
        drawn = {f"{prefix}{stem}.png": plot for stem, plot in section.figures.items()}
        pictures |= {file: plot.png() for file, plot in drawn.items()}
        figures.append({file: plot.caption for file, plot in drawn.items()})
    for stale in (folder / "figures").glob("*.png"):
        if stale.name not in pictures:
            stale.unlink()
    for file, content in pictures.items():
        write_bytes(folder / "figures" / file, content)

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quarl_tf"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": number_text,
        "percent": percent,
        "size": size,
        "dtypes": dtypes,
        "alt": lambda file: file.removesuffix(".png").replace("_", " "),
        "colour": plots.scheme_colour,
    }
    everything = {
        **context,
        "limits": limits,
        "ratio": _ratio,
        "figures": figures,
        "provenance": _provenance(sections),
        "unseen_percent": 100 * _unseen(min(section.episodes for section in sections)),
    }
    encoded = {
        file: f"data:image/png;base64,{base64.b64encode(content).decode()}"
        for file, content in pictures.items()
    }
    page = environment.get_template("report.html.j2").render(everything, pictures=encoded)
    write_text(folder / "report.md", environment.get_template("report.md.j2").render(everything))
    write_text(folder / "index.html", page)
    return folder / "index.html"


def _provenance(sections: Sequence[_Section]) -> dict[str, Any]:
    """Collect the commits and package versions behind the results; several where they differ."""
    experiments = [e for s in sections for run in s.runs for e in run.experiments.values()]
    versions: dict[str, set[str]] = {}
    for experiment in experiments:
        for record in (experiment.sidecar.versions, experiment.evaluation.versions):
            for package, version in record.items():
                versions.setdefault(package, set()).add(version)
    commits = {experiment.sidecar.commit or "unknown" for experiment in experiments}
    return {
        "commits": sorted(commits),
        "versions": {package: sorted(found) for package, found in sorted(versions.items())},
    }


def _unseen(episodes: int) -> float:
    """Return how often an event may occur and still, at 95 %, not be seen in so many episodes."""
    return float(1 - 0.05 ** (1 / episodes))


# Numbers as text.


def number_text(value: float | None) -> str:
    """Write a return or a latency with three to five digits; a dash for what is unknown."""
    if value is None:
        return _UNKNOWN
    magnitude = abs(value)
    digits = 0 if magnitude >= 1000 else 1 if magnitude >= 10 else 2
    text = f"{value:,.{digits}f}" if magnitude >= 0.01 or value == 0 else f"{value:.1g}"
    return ("0" if value == 0 else text).replace("-", "\N{MINUS SIGN}")


def percent(value: float | None) -> str:
    """Write a percentage."""
    return number_text(value) + ("" if value is None else " %")


def size(value: float | None) -> str:
    """Write a number of bytes."""
    if value is None:
        return _UNKNOWN
    for unit, step in (("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:.1f} {unit}"
    return f"{value:.0f} B"


def limits(low: float | None, high: float | None) -> str:
    """Write the limits of an interval."""
    if low is None or high is None:
        return "[no interval]"
    return f"[{number_text(low)}, {number_text(high)}]"


def dtypes(counts: Mapping[str, int]) -> str:
    """Write the weights of a file by dtype, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {dtype}" for dtype, count in ordered)
