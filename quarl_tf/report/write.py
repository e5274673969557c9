"""Write the report on the costs of quantisation, from sidecars and evaluations of trainings.

No mean is over a part: an experiment that is missing, or whose files do not belong together, is
listed, and its scheme has no pooled figures. Sizes and latencies of simulated schemes would be
those of a float file and are left out.
"""

import contextlib
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from quarl_tf.environments import require_chance
from quarl_tf.evaluation.compare import CONFIDENCE
from quarl_tf.evaluation.shelf import quantised_by
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import write_csv, write_json
from quarl_tf.presets import settings
from quarl_tf.report import results
from quarl_tf.report.drawing import draw
from quarl_tf.report.figures.style import FAMILIES, family, png
from quarl_tf.report.notes import blame_rows, last_networks, memory_rows, notes_on
from quarl_tf.report.page import dtypes, provenance, write_pages
from quarl_tf.report.play import animation
from quarl_tf.report.results import CellResults, Missing, Source, finite, load
from quarl_tf.spec import BASELINE, REFERENCE, Run, Scheme
from quarl_tf.spec.cell import Cell, Column
from quarl_tf.store.records import Sidecar
from quarl_tf.store.state import has_exports, is_begun
from quarl_tf.store.workspace import Workspace, checked_report_name, report_name, sidecar_path


def write_report(source: Source, run_ids: Sequence[str], name: str | None) -> Path:
    """Write the report of `pipeline.report`: one cell for runs that differ in their seed alone.

    The default name is the run's, without its seed for several.
    """
    if name is not None:
        checked_report_name(name)
    sidecars = [_sidecar(source, run_id) for run_id in dict.fromkeys(run_ids)]
    runs = [Run.from_dict(sidecar.run) for sidecar in sidecars]
    names = {run.seedless_id for run in runs}
    if name is None and len(names) > 1:
        raise UsageError(
            "A report on runs that differ in more than their seed needs a name; give --name NAME. "
            f"Received: runs={[run.run_id for run in runs]}"
        )
    name = name or report_name(runs[0].run_id if len(runs) == 1 else names.pop(), source.chance)
    adopted = [s.network_sha256 for s, run in zip(sidecars, runs, strict=True) if run.adopted]
    if len(set(adopted)) < len(adopted):
        raise UsageError(
            "A policy that was adopted several times is one training; report one of its runs. "
            f"Received: runs={[run.run_id for run in runs]}"
        )
    groups: dict[str, list[Run]] = {}
    for run, sidecar in zip(runs, sidecars, strict=True):
        # One for each seed: a training may go on from several of its checkpoints.
        key = f"{run.seedless_id} {settings(run, sidecar.preset)}"
        while run.seed in (other.seed for other in groups.get(key, ())):
            key += " again"
        groups.setdefault(key, []).append(run)
    cells = [_cell_of(source, group) for group in groups.values()]
    return write(source, cells, name, cells[0].title if len(cells) == 1 else name)


