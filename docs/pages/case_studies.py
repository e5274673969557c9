"""QuaRL's case studies, deployment and mixed precision, beside ours."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas
import seaborn
from records import DASH, MODELS, ROOT, benchmark, draw, report, table

from quarl_tf.evaluation.compare import compare, pool
from quarl_tf.evaluation.shelf import Entry, shelf
from quarl_tf.report.page import limits, number_text, percent, size
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace

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
        flights(report("airnav")["pooled"])
        + "## Memory\n\nOne inference of Policy III whose process has so many MiB and swaps "
        "beyond them (`sudo python benchmarks/memory_limit.py`, on a machine busy with other "
        "work). QuaRL does not say how many numbers the policy observes; shown are a short vector "
        "and the 39,427 numbers of its environment's baselines. While fp32 fits, int8 gains what "
        "its arithmetic gains; where fp32 swaps and int8 does not, the factor is that of memory "
        "over disk.\n\n" + _limits() + "\n"
        "![Time of an inference against the memory of the process](../assets/memory_limit.png)\n"
        "\n## On Arm\n\n" + another_board(benchmark("arm"), shelf(MODELS))
    )


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
        factor = number_text(times[0] / times[1] if all(times) else None)
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


def _limits() -> str:
    """Return milliseconds and the speed-up of int8 by memory limit."""
    found = benchmark("memory_limit")
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
    runs = report("half-the-bits")["runs"]
    return (
        "## Speed\n\n"
        + halved(benchmark("mixed_precision"))
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
    draw("half-the-bits", _both_precisions(found, seeds))
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
        + "![Returns in training against steps and minutes](../assets/half-the-bits.png)\n"
    )


#: Pong is won by 21 points.
_GOAL = 18

_CONVERGENCE = ("million steps", "minutes", "return")


def _solved(curve: pandas.DataFrame) -> tuple[float | None, float | None]:
    """Return the step and the seconds of the first greedy return of the goal; None for none."""
    solved = curve[curve["greedy_return"] >= _GOAL]
    return (None, None) if solved.empty else (solved["step"].min(), solved["seconds"].min())


def _both_precisions(found: dict[str, dict[int, Path]], seeds: Sequence[int]) -> plt.Figure:
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True)
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
