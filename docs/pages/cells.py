"""What int8, fewer bits and the policies of others cost."""

from dataclasses import asdict, replace
from functools import cache
from itertools import groupby
from typing import Any

from records import DASH, GAMES, POOLED, ROOT, interval, report, table

from quarl_tf import study
from quarl_tf.evaluation.aggregate import Paired, aggregate, paired
from quarl_tf.report.page import number_text, percent, size
from quarl_tf.report.results import finite
from quarl_tf.spec import REFERENCE, Run
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import baseline
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path


def every_cell() -> str:
    """Return what int8 costs in every cell."""
    stuck = {_task(row) for row in GAMES}
    found = [(row, "") for row in POOLED if _task(row) not in stuck]
    found += [(row, ", sticky actions") for row in GAMES]
    rows = [
        [
            _task(row) + told,
            row["verdict"] or DASH,
            row["runs"],
            number_text(row["return_mean"]),
            percent(row["reward_error_percent"]),
            percent(row["normalised_error_percent"]),
        ]
        for row, told in found
        if row["scheme"] == "int8"
    ]
    header = ["cell", "verdict", "trainings", "return of int8", "reward error", "normalised"]
    return table(header, rows, 4)


def _task(row: dict[str, Any]) -> str:
    return f"{row['algo']} on {row['env_id']}"


def int8() -> str:
    """Return what the int8 schemes cost over all cells and in each."""
    results = report("int8")
    sums = [(one, "fp32", "tasks") for one in results["aggregates"]]
    for scheme, reference in (("int8", "fp32"), ("int8_stock", "fp32"), ("int8_stock", "int8")):
        sums.append((_with_games(scheme, reference), reference, "tasks and games"))
    all_cells = [
        [
            *(f"`{one['scheme']}`", f"`{reference}`", of, one["cells"], len(one["errors"])),
            *(interval(one["error"]), percent(one["absolute"]), percent(one["noise"])),
            ", ".join(one["losses"]) or "none",
        ]
        for one, reference, of in sums
    ]
    ways = [one["scheme"] for one in results["aggregates"]]
    rows = []
    for cell, group in groupby(results["pooled"], key=lambda row: row["cell"]):
        by_scheme = {row["scheme"]: row for row in group}
        fp32 = by_scheme["fp32"]
        texts = [_cost(by_scheme[way]) for way in ways]
        rows.append([cell, fp32["runs"], number_text(fp32["return_mean"]), *texts])
    header = ["scheme", "reference", "cells of", "cells", "trainings"]
    header += ["mean normalised error, 95 % interval", "mean of absolute values"]
    header += ["reference against itself, expected", "cells with a certain loss"]
    return (
        "## Over all cells\n\nThe games are those of [sticky actions]"
        "(../../reports/games/report.md). Rows with games have all episodes that both have played, "
        "of tasks those behind the first 200; where fp32 has played fewer, as its file is not "
        "kept, the others are compared with fp16. Errors are normalised by how far the reference "
        "is ahead of a random policy; in the last but one column is what it would differ from "
        "itself by on as many other episodes.\n\n"
        + table(header, all_cells)
        + "\nThese `int8` files are of a former recipe, with fewer bits in the head: "
        + f"{', '.join(f'`{run_id}`' for run_id in _former_heads()) or 'none'}.\n"
        + "\n## Cells\n\nErrors in percent of fp32's return, normalised ones in brackets.\n\n"
        + table(["cell", "trainings", "return of fp32", *(f"`{way}`" for way in ways)], rows, 4)
    )


def _former_heads() -> list[str]:
    """Return the trainings on games whose `int8` has no head in two stages."""
    columns = (c for cell in study.read(ROOT / "studies/games.yaml").cells for c in cell.columns)
    runs = [run for column in columns if column.scheme.name == "int8" for run in column.runs]
    paths = {run.run_id: Workspace(ROOT).artifact(run.run_id, "int8") for run in runs}
    sidecars = {run_id: Sidecar.load(sidecar_path(path)) for run_id, path in paths.items()}
    return [name for name, one in sidecars.items() if "BROADCAST_TO int8" not in one.operators]


