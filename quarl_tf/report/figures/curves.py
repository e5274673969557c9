"""Draw trainings: returns and exploration against steps or episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from quarl_tf.report.figures.style import (
    GREY,
    TITLE_LETTERS,
    grid,
    legend_below,
    scheme_colour,
    style,
    wrapped,
)
from quarl_tf.spec import REFERENCE

#: Lines that can still be told apart.
MOST_LINES = 10

_DELAY_COLOUR = "#b3321f"
# As in QuaRL's figure of action variances.
_SMOOTHING = 0.95


@dataclass(frozen=True)
class Curve:
    """The course of one training.

    Attributes:
        label: Name of the training in the legend.
        values: Rows of `progress.csv`, NaN where one has no value: step, episode_return and
            greedy_return; episodes and action_variance, where they were recorded.
        delay: Step at which a quantisation-aware training began to quantise.
    """

    label: str
    values: pd.DataFrame
    delay: int | None = None

    def has(self, column: str) -> bool:
        """Tell whether the training recorded a column."""
        return column in self.values and bool(self.values[column].notna().any())

    def line(self, y: str, x: str = "step") -> pd.Series[float]:
        """Return a column where it is known, indexed by another."""
        known = self.values[[x, y]].dropna().groupby(x)[y].last()
        return known.astype(float)

    def delay_on(self, x: str) -> float | None:
        """Return where on an axis the training began to quantise."""
        if self.delay is None:
            return None
        return float(np.interp(self.delay, self.values["step"], self.values[x]))


def learning_curves(panels: Mapping[str, Sequence[Curve]], title: str = "") -> Figure:
    """Draw training return and greedy evaluation against steps, one panel a way of training.

    Args:
        panels: Heading of a panel to its curves; those of one label share a colour.
        title: Heading of the figure.
    """
    columns = min(4, len(panels))
    curves = [curve for several in panels.values() for curve in several]
    labels = list(dict.fromkeys(curve.label for curve in curves))
    colours = dict(zip(labels, sns.color_palette("deep", len(labels)), strict=True))
    with style():
        height = 2.8 if columns == 1 else 2.1
        figure, grid_of_axes = grid(
            len(panels), columns, height, "environment steps", sharex=True, sharey=True
        )
        for axes, (heading, several) in zip(grid_of_axes, panels.items(), strict=True):
            for curve in several:
                _draw_curve(axes, curve, colours[curve.label])
            if len(panels) > 1:
                axes.set_title(wrapped(heading, columns), fontsize="small")
            axes.xaxis.set_major_locator(MaxNLocator(7 // columns + 2))
            _finish(axes)
        figure.suptitle(title)
        figure.supylabel("return per episode", fontsize="medium")
        handles = [
            Line2D([], [], color=GREY, lw=1.0, alpha=0.7, label="training (exploring)"),
            Line2D([], [], color=GREY, lw=1.6, marker="o", ms=4, label="greedy evaluation"),
            *_delay_handle(curves),
            *(Line2D([], [], color=colours[one], lw=3, label=one) for one in labels),
        ]
        legend_below(figure, handles, columns=5)
    return figure


def _draw_curve(axes: Axes, curve: Curve, colour: Any) -> None:
    training, greedy = curve.line("episode_return"), curve.line("greedy_return")
    axes.plot(training.index, training, color=colour, lw=1.0, alpha=0.55)
    axes.plot(greedy.index, greedy, color=colour, lw=1.6, marker="o", ms=3.5, mec="white")
    if curve.delay is not None:
        _draw_delay(axes, curve.delay)


def mean_curves(
    groups: Mapping[str, Sequence[Curve]], columns: Mapping[str, str], x: str, title: str = ""
) -> Figure:
    """Draw the mean course of each group of trainings, one panel a column of their curves.

    Args:
        groups: Label to trainings that differ in their seeds alone; none if one is missing. Those
            in full precision come first.
        columns: Columns to draw, each with the label of its axis.
        x: The column to draw them against.
        title: Heading of the figure.
    """
    colours = _colours(groups)
    curves = [curve for several in groups.values() for curve in several]
    with style():
        label = "environment steps" if x == "step" else "training episodes"
        figure, panels = grid(len(columns), 1, 2.6, label, sharex=True)
        for axes, (column, name) in zip(panels, columns.items(), strict=True):
            smooth = column != "episode_return"  # Which is a mean of episodes already.
            for several, colour in zip(groups.values(), colours, strict=True):
                lines = [curve.line(column, x) for curve in several]
                lines = [_smoothed(line) for line in lines] if smooth else lines
                # Until the delay a quantised training is its reference: that one is on top.
                _draw_mean(axes, lines, colour, 3 if _delayed(several) else 4)
            for delay in sorted({d for c in curves if (d := c.delay_on(x)) is not None}):
                _draw_delay(axes, delay)
            axes.set_ylabel(f"{name}, smoothed" if smooth else name)
            _finish(axes)
        figure.align_ylabels()
        figure.suptitle(title)
        names = [name if several else f"{name} (missing)" for name, several in groups.items()]
        handles = [
            Line2D([], [], color=colour, lw=2.2, label=wrapped(name, 2))
            for colour, name in zip(colours, names, strict=True)
        ]
        handles += _delay_handle(curves)
        longest = max(len(name) for name in names)
        legend_below(figure, handles, columns=2 if longest > TITLE_LETTERS // 4 else 4)
    return figure


def mean_line(lines: Sequence[pd.Series[float]]) -> pd.Series[float]:
    """Return the mean of lines where all are, each interpolated between its own points."""
    together = pd.concat(lines, axis=1).sort_index()
    known: pd.Series[float] = (
        together.interpolate("index", limit_area="inside").dropna().mean(axis=1)
    )
    return known


def _smoothed(line: pd.Series[float]) -> pd.Series[float]:
    """Return the exponential moving average, without the pull towards 0 at its start."""
    return line.ewm(alpha=1 - _SMOOTHING).mean()


def _draw_mean(axes: Axes, lines: Sequence[pd.Series[float]], colour: Any, zorder: int) -> None:
    """Draw the mean of some lines, and faintly each of several."""
    # A tint, not a transparent line: where several agree, it stays faint.
    tint = sns.blend_palette(["white", colour], 10)[3]
    for line in lines if len(lines) > 1 else ():
        axes.plot(line.index, line, color=tint, lw=0.8, zorder=zorder - 2)
    if lines:
        mean = mean_line(lines)
        axes.plot(mean.index, mean, color=colour, lw=2.0, zorder=zorder)


def _colours(groups: Mapping[str, Sequence[Curve]]) -> list[Any]:
    """Return dark and warm colours for full precision, then cool ones in the order of the rest."""
    aware = sum(_delayed(several) for several in groups.values())
    warm = sns.color_palette("blend:#e8830c,#f2c14e", len(groups))
    cool = iter(sns.color_palette("blend:#6cc24a,#1f9e9a,#3a6fd8,#9b2fc4", aware))
    plain = iter([scheme_colour(REFERENCE), *warm])
    return [next(cool if _delayed(several) else plain) for several in groups.values()]


def _delayed(curves: Sequence[Curve]) -> bool:
    return any(curve.delay is not None for curve in curves)


def _delay_handle(curves: Sequence[Curve]) -> list[Line2D]:
    line = Line2D([], [], color=_DELAY_COLOUR, ls="--", lw=1.1, label="quantised from here on")
    return [line] if _delayed(curves) else []


def _draw_delay(axes: Axes, delay: float) -> None:
    axes.axvline(delay, color=_DELAY_COLOUR, ls="--", lw=1.1, zorder=1)


def _finish(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.margins(x=0.02)
