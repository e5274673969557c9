"""Generate pages of the site from the code, the presets and the records."""

import argparse
import ast
import csv
import heapq
import io
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import mkdocs_gen_files
import numpy as np
import pandas
import seaborn
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from scipy.stats import spearmanr

from quarl_tf import presets, study
from quarl_tf.cli import arguments
from quarl_tf.evaluation.aggregate import Aggregate, Paired, aggregate, paired
from quarl_tf.evaluation.compare import compare, pool
from quarl_tf.evaluation.shelf import Entry, entries, shelf
from quarl_tf.presets import ALGORITHMS, tables
from quarl_tf.report.figures.style import scheme_colour
from quarl_tf.report.page import limits, number_text, percent, size, templates
from quarl_tf.report.results import finite
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import BASELINE, REFERENCE, LayerFormat, Run, Scheme, TensorFormat
from quarl_tf.spec.recipe import QAT_BITS
from quarl_tf.spec.scheme import LISTED_SCHEMES
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import baseline
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path

ROOT = Path(__file__).parents[1]
PACKAGE, REPORTS, MODELS = ROOT / "quarl_tf", ROOT / "reports", Path("tflite_models")

#: From the ground up.
ROOMS = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/design/rooms.md").read_text(), re.MULTILINE)

#: For a missing value.
DASH = "\N{EN DASH}"

#: Reports that are pages of their own.
STUDIES = (
    *("ptq", "games", "games-again", "games-sampled", "qat", "li", "regularisation", "options"),
    "airnav",
)


def write(path: str, text: str, *, after: bool = False) -> None:
    """Write a page, or `after` the handwritten page of this path."""
    if after:
        text = (ROOT / "docs" / path).read_text() + "\n" + text
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(text)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], numbers: int = 0) -> str:
    """Return a Markdown table with the last `numbers` columns aligned right."""
    rule = ["---"] * (len(header) - numbers) + ["--:"] * numbers
    lines = [header, rule, *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines) + "\n"


def _report(report: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPORTS / report / "results.json").read_text())
    return found


def command_line() -> str:
    """Return the help of every subcommand."""
    parser = arguments.build()
    parts = ["# Command line\n", _help(parser)]
    for name, verb in _verbs(parser):
        parts += [f"## quarl {name}\n", _help(verb)]
    return "\n".join(parts)


