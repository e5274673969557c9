"""QuaRL's Tables 2 and 3 beside ours, and what smaller and faster files keep."""

import csv
import re
import statistics
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas
import seaborn
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from records import GAMES, MODELS, POOLED, ROOT, TRAININGS, draw, interval, report, table
from scipy.stats import spearmanr

from quarl_tf import presets
from quarl_tf.evaluation.shelf import entries
from quarl_tf.report.figures.style import scheme_colour
from quarl_tf.report.page import number_text, percent
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import BASELINE, Run
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path

#: Schemes of the papers' Table 2 and ours; int8 of the papers is `ptq_w8`.
_TABLE_2 = ("fp16", "ptq_w8", "int8", "int8_stock")

_ERROR = "normalised_error_percent"

#: Native schemes of the trade-offs, and schemes whose errors are compared with the weights.
_NATIVE = ("fp16", "int8", "int8_head32", "int8_tensor", "int8_stock")

_ROUNDED = ("int8", "int8_tensor", "ptq_w8", "ptq_w4")

_COLOURS = {scheme: scheme_colour(scheme) for scheme in (*_NATIVE, *_ROUNDED)}


def papers() -> str:
    """Return Table 2 of the papers with signed and absolute means, beside ours."""
    cells = list(csv.DictReader((ROOT / "docs/results/quarl_table2.csv").read_text().splitlines()))
    played = {row["run_id"] for row in TRAININGS}
    others = {row["cell"] for row in report("games")["runs"] if row["run_id"] not in played}
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
            *(f"`{one['scheme']}`", of, one["cells"], interval(one["error"])),
            *(interval(one["iqm"]), percent(one["absolute"])),
        ]
        for of, name in (("tasks", "ptq"), ("games, sticky actions", "games"))
        for one in report(name)["aggregates"]
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


def trade_offs() -> str:
    """Draw returns against size and speed, and return errors against the spread of weights."""
    draw("compression", _kept_against("compression", "file: times smaller than fp32", POOLED))
    draw("speedup", _kept_against("speedup", "times as fast", _times_as_fast()))
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
    draw("spread", _errors_against_spread(figure_rows))
    return (
        "![Return kept against how much smaller the file is](../assets/compression.png)\n"
        "\n![Return kept against how much faster an inference is](../assets/speedup.png)\n\n"
        "## Does the spread of weights tell the error?\n\nQuaRL's Table 3 explains errors by the "
        "width of the weights' distribution. Over cells, by Spearman's rank correlation of the "
        "widest kernel's range (mean over trainings) with the absolute normalised error:\n\n"
        + table(["scheme", "cells", "rank correlation", "p"], rows, 3)
        + f"Wider kernels have larger errors at p < 5 %, each scheme by itself, in: "
        f"{', '.join(telling) or 'none'}.\n\n"
        "![Error against the widest kernel's range](../assets/spread.png)\n"
    )


def _times_as_fast() -> Iterator[dict[str, Any]]:
    """Yield the results with the ratio of the least latencies over their trainings."""
    name = "latency_median_us"
    fp32 = {row["cell"]: row[name] for row in POOLED if row["scheme"] == "fp32"}
    for row in POOLED:
        both = fp32.get(row["cell"]), row[name]
        yield {**row, "speedup": both[0] / both[1] if all(both) else None}


def _kept_against(quantity: str, label: str, results: Iterable[dict[str, Any]]) -> plt.Figure:
    rows = [
        {"scheme": row["scheme"], quantity: row[quantity], "kept": min(100 - row[_ERROR], 150)}
        for row in results
        if row["scheme"] in _NATIVE and row[quantity] and row[_ERROR] is not None
    ]
    figure, axes = plt.subplots(figsize=(7, 3.5))
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
    figure, axes = plt.subplots(figsize=(7, 3.5))
    look = {"x": "range", "y": "error", "hue": "scheme", "style": "scheme"}
    seaborn.scatterplot(frame, **look, palette=_COLOURS, ax=axes)
    axes.set(xlabel="range of the widest kernel", ylabel="absolute error, %")
    _plain_logarithm(axes)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    axes.legend(title=None, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    seaborn.despine(figure)
    return figure
