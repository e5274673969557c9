"""Draw returns against bits, and every episode beside the one of fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from quarl_tf.evaluation.compare import Interval
from quarl_tf.report.figures.style import (
    GREY,
    LIGHT_GREY,
    SWEEPS,
    Floats,
    family,
    grid,
    legend_below,
    scheme_colour,
    style,
    wrapped,
)
from quarl_tf.spec import BASELINE, REFERENCE, Scheme


@dataclass(frozen=True)
class Point:
    """What one scheme earns.

    Attributes:
        delay: Step from which on the trainings were quantised, None for others.
        returns: Mean return with its interval; None if a training is missing.
        training_means: Mean return in each training that is there.
    """

    scheme: Scheme
    delay: int | None
    returns: Interval | None
    training_means: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """What the schemes of one cell earn.

    Attributes:
        title: The cell's.
        task: What is trained where; panels of one share their axis of returns.
        baseline: Mean return of a random policy, if known.
    """

    title: str
    task: str
    points: Sequence[Point]
    baseline: float | None


def return_against_bits(panels: Sequence[Panel], title: str = "") -> Figure:
    """Draw mean return against bits per weight, from many to few, one panel a cell."""
    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    with style():
        height = 3.4 if columns == 1 else 2.6
        figure, grid_of_axes = grid(len(panels), columns, height, "bits per weight")
        points = [point for panel in panels for point in panel.points]
        widths = sorted({point.scheme.weight_bits for point in points}, reverse=True)
        limits = {
            task: _limits(point for panel in same for point in _all_values(panel))
            for task, same in groupby(sorted(panels, key=_task), key=_task)
        }
        for axes, panel in zip(grid_of_axes, panels, strict=True):
            _draw_panel(axes, panel, widths)
            if ends := limits[panel.task]:
                axes.set_ylim(*ends)
            axes.set_title(wrapped(panel.title, columns))
        figure.suptitle(title)
        figure.supylabel("mean return per episode", fontsize="medium")
        legend_below(figure, _legend(panels), columns=5)
    return figure


def _task(panel: Panel) -> str:
    return panel.task


def _all_values(panel: Panel) -> Iterable[float]:
    """Yield what must be seen: trainings, or the interval of a single one; not what dwarfs them."""
    if panel.baseline is not None:
        yield panel.baseline
    for point in panel.points:
        yield from point.training_means
        if point.returns is not None and len(point.training_means) == 1 and point.returns.bounded:
            yield from (point.returns.low, point.returns.high)


def _limits(values: Iterable[float]) -> tuple[float, float] | None:
    known = list(values)
    if not known:
        return None
    room = 0.08 * (max(known) - min(known)) or 1.0
    return min(known) - room, max(known) + room


def _draw_panel(axes: Axes, panel: Panel, widths: Sequence[int]) -> None:
    places = [
        widths.index(point.scheme.weight_bits) + _dodge(point, panel.points)
        for point in panel.points
    ]
    lines: dict[tuple[str, int | None], list[tuple[float, Point]]] = {}
    for place, point in zip(places, panel.points, strict=True):
        if (name := family(point.scheme)) is not None:
            lines.setdefault((name, point.delay), []).append((place, point))
    # Every sweep starts at fp32.
    start = next(
        pair for pair in zip(places, panel.points, strict=True) if pair[1].scheme.name == REFERENCE
    )
    for (name, _), line in lines.items():
        _draw_line(axes, [start, *line], name)
    for place, point in zip(places, panel.points, strict=True):
        _draw_point(axes, place, point)
    if panel.baseline is not None:
        axes.axhline(panel.baseline, color=scheme_colour(BASELINE), ls="--", lw=1.2, zorder=1)
    axes.set_xticks(range(len(widths)), [str(bits) for bits in widths])
    axes.set_xlim(-0.6, len(widths) - 0.4)
    axes.grid(axis="x", visible=False)


def _draw_line(axes: Axes, line: Sequence[tuple[float, Point]], name: str) -> None:
    """Join the schemes of one family, broken where one is missing; lightly for each training."""
    x, points = zip(*sorted(line, key=lambda pair: pair[0]), strict=True)
    look = SWEEPS[name].line
    y = [math.nan if point.returns is None else point.returns.mean for point in points]
    axes.plot(x, y, color=GREY, ls=look, lw=1.2, zorder=2)
    trainings = {len(point.training_means) for point in points}
    if len(trainings) == 1 and trainings != {1}:
        means = np.array([point.training_means for point in points])
        axes.plot(x, means, color=LIGHT_GREY, ls=look, lw=0.9, zorder=1)


def _draw_point(axes: Axes, place: float, point: Point) -> None:
    returns, name = point.returns, family(point.scheme)
    if returns is None:
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
    reach = [[returns.mean - returns.low], [returns.high - returns.mean]]
    axes.errorbar(
        place,
        returns.mean,
        yerr=reach if returns.bounded else None,
        color=scheme_colour(point.scheme.name),
        marker="o" if name is None else SWEEPS[name].marker,
        ms=6,
        mec="white",
        elinewidth=1.4,
        capsize=2.5,
        zorder=3,
    )


def _dodge(point: Point, points: Sequence[Point]) -> float:
    """Return the sideways shift that keeps schemes of equally many bits apart."""
    peers = [p for p in points if p.scheme.weight_bits == point.scheme.weight_bits]
    native = [p for p in peers if p.scheme.native]
    # Simulated schemes stand in the middle: their lines stay straight.
    half = len(native) // 2
    order = [*native[:half], *(p for p in peers if not p.scheme.native), *native[half:]]
    place = next(i for i, one in enumerate(order) if one is point)
    return min(0.24, 0.8 / len(order)) * (place - (len(order) - 1) / 2)


def _legend(panels: Sequence[Panel]) -> list[Line2D]:
    schemes = {p.scheme.name: p.scheme for panel in panels for p in panel.points}
    handles = [
        Line2D([], [], ls="", marker="o", ms=6.5, color=scheme_colour(name), label=name)
        for name, scheme in schemes.items()
        if scheme.native
    ]
    for prefix, look in SWEEPS.items():
        names = [name for name, scheme in schemes.items() if family(scheme) == prefix]
        if names:
            handle = Line2D([], [], color=GREY, ls=look.line, marker=look.marker, ms=6, mec="white")
            handle.set(mfc=scheme_colour(names[len(names) // 2]), label=f"{prefix}… (simulated)")
            handles.append(handle)
    if any(panel.baseline is not None for panel in panels):
        colour = scheme_colour(BASELINE)
        handles.append(Line2D([], [], color=colour, ls="--", label="random policy"))
    return handles


def paired_returns(pairs: Mapping[str, tuple[Floats, Floats]], title: str = "") -> Figure:
    """Draw every episode twice, under fp32 and under a scheme, one panel per scheme.

    Episodes are sorted by both returns, so that even when nearly all returns are the same the few
    that are not stand at one side.

    Args:
        pairs: Label, which begins with a scheme's name, to the returns of fp32 and of the
            scheme on the same seeds, each of shape [n].
        title: Heading of the figure.
    """
    rows = math.ceil(len(pairs) / 5)
    with style():
        columns, label = math.ceil(len(pairs) / rows), "episodes, sorted"
        figure, panels = grid(len(pairs), columns, 2.2, label, sharex=True, sharey=True)
        for axes, (name, (reference, other)) in zip(panels, pairs.items(), strict=True):
            _draw_pairs(axes, name, reference, other)
        figure.suptitle(title)
        figure.supylabel("return per episode", fontsize="medium")
        ring = Line2D([], [], ls="", marker="o", ms=5, mfc="none", mec=GREY, label=REFERENCE)
        dot = Line2D([], [], color=GREY, marker="o", ms=4, label="scheme of the panel, same seed")
        counts = Line2D([], [], ls="", label="episodes: ↓ worse   = equal   ↑ better")
        legend_below(figure, [ring, dot, counts])
    return figure


def _draw_pairs(axes: Axes, name: str, reference: Floats, other: Floats) -> None:
    order = np.lexsort((other, reference))
    before, after = reference[order], other[order]
    episodes = np.arange(1, len(order) + 1)
    colour = scheme_colour(name.partition(" ")[0])
    # Many episodes need smaller dots, or they merge into a band.
    size = float(np.clip(900 / len(order), 2.0, 14.0))
    width = min(0.8, 50 / len(order))
    # Unsnapped: on whole pixels, some neighbouring lines would merge and others not.
    axes.vlines(episodes, before, after, color=colour, lw=width, alpha=0.6, snap=False)
    axes.scatter(episodes, before, s=2 * size, facecolor="none", edgecolor=GREY, linewidth=0.6)
    axes.scatter(episodes, after, s=size, color=colour, linewidth=0)
    worse, better = int((other < reference).sum()), int((other > reference).sum())
    axes.set_title(name, color=colour, pad=16)
    axes.annotate(
        f"↓ {worse}    = {len(order) - worse - better}    ↑ {better}",
        (0.5, 1.0),
        (0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="center",
        fontsize="small",
        color="#555b65",
    )
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(axis="x", visible=False)
