"""Draw what a study compares: trainings in several precisions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quarl_tf.evaluation.compare import Interval
from quarl_tf.report.figures.style import (
    GREY,
    TITLE_LETTERS,
    WIDTH,
    Plot,
    label_lowest,
    legend_below,
    scheme_colour,
    style,
)
from quarl_tf.spec import BASELINE, REFERENCE, Scheme


@dataclass(frozen=True)
class PrecisionPoint:
    """What the trainings of one cell of a study earn in one precision.

    Attributes:
        label: Name of the precision on the axis; several points may share it.
        delay: Step at which the trainings began to quantise; None for plain ones.
        returns: Mean return with its interval; None if a training is missing.
        training_means: Mean return of each training that is there.
    """

    label: str
    scheme: Scheme
    delay: int | None
    returns: Interval | None
    training_means: tuple[float, ...]

    @property
    def drawn_means(self) -> tuple[float, ...]:
        """Return the trainings that are drawn apart: all, but not one that is the mean."""
        return (
            ()
            if len(self.training_means) == 1 and self.returns is not None
            else self.training_means
        )


@dataclass(frozen=True)
class PrecisionPanel:
    """One cell of a study, with the mean return of a random policy, if that is known."""

    title: str
    points: Sequence[PrecisionPoint]
    chance: float | None


def reward_against_precision(panels: Sequence[PrecisionPanel], title: str) -> Plot:
    """Draw mean return against precision, one panel a cell, as in QuaRL's figure of QAT."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with style():
        figure = Figure(figsize=(WIDTH, 1.0 + 2.9 * rows), layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            _draw_precisions(axes, panel)
        label_lowest(grid, len(panels), columns, "precision")
        figure.suptitle(title)
        figure.supylabel("mean return per episode", fontsize="medium")
        handles = [
            Line2D([], [], ls="", marker="o", ms=7, color=GREY, label="native"),
            Line2D([], [], ls="", marker="D", ms=6, color=GREY, label="simulated"),
        ]
        if any(point.drawn_means for panel in panels for point in panel.points):
            dot = Line2D(
                [], [], ls="", marker="o", ms=4, color=GREY, alpha=0.5, label="one training"
            )
            handles.append(dot)
        handles += _delay_legend(panels)
        handles.append(Line2D([], [], color=GREY, ls="--", lw=1.2, label="random policy"))
        legend_below(figure, handles, columns=5)
    return Plot(
        figure,
        f"Reward against precision. {_key(panels)}. Mean over the "
        "trainings with its 95 % interval, which may leave the panel, and each of several as a "
        "light point. Circles are native flatbuffers, diamonds simulated ones.",
    )


def _key(panels: Sequence[PrecisionPanel]) -> str:
    """Say what the labels of the points that are there stand for."""
    points = [point for panel in panels for point in panel.points]
    schemes = [point.scheme for point in points]
    names = {scheme.name for scheme in schemes}
    meanings = (
        ("Fp: float32", REFERENCE in names),
        (
            "8*: int8 after training, activations too (the papers' 8* is of weights alone)",
            "int8" in names,
        ),
        ("w8, w7, …: weights alone, after training", any(s.rounding == "nearest" for s in schemes)),
        ("8, 7, …: trained and run at so many bits", any(s.aware for s in schemes)),
    )
    return "; ".join(meaning for meaning, there in meanings if there)


def _delays(panel: PrecisionPanel) -> list[int]:
    return list(dict.fromkeys(p.delay for p in panel.points if p.delay is not None))


def _delay_legend(panels: Sequence[PrecisionPanel]) -> list[Line2D]:
    """Return a line for each rank of a delay in its panel, which has the same style everywhere."""
    ranks = list(zip_longest(*map(_delays, panels)))
    handles = []
    for rank, of_panels in enumerate(ranks):
        steps = " or ".join(dict.fromkeys(f"{delay:,}" for delay in of_panels if delay))
        label = f"trained from {steps}" if len(ranks) > 1 else "trained at those bits"
        handles.append(Line2D([], [], color=GREY, lw=1.2, ls=_line(rank), label=label))
    return handles


def _line(rank: int) -> Literal["-", ":", "-."]:
    lines: tuple[Literal["-", ":", "-."], ...] = ("-", ":", "-.")
    return lines[rank % len(lines)]


def _draw_precisions(axes: Axes, panel: PrecisionPanel) -> None:
    labels = list(dict.fromkeys(point.label for point in panel.points))
    known = [point for point in panel.points if point.returns is not None]
    places = {id(point): _place(point, panel.points, labels) for point in panel.points}
    for rank, delay in enumerate(_delays(panel)):
        sweep = [p for p in panel.points if p.delay == delay and not p.scheme.native]
        x = [places[id(point)] for point in sweep]
        # NaN breaks the line where a result is missing.
        y = [math.nan if point.returns is None else point.returns.mean for point in sweep]
        axes.plot(x, y, color=GREY, lw=1.2, ls=_line(rank), zorder=2)
    for point in panel.points:
        _draw_precision(axes, point, places[id(point)])
    if panel.chance is not None:
        axes.axhline(panel.chance, color=scheme_colour(BASELINE), ls="--", lw=1.2, zorder=1)
    values = [value for point in known for value in point.training_means]
    values += [] if panel.chance is None else [panel.chance]
    if values:
        axes.set_ylim(*_ends(values))
    else:
        axes.set_yticks([])
    axes.set_title(textwrap.fill(panel.title, TITLE_LETTERS))
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.grid(axis="x", visible=False)
    sns.despine(ax=axes)


def _place(point: PrecisionPoint, points: Sequence[PrecisionPoint], labels: Sequence[str]) -> float:
    peers = [one for one in points if one.label == point.label]
    step = min(0.28, 0.8 / len(peers))
    return labels.index(point.label) + step * (peers.index(point) - (len(peers) - 1) / 2)


def _draw_precision(axes: Axes, point: PrecisionPoint, place: float) -> None:
    colour = scheme_colour(point.scheme.name)
    # Beside the interval, which would hide them, and away from the neighbour.
    x = [place + (-0.1 if place < round(place) else 0.1)] * len(point.drawn_means)
    axes.scatter(x, point.drawn_means, s=18, color=colour, alpha=0.5, linewidth=0, zorder=4)
    if point.returns is None:
        axes.annotate(
            "missing",
            (place, 0.5),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="center",
            va="center",
            fontsize="small",
            color=GREY,
        )
        return
    axes.errorbar(
        place,
        point.returns.mean,
        yerr=_reach(point.returns),
        color=colour,
        marker=_marker(point.scheme),
        ms=7 if point.scheme.native else 6,
        mec="white",
        elinewidth=1.4,
        capsize=3,
        zorder=3,
    )


def reward_by_setting(groups: Mapping[str, Sequence[PrecisionPanel]], title: str) -> Plot:
    """Draw mean return by setting and precision: a column a group, a row a setting.

    Args:
        groups: Heading of a column to its cells, each under the name of its setting; the plain
            trainings of a group are the same in all of its cells.
        title: Heading of the figure.
    """
    rows = list(dict.fromkeys(panel.title for panels in groups.values() for panel in panels))
    points = [point for panels in groups.values() for panel in panels for point in panel.points]
    lanes = list(dict.fromkeys(point.scheme for point in points if point.delay is not None))
    widths = [scheme.weight_bits for scheme in lanes]
    with style():
        figure = Figure(figsize=(WIDTH, 1.6 + 0.42 * len(rows)), layout="constrained")
        columns = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for axes, (heading, panels) in zip(columns, groups.items(), strict=True):
            _draw_settings(axes, panels, rows, lanes)
            axes.set(title=heading, xlabel="mean return per episode")
        columns[0].set_yticks(range(len(rows)), rows)
        columns[0].set_ylim(len(rows) - 0.5, -0.5)
        figure.suptitle(title)
        figure.supylabel("setting", fontsize="medium")
        handles = [
            Line2D([], [], ls="", marker=_marker(scheme), ms=6, color=scheme_colour(scheme.name))
            for scheme in lanes
        ]
        for handle, scheme in zip(handles, lanes, strict=True):
            shared = widths.count(scheme.weight_bits) > 1
            handle.set_label(scheme.name if shared else f"{scheme.weight_bits} bits")
        handles += [
            Line2D([], [], ls="", marker="o", ms=4, color=GREY, alpha=0.5, label="one training"),
            Line2D([], [], color=scheme_colour(REFERENCE), lw=1.4, label="full precision"),
            Line2D([], [], color=GREY, ls="--", lw=1.2, label="random policy"),
        ]
        legend_below(figure, handles, columns=len(handles))
    return Plot(
        figure,
        "Reward by setting. Mean over the trainings with its 95 % interval, which may leave the "
        "panel, and each training as a light point; every setting is trained and run at so many "
        "bits. The line is the mean of the plain trainings.",
    )


def _draw_settings(
    axes: Axes, panels: Sequence[PrecisionPanel], rows: Sequence[str], lanes: Sequence[Scheme]
) -> None:
    for panel in panels:
        for point in panel.points:
            if point.delay is not None:
                lane = (lanes.index(point.scheme) - (len(lanes) - 1) / 2) * 0.6 / len(lanes)
                _draw_setting(axes, point, rows.index(panel.title) + lane)
    plain = [p.returns for p in panels[0].points if p.scheme.name == REFERENCE]
    if plain and plain[0] is not None:
        axes.axvline(plain[0].mean, color=scheme_colour(REFERENCE), lw=1.4, zorder=1)
    chance = panels[0].chance
    if chance is not None:
        axes.axvline(chance, color=scheme_colour(BASELINE), ls="--", lw=1.2, zorder=1)
    values = [value for panel in panels for point in panel.points for value in point.training_means]
    values += [] if chance is None else [chance]
    if values:
        axes.set_xlim(*_ends(values))
    else:
        axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    sns.despine(ax=axes, left=True)


def _draw_setting(axes: Axes, point: PrecisionPoint, place: float) -> None:
    colour = scheme_colour(point.scheme.name)
    y = [place + 0.1] * len(point.drawn_means)
    axes.scatter(point.drawn_means, y, s=14, color=colour, alpha=0.5, linewidth=0, zorder=4)
    if point.returns is None:
        axes.annotate(
            "missing",
            (0.5, place),
            xycoords=("axes fraction", "data"),
            ha="center",
            va="center",
            fontsize="small",
            color=GREY,
        )
        return
    axes.errorbar(
        point.returns.mean,
        place,
        xerr=_reach(point.returns),
        color=colour,
        marker=_marker(point.scheme),
        ms=6,
        mec="white",
        elinewidth=1.4,
        capsize=3,
        zorder=3,
    )


def _marker(scheme: Scheme) -> str:
    return "o" if scheme.native else "D"


def _reach(returns: Interval) -> list[list[float]] | None:
    """Return the lengths of an error bar; None for an interval without ends."""
    below, above = returns.mean - returns.low, returns.high - returns.mean
    return [[below], [above]] if returns.bounded else None


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return an axis' ends: of the trainings, not of intervals; over few these dwarf all else."""
    room = 0.12 * (max(values) - min(values)) or 1.0
    return min(values) - room, max(values) + room