def over_all() -> str:
    """Return what int8, ours and the converter's, costs over all tasks and games."""
    rows = []
    for scheme in ("int8", "int8_stock"):
        one = _with_games(scheme, "fp32")
        counts = f"{one['cells']} ({len(one['errors'])})", f"{len(one['losses'])}"
        rows.append([f"`{scheme}`", interval(one["error"]), percent(one["absolute"]), *counts])
    header = ["scheme", "mean loss, 95 % interval", "mean of absolute values"]
    return table([*header, "cells (trainings)", "cells with a certain loss"], rows, 4)


@cache
def _with_games(scheme: str, reference: str) -> dict[str, Any]:
    """Return what a scheme costs against another over all tasks and games that have both."""
    cells = {}
    for plan in (study.read(ROOT / f"studies/{name}.yaml") for name in ("int8", "games")):
        for cell in plan.cells:
            if {scheme, reference} <= {column.scheme.name for column in cell.columns}:
                pairs = (_paired(plan, run, scheme, reference) for run in cell.references)
                cells[cell.title] = [pair for pair in pairs if pair is not None]
    whole = aggregate(scheme, {title: pairs for title, pairs in cells.items() if pairs})
    return asdict(whole, dict_factory=finite)


def _paired(plan: study.Study, run: Run, scheme: str, reference: str) -> Paired | None:
    """Pair two schemes on the episodes of both; beyond those of fp32 are fp16's."""
    workspace = Workspace(ROOT)

    def played(scheme: str) -> Evaluation:
        artifact = workspace.artifact(run.run_id, scheme)
        evaluation = Evaluation.load(evaluation_path(artifact, plan.chance))
        if evaluation.artifact_sha256 != Sidecar.load(sidecar_path(artifact)).sha256:
            raise SystemExit(f"Evaluate this file anew, it is another: {artifact}")
        return evaluation.first(None, skip=plan.skip_episodes)

    first, second = played(reference), played(scheme)
    if reference == "fp32" and len(first.seeds) < len(second.seeds):
        rest = played("fp16").first(None, skip=len(first.seeds))
        lists = {k: v + vars(rest)[k] for k, v in vars(first).items() if isinstance(v, list)}
        first = replace(first, **lists)
    count = min(len(first.seeds), len(second.seeds))
    first, second = first.first(count), second.first(count)
    random = baseline(workspace.artifact(run.run_id, REFERENCE), run, first.seeds)
    if random is None or first.seeds != second.seeds:
        raise SystemExit(f"Evaluate {scheme}, {reference} and a random policy alike: {run.run_id}")
    return paired(first, second, random)


def few_bits() -> str:
    """Return what trainings at each width cost."""
    ways = ("qat_int8", "qat_w4a4", "ptq_opt_w4a4", "qat_w3a3", "qat_w2a2")
    rows = []
    for name, told in (("few-bits", ""), ("fine-tuning", ", fine-tuned")):
        for cell, group in groupby(report(name)["pooled"], key=lambda row: row["cell"]):
            found = {row["scheme"]: row for row in group}
            texts = [DASH if way not in found else _cost(found[way]) for way in ways]
            rows.append([cell + told, number_text(found["fp32"]["return_mean"]), *texts])
    header = ["cell", "return of fp32", "8 bits", "4 bits", "4 bits after training"]
    return table([*header, "3 bits", "2 bits"], rows, 6)


def _cost(row: dict[str, Any]) -> str:
    if row["verdict"] is None:
        return "missing"
    normalised = percent(row["normalised_error_percent"])
    return f"{percent(row['reward_error_percent'])} ({normalised})<br>{row['verdict']}"


def adopted() -> str:
    """Return what schemes cost the policies of Stable-Baselines3."""
    rows = [
        [
            f"{row['env_id']}, `{row['scheme']}`",
            f"{row['episodes'] or 0:,}",
            f"{number_text(row['return_mean'])} "
            f"[{number_text(row['return_low'])}, {number_text(row['return_high'])}]",
            DASH if row["scheme"] == "fp32" else percent(row["reward_error_percent"]),
            row["verdict"] or DASH,
            size(row["size_bytes"]) if row["native"] else "simulated",
        ]
        for row in report("sb3")["pooled"]
    ]
    header = ["policy", "episodes", "return, 95 % interval", "error", "verdict", "size"]
    return "## What it costs\n\n" + table(header, rows, 1)
