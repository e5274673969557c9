"""Draw trainings: returns and exploration against steps or episodes."""

from __future__ import annotations

import math
import textwrap
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
    WIDTH,
    Floats,
    Plot,
    label_lowest,
    legend_below,
    scheme_colour,
    style,
)
from quarl_tf.spec import REFERENCE

#: Lines that can still be told apart in the figure of action variances.
MOST_PRECISIONS = 10

# As many as stand beside each other in the headings of a row of panels.
_GRID_LETTERS = 92
# As many as stand beside each other in a legend, the lines before them apart.
_LEGEND_LETTERS = 90
_DELAY_COLOUR = "#b3321f"
# As in QuaRL's figure of action variances.
_SMOOTHING = 0.95


@dataclass(frozen=True)
class Curve:
    """The course of one training; NaN where a row of `progress.csv` has no value.

    Attributes:
        label: Name of the training in the legend.
        steps: Environment steps, shape [n].
        episode_return: Mean return of the latest training episodes, shape [n].
        greedy_return: Mean return of a greedy evaluation, shape [n].
        action_variance: Mean variance of the policy's distributions in that evaluation, shape [n];
            all NaN if the policy has none, or they were not recorded.
        delay: Step at which a quantisation-aware training began to quantise.
        episodes: Training episodes finished so far, shape [n]; None if they were not counted.
    """

    label: str
    steps: Floats
    episode_return: Floats
    greedy_return: Floats
    action_variance: Floats
    delay: int | None = None
    episodes: Floats | None = None


@dataclass(frozen=True)
class PrecisionCurves:
    """The trainings in one precision, which differ in their seeds alone.

    Attributes:
        label: Name of the precision in the legend.
        quantised: Whether they are quantisation-aware.
        curves: The course of each; none if a training is missing.
    """

    label: str
    quantised: bool
    curves: Sequence[Curve]


def learning_curve(curves: Sequence[Curve], title: str) -> Plot:
    """Draw training return and greedy evaluation against environment steps, one colour a run."""
    with style():
        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        axes = figure.subplots()
        palette = (
            [scheme_colour(REFERENCE)]
            if len(curves) == 1
            else sns.color_palette("deep", len(curves))
        )
        for curve, colour in zip(curves, palette, strict=True):
            _draw_curve(axes, curve, colour)
        axes.set(xlabel="environment steps", ylabel="return per episode", title=title)
        handles = _curve_legend(curves)
        if len(curves) > 1:
            handles += [
                Line2D([], [], color=colour, lw=3, label=curve.label)
                for curve, colour in zip(curves, palette, strict=True)
            ]
        legend_below(figure, handles)
    return Plot(figure, f"Learning curve. {_curve_caption(curves)}")


