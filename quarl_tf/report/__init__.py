"""Report what quantisation costs: one page from the sidecars and evaluations of some runs.

Nothing is averaged over what happens to be there: an experiment that is missing, or whose files do
not belong together, is named with the command that makes it, and its scheme has no pooled figures.
Sizes and latencies of simulated schemes are those of a float file and are left out everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf.evaluation.compare import CONFIDENCE, DEFAULT_MARGIN_PERCENT, Interval
from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.files import write_csv, write_json
from quarl_tf.report import figures as plots
from quarl_tf.report.figures import BitsPoint, Plot
from quarl_tf.report.pages import provenance, write_pages
from quarl_tf.report.results import (
    OK,
    LoadedRun,
    Row,
    chance_interval,
    common_protocol,
    fewest_episodes,
    load_run,
    pooled_row,
    run_row,
    scheme_names,
)
from quarl_tf.report.wording import dtypes, headline, notes_on, quantization_text
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import BASELINE, REFERENCE, Scheme
from quarl_tf.store.workspace import Workspace, checked_report_name, report_name


@dataclass(frozen=True)
class _Section:
    """The runs that differ in their seed alone, as the templates show them.

    Attributes:
        schemes: Names of the schemes reported on.
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
    runs: list[LoadedRun]
    schemes: list[str]
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
    margin_percent: float = DEFAULT_MARGIN_PERCENT,
    sample: bool = False,
) -> Path:
    """Write `reports/<name>/`: index.html, report.md, figures/, results.csv and results.json.

    Args:
        workspace: Where the runs are and the report goes.
        run_ids: Runs to report on, exported and evaluated.
        command: Command line that makes this report, shown in it.
        name: Name of the report; by default the run's, without the seed that of several, and
            apart for sampled actions.
        margin_percent: Loss that does not matter, in percent of the fp32 return.
        sample: Report on the evaluations by sampled actions instead of the greedy ones.

    Returns:
        The path of index.html. The same files in give the same bytes out.

    Raises:
        UsageError: No run is given, the name is unfit, or runs differ in more than their seed.
        QuarlError: A run has no fp32 result, or its files cannot be read or do not belong together.
    """
    if not run_ids:
        raise UsageError("A report needs at least one run; name one (quarl list). Received: none")
    unique = list(dict.fromkeys(run_ids))
    names = scheme_names(workspace, unique)
    runs = [load_run(workspace, one, names, margin_percent, sample=sample) for one in unique]
    chosen = _default_name(runs, sample) if name is None else checked_report_name(name)
    folder = workspace.report_dir(chosen)
    sections = [_section(workspace, group, sample) for group in _groups(runs)]
    missing = [
        run.missing[scheme]
        for section in sections
        for run in section.runs
        for scheme in (*section.schemes, BASELINE)
        if scheme in run.missing
    ]
    context = {
        "sections": sections,
        "schemes": [name for section in sections for name in section.schemes],
        "missing": missing,
        "margin_percent": margin_percent,
        "margin": f"{margin_percent:g} %",
        "command": command,
    }
    _write_results(folder, sections, context)
    return _write_pages(folder, sections, context)


# Grouping.


def _groups(runs: Sequence[LoadedRun]) -> list[list[LoadedRun]]:
    """Group runs that differ in their seed alone; only those may be pooled."""
    groups: dict[str, list[LoadedRun]] = {}
    for run in runs:
        key = run.run.to_dict() | {"seed": None, "settings": run.settings}
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    return list(groups.values())


def _default_name(runs: Sequence[LoadedRun], sample: bool) -> str:
    names = {loaded.run.seedless_id for loaded in runs}
    if len(names) > 1:
        raise UsageError(
            "A report on runs that differ in more than their seed needs a name; give --name NAME. "
            f"Received: runs={[run.run_id for run in runs]}"
        )
    return report_name(runs[0].run_id if len(runs) == 1 else names.pop(), sample=sample)