def _help(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help()}```\n"


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                yield name, verb
                yield from ((f"{name} {inner}", one) for inner, one in _verbs(verb))


def preset_tables() -> str:
    """Return a table for each algorithm, with a row for each setting and columns of tasks."""
    parts = ["# Presets\n\nThe source of each number is in `quarl_tf/presets/<algorithm>.yaml`.\n"]
    for algo in ALGORITHMS:
        presets = [item for item in tables.shipped(algo).items() if item[0] != "quantization"]
        named = sorted(presets, key=lambda item: (repr(item[1]), item[0]))
        groups = [list(group) for _, group in groupby(named, key=lambda item: repr(item[1]))]
        header = [algo, *("<br>".join(env_id for env_id, _ in group) for group in groups)]
        columns = [group[0][1] for group in groups]
        keys = dict.fromkeys(key for values in columns for key in values)
        rows = [[f"`{key}`", *(values.get(key, "") for values in columns)] for key in keys]
        parts += [f"## {algo}\n", table(header, rows)]
    return "\n".join(parts)


def schemes() -> str:
    """Return the recipe of every scheme."""
    qat = ("qat_int8", "qat_int4", *(f"qat_w{bits}a{bits}" for bits in QAT_BITS))
    rows = []
    for scheme in map(Scheme.parse, (*LISTED_SCHEMES, "ptq_paper_w8", "ptq_opt_w4", *qat)):
        recipe = scheme.recipe
        forms = (recipe.default, recipe.observation, recipe.head)
        kind = "native" if scheme.native else "simulated"
        rows.append([f"`{scheme.name}`", *map(_layer, forms), kind])
    header = ["scheme", "layers", "observation", "head", "file"]
    return (
        "# Schemes\n\nA scheme is a named recipe and how its file stores it; its name parses to "
        "the recipe. `ptq_wN`, `ptq_paper_wN` and `ptq_opt_wN` are there for N = 2 … 32; "
        "`ptq_w4-head=8` has 8 bits in the head. The converter leaves kernels of fewer than 1024 "
        "numbers of `dynamic_int8` in float32. Grids are explained in "
        "[quantisers](../design/quantisers.md).\n\n" + table(header, rows)
    )


def _layer(form: LayerFormat) -> str:
    parts = {"weights": form.weights, "activations": form.activations}
    said = [f"{what}: {_tensor(one)}" for what, one in parts.items() if one is not None]
    return "<br>".join(said) or "float32"


def _tensor(form: TensorFormat) -> str:
    if form.ieee:
        return f"float{form.bits}"
    extra = ["symmetric"] * form.symmetric + ["per channel"] * form.per_channel
    extra += (
        ["by GPTQ"] * (form.rounding == "gptq")
        + ["rounded down"] * (form.rounding == "floor")
        + ["range/2ⁿ"] * (form.step == "paper")
    )
    return ", ".join([f"{form.bits} bits", *extra])


def algorithm(algo: str) -> str:
    """Return the numbered deviations of an algorithm and the commands of its results."""
    said = ast.get_docstring(ast.parse((PACKAGE / f"agents/{algo}.py").read_text())) or ""
    deviations = re.sub(r"`agents`", "the end of this page", said[said.index("Deviations") :])
    of_all = ast.get_docstring(ast.parse((PACKAGE / "agents/__init__.py").read_text())) or ""
    common = of_all[of_all.index("Deviations of all") :].partition(":")[2].strip()
    rows = [
        [e.run.env_id, number_text(c.reference_mean if c else None), f"`{e.run.command('run')}`"]
        for e in SHELF
        if e.run.algo == algo and e.sidecar.scheme == "fp32"
        for c in [e.comparison()]
    ]
    heading, _, listed = deviations.partition("\n")
    return (
        f"## Deviations\n\nF{heading.removeprefix('Deviations f')}\n{listed}\n\n"
        f"In every algorithm {common}\n\n"
        "## Results\n\nThe run that did best on selection seeds, and the command that makes it.\n\n"
        + table(["task", "return of fp32", "command"], rows)
    )


def fields(record: str) -> str:
    """Return the fields of a record with their types and comments."""
    source = (PACKAGE / "store/records.py").read_text()
    lines = source.splitlines()
    body = next(n.body for n in ast.parse(source).body if getattr(n, "name", "") == record)
    rows = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said, above = [], node.lineno - 2
            while lines[above].strip().startswith("#:"):
                said.insert(0, lines[above].strip().removeprefix("#:").strip())
                above -= 1
            kind = ast.unparse(node.annotation).replace("|", "or")
            rows.append([f"`{node.target.id}`", kind, " ".join(said)])
    return table(["field", "type", "meaning"], rows)


def result(name: str) -> str:
    """Return a report as a page."""
    text = (REPORTS / name / "report.md").read_text()

    def figure(match: re.Match[str]) -> str:
        with mkdocs_gen_files.open(f"results/{name}/{match[2]}", "wb") as file:
            file.write((REPORTS / name / match[2]).read_bytes())
        return f"![{match[1]}]({name}/{match[2]})"

    return re.sub(r"!\[([^]]*)\]\(([^)]+)\)", figure, text)


def _task(row: dict[str, Any]) -> str:
    return f"{row['algo']} on {row['env_id']}"


def results_index() -> str:
    """Return what int8 costs in every cell, with links to the other pages."""
    stuck = {_task(row) for row in GAMES}
    found = [(row, "") for row in POOLED if _task(row) not in stuck]
    found += [(row, ", sticky actions") for row in GAMES]
    rows = [
        [
            _task(row) + told,
            row["verdict"],
            row["runs"],
            number_text(row["return_mean"]),
            percent(row["reward_error_percent"]),
            percent(row["normalised_error_percent"]),
        ]
        for row, told in found
        if row["scheme"] == "int8"
    ]
    header = ["cell", "verdict", "trainings", "return of int8"]
    return (
        "# Results\n\nWhat full int8, weights and activations, costs in every cell, from "
        "[all schemes on all tasks](ptq.md) and [games with sticky actions](games.md). Percent of "
        "fp32's return, and normalised of what fp32 is ahead of a random policy; positive is "
        "worse. int8 of games is the export's or, where the recipe is newer, made by "
        "`quarl quantize` from the float file that is kept.\n\n"
        + table([*header, "reward error", "normalised"], rows, 4)
        + "\n* [Games with sticky actions, in other episodes](games-again.md) of three policies\n"
        "* [Games with sampled actions](games-sampled.md), as PPO and A2C are trained\n"
        "* [Full int8, ours and the converter's](int8.md)\n"
        "* [Quantisation-aware training from 8 to 2 bits](qat.md), and "
        "[with more trainings of each](few-bits.md)\n"
        "* [Li's study of DQN](li.md)\n* [Exploration and regularisation](regularisation.md)\n"
        "* [Options of quantisation-aware training](options.md)\n"
        "* [Flying among obstacles](airnav.md) and [under a memory limit](deployment.md)\n"
        "* [Policies of Stable-Baselines3](sb3.md)\n"
        "* [Training in half the bits](half-the-bits.md)\n"
        "* [Size, speed and weights](trade-offs.md)\n"
        "* [The papers' table, and where it misleads](papers.md)\n* [Benchmarks](benchmarks.md)\n"
    )


def int8() -> str:
    """Return what the int8 schemes cost over all cells and in each."""
    results = _report("int8")
    found = [(one, "fp32", "tasks") for one in results["aggregates"]]
    for scheme, reference in (("int8", "fp32"), ("int8_stock", "fp32"), ("int8_stock", "int8")):
        whole = asdict(_with_games(scheme, reference), dict_factory=finite)
        found.append((whole, reference, "tasks and games"))
    sums = [
        [
            *(f"`{one['scheme']}`", f"`{reference}`", of, one["cells"], len(one["errors"])),
            *(_interval(one["error"]), percent(one["absolute"]), percent(one["noise"])),
            ", ".join(one["losses"]) or "none",
        ]
        for one, reference, of in found
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
        "## Over all cells\n\nThe games are those of [sticky actions](games.md). Rows with games "
        "have all episodes that both have played, of tasks those behind the first 200; where fp32 "
        "has played fewer, as its file is not kept, the others are compared with fp16. Errors are "
        "normalised by how far the reference is ahead of a random policy; in the last but one "
        "column is what it would differ from itself by on as many other episodes.\n\n"
        + table(header, sums)
        + "\n## Cells\n\nErrors in percent of fp32's return, normalised ones in brackets.\n\n"
        + table(["cell", "trainings", "return of fp32", *(f"`{way}`" for way in ways)], rows, 4)
    )


def _interval(one: dict[str, Any]) -> str:
    low, high = one["low"], one["high"]
    text = percent(one["mean"])
    return text if low is None else f"{text} [{number_text(low)}, {number_text(high)}]"


def _with_games(scheme: str, reference: str) -> Aggregate:
    """Return what a scheme costs against another over all tasks and games that have both."""
    cells = {}
    for plan in (study.read(ROOT / f"studies/{name}.yaml") for name in ("int8", "games")):
        for cell in plan.cells:
            if {scheme, reference} <= {column.scheme.name for column in cell.columns}:
                pairs = (_paired(plan, run, scheme, reference) for run in cell.references)
                cells[cell.title] = [pair for pair in pairs if pair is not None]
    return aggregate(scheme, {title: pairs for title, pairs in cells.items() if pairs})


def _paired(plan: study.Study, run: Run, scheme: str, reference: str) -> Paired | None:
    """Pair two schemes on the episodes of both; beyond those of fp32 are fp16's."""
    workspace = Workspace(ROOT)

    def played(scheme: str) -> Evaluation:
        path = evaluation_path(workspace.artifact(run.run_id, scheme), plan.chance)
        return Evaluation.load(path).first(None, skip=plan.skip_episodes)

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
    """Return what trainings at each width cost, and the report on them."""
    ways = ("qat_int8", "qat_w4a4", "ptq_opt_w4a4", "qat_w3a3", "qat_w2a2")
    rows = []
    for cell, group in groupby(_report("few-bits")["pooled"], key=lambda row: row["cell"]):
        found = {row["scheme"]: row for row in group}
        texts = [DASH if way not in found else _cost(found[way]) for way in ways]
        rows.append([cell, number_text(found["fp32"]["return_mean"]), *texts])
    header = ["cell", "return of fp32", "8 bits", "4 bits", "4 bits after training"]
    return (
        table([*header, "3 bits", "2 bits"], rows, 6)
        + "\n## Report\n"
        + result("few-bits").partition("\n")[2]
    )


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
            f"{row['episodes']:,}",
            f"{number_text(row['return_mean'])} "
            f"[{number_text(row['return_low'])}, {number_text(row['return_high'])}]",
            DASH if row["scheme"] == "fp32" else percent(row["reward_error_percent"]),
            row["verdict"],
            size(row["size_bytes"]) if row["native"] else "simulated",
        ]
        for row in _report("sb3")["pooled"]
    ]
    header = ["policy", "episodes", "return, 95 % interval", "error", "verdict", "size"]
    return "## What it costs\n\n" + table(header, rows, 1)


#: Schemes of the papers' Table 2 and ours; int8 of the papers is `ptq_w8`.
_TABLE_2 = ("fp16", "ptq_w8", "int8", "int8_stock")


def papers() -> str:
    """Return Table 2 of the papers with signed and absolute means, beside ours."""
    cells = list(csv.DictReader((ROOT / "docs/results/quarl_table2.csv").read_text().splitlines()))
    played = {row["run_id"] for row in TRAININGS}
    others = {row["cell"] for row in _report("games")["runs"] if row["run_id"] not in played}
    sticky = [row for row in GAMES if row["cell"] not in others]
    reference = _by_task(POOLED, "fp32")
    judged = [row for row in POOLED if "NoFrameskip" not in row["env_id"]] + sticky
    found = {way: _by_task(judged, way) for way in _TABLE_2}
    trained = {task: _steps(row["cell"]) for task, row in reference.items()}
    rows, means = [], []
    for algo, group in groupby(cells, key=lambda cell: cell["algo"]):
        errors, common = [], []
        for cell in group:
            task = algo, cell["task"]
            fp32, fp16, int8 = (float(cell[name]) for name in ("fp32", "fp16", "int8"))
            errors.append(100 * (fp32 - int8) / abs(fp32))
            here = [found[way].get(task, {}) for way in _TABLE_2]
            plain = reference.get(task, {})
            rows.append(
                [
                    *(algo, cell["task"], f"{fp32:g}", f"{fp16:g}", f"{int8:g}"),
                    *(percent(errors[-1]), f"{int(cell['steps']):,}"),
                    *(number_text(trained.get(task)), number_text(plain.get("return_mean"))),
                    *(percent(row.get("reward_error_percent")) for row in here),
                ]
            )
            int8_here = found["int8"].get(task)
            if int8_here and not _near_zero(int8_here):
                error_here = int8_here["absolute_reward_error_percent"]
                common.append((cell["task"], abs(errors[-1]), error_here))
        tasks, theirs, mine = zip(*common, strict=True)
        averaged = (errors, map(abs, errors), theirs, mine)
        means.append([algo, ", ".join(tasks), *(percent(statistics.fmean(x)) for x in averaged)])
    head = ["algorithm", "task", "fp32", "fp16", "int8", "error of int8", "steps"]
    head += ["steps here", "fp32 here", *(f"`{way}`" for way in _TABLE_2)]
    summary = ["algorithm", "tasks compared", "papers, signed", "papers, absolute"]
    summary += ["papers, absolute, tasks compared", "here, absolute, the same"]
    return (
        "## Means of the int8 errors\n\nIn percent of fp32's return. Those of games here are with "
        "sticky actions; steps and returns are below. Tasks are not compared where fp32 earns, in "
        "those episodes, less than half of what it is ahead of a random policy: percentages of "
        "returns near zero say little.\n\n"
        + table(summary, means, 4)
        + "\n## Here, by scheme\n\nNormalised errors over all cells: 100 % is as bad as a random "
        "policy.\n\n" + _by_scheme() + "\n## All cells\n\nErrors here are in percent of fp32's "
        "return. int8 of the papers has 8-bit weights alone, which is `ptq_w8` here. A hundred "
        "greedy episodes of a game are a few different ones, repeated: errors of games are over "
        "100 episodes with sticky actions, the return of fp32 is that of greedy ones. Steps of "
        "theirs are those of their code's settings. A dash: there is no such result yet.\n\n"
        + table(head, rows, 11)
    )


def _near_zero(row: dict[str, Any]) -> bool:
    """Tell whether fp32 earns less than half of what it is ahead of a random policy."""
    task = row["algo"], row["env_id"]
    run_id = next(r["run_id"] for r in TRAININGS if (r["algo"], r["env_id"]) == task)
    random = Evaluation.load(evaluation_path(Workspace(ROOT).artifact(run_id, BASELINE)))
    fp32 = row["return_mean"] - row["difference_mean"]
    return bool(abs(fp32) < abs(fp32 - np.mean(random.returns)) / 2)


def _by_scheme() -> str:
    rows = [
        [
            *(f"`{one['scheme']}`", of, one["cells"], _interval(one["error"])),
            *(_interval(one["iqm"]), percent(one["absolute"])),
        ]
        for of, report in (("tasks", "ptq"), ("games, sticky actions", "games"))
        for one in _report(report)["aggregates"]
        if one["scheme"] in _TABLE_2
    ]
    header = ["scheme", "of", "cells", "mean, 95 % interval", "interquartile mean"]
    return table([*header, "mean of absolute values"], rows, 4)


def _steps(cell: str) -> float:
    """Return the environment steps of a cell's first training, those it goes on from included."""
    run_id = next(row["run_id"] for row in TRAININGS if row["cell"] == cell)
    sidecar = Sidecar.load(sidecar_path(Workspace(ROOT).artifact(run_id, "fp32")))
    steps, origin = sidecar.preset["steps"], Run.from_dict(sidecar.run).origin
    return float(steps + (presets.of(origin.run).steps if origin and not origin.step else 0))


def _by_task(rows: Iterable[dict[str, Any]], scheme: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results of a scheme by algorithm and the task's name in the papers."""
    return {
        (row["algo"], re.sub(r"(Env|NoFrameskip)?-v\d+$", "", row["env_id"])): row
        for row in rows
        if row["scheme"] == scheme
    }


_ERROR = "normalised_error_percent"

#: Native schemes of the trade-offs, and schemes whose errors are compared with the weights.
_NATIVE = ("fp16", "int8", "int8_head32", "int8_tensor", "int8_stock")
_ROUNDED = ("int8", "int8_tensor", "ptq_w8", "ptq_w4")
_COLOURS = {scheme: scheme_colour(scheme) for scheme in (*_NATIVE, *_ROUNDED)}


def trade_offs() -> str:
    """Draw returns against size and speed, and return errors against the spread of weights."""
    for name, axis in (("compression", "times smaller"), ("speedup", "times as fast")):
        _draw(name, _kept_against(name, f"file: {axis} than fp32" if name[0] == "c" else axis))
    spreads: dict[str, float] = {}
    for entry in entries(MODELS):
        if entry.sidecar.scheme == "fp32" and entry.artifact.exists():
            kernels = flatbuffer.weights(entry.artifact.read_bytes()).values()
            spreads[entry.run.run_id] = max(float(np.ptp(kernel)) for kernel in kernels)
    rows, figure_rows, telling = [], [], list[str]()
    for scheme in _ROUNDED:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in TRAININGS:
            if row["scheme"] == scheme and row["run_id"] in spreads:
                pair = spreads[row["run_id"]], abs(row[_ERROR])
                found.setdefault(row["cell"], []).append(pair)
        cells = [np.mean(found[cell], axis=0) for cell in sorted(found)]
        rho, chance = spearmanr(*zip(*cells, strict=True))
        rows.append([f"`{scheme}`", len(cells), f"{rho:.2f}", f"{chance:.2f}"])
        telling += [f"`{scheme}`"] * bool(rho > 0 and chance < 0.05)
        figure_rows += [(scheme, *cell) for cell in cells]
    _draw("spread", _errors_against_spread(figure_rows))
    return (
        "![Return kept against how much smaller the file is](compression.svg)\n"
        "\n![Return kept against how much faster an inference is](speedup.svg)\n\n"
        "## Does the spread of weights tell the error?\n\nQuaRL's Table 3 explains errors by the "
        "width of the weights' distribution. Over cells, by Spearman's rank correlation of the "
        "widest kernel's range (mean over trainings) with the absolute normalised error:\n\n"
        + table(["scheme", "cells", "rank correlation", "p"], rows, 3)
        + f"Wider kernels have larger errors at p < 5 %, each scheme by itself, in: "
        f"{', '.join(telling) or 'none'}.\n\n"
        "![Error against the widest kernel's range](spread.svg)\n"
    )


def _draw(name: str, figure: plt.Figure) -> None:
    with mkdocs_gen_files.open(f"results/{name}.svg", "w") as file:
        figure.savefig(file, format="svg", bbox_inches="tight")
    plt.close(figure)


def _kept_against(quantity: str, label: str) -> plt.Figure:
    rows = [
        {"scheme": row["scheme"], quantity: row[quantity], "kept": min(100 - row[_ERROR], 150)}
        for row in POOLED
        if row["scheme"] in _NATIVE and row[quantity] and row[_ERROR] is not None
    ]
    figure, axes = plt.subplots(figsize=(8, 4))
    style: dict[str, Any] = {"x": quantity, "y": "kept", "hue": "scheme", "hue_order": _NATIVE}
    style["palette"] = _COLOURS
    frame = pandas.DataFrame(rows)
    seaborn.scatterplot(frame, **style, ax=axes, alpha=0.35, s=30, legend=False)
    medians = frame.groupby("scheme", as_index=False).median()
    seaborn.scatterplot(medians, **style, ax=axes, s=130, edgecolor="black")
    axes.axhline(100, color="0.6", linewidth=1, zorder=0)
    axes.set(xlabel=label, ylabel="return kept, %", ylim=(0, 155))
    _plain_logarithm(axes)
    axes.legend(title=None, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    seaborn.despine(figure)
    return figure


def _plain_logarithm(axes: plt.Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _errors_against_spread(rows: list[tuple[Any, ...]]) -> plt.Figure:
    frame = pandas.DataFrame(rows, columns=["scheme", "range", "error"])
    figure, axes = plt.subplots(figsize=(8, 4))
    look = {"x": "range", "y": "error", "hue": "scheme", "style": "scheme"}
    seaborn.scatterplot(frame, **look, palette=_COLOURS, ax=axes)
    axes.set(xlabel="range of the widest kernel", ylabel="absolute error, %")
    _plain_logarithm(axes)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    axes.legend(title=None, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    seaborn.despine(figure)
    return figure


def benchmarks() -> str:
    """Return the speed tables."""
    folder = ROOT / "benchmarks"
    return (
        "# Benchmarks\n\n## Training\n\nAgainst Stable-Baselines3 and SBX by the same "
        "hyper-parameters, alternating on one machine "
        "(`python benchmarks/training_throughput.py`). The floor is the environment with random "
        "actions and then the networks' multiplications at the speed of large products. Games are "
        "in bfloat16 here and in float32 there.\n\n"
        + (folder / "training_throughput.md").read_text()
        + "\n### In float32 on both sides\n\n"
        + (folder / "training_throughput_float32.md").read_text()
        + "\n## Time to solve\n\nEach library with its own recipe of the same algorithm, "
        "rl-baselines3-zoo's and ours (`benchmarks/solving.yaml`), whose step size and rollout for "
        "LunarLander were chosen on other seeds of the task: a ratio compares recipe and speed "
        "together. A task is solved when 20 greedy episodes on selection seeds reach the goal on "
        "average; *confirmed* is the mean return of 100 others. Seconds, steps and ratios are of "
        "the trainings that solved it (`python benchmarks/time_to_solve.py`).\n\n"
        + (folder / "time_to_solve.md").read_text()
        + "\n## Trainings of games\n\nThose of `studies/games.yaml`, on several machines that were "
        "not at rest; of those that go on from another the last part. Medians with the range.\n\n"
        + _trainings_of_games()
    )


def _trainings_of_games() -> str:
    rows = []
    runs = [row for row in _report("games")["runs"] if row["scheme"] == "fp32"]
    for cell, group in groupby(runs, key=lambda row: row["cell"]):
        paths = [Workspace(ROOT).artifact_dir(row["run_id"]) / "progress.csv" for row in group]
        ends = [pandas.read_csv(path).iloc[-1] for path in paths]
        timed = [end for end in ends if "seconds" in end]
        minutes = [end["seconds"] / 60 for end in timed]
        rates = [end["step"] / end["seconds"] for end in timed]
        steps = f"{ends[0]['step'] / 1e6:.1f}"
        rows.append([cell, len(ends), steps, *map(_median_and_range, (minutes, rates))])
    return table(["cell", "trainings", "million steps", "minutes", "steps/s"], rows, 4)


def _median_and_range(values: Sequence[float]) -> str:
    if len(values) < 2:
        return number_text(values[0] if values else None)
    parts = (statistics.median(values), min(values), max(values))
    return "{} [{}, {}]".format(*map(number_text, parts))


#: QuaRL's Table 4: success in percent and milliseconds, of fp32 and of int8; differences to ours.
_FLIGHTS = (
    (
        *("I", "policy_i", 60, 45, 0.147, 0.124),
        "At 39,427 inputs its 10 MB of weights would take longer than 0.147 ms.",
    ),
    (
        *("II", "policy_ii", 74, 60, 133.49, 9.53),
        "133 ms for 16 times the weights of I, which took 0.15 ms, is not arithmetic; at 39,427 "
        "inputs it has 41 MB in float32.",
    ),
    (
        *("III", "policy_iii", 86, 75, 208.115, 11.036),
        "The factor is that of memory over disk: see below. At 39,427 inputs it has 656 MB in "
        "float32, on a board of 1 GB.",
    ),
)
_FLOWN = ("fp32", "int8", "int8_stock", "qat_int8")


def deployment() -> str:
    """Return QuaRL's table of deployment beside ours, and the effect of memory."""
    return (
        flights(_report("airnav")["pooled"])
        + "## Memory\n\nOne inference of Policy III whose process has so many MiB and swaps "
        "beyond them (`sudo python benchmarks/memory_limit.py`, on a machine busy with other "
        "work). QuaRL does not say how many numbers the policy observes; shown are a short vector "
        "and the 39,427 numbers of its environment's baselines. While fp32 fits, int8 gains what "
        "its arithmetic gains; where fp32 swaps and int8 does not, the factor is that of memory "
        "over disk.\n\n" + _limits() + "\n"
        "![Time of an inference against the memory of the process](../assets/memory_limit.png)\n"
        "\n## On Arm\n\n" + another_board(_benchmark("arm"), SHELF)
    )


def _benchmark(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/{name}.json").read_text())


def flights(pooled: Sequence[dict[str, Any]]) -> str:
    """Return success, size and speed of QuaRL's three policies beside ours."""
    ours = {}
    for row in pooled:
        network = re.search(r"network=(\w+)", row["cell"])
        ours[network[1] if network else "policy_i", row["scheme"]] = row
    success, speed, missing = [], [], []
    for name, network, float_, int8, slow, fast, difference in _FLIGHTS:
        rows = [ours.get((network, scheme), {}) for scheme in _FLOWN]
        shares = [percent(row.get("success_rate") and 100 * row["success_rate"]) for row in rows]
        lacking = [way for way, share in zip(_FLOWN, shares, strict=True) if share == DASH]
        missing += [f"Policy {name} in {', '.join(lacking)}"] * bool(lacking)
        success.append([name, f"{float_} %", f"{int8} %", rows[0].get("runs", DASH), *shares])
        times = [row.get("latency_median_us") for row in rows[:2]]
        factor = number_text(rows[1].get("speedup"))
        sizes = [size(row.get("size_bytes")) for row in rows[:2]]
        papers = [f"{slow:g}", f"{fast:g}", f"{slow / fast:.2f}"]
        speed.append([name, *papers, *sizes, *map(number_text, times), factor, difference])
    header = ["policy", "QuaRL fp32", "int8", "trainings here", *_FLOWN]
    return (
        "## Success\n\n"
        + table(header, success, 7)
        + "`int8_stock` is TensorFlow's converter alone. "
        + (f"Missing: {'; '.join(missing)}. " if missing else "")
        + "`quarl study run studies/airnav.yaml` flies them.\n\n## Size and speed\n\n"
        + table(
            [
                *("policy", "QuaRL fp32, ms", "int8, ms", "factor", "size here, fp32", "int8"),
                *("fp32, µs", "int8, µs", "factor", "what is different"),
            ],
            speed,
        )
    )


def another_board(found: dict[str, Any], known: Sequence[Entry]) -> str:
    """Return how many actions of an emulated Arm board equal those of x86.

    Policies that are `known` with an int8 file but have no row are listed as missing.
    """
    wanted = [f"{e.run.algo} on {e.run.env_id}" for e in known if e.sidecar.scheme == "int8"]
    measured = {f"{row['algo']} on {row['env_id']}" for row in found["rows"]}
    missing = ", ".join(name for name in wanted if name not in measured)
    rows = []
    for row in found["rows"]:
        text = number_text if row["step"] is None else "{} steps".format
        cells = [f"{row['algo']} on {row['env_id']}", row["network"], f"`{row['scheme']}`"]
        for one in (row["xnnpack"], row["built_in"]):
            cells += [f"{one['equal_actions']:,}", text(one["difference"])]
        rows.append([*cells, text(row["xnnpack"]["lead"]) if "lead" in row["xnnpack"] else DASH])
    board, here = found["arm"], found["xnnpack"]
    header = ["policy", "network", "scheme", "equal actions", "largest difference"]
    header += ["equal to built-in", "largest difference", "largest lead"]
    return (
        f"{found['rows'][0]['states']:,} states of play of each policy through `Policy`, on an "
        f"emulated {board['processor']} (tflite-runtime {board['tflite-runtime']}, NumPy "
        f"{board['numpy']}, {board['emulator']}), beside x86 (LiteRT {here['ai-edge-litert']}): "
        "its default kernels, XNNPACK's, and its built-in ones. Differences of heads are in steps "
        "of their codes, those of float32 as they are. An action of several numbers is equal where "
        "all its bits are. The lead is the most by which x86 preferred its action to that of the "
        "board. `python benchmarks/arm.py --json benchmarks/arm.json` makes the table.\n\n"
        + table(header, rows, 5)
        + "Where int8 differs "
        "from XNNPACK and not from the built-in kernels, it is their rounding that differs, not "
        "the processor: XNNPACK rounds a sum once, the others twice.\n"
        + (f"\nMissing: {missing}.\n" if missing else "")
    )


#: QuaRL's Table 5: minutes of a training in full and in mixed precision; differences to ours.
_HALVED = (
    (
        *("A", "policy_a", 127, 156),
        "They print 0.87, but 127 over 156 is 0.81. The smallest network, 1.25 million weights: "
        "what casts cost weighs most.",
    ),
    (
        *("B", "policy_b", 179, 172),
        "Theirs are minutes of a whole training, games and replay included; here steps by the "
        "clock, once all is compiled.",
    ),
    (
        *("C", "policy_c", 391, 242),
        "129 million weights, where arithmetic rules: theirs in float16, here in "
        "bfloat16, which needs no loss scaling.",
    ),
)


def half_the_bits() -> str:
    """Return QuaRL's table of mixed precision beside ours, and how trainings converge in both."""
    runs = _report("half-the-bits")["runs"]
    return (
        "## Speed\n\n"
        + halved(_benchmark("mixed_precision"))
        + "\n## Convergence\n\n"
        + convergence([row for row in runs if row["scheme"] == "fp32"])
    )


def halved(found: dict[str, Any]) -> str:
    """Return the speed of QuaRL's Policies A, B and C in both precisions, theirs beside ours."""
    ratios, figures = [], []
    for name, key, full, mixed, difference in _HALVED:
        ours = found["policies"][key]
        cells = [_spread(ours[f"{what}_steps_ratio"]) for what in ("gradient", "environment")]
        cells.append(f"{ours['bfloat16']['peak_mib'] / ours['float32']['peak_mib']:.2f}")
        each = [
            number_text(ours[precision][what])
            for what in ("gradient_steps", "environment_steps", "peak_mib")
            for precision in ("float32", "bfloat16")
        ]
        figures.append([name, *each])
        ratios.append([name, f"{full} → {mixed}", f"{full / mixed:.2f}", *cells, difference])
    command = "`python benchmarks/mixed_precision.py --json benchmarks/mixed_precision.json`"
    header = ["policy", "QuaRL, minutes", "factor", "gradient steps here", "environment steps"]
    text = table([*header, "peak memory", "what is different"], ratios)
    repetitions = len(next(iter(found["repetitions"].values())))
    header = ["policy", "gradient steps/s, float32", "bfloat16", "environment steps/s, float32"]
    return (
        f"{text}Factors are of bfloat16 over float32, medians of {repetitions} repetitions in "
        "turns with the least and the largest; above 1 bfloat16 is faster, and takes more memory. "
        f"Measured on {found['cores']} cores of {found['processor']}, with a load of "
        f"{found['load_before']:.1f} before ({command}).\n\n"
        + table([*header, "bfloat16", "peak MiB, float32", "bfloat16"], figures, 6)
    )


def _spread(ratio: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*ratio)


_PRECISIONS = ("float32", "bfloat16")


def convergence(runs: Sequence[dict[str, Any]]) -> str:
    """Return the returns of fp32 policies trained in both precisions, and their curves."""
    found: dict[str, dict[int, Path]] = {precision: {} for precision in _PRECISIONS}
    for row in runs:
        folder = Workspace(ROOT).artifact_dir(row["run_id"])
        found[row["cell"].partition("precision=")[2].rstrip(")")][row["seed"]] = folder
    full, half = found.values()
    seeds = sorted(full)
    rows, compared, ratios = [], [], []
    for seed in seeds:
        pair = [folders[seed] for folders in (full, half)]
        evaluations = [Evaluation.load(one / "fp32.eval.json") for one in pair]
        if evaluations[0].seeds != evaluations[1].seeds:
            raise SystemExit(f"Evaluate both on the same episodes: {pair}")
        compared.append(compare(*evaluations, None))
        solved = [_solved(pandas.read_csv(one / "progress.csv")) for one in pair]
        if None not in (first := [seconds for _, seconds in solved]):
            ratios.append(first[1] / first[0])
        steps = [number_text(steps and steps / 1e6) for steps, _ in solved]
        minutes = [number_text(seconds and seconds / 60) for seconds in first]
        means = map(number_text, (compared[-1].reference_mean, compared[-1].returns.mean))
        rows.append([seed, *steps, *minutes, *means, compared[-1].verdict])
    together = pool(compared)
    spread = _spread([statistics.median(ratios), min(ratios), max(ratios)]) if ratios else DASH
    _draw("half-the-bits", _both_precisions(found, seeds))
    header = [f"{what}, {one}" for what in _CONVERGENCE for one in _PRECISIONS]
    return (
        f"PPO on Pong, all else equal, until a mean greedy return of {_GOAL} on selection seeds, "
        "each training on a core of its own, two at a time; the return is of "
        f"{compared[0].episodes} other games (`quarl study run studies/half-the-bits.yaml`). "
        f"{DASH}: not reached.\n\n"
        + table(["seed", *header, "verdict"], rows)
        + f"Pairs of trainings: {len(seeds)}, with that return in both: {len(ratios)}, in which "
        f"bfloat16 takes {spread} times float32's minutes. Its return less float32's "
        f"is {number_text(together.difference.mean)} {limits(together.difference)}, "
        f"{together.verdict}.\n\n"
        + "![Returns in training against steps and minutes](half-the-bits.svg)\n"
    )


#: Pong is won by 21 points.
_GOAL = 18

_CONVERGENCE = ("million steps", "minutes", "return")


def _solved(curve: pandas.DataFrame) -> tuple[float | None, float | None]:
    """Return the step and the seconds of the first greedy return of the goal; None for none."""
    solved = curve[curve["greedy_return"] >= _GOAL]
    return (None, None) if solved.empty else (solved["step"].min(), solved["seconds"].min())


def _both_precisions(found: dict[str, dict[int, Path]], seeds: Sequence[int]) -> plt.Figure:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    for colour, (precision, folders) in zip(("C0", "C1"), found.items(), strict=True):
        for seed in seeds:
            curve = pandas.read_csv(folders[seed] / "progress.csv").dropna(subset="episode_return")
            label = precision if seed == seeds[0] else None
            for axes, x in zip(panels, (curve["step"] / 1e6, curve["seconds"] / 60), strict=True):
                axes.plot(x, curve["episode_return"], color=colour, linewidth=1, label=label)
    panels[0].set(xlabel="million environment steps", ylabel="return per episode")
    panels[1].set(xlabel="minutes")
    panels[0].legend(frameon=False)
    seaborn.despine(figure)
    return figure


def _limits() -> str:
    """Return milliseconds and the speed-up of int8 by memory limit."""
    found = _benchmark("memory_limit")
    times: dict[Any, dict[Any, float | None]] = {}
    for one in found["rows"]:
        row = times.setdefault(one["limit_mib"], {})
        row[one["inputs"], one["scheme"]] = one.get("median_ms")
    inputs = sorted({one["inputs"] for one in found["rows"]})
    names = [f"{n:,} inputs: {what}" for n in inputs for what in ("fp32 ms", "int8 ms", "factor")]
    rows = []
    for limit, row in times.items():
        cells = ["none" if limit is None else str(limit)]
        for n in inputs:
            slow, fast = row.get((n, "fp32")), row.get((n, "int8"))
            ratio = f"{slow / fast:.1f}" if slow and fast else DASH
            cells += [number_text(slow), number_text(fast), ratio]
        rows.append(cells)
    return table(["limit, MiB", *names], rows, 7)


#: Trainings that run in parallel, each on two cores.
_AT_A_TIME = {"2 cores": 1, "32 cores": 16, "ten machines of 32 cores": 160}


def costs() -> str:
    """Return the hours of training of QuaRL's matrix, by measured rates."""
    studies = {name: study.read(ROOT / f"studies/{name}.yaml") for name in ("quarl", "classic")}
    hours = {name: _training_hours(one) for name, one in studies.items()}
    whole = [
        [f"`{name}.yaml`", len(studies[name].experiments()), len(found)]
        + [f"{_makespan(found, slots):,.1f}" for slots in _AT_A_TIME.values()]
        for name, found in hours.items()
    ]
    cells: dict[tuple[str, str], list[tuple[Run, float]]] = {}
    for job in hours["quarl"]:
        cells.setdefault((job[0].algo, job[0].env_id), []).append(job)
    rows = []
    for (algo, env_id), found in cells.items():
        measured, rate = _closest(algo, env_id, _rates())
        origin = "measured" if measured == env_id else f"of {measured}, the closest"
        cell = f"{algo} on {env_id}"
        rows.append([cell, origin, len(found), f"{rate:,.0f}", f"{_makespan(found, 1):,.2f}"])
    return (
        "## What QuaRL's matrix takes\n\n`studies/quarl.yaml` has the papers' whole matrix, "
        "`studies/classic.yaml` its part without games. Hours of training alone: environment steps "
        "of the presets by the [measured rates](../results/benchmarks.md) of one training on two "
        "cores, times what quantisation-aware training was measured to take longer; as many "
        "trainings at a time as there are pairs of cores, each after its plain reference.\n\n"
        + table(["study", "experiments", "trainings", *_AT_A_TIME], whole, 5)
        + table(["cell", "rate", "trainings", "steps/s", "hours on 2 cores"], rows, 3)
    )


def _rates() -> dict[tuple[str, str], float]:
    return {
        (one["algo"], one["env_id"]): statistics.median(one["steps_per_second"]["ours"])
        for one in _benchmark("training_throughput").values()
    }


def _slowdowns() -> dict[tuple[str, str], tuple[float, float]]:
    """Return the slowdown of quantisation-aware training before and after the delay.

    What was measured is that of learning, one part of a training.
    """
    shares = {
        (one["algo"], one["env_id"]): one["shares"]["learning"] / 100
        for one in _benchmark("training_throughput").values()
    }
    slowdowns = {}
    for name, one in _benchmark("qat_overhead")["cases"].items():
        algo, env_id, *_ = name.split()
        share = _closest(algo, env_id, shares)[1]
        ratios = (statistics.median(one[part]) for part in ("before", "after"))
        before, after = (1 + share * (ratio - 1) for ratio in ratios)
        slowdowns[algo, env_id] = before, after
    return slowdowns


def _closest(algo: str, env_id: str, known: dict[tuple[str, str], float]) -> tuple[str, float]:
    """Return the value of an environment, else of a similar one, for a game that of a game."""
    alike = sorted(
        (other != env_id, ("NoFrameskip" in other) != ("NoFrameskip" in env_id), other)
        for one, other in known
        if one == algo
    )
    other = alike[0][-1]
    return other, known[algo, other]


def _training_hours(wanted: study.Study) -> list[tuple[Run, float]]:
    """Return the runs with their hours."""
    rates, slowdowns, found = _rates(), _slowdowns(), {}
    for run, _ in wanted.experiments():
        steps: float = presets.of(run).steps
        rate = 3600 * _closest(run.algo, run.env_id, rates)[1]
        if run.quantization is not None:
            before, after = _closest(run.algo, run.env_id, slowdowns)[1]
            delay = run.quantization.delay
            steps = delay * before + (steps - delay) * after
        found[run.run_id] = run, steps / rate
    return list(found.values())


def _makespan(jobs: list[tuple[Run, float]], slots: int) -> float:
    """Return the hours until all jobs are done: plain ones first, then the longest."""
    free, ends = [0.0] * slots, dict[str, float]()
    for run, hours in sorted(jobs, key=lambda job: (job[0].quantization is not None, -job[1])):
        start = max(heapq.heappop(free), ends.get(run.plain.run_id, 0.0))
        ends[run.run_id] = start + hours
        heapq.heappush(free, ends[run.run_id])
    return max(ends.values())


def policies() -> str:
    """Return a table of the best policies by task and algorithm, and write a card for each."""
    rows = []
    for (env_id, algo), group in groupby(SHELF, key=lambda e: (e.run.env_id, e.run.algo)):
        found = list(group)
        rows.append([env_id, f"[{algo}]({env_id}-{algo}.md)", *_index_row(found)])
        write(f"policies/{env_id}-{algo}.md", card(env_id, algo, found))
    header = ["task", "policy", "fp32", "int8", "error", "verdict", "size"]
    return (
        "# Policies\n\nTrained policies of this repository: for each task, algorithm and scheme "
        "the one that did best on selection seeds. `quarl list` shows them in the terminal, and "
        "`quarl evaluate CartPole-v1/dqn/int8` shows the evaluation of one by its name.\n\n"
        + table(header, rows, 2)
    )


def _index_row(found: list[Entry]) -> list[str]:
    by_scheme = {entry.sidecar.scheme: entry for entry in found}
    entry = by_scheme.get("int8") or found[0]
    outcome = entry.outcome()
    return [
        number_text(outcome.reference_mean),
        number_text(outcome.mean_return),
        percent(outcome.error_percent),
        outcome.verdict or DASH,
        size(entry.sidecar.size_bytes),
    ]


def card(env_id: str, algo: str, found: list[Entry]) -> str:
    """Return the card of a task's policies by one algorithm."""
    native = next((e for e in found if e.sidecar.scheme == "int8"), found[0])
    sidecar = native.sidecar
    actions = (
        f"{sidecar.num_actions} discrete actions"
        if sidecar.num_actions is not None
        else f"a continuous action of {len(sidecar.action_low or [])} numbers"
    )
    evaluation = native.evaluation()
    rules = templates().filters["protocol"](evaluation.protocol).strip() if evaluation else DASH
    origin = [["algorithm", "adopted, as [others trained it](../results/sb3.md)"]]
    if not native.run.adopted:
        origin = [
            ["algorithm", f"[{algo}](../algorithms/{algo}.md)"],
            ["environment steps", f"{sidecar.preset['steps']:,}"],
            ["network", sidecar.preset["network"]],
        ]
    facts = [
        *origin,
        ["observation", f"{sidecar.observation_shape} {sidecar.observation_dtype}"],
        ["action", f"{actions}; head: {sidecar.head}"],
        ["rules of an episode", rules],
        ["licence", "Apache-2.0"],
    ]
    header = ["scheme", "verdict", "run", "sha256", "return", "fp32", "error", "size"]
    found = sorted(found, key=lambda e: (-Scheme.parse(e.sidecar.scheme).weight_bits, e.name))
    commands = "".join(f"{entry.command()}\n" for entry in found)
    again = "" if native.run.adopted else f"{native.run.command('run')}\n"
    act = (
        f'```python\nfrom quarl_tf import Policy\n\npolicy = Policy.load("{native.artifact}")\n'
        "action = policy.act(observation)\n```\n"
    )
    return (
        f"# {algo} on {env_id}\n\n"
        + table(["task", env_id], facts)
        + "## Schemes\n\nOf each scheme the run that did best on selection seeds, and its fp32 "
        "in the same episodes.\n\n"
        + table(header, map(_card_row, found), 4)
        + "\n## Play or make them\n\nFiles that another command makes again are not kept.\n\n"
        + f"```\n{commands}{again}```\n"
        + "\n## Act with it\n\n"
        + act
        + "\n## Limits\n\nMeasured on evaluation seeds of the task as it is registered; the return "
        "in another version of the environment, or on hardware that rounds otherwise, may differ. "
        "Simulated schemes have no size of their own.\n"
    )