def write(source: Source, cells: Sequence[Cell], name: str, title: str) -> Path:
    """Write `reports/<name>/`: index.html, report.md, figures/, results.csv and results.json.

    The same files give the same bytes, except for the memory of processes. Returns the path of
    index.html.
    """
    cell_results = [results.load_cell(source, cell) for cell in cells]
    missing = {(m.run_id, m.scheme): m for cell in cell_results for m in cell.missing}
    memories = memory_rows(source.workspace, cell_results) if source.memory else []
    summaries = [_summary(cell) for cell in cell_results]
    aggregates = results.aggregates(cell_results)
    figures = list(draw(source.workspace, cell_results, aggregates, source.x))
    rows = [results.flat(row) for cell in cell_results for row in cell.trainings]
    pooled = [results.flat(row) for cell in cell_results for row in cell.rows]
    succeeding = any(row["success_rate"] is not None for row in rows)
    for row in () if succeeding else (*rows, *pooled):
        del row["success_rate"]
    content = {
        "name": name,
        "margin_percent": source.margin_percent,
        "confidence": CONFIDENCE,
        "command": source.command,
        "cells": summaries,
        "pooled": pooled,
        "runs": rows,
        "missing": [experiment._asdict() for experiment in missing.values()],
        "aggregates": [asdict(aggregate, dict_factory=finite) for aggregate in aggregates],
    }
    if source.memory:
        content["memory"] = list(chain(*memories))
    folder = source.workspace.report_dir(name)
    write_json(folder / "results.json", content)
    csv_rows = [row | {"weight_dtypes": dtypes(row["weight_dtypes"])} for row in rows]
    write_csv(folder / "results.csv", csv_rows)
    context = {
        "title": title,
        "cells": cell_results,
        "summaries": summaries,
        "aggregates": aggregates,
        "labels": list(dict.fromkeys(row["label"] for row in pooled)),
        "schemes": {row["scheme"] for row in pooled},
        "missing": list(missing.values()),
        "experiments": len({(row["run_id"], row["scheme"]) for row in rows} | set(missing)),
        "memory": memories,
        "blamed": [blame_rows(source.workspace, cell) for cell in cell_results],
        "succeeding": succeeding,
        "margin": f"{source.margin_percent:g} %",
        "skipped": source.skip_episodes,
        "fewest_episodes": min((n for cell in cell_results if (n := cell.episodes)), default=None),
        "command": source.command,
        "provenance": provenance([result for cell in cell_results for result in cell.results]),
        "figures": figures,
        **_repetition(source, cell_results, missing.values()),
        **animation(source, cell_results),
    }
    return write_pages(folder, context, {picture.file: png(picture.figure) for picture in figures})


def _sidecar(source: Source, run_id: str) -> Sidecar:
    """Return a sidecar of a run that has an fp32 result, else a QuarlError."""
    workspace = source.workspace
    schemes = _exported(workspace, [run_id])
    paths = (sidecar_path(workspace.artifact(run_id, scheme.name)) for scheme in schemes)
    sidecars = (Sidecar.load(path) for path in paths if path.exists())
    sidecar = next((sidecar for sidecar in sidecars if sidecar.run_id == run_id), None)
    if sidecar is None:
        raise QuarlError(
            "There are no flatbuffers of this run; make them with "
            f"`{workspace.command(f'quarl export {run_id}')}`, or name the folder of the run "
            f"(--root DIR). Received: run={run_id!r} in {workspace.root.resolve()}"
        )
    run = Run.from_dict(sidecar.run)
    # First, as the error below names a command that would be refused.
    require_chance(run.env_id, source.chance, None if run.adopted else run.algo)
    fp32 = load(source, run.plain, REFERENCE)
    if isinstance(fp32, Missing):
        option = source.chance.option
        command = f"{run.plain.command('run')} --schemes {REFERENCE}{option}"
        remedy = _remedy(source, fp32, run.plain, command, option)
        raise QuarlError(
            f"There is nothing to compare with: fp32 of {fp32.run_id} {fp32.reason}; make it with "
            f"`{remedy}`. Received: run={run_id!r}"
        )
    return sidecar


def _cell_of(source: Source, runs: Sequence[Run]) -> Cell:
    """Return the cell of runs that differ in their seed alone, with all their exported schemes."""
    schemes = _exported(source.workspace, [run.run_id for run in runs])
    columns = [Column(REFERENCE, Scheme.parse(REFERENCE), tuple(run.plain for run in runs))]
    columns += [Column(s.name, s, tuple(runs)) for s in schemes if s.name != REFERENCE]
    first = runs[0]
    options = dict(first.overrides)
    if first.origin is not None:
        step = f" at {first.origin.step}" if first.origin.step and len(runs) == 1 else ""
        options["from"] = first.origin.run.seedless_id + step
    if first.quantization is not None:
        options |= first.quantization.options()
    details = [f"{key}={value}" for key, value in options.items()]
    distinction = ", ".join(filter(None, [*details, source.chance.words]))
    return Cell(distinction=distinction, columns=tuple(columns))


