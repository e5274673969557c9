"""Insert the rows of numbers into README.md, between its markers: `python pipelines/readme.py`."""

import json
import re
from pathlib import Path

import yaml

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

_SOLVING = Path("benchmarks/solving.yaml")


def filled(text: str) -> str:
    """Return the README with the tables of today's records."""
    for name, table in (("results", _results()), ("speed", _speed())):
        pattern = f"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)"
        text = re.sub(pattern, lambda _, table=table: table, text, flags=re.S)
    return text


def _results() -> str:
    lines = [
        "| scheme | trainings | return | reward error | difference | verdict | size | one action |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for report, scheme in _ROWS:
        rows = json.loads(Path(f"reports/{report}/results.json").read_text())["pooled"]
        row = next(row for row in rows if (row["cell"], row["scheme"]) == (_CELL, scheme))
        native, judged = row["native"], templates().filters["judged"]
        low, high = row["difference_low"], row["difference_high"]
        interval = "" if low is None else f" [{number_text(low)}, {number_text(high)}]"
        cells = [
            *(f"`{scheme}`", str(row["runs"]), number_text(row["return_mean"])),
            percent(row["reward_error_percent"]),
            f"{number_text(row['difference_mean'])}{interval}",
            judged(row | {"difference": {"alike": row["difference_alike"]}}),
            size(row["size_bytes"]) if native else "simulated",
            number_text(row["latency_median_us"], " µs") if native else "simulated",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _speed() -> str:
    ratios: dict[tuple[str, str], dict[str, str]] = {}
    for name, tasks in _WORKLOADS.items():
        for line in Path(f"benchmarks/{name}.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if len(cells) == 8 and cells[0].endswith(tasks):
                ratios.setdefault((cells[0], cells[1]), {})[cells[2]] = cells[4]
    lines = [
        "| training | steps/s | over Stable-Baselines3 | over SBX | seconds to solve |",
        "|---|--:|--:|--:|--:|",
    ]
    solved, missing = _seconds_to_solve(), number_text(None)
    for words, peers in ratios.items():
        cells = *words, peers["sb3"], peers.get("sbx", missing), solved.get(words[0], missing)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _seconds_to_solve() -> dict[str, str]:
    """Return our seconds by the names of the speed table's trainings."""
    algos = {k: v["algo"] for k, v in yaml.safe_load(_SOLVING.read_text()).items()}
    rows = Path("benchmarks/time_to_solve.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {f"{algos[c[0]]}-{c[0]}": c[4] for c in cells if c[2:3] == ["ours"]}


if __name__ == "__main__":
    page = Path("README.md")
    write_text(page, filled(page.read_text()))