def _card_row(entry: Entry) -> list[str]:
    sidecar, outcome = entry.sidecar, entry.outcome()
    return [
        f"`{sidecar.scheme}`",
        outcome.verdict or DASH,
        entry.artifact.parent.name,
        f"`{sidecar.sha256[:12]}`",
        number_text(outcome.mean_return),
        number_text(outcome.reference_mean),
        percent(outcome.error_percent),
        size(sidecar.size_bytes) if sidecar.native else "simulated",
    ]


def rooms() -> str:
    """Draw the imports between rooms, without those that others imply."""
    arrows = {room: _imports(room) - {room} for room in ROOMS}
    for _ in ROOMS:
        for room, below in arrows.items():
            implied = {deep for one in below for deep in _reached(one, arrows)}
            arrows[room] = below - implied
    floor: dict[str, int] = {}
    for room in ROOMS:
        floor[room] = 1 + max((floor[one] for one in arrows[room]), default=-1)
    return _drawing(arrows, floor)


def _reached(room: str, arrows: dict[str, set[str]]) -> set[str]:
    return {deep for one in arrows[room] for deep in {one} | _reached(one, arrows)}


def _imports(room: str) -> set[str]:
    found: set[str] = set()
    for path in (*(PACKAGE / room).rglob("*.py"), *PACKAGE.glob(f"{room}.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quarl_tf"):
                _, *parts = str(node.module).split(".")
                found |= set(parts[:1] or (alias.name for alias in node.names)) & set(ROOMS)
    return found


def _drawing(arrows: dict[str, set[str]], floor: dict[str, int]) -> str:
    by_floor = {f: [room for room in ROOMS if floor[room] == f] for f in set(floor.values())}
    place = {
        room: ((i - (len(row) - 1) / 2) * 2.6, f * 1.0)
        for f, row in by_floor.items()
        for i, room in enumerate(row)
    }
    figure, axes = plt.subplots(figsize=(8, 9))
    for room, below in arrows.items():
        for one in sorted(below):
            axes.annotate(
                "",
                place[one],
                place[room],
                arrowprops={"arrowstyle": "-|>", "color": "0.6", "shrinkA": 12, "shrinkB": 12},
            )
    for room, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#e8eaf6", "edgecolor": "#3f51b5"}
        axes.text(x, y, room, ha="center", va="center", bbox=box, fontsize=11)
    widest = max(map(len, by_floor.values()))
    axes.set_xlim(-1.3 * widest, 1.3 * widest)
    axes.set_ylim(-0.5, max(floor.values()) + 0.5)
    axes.axis("off")
    image = io.StringIO()
    figure.savefig(image, format="svg", bbox_inches="tight")
    plt.close(figure)
    return image.getvalue()


SHELF = shelf(MODELS)
POOLED, TRAININGS = (_report("ptq")[key] for key in ("pooled", "runs"))
GAMES = _report("games")["pooled"]

write("reference/command-line.md", command_line())
write("reference/presets.md", preset_tables())
write("reference/schemes.md", schemes())
records = f"## A sidecar\n\n{fields('Sidecar')}\n## An evaluation\n\n{fields('Evaluation')}"
write("reference/files.md", records, after=True)
for algo in ALGORITHMS:
    write(f"algorithms/{algo}.md", algorithm(algo), after=True)
for name in STUDIES:
    write(f"results/{name}.md", result(name))
write("results/index.md", results_index())
write("results/few-bits.md", few_bits(), after=True)
write("results/int8.md", int8(), after=True)
write("results/sb3.md", adopted(), after=True)
write("results/papers.md", papers(), after=True)
write("results/benchmarks.md", benchmarks())
write("results/deployment.md", deployment(), after=True)
write("results/half-the-bits.md", half_the_bits(), after=True)
write("results/trade-offs.md", trade_offs(), after=True)
write("policies/index.md", policies())
write("guide/studies.md", costs(), after=True)
write("design/rooms.svg", rooms())