def _exported(workspace: Workspace, run_ids: Sequence[str]) -> list[Scheme]:
    """Return the schemes of runs' files: native ones first, then families, most bits first.

    Of a large flatbuffer only the sidecar may have been kept.
    """
    files = [path for run_id in run_ids for path in workspace.artifact_dir(run_id).glob("*")]
    schemes = []
    for name in {path.stem for path in files if path.suffix in (".tflite", ".json")}:
        with contextlib.suppress(UsageError):  # Not named after a scheme.
            schemes.append(Scheme.parse(name))

    families = [None, *FAMILIES]
    return sorted(schemes, key=lambda s: (families.index(family(s)), -s.weight_bits, s.name))


def _summary(cell: CellResults) -> dict[str, Any]:
    return {
        "title": cell.cell.title,
        "runs": [fp32.sidecar.run_id for fp32 in cell.references],
        "episodes": cell.episodes,
        "protocol": next((asdict(fp32.evaluation.protocol) for fp32 in cell.references), None),
        "smallest": None if cell.smallest is None else cell.smallest.scheme,
        "fewest": {name: row and row.scheme for name, row in cell.fewest},
        "notes": list(notes_on(cell)),
        "last_networks": last_networks(cell),
    }


def _repetition(
    source: Source, cells: Sequence[CellResults], missing: Collection[Missing]
) -> dict[str, list[str]]:
    """Return the commands that make all results, and those that make the missing ones."""
    if source.remedy:
        return {"commands": [source.remedy], "remedies": [source.remedy] if missing else []}
    runs: dict[str, Run] = {}
    schemes: dict[str, dict[str, None]] = {}
    episodes: dict[str, int] = {}
    most = max((cell.episodes or 0 for cell in cells), default=0)
    for cell in cells:
        for run, name in ((run, c.scheme.name) for c in cell.cell.columns for run in c.runs):
            runs[run.run_id] = run
            schemes.setdefault(run.run_id, {})[name] = None
            episodes[run.run_id] = max(episodes.get(run.run_id, 0), cell.episodes or most)
    commands, options = dict[str, str](), dict[str, str]()
    for run_id, run in runs.items():
        count = episodes[run_id] + source.skip_episodes
        options[run_id] = f" --episodes {count}{source.chance.option}"
        needed = run.needed
        if needed is not None and needed.run_id not in runs:  # What a training starts from.
            commands[needed.run_id] = f"{needed.command('run')} --schemes {REFERENCE}"
        names = ",".join(schemes[run_id])
        commands[run_id] = f"{run.command('run')} --schemes {names}{options[run_id]}"
    remedies = (
        _remedy(source, one, runs[one.run_id], commands[one.run_id], options[one.run_id])
        for one in missing
    )
    return {
        "commands": [source.workspace.command(command) for command in commands.values()],
        "remedies": list(dict.fromkeys(remedies)),
    }


def _remedy(source: Source, missing: Missing, run: Run, command: str, options: str) -> str:
    """Return the command that makes a missing result: that of its training, if it is here."""
    workspace, scheme = source.workspace, missing.scheme
    artifact = workspace.artifact(missing.run_id, REFERENCE if scheme == BASELINE else scheme)
    if not is_begun(workspace, missing.run_id):
        if missing.exported and artifact.exists():
            return f"quarl evaluate {shlex.quote(str(artifact))}{options}{run.imports}"
        if scheme != BASELINE and (made := quantised_by(artifact, run)) is not None:
            return f"{made} && quarl evaluate {shlex.quote(str(artifact))}{options}{run.imports}"
        # Beside what its training was exported to, it would not be trained.
        if not run.adopted and has_exports(workspace, missing.run_id):
            return f"{command} --root DIR"
    return workspace.command(command)
