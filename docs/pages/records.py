"""What the pages of numbers share: records, tables and figures."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from quarl_tf.foundation.files import write_bytes
from quarl_tf.report.figures.style import png
from quarl_tf.report.page import number_text, percent

ROOT = Path(__file__).parents[2]
MODELS = Path("tflite_models")

#: For a missing value.
DASH = "\N{EN DASH}"


def report(name: str) -> dict[str, Any]:
    """Return the records of a report."""
    found: dict[str, Any] = json.loads((ROOT / f"reports/{name}/results.json").read_text())
    return found


def benchmark(name: str) -> Any:
    """Return the records of a benchmark."""
    return json.loads((ROOT / f"benchmarks/{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], numbers: int = 0) -> str:
    """Return a Markdown table with the last `numbers` columns aligned right."""
    rule = ["---"] * (len(header) - numbers) + ["--:"] * numbers
    lines = [header, rule, *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines) + "\n"


def interval(one: dict[str, Any]) -> str:
    """Return the mean and the ends of an interval in percent."""
    low, high = one["low"], one["high"]
    text = percent(one["mean"])
    return text if low is None else f"{text} [{number_text(low)}, {number_text(high)}]"


def draw(name: str, figure: plt.Figure) -> None:
    """Write a figure of the pages."""
    figure.set_layout_engine("constrained")
    write_bytes(ROOT / f"docs/assets/{name}.png", png(figure))
    plt.close(figure)


#: Results of cells and of their trainings in greedy episodes, and of games with sticky actions.
POOLED, TRAININGS = (report("ptq")[key] + report("games-greedy")[key] for key in ("pooled", "runs"))
GAMES = report("games")["pooled"]
