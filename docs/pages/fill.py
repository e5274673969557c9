"""Insert the numbers and figures of today's records into README.md and docs/results.

python docs/pages/fill.py
"""

import os
from pathlib import Path

import yaml
from case_studies import deployment, half_the_bits
from cells import adopted, every_cell, few_bits, int8, over_all
from papers import papers, trade_offs
from records import DASH, ROOT, report, table

from quarl_tf.foundation.files import write_text
from quarl_tf.report.page import number_text, percent, size, templates

#: Rows of the first table, by report and scheme; all of one cell.
_CELL = "dqn on CartPole-v1"
_ROWS = (("ptq", "fp32"), ("ptq", "int8"), ("ptq", "ptq_w4"), ("qat", "qat_w4a4"))

#: Workloads of the second table by their file: Pong as its peer computes, in float32.
_WORKLOADS = {
    "training_throughput": ("CartPole", "MountainCarContinuous"),
    "training_throughput_float32": ("Pong",),
}

_SOLVING = ROOT / "benchmarks/solving.yaml"


def _results() -> str:
    lines = []
    for name, scheme in _ROWS:
        rows = report(name)["pooled"]
        row = next(row for row in rows if (row["cell"], row["scheme"]) == (_CELL, scheme))
        native, judged = row["native"], templates().filters["judged"]
        low, high = row["difference_low"], row["difference_high"]
        interval = "" if low is None else f" [{number_text(low)}, {number_text(high)}]"
        cells = [
            *(f"`{scheme}`", str(row["runs"]), number_text(row["return_mean"])),
            percent(row["reward_error_percent"]),
            f"{number_text(row['difference_mean'])}{interval}",
            size(row["size_bytes"]) if native else "simulated",
            number_text(row["latency_median_us"], " µs") if native else "simulated",
        ]
        verdict = judged(row | {"difference": {"alike": row["difference_alike"]}})
        lines.append([cells[0], verdict, *cells[1:]])
    header = ["scheme", "verdict", "trainings", "return", "reward error", "difference", "size"]
    return table([*header, "one action"], lines, 6)


def _speed() -> str:
    ratios: dict[tuple[str, str], dict[str, str]] = {}
    for name, tasks in _WORKLOADS.items():
        for line in (ROOT / f"benchmarks/{name}.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if len(cells) == 8 and cells[0].endswith(tasks):
                ratios.setdefault((cells[0], cells[1]), {})[cells[2]] = cells[4]
    solved = _seconds_to_solve()
    lines = [
        [*words, peers["sb3"], peers.get("sbx", DASH), solved.get(words[0], DASH)]
        for words, peers in ratios.items()
    ]
    header = ["training", "steps/s", "over Stable-Baselines3", "over SBX", "seconds to solve"]
    return table(header, lines, 4)


def _seconds_to_solve() -> dict[str, str]:
    """Return our seconds by the names of the speed table's trainings."""
    algos = {k: v["algo"] for k, v in yaml.safe_load(_SOLVING.read_text()).items()}
    rows = (ROOT / "benchmarks/time_to_solve.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {f"{algos[c[0]]}-{c[0]}": c[4] for c in cells if c[2:3] == ["ours"]}


#: What stands between the markers of a page, by their name.
NUMBERS = {
    "README.md": {"results": _results, "int8": over_all, "speed": _speed},
    "docs/results/index.md": {"numbers": every_cell},
    "docs/results/int8.md": {"numbers": int8},
    "docs/results/few-bits.md": {"numbers": few_bits},
    "docs/results/sb3.md": {"numbers": adopted},
    "docs/results/papers.md": {"numbers": papers},
    "docs/results/trade-offs.md": {"numbers": trade_offs},
    "docs/results/deployment.md": {"numbers": deployment},
    "docs/results/half-the-bits.md": {"numbers": half_the_bits},
}


def fill(page: Path) -> None:
    """Replace what stands between a page's markers by the numbers of today's records."""
    text = page.read_text()
    for name, numbers in NUMBERS[str(page.relative_to(ROOT))].items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if (text.count(start), text.count(end)) != (1, 1):
            raise SystemExit(f"{page} needs one pair of markers: {start}{end}")
        before, _, rest = text.partition(start)
        text = before + start + numbers().rstrip() + "\n" + end + rest.partition(end)[2]
    write_text(page, text)


if __name__ == "__main__":
    os.chdir(ROOT)
    for page in NUMBERS:
        fill(ROOT / page)
