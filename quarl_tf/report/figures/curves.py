"""Draw trainings: returns and exploration against steps or episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from quarl_tf.report.figures.style import grid, legend_below, scheme_colour, styled, wrapped
from quarl_tf.spec import REFERENCE

MOST_LINES = 10  #: Most lines that can be told apart.
#: Columns of `mean_curves`, with their y labels.
RETURNS = {"episode_return": "training return", "greedy_return": "greedy return"}
VARIANCE = {"action_variance": "action variance", "greedy_return": "greedy return"}

_DELAY: dict[str, Any] = {"color": "#b3321f", "ls": "--", "lw": 1.1}
_SMOOTHING = 0.95  #: As in QuaRL's figure of action variances.
_AXES = {"step": "environment steps", "episodes": "training episodes", "seconds": "seconds"}


class Curve(NamedTuple):
    """The learning curve of one training.

    `values` are the rows of `progress.csv`: step, episode_return and greedy_return, and seconds,
    episodes and action_variance if they were recorded. `delay` is the step at which a
    quantisation-aware training began to quantise.
    """

    values: pd.DataFrame
    delay: int | None = None

    def has(self, column: str) -> bool:
        """Return whether the training recorded a column."""
        return column in self.values and bool(self.values[column].notna().any())

    def line(self, y: str, x: str = "step") -> pd.Series[float]:
        """Return the known values of a column, indexed by another."""
        return self.values[[x, y]].dropna().groupby(x)[y].last().astype(float)


@styled
def mean_curves(
    groups: Mapping[str, Sequence[Curve]], columns: Mapping[str, str], x: str, title: str = ""
) -> Figure:
    """Draw the mean curve of each group of trainings that differ in their seed alone.

    Groups are in full precision first; one that lacks a training is empty. There is a panel for
    each of `columns`, given with y labels, against the column `x`. Beside action variances all is
    smoothed.
    """
    # Warm colours for full precision, cool ones for the rest.
    delayed = [any(curve.delay is not None for curve in curves) for curves in groups.values()]
    warm_palette = sns.color_palette("blend:#e8830c,#f2c14e", len(groups))
    warm_colours = iter([scheme_colour(REFERENCE), *warm_palette])
    cool_colours = iter(sns.color_palette("blend:#6cc24a,#1f9e9a,#3a6fd8,#9b2fc4", sum(delayed)))
    colours: list[Any] = [next(cool_colours if cool else warm_colours) for cool in delayed]
    smooth, labels = "action_variance" in columns, (title, _AXES[x], "")
    figure, panels = grid(len(columns), 1, 2.6, labels, sharex=True, sharey=not smooth)
    trainings = [curve for curves in groups.values() for curve in curves]
    begins = {np.interp(c.delay, c.values["step"], c.values[x]) for c in trainings if c.delay}
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        for curves, cool, colour in zip(groups.values(), delayed, colours, strict=True):
            lines = [curve.line(column, x) for curve in curves]
            if smooth:  # Corrected for bias at the start.
                lines = [line.ewm(alpha=1 - _SMOOTHING).mean() for line in lines]
            # Until the delay a quantised training equals its reference, which is on top.
            _draw_mean(axes, lines, colour, 3 if cool else 4)
        axes.set_ylabel(f"{label}, smoothed" if smooth else label)
        for step in sorted(begins):
            axes.axvline(step, zorder=1, **_DELAY)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.margins(x=0.02)
    figure.align_ylabels()
    names = [name if curves else f"{name} (missing)" for name, curves in groups.items()]
    handles = [
        Line2D([], [], color=colour, lw=2.2, label=wrapped(name, 2))
        for colour, name in zip(colours, names, strict=True)
    ]
    if begins:
        handles.append(Line2D([], [], label="quantised from here on", **_DELAY))
    legend_below(figure, handles, columns=2 if max(map(len, names)) > 20 else 4)
    return figure


def _draw_mean(axes: Axes, lines: Sequence[pd.Series[float]], colour: Any, zorder: int) -> None:
    # A tint stays faint where several lines coincide, unlike transparency.
    tint = sns.blend_palette(["white", colour], 10)[3]
    for line in lines if len(lines) > 1 else ():
        axes.plot(line.index, line, color=tint, lw=0.8, zorder=zorder - 2)
    if lines:
        # The mean over their common range, each interpolated linearly.
        table = pd.concat(lines, axis=1).sort_index().interpolate("index", limit_area="inside")
        mean = table.dropna().mean(axis=1)
        marker = "" if len(mean) > 1 else "o"  # A line of one point is not seen.
        axes.plot(mean.index, mean, color=colour, lw=2.0, marker=marker, zorder=zorder)