def _section(workspace: Workspace, runs: list[LoadedRun], sample: bool) -> _Section:
    title = _title(runs[0], sample)
    # Of these runs alone: those of other sections may have been exported in others.
    names = scheme_names(workspace, [run.run_id for run in runs])
    by_run = {run.run_id: [run_row(run, name) for name in names] for run in runs}
    rows = [pooled_row(runs, of_scheme) for of_scheme in zip(*by_run.values(), strict=True)]
    return _Section(
        title=title,
        runs=runs,
        schemes=names,
        episodes=fewest_episodes(runs),
        protocol=common_protocol(runs),
        headline=headline(rows),
        notes=notes_on(runs),
        rows=rows,
        by_run=by_run,
        chance=chance_interval(runs),
        figures=_figures(workspace, runs, rows, title),
    )


def _title(loaded: LoadedRun, sample: bool) -> str:
    run = loaded.run
    overrides = ", ".join(f"{key}={value}" for key, value in run.overrides.items())
    title = f"{run.algo} on {run.env_id}" + (f" ({overrides})" if overrides else "")
    if run.quantization is not None:
        title += f", trained at {quantization_text(run.quantization)}"
    return title + (", sampled actions" if sample else "")


# Figures.


def _figures(
    workspace: Workspace, runs: Sequence[LoadedRun], rows: Sequence[Row], title: str
) -> dict[str, Plot]:
    figures: dict[str, Plot] = {}
    complete = [row for row in rows if row.status == OK]
    others = [row.scheme for row in complete if row.scheme != REFERENCE]
    if others:
        points = [
            BitsPoint(
                Scheme.parse(row.scheme),
                row.returns,
                tuple(run.results[row.scheme].comparison.returns.mean for run in runs),
            )
            for row in complete
            if row.returns is not None
        ]
        chance = chance_interval(runs)
        figures["reward_against_bits"] = plots.reward_against_bits(
            points, None if chance is None else chance.mean, title
        )
        reference = _all_returns(runs, REFERENCE)
        figures["paired_returns"] = plots.paired_returns(
            {name: (reference, _all_returns(runs, name)) for name in others}, title
        )
    reference_id = runs[0].reference.sidecar.run_id
    reference_path = workspace.artifact(reference_id, REFERENCE)
    # Without it, where only its hash was kept, and nothing else needs its weights.
    layers = flatbuffer.weights(reference_path.read_bytes()) if reference_path.exists() else {}
    if layers:
        figures["weight_histograms"] = plots.weight_histograms(
            layers, f"fp32 weights of {reference_id}"
        )
    curves = [run.curve for run in runs if run.curve is not None]
    if curves:
        figures["learning_curve"] = plots.learning_curve(curves, title)
    return figures


def _all_returns(runs: Sequence[LoadedRun], name: str) -> plots.Floats:
    return np.concatenate([run.results[name].evaluation.returns for run in runs])


# Writing.


def _write_results(folder: Path, sections: Sequence[_Section], context: Mapping[str, Any]) -> None:
    rows = [asdict(row) for s in sections for lines in s.by_run.values() for row in lines]
    results = {
        "margin_percent": context["margin_percent"],
        "confidence": CONFIDENCE,
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
    """Write the figures and both pages."""
    pictures: dict[str, bytes] = {}
    figures = []
    for number, section in enumerate(sections, start=1):
        prefix = f"{number}_" if len(sections) > 1 else ""
        drawn = {f"{prefix}{stem}.png": plot for stem, plot in section.figures.items()}
        pictures |= {file: plot.png() for file, plot in drawn.items()}
        figures.append({file: plot.caption for file, plot in drawn.items()})
    everything = {
        **context,
        "figures": figures,
        "provenance": provenance([run for section in sections for run in section.runs]),
        "fewest_episodes": min(section.episodes for section in sections),
    }
    return write_pages(folder, "report", everything, pictures)