def learning_curves(panels: Mapping[str, Sequence[Curve]], title: str) -> Plot:
    """Draw the curves of many trainings, one panel a precision, one colour a seed.

    Args:
        panels: Heading of a panel to its curves, in the same order of seeds everywhere.
        title: Heading of the figure.
    """
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    curves = [curve for several in panels.values() for curve in several]
    labels = list(dict.fromkeys(curve.label for curve in curves))
    colours = dict(zip(labels, sns.color_palette("deep", len(labels)), strict=True))
    with style():
        figure = Figure(figsize=(WIDTH, 1.2 + 2.1 * rows), layout="constrained")
        grid = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for axes, (heading, several) in zip(grid, panels.items(), strict=False):
            for curve in several:
                _draw_curve(axes, curve, colours[curve.label])
            lines = [textwrap.fill(line, _GRID_LETTERS // columns) for line in heading.split("\n")]
            axes.set_title("\n".join(lines), fontsize="small")
            axes.xaxis.set_major_locator(MaxNLocator(3))
        label_lowest(grid, len(panels), columns, "environment steps")
        figure.suptitle(title)
        figure.supylabel("return per episode", fontsize="medium")
        handles = _curve_legend(curves)
        handles += [Line2D([], [], color=colours[one], lw=3, label=one) for one in labels]
        legend_below(figure, handles)
    return Plot(
        figure, f"Learning curves, a panel for each way of training. {_curve_caption(curves)}"
    )


def _draw_curve(axes: Axes, curve: Curve, colour: Any) -> None:
    known = np.isfinite(curve.episode_return)
    axes.plot(curve.steps[known], curve.episode_return[known], color=colour, lw=1.0, alpha=0.55)
    known = np.isfinite(curve.greedy_return)
    axes.plot(
        curve.steps[known],
        curve.greedy_return[known],
        color=colour,
        lw=1.6,
        marker="o",
        ms=4,
        mec="white",
    )
    if curve.delay is not None:
        _draw_delay(axes, curve.delay)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.margins(x=0.02)
    sns.despine(ax=axes)


def _draw_delay(axes: Axes, delay: float) -> None:
    axes.axvline(delay, color=_DELAY_COLOUR, ls="--", lw=1.1, zorder=1)


def _delay_handle() -> Line2D:
    return Line2D([], [], color=_DELAY_COLOUR, ls="--", lw=1.1, label="quantised from here on")


def _curve_legend(curves: Sequence[Curve]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=GREY, lw=1.0, alpha=0.7, label="training (exploring)"),
        Line2D([], [], color=GREY, lw=1.6, marker="o", ms=4, label="greedy evaluation"),
    ]
    return [*handles, _delay_handle()] if _delayed(curves) else handles


def _curve_caption(curves: Sequence[Curve]) -> str:
    return (
        "Thin line: mean return of the latest training episodes, exploration included. Dots: "
        "greedy evaluations during training, on seeds apart from those of the final evaluation; "
        "the network of the best one (quantised, where it ends so) is exported, not the last."
        + _delay_caption(curves)
    )


def _delay_caption(curves: Sequence[Curve]) -> str:
    if not _delayed(curves):
        return ""
    return " Dashed: the quantisation delay, from which on the network is quantised."


def _delayed(curves: Sequence[Curve]) -> bool:
    return any(curve.delay is not None for curve in curves)


def action_variance(precisions: Sequence[PrecisionCurves], title: str) -> Plot:
    """Draw action variance and greedy return against environment steps, one colour a precision.

    Args:
        precisions: Trainings whose evaluations have both, plain ones first.
        title: Heading of the figure.
    """
    curves = [curve for one in precisions for curve in one.curves]
    colours = _precision_colours(precisions)
    with style():
        figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for one, colour in zip(precisions, colours, strict=True):
            variances = [_smoothed_line(curve.steps, curve.action_variance) for curve in one.curves]
            returns = [_smoothed_line(curve.steps, curve.greedy_return) for curve in one.curves]
            # A quantisation-aware training is its plain twin until the delay: that one is on top.
            _draw_mean(above, variances, colour, zorder=3 if one.quantised else 4)
            _draw_mean(below, returns, colour, zorder=3 if one.quantised else 4)
        for axes, label in (
            (above, "action variance, smoothed"),
            (below, "greedy return, smoothed"),
        ):
            for delay in sorted({curve.delay for curve in curves if curve.delay is not None}):
                _draw_delay(axes, delay)
            axes.set_ylabel(label)
            axes.margins(x=0.02)
            sns.despine(ax=axes)
        below.set_xlabel("environment steps")
        below.xaxis.set_major_formatter(EngFormatter(sep=" "))
        figure.align_ylabels()
        figure.suptitle(title)
        handles = _precision_handles(precisions, colours)
        handles += [_delay_handle()] if _delayed(curves) else []
        longest = max(len(line) for one in handles for line in str(one.get_label()).split("\n"))
        legend_below(figure, handles, columns=min(4, _LEGEND_LETTERS // longest))
    return Plot(figure, _variance_caption(precisions))


def reward_trend(precisions: Sequence[PrecisionCurves], title: str) -> Plot:
    """Draw return in training against training episodes, one colour a precision.

    Args:
        precisions: Trainings whose episodes were counted, plain ones first.
        title: Heading of the figure.
    """
    curves = [curve for one in precisions for curve in one.curves]
    colours = _precision_colours(precisions)
    with style():
        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        axes = figure.subplots()
        for one, colour in zip(precisions, colours, strict=True):
            lines = [_against_episodes(curve) for curve in one.curves]
            # A quantisation-aware training is its plain twin until the delay: that one is on top.
            _draw_mean(axes, lines, colour, zorder=3 if one.quantised else 4)
        for curve in curves:
            if curve.delay is not None and curve.episodes is not None:
                _draw_delay(axes, float(np.interp(curve.delay, curve.steps, curve.episodes)))
        axes.set(xlabel="training episodes", ylabel="return per episode", title=title)
        axes.margins(x=0.02)
        sns.despine(ax=axes)
        handles = _precision_handles(precisions, colours)
        handles += [_delay_handle()] if _delayed(curves) else []
        legend_below(figure, handles)
    return Plot(figure, _trend_caption(precisions))


def smoothed(values: Floats, factor: float) -> Floats:
    """Return the exponential moving average of values, without the pull towards 0 at its start.

    Args:
        values: What to smooth, shape [n].
        factor: Weight of a value over that of the next one, 0 ... 1.

    Returns:
        At each place the weighted mean of all values up to there, shape [n].
    """
    averages: Floats = pd.Series(values).ewm(alpha=1 - factor).mean().to_numpy()
    return averages


def mean_line(lines: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return the mean of lines over the steps that all span, each interpolated between its own.

    Args:
        lines: Steps, ascending, and values of each line.

    Returns:
        Steps and values of the mean.
    """
    steps = np.unique(np.concatenate([x for x, _ in lines]))
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    steps = steps[(first <= steps) & (steps <= last)]
    return steps, np.mean([np.interp(steps, x, y) for x, y in lines], axis=0)


def _precision_colours(precisions: Sequence[PrecisionCurves]) -> list[Any]:
    """Return dark and warm colours for plain trainings, then cool ones in the order of the rest."""
    aware = sum(one.quantised for one in precisions)
    plain = len(precisions) - aware
    warm = sns.color_palette("blend:#e8830c,#f2c14e", plain)
    cool = sns.color_palette("blend:#6cc24a,#1f9e9a,#3a6fd8,#9b2fc4", aware)
    return [*[scheme_colour(REFERENCE), *warm][:plain], *cool]


def _precision_handles(
    precisions: Sequence[PrecisionCurves], colours: Sequence[Any]
) -> list[Line2D]:
    """Return the legend's lines; none beside the name of a precision that has no curves."""
    return [
        Line2D([], [], color=colour, lw=2.2, ls="-" if one.curves else "", label=label)
        for one, colour, label in zip(
            precisions, colours, map(_precision_label, precisions), strict=True
        )
    ]


def _precision_label(precision: PrecisionCurves) -> str:
    label = precision.label if precision.curves else f"{precision.label} (missing)"
    return textwrap.fill(label, TITLE_LETTERS)


def _last(values: Floats) -> float:
    """Return the last value that is known."""
    return float(values[np.isfinite(values)][-1])


def _smoothed_line(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(values)
    return steps[known], smoothed(values[known], _SMOOTHING)


def _draw_mean(
    axes: Axes, lines: Sequence[tuple[Floats, Floats]], colour: Any, zorder: int
) -> None:
    """Draw the mean of some lines, and faintly each of several."""
    # A tint, not a transparent line: where several precisions agree, it stays faint.
    tint = sns.blend_palette(["white", colour], 10)[3]
    for line in lines if len(lines) > 1 else ():
        axes.plot(*line, color=tint, lw=0.8, zorder=zorder - 2)
    if lines:
        axes.plot(*mean_line(lines), color=colour, lw=2.0, zorder=zorder)


def _trend_caption(precisions: Sequence[PrecisionCurves]) -> str:
    delayed = _delayed([curve for one in precisions for curve in one.curves])
    several = any(len(one.curves) > 1 for one in precisions)
    return (
        "Return in training against training episodes: mean return of the latest episodes, "
        "exploration included."
        + (" Strong lines: mean over the trainings, as far as all go." if several else "")
        + (" Faint lines: each training." if several else "")
        + (" Dashed: from there on the network is quantised, for each training" if delayed else "")
        + (" in an episode of its own." if delayed else "")
    )


def _against_episodes(curve: Curve) -> tuple[Floats, Floats]:
    known = np.isfinite(curve.episode_return)
    episodes = curve.steps if curve.episodes is None else curve.episodes
    return episodes[known], curve.episode_return[known]


def _variance_caption(precisions: Sequence[PrecisionCurves]) -> str:
    curves = [curve for one in precisions for curve in one.curves]
    several = any(len(one.curves) > 1 for one in precisions)
    ends = [
        f"{np.mean([_last(curve.action_variance) for curve in one.curves]):.3g} ({one.label})"
        for one in precisions
        if one.curves
    ]
    hidden = " Until then quantised trainings compute what plain ones do, whose lines hide theirs."
    return (
        "Action variance in training. Above: variance of the policy's action distribution, mean "
        "over the states of greedy episodes. For discrete actions it is the variance over their "
        "probabilities, and a lower one means more exploration; for continuous ones it is the "
        "action's own, and a lower one means less. Below: mean return of the same episodes. Both "
        f"are exponential moving averages of factor {_SMOOTHING} over the evaluations, "
        "bias-corrected at the start, so that they begin at the first value and not at 0."
        + f" Not smoothed, the variances end at {', '.join(ends)}."
        + (" Strong lines: mean over the trainings; faint: each training." if several else "")
        + _delay_caption(curves)
        + (hidden if _delayed(curves) else "")
    )
