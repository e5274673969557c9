"""Draw the figures of a report: pure functions from numbers to a figure and its caption.

Figures are `Figure` objects of their own: nothing is registered with pyplot, no window opens, and
a scheme has the same colour in every one of them.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image

from quarl_tf.quantization.affine import affine_grid, dequantize
from quarl_tf.spec import PTQ_BITS, REFERENCE, Scheme
from quarl_tf.statistics import Interval

Floats = npt.NDArray[np.floating[Any]]

#: Lines that can still be told apart in the figure of action variances.
MOST_PRECISIONS = 10

#: Grids drawn into the weight histograms: at 8 bits the lines would be a solid block.
HISTOGRAM_BITS = (4, 2)

# Inches; at 150 dots per inch a figure is 1350 pixels wide, sharp at twice a report's column.
_WIDTH = 9.0
_DPI = 150
_PANELS_PER_ROW = 5
# As many as stand above one of two panels.
_TITLE_LETTERS = 40
# As many as stand beside each other in a legend, the lines before them apart.
_LEGEND_LETTERS = 90
_GREY = "#8a8f98"
_LIGHT_GREY = "#c9ccd1"
_DELAY_COLOUR = "#b3321f"
# As in QuaRL's figure of action variances.
_SMOOTHING = 0.95
# Native schemes are cool; simulated ones warm, olive as published, purple if trained at those bits,
# and darker the fewer their bits.
_NATIVE_COLOURS = {
    "fp32": "#22313f",
    "fp16": "#0173b2",
    "dynamic_int8": "#2fa7c7",
    "int8": "#029e73",
    "qat_int8": "#6aa51e",
    "qat_int4": "#3f7f3a",
}


@dataclass(frozen=True)
class _Sweep:
    """The look of the simulated schemes that are made in the same way."""

    label: str
    palette: str
    marker: str
    line: Literal["-", ":", "-."]


_SWEEPS = {
    "code": _Sweep("ptq_w… (simulated)", "flare_r", "D", "-"),
    "paper": _Sweep("ptq_paper_w… (simulated)", "blend:#4f4200,#c9ae35", "^", ":"),
    "trained": _Sweep("qat_w… (simulated)", "blend:#3a0f5e,#b79be0", "s", "-."),
}


def _sweep(scheme: Scheme) -> _Sweep | None:
    """Return the look of a simulated scheme; None for a native one."""
    kind = "trained" if scheme.trained else scheme.mode
    return None if scheme.native or kind is None else _SWEEPS[kind]


@dataclass(frozen=True)
class Plot:
    """A figure and the caption that says what it shows."""

    figure: Figure
    caption: str

    def png(self) -> bytes:
        """Render the figure; the same figure gives the same bytes."""
        full, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(full, format="png", dpi=_DPI)
        # A palette makes a chart 2 to 3 times smaller, and drops matplotlib's version with the rest
        # of the metadata.
        Image.open(full).convert("RGB").quantize(256).save(small, format="png", optimize=True)
        return small.getvalue()


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
class BitsPoint:
    """What one scheme earns.

    Attributes:
        scheme: The scheme.
        returns: Its mean return with the interval.
        runs: Its mean return in each training, in the order of the trainings.
    """

    scheme: Scheme
    returns: Interval
    runs: tuple[float, ...]


@dataclass(frozen=True)
class PrecisionPoint:
    """What the trainings of one cell of a study earn in one precision.

    Attributes:
        label: Name of the precision on the axis; several points may share it.
        delay: Step at which the trainings began to quantise; None for plain ones.
        returns: Mean return with its interval; None if a training is missing.
        runs: Mean return of each training that is there.
    """

    label: str
    scheme: Scheme
    delay: int | None
    returns: Interval | None
    runs: tuple[float, ...]


@dataclass(frozen=True)
class PrecisionPanel:
    """One cell of a study, with the mean return of a random policy, if that is known."""

    title: str
    points: Sequence[PrecisionPoint]
    chance: float | None


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


def scheme_colour(name: str) -> str:
    """Return a scheme's colour as `#rrggbb`, the same in every figure; "random" is grey.

    Raises:
        UsageError: No scheme has that name.
    """
    if name == "random":
        return _GREY
    scheme = Scheme.parse(name)
    sweep = _sweep(scheme)
    if sweep is None:
        return _NATIVE_COLOURS[name]
    # The palette spans 2 ... 8 bits, what is exported by default; wider grids share the lightest.
    steps = 7
    palette = sns.color_palette(sweep.palette, steps).as_hex()
    return str(palette[min(scheme.weight_bits - PTQ_BITS.start, steps - 1)])


def learning_curve(curves: Sequence[Curve], title: str) -> Plot:
    """Draw training return and greedy evaluation against environment steps, one colour a run."""
    with _style():
        figure = Figure(figsize=(_WIDTH, 4.0), layout="constrained")
        axes = figure.subplots()
        palette = (
            [scheme_colour("fp32")] if len(curves) == 1 else sns.color_palette("deep", len(curves))
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
        _legend_below(figure, handles)
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
    with _style():
        figure = Figure(figsize=(_WIDTH, 1.2 + 2.1 * rows), layout="constrained")
        grid = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for axes, (heading, several) in zip(grid, panels.items(), strict=False):
            for curve in several:
                _draw_curve(axes, curve, colours[curve.label])
            axes.set_title(heading)
            axes.xaxis.set_major_locator(MaxNLocator(3))
        _label_lowest(grid, len(panels), columns, "environment steps")
        figure.suptitle(title)
        figure.supylabel("return per episode", fontsize="medium")
        handles = _curve_legend(curves)
        handles += [Line2D([], [], color=colours[one], lw=3, label=one) for one in labels]
        _legend_below(figure, handles)
    return Plot(figure, f"Learning curves by precision. {_curve_caption(curves)}")


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
        Line2D([], [], color=_GREY, lw=1.0, alpha=0.7, label="training (exploring)"),
        Line2D([], [], color=_GREY, lw=1.6, marker="o", ms=4, label="greedy evaluation"),
    ]
    return [*handles, _delay_handle()] if _delayed(curves) else handles


def _curve_caption(curves: Sequence[Curve]) -> str:
    return (
        "Thin line: mean return of the latest training episodes, exploration included. Dots: "
        "greedy evaluations during training, on seeds apart from those of the final evaluation."
        + _delay_caption(curves)
    )


def _delay_caption(curves: Sequence[Curve]) -> str:
    if not _delayed(curves):
        return ""
    return " Dashed: the quantisation delay, from which on the network is quantised."


def _delayed(curves: Sequence[Curve]) -> bool:
    return any(curve.delay is not None for curve in curves)


def _label_lowest(panels: Sequence[Axes], used: int, columns: int, label: str) -> None:
    """Remove panels without data; label the lowest of each column, maybe not in the last row."""
    for axes in panels[used:]:
        axes.remove()
    for axes in panels[:used][-columns:]:
        axes.set_xlabel(label)
        axes.tick_params(labelbottom=True)


def smoothed(values: Floats, factor: float) -> Floats:
    """Return the exponential moving average of values, without the pull towards 0 at its start.

    Args:
        values: What to smooth, shape [n].
        factor: Weight of a value over that of the next one, 0 ... 1.

    Returns:
        At each place the weighted mean of all values up to there, shape [n].
    """
    total = weights = 0.0
    averages = []
    for value in values:
        total, weights = factor * total + value, factor * weights + 1
        averages.append(total / weights)
    return np.array(averages)


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


def action_variance(precisions: Sequence[PrecisionCurves], title: str) -> Plot:
    """Draw action variance and greedy return against environment steps, one colour a precision.

    Args:
        precisions: Trainings whose evaluations have both, plain ones first.
        title: Heading of the figure.
    """
    curves = [curve for one in precisions for curve in one.curves]
    colours = _precision_colours(precisions)
    with _style():
        figure = Figure(figsize=(_WIDTH, 6.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for one, colour in zip(precisions, colours, strict=True):
            variances = [_smoothed_line(curve.steps, curve.action_variance) for curve in one.curves]
            returns = [_smoothed_line(curve.steps, curve.greedy_return) for curve in one.curves]
            # A quantisation-aware training is its plain twin until the delay: that one is on top.
            _draw_mean(above, variances, colour, zorder=3 if one.quantised else 4)
            _draw_mean(below, returns, colour, zorder=3 if one.quantised else 4)
        for axes, label in ((above, "action variance"), (below, "greedy return")):
            for delay in sorted({curve.delay for curve in curves if curve.delay is not None}):
                _draw_delay(axes, delay)
            axes.set_ylabel(label)
            axes.margins(x=0.02)
            sns.despine(ax=axes)
        below.set_xlabel("environment steps")
        below.xaxis.set_major_formatter(EngFormatter(sep=" "))
        figure.align_ylabels()
        figure.suptitle(title)
        handles = [
            Line2D([], [], color=colour, lw=2.2, label=_precision_label(one))
            for one, colour in zip(precisions, colours, strict=True)
        ]
        handles += [_delay_handle()] if _delayed(curves) else []
        longest = max(len(line) for one in handles for line in str(one.get_label()).split("\n"))
        _legend_below(figure, handles, columns=min(4, _LEGEND_LETTERS // longest))
    return Plot(figure, _variance_caption(precisions))


def _precision_colours(precisions: Sequence[PrecisionCurves]) -> list[Any]:
    """Return dark and warm colours for plain trainings, then cool ones in the order of the rest."""
    aware = sum(one.quantised for one in precisions)
    plain = len(precisions) - aware
    warm = sns.color_palette("blend:#e8830c,#f2c14e", plain)
    cool = sns.color_palette("blend:#6cc24a,#1f9e9a,#3a6fd8,#9b2fc4", aware)
    return [*[scheme_colour(REFERENCE), *warm][:plain], *cool]


def _precision_label(precision: PrecisionCurves) -> str:
    label = precision.label if precision.curves else f"{precision.label} (missing)"
    return textwrap.fill(label, _TITLE_LETTERS)


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


def reward_trend(precisions: Sequence[PrecisionCurves], title: str) -> Plot:
    """Draw return in training against training episodes, one colour a precision.

    Args:
        precisions: Trainings whose episodes were counted, plain ones first.
        title: Heading of the figure.
    """
    curves = [curve for one in precisions for curve in one.curves]
    colours = _precision_colours(precisions)
    with _style():
        figure = Figure(figsize=(_WIDTH, 4.0), layout="constrained")
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
        handles = [
            Line2D([], [], color=colour, lw=2.2, label=_precision_label(one))
            for one, colour in zip(precisions, colours, strict=True)
        ]
        handles += [_delay_handle()] if _delayed(curves) else []
        _legend_below(figure, handles)
    return Plot(figure, _trend_caption(precisions))


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
    hidden = " Until then quantised trainings compute what plain ones do, whose lines hide theirs."
    return (
        "Action variance in training. Above: variance of the policy's action distribution, mean "
        "over the states of greedy episodes. For discrete actions it is the variance over their "
        "probabilities, and a lower one means more exploration; for continuous ones it is the "
        "action's own, and a lower one means less. Below: mean return of the same episodes. Both "
        f"are exponential moving averages of factor {_SMOOTHING} over the evaluations, "
        "bias-corrected at the start, so that they begin at the first value and not at 0."
        + (" Strong lines: mean over the trainings; faint: each training." if several else "")
        + _delay_caption(curves)
        + (hidden if _delayed(curves) else "")
    )


def paired_returns(pairs: Mapping[str, tuple[Floats, Floats]], title: str) -> Plot:
    """Draw every episode twice, under fp32 and under a scheme, one panel per scheme.

    Episodes are sorted by both returns, so that even when nearly all returns are the same the few
    that are not stand at one side.

    Args:
        pairs: Scheme to the returns of fp32 and of the scheme on the same seeds, each of shape [n].
        title: Heading of the figure.
    """
    rows = math.ceil(len(pairs) / _PANELS_PER_ROW)
    columns = math.ceil(len(pairs) / rows)
    with _style():
        figure = Figure(figsize=(_WIDTH, 1.2 + 2.2 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for axes, (name, (reference, other)) in zip(panels, pairs.items(), strict=False):
            _draw_pairs(axes, name, reference, other)
        _label_lowest(panels, len(pairs), columns, "episodes, sorted")
        figure.suptitle(title)
        figure.supylabel("return per episode", fontsize="medium")
        _legend_below(
            figure,
            [
                Line2D([], [], ls="", marker="o", ms=5, mfc="none", mec=_GREY, label="fp32"),
                Line2D(
                    [], [], color=_GREY, marker="o", ms=4, label="scheme of the panel, same seed"
                ),
                Line2D([], [], ls="", label="episodes: ↓ worse   = equal   ↑ better"),
            ],
        )
    return Plot(
        figure,
        "Every episode under fp32 (ring) and, from the same environment seed, under the scheme "
        "(dot), joined by a line: a dot below its ring is an episode that earned less. Above each "
        "panel: how many episodes earned less, the same and more than under fp32.",
    )


def weight_histograms(weights: Mapping[str, npt.NDArray[np.float32]], title: str) -> Plot:
    """Draw the weights of each layer with the values that a 4-bit and a 2-bit grid can hold.

    Args:
        weights: Layer to its weights, rank 2 or more, finite.
        title: Heading of the figure.
    """
    with _style():
        figure = Figure(figsize=(_WIDTH, 0.9 + 2.0 * len(weights)), layout="constrained")
        panels = figure.subplots(len(weights), len(HISTOGRAM_BITS), squeeze=False, sharey="row")
        for row, (name, values) in zip(panels, weights.items(), strict=True):
            for axes, bits in zip(row, HISTOGRAM_BITS, strict=True):
                _draw_histogram(axes, values, bits)
            row[0].set_title(_layer_title(name, values), loc="left", fontsize="small")
        for axes in panels[-1]:
            axes.set_xlabel("weight")
        figure.suptitle(title)
        figure.supylabel("number of weights (log scale)", fontsize="medium")
        _legend_below(
            figure,
            [
                Line2D(
                    [],
                    [],
                    color=scheme_colour(f"ptq_w{bits}"),
                    label=f"the {2**bits} values of {bits} bits",
                )
                for bits in HISTOGRAM_BITS
            ],
        )
    convolution = (
        " Convolutions have one grid per output channel; that of the widest channel is drawn."
        if any(_channel_axis(values) is not None for values in weights.values())
        else ""
    )
    return Plot(
        figure,
        "Weights of the fp32 network by layer (biases left out). Lines: the only values left when "
        "the layer is quantised to 4 bits (left) and to 2 bits (right); each weight moves to the "
        "nearest. A few outliers widen the range and leave fewer "
        "lines to the bulk." + convolution,
    )


def reward_against_bits(points: Sequence[BitsPoint], chance: float | None, title: str) -> Plot:
    """Draw mean return against bits per weight, from many to few.

    Args:
        points: What each scheme earns; all over the same runs.
        chance: Mean return of a random policy, if known.
        title: Heading of the figure.
    """
    widths = sorted({point.scheme.weight_bits for point in points}, reverse=True)
    runs = len(points[0].runs)
    with _style():
        figure = Figure(figsize=(_WIDTH, 4.2), layout="constrained")
        axes = figure.subplots()
        places = {
            p.scheme.name: widths.index(p.scheme.weight_bits) + _dodge(p, points) for p in points
        }
        for sweep in dict.fromkeys(_sweep(point.scheme) for point in points):
            if sweep is not None:
                _draw_sweep(axes, points, sweep, places)
        for point in points:
            _draw_point(axes, point, places[point.scheme.name])
        if chance is not None:
            axes.axhline(chance, color=scheme_colour("random"), ls="--", lw=1.2, zorder=1)
        axes.set(xlabel="bits per weight", ylabel="mean return per episode", title=title)
        axes.set_xticks(range(len(widths)), [str(bits) for bits in widths])
        axes.set_xlim(-0.6, len(widths) - 0.4)
        axes.grid(axis="x", visible=False)
        sns.despine(ax=axes)
        handles = _bits_legend(points, chance)
        _legend_below(figure, handles, columns=6 if len(handles) <= 6 else 4)
    unit = (
        "95 % interval of the mean over episodes"
        if runs == 1
        else f"95 % interval over {runs} trainings (light lines: each training)"
    )
    random_line = " Dashed: a policy that acts at random." if chance is not None else ""
    return Plot(
        figure,
        f"Reward against bits: mean return and {unit}. Circles are native flatbuffers, other "
        "marks are simulated: weights, of qat_wNaN activations too, on the n-bit grid, computed "
        "in float. Schemes of the same "
        "width stand side by side." + random_line,
    )


def reward_against_precision(panels: Sequence[PrecisionPanel], title: str) -> Plot:
    """Draw mean return against precision, one panel a cell, as in QuaRL's figure of QAT."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with _style():
        figure = Figure(figsize=(_WIDTH, 1.0 + 2.9 * rows), layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            _draw_precisions(axes, panel)
        _label_lowest(grid, len(panels), columns, "precision")
        figure.suptitle(title)
        figure.supylabel("mean return per episode", fontsize="medium")
        handles = [
            Line2D([], [], ls="", marker="o", ms=7, color=_GREY, label="native"),
            Line2D([], [], ls="", marker="D", ms=6, color=_GREY, label="simulated"),
            Line2D([], [], ls="", marker="o", ms=4, color=_GREY, alpha=0.5, label="one training"),
        ]
        handles += _delay_legend(panels)
        handles.append(Line2D([], [], color=_GREY, ls="--", lw=1.2, label="random policy"))
        _legend_below(figure, handles, columns=5)
    return Plot(
        figure,
        "Reward against precision. Fp: float32; 8*: int8 after training; 8, 7, …: trained and run "
        "at so many bits. Mean over the trainings with its 95 % interval, which may leave the "
        "panel, and each training as a light point. Circles are native flatbuffers, diamonds "
        "simulated ones.",
    )


def _delays(panel: PrecisionPanel) -> list[int]:
    return list(dict.fromkeys(p.delay for p in panel.points if p.delay is not None))


def _delay_legend(panels: Sequence[PrecisionPanel]) -> list[Line2D]:
    """Return a line for each rank of a delay in its panel, which has the same style everywhere."""
    ranks = list(zip_longest(*map(_delays, panels)))
    handles = []
    for rank, of_panels in enumerate(ranks):
        steps = " or ".join(dict.fromkeys(f"{delay:,}" for delay in of_panels if delay))
        label = f"trained from {steps}" if len(ranks) > 1 else "trained at those bits"
        handles.append(Line2D([], [], color=_GREY, lw=1.2, ls=_line(rank), label=label))
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
        axes.plot(x, y, color=_GREY, lw=1.2, ls=_line(rank), zorder=2)
    for point in panel.points:
        _draw_precision(axes, point, places[id(point)])
    if panel.chance is not None:
        axes.axhline(panel.chance, color=scheme_colour("random"), ls="--", lw=1.2, zorder=1)
    values = [value for point in known for value in point.runs]
    values += [] if panel.chance is None else [panel.chance]
    if values:
        # Of the trainings, not of their intervals: over 2 or 3 these may dwarf all else.
        room = 0.12 * (max(values) - min(values)) or 1.0
        axes.set_ylim(min(values) - room, max(values) + room)
    else:
        axes.set_yticks([])
    axes.set_title(textwrap.fill(panel.title, _TITLE_LETTERS))
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
    x = [place + (-0.1 if place < round(place) else 0.1)] * len(point.runs)
    axes.scatter(x, point.runs, s=18, color=colour, alpha=0.5, linewidth=0, zorder=4)
    if point.returns is None:
        axes.annotate(
            "missing",
            (place, 0.5),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="center",
            va="center",
            fontsize="small",
            color=_GREY,
        )
        return
    reach = [
        [point.returns.mean - point.returns.low],
        [point.returns.high - point.returns.mean],
    ]
    axes.errorbar(
        place,
        point.returns.mean,
        yerr=reach if point.returns.bounded else None,
        color=colour,
        marker="o" if point.scheme.native else "D",
        ms=7 if point.scheme.native else 6,
        mec="white",
        elinewidth=1.4,
        capsize=3,
        zorder=3,
    )


def _style() -> Any:
    """Return a context in which artists take the project's look."""
    return mpl.rc_context(
        {
            **sns.axes_style("ticks", {"axes.grid": True}),
            **sns.plotting_context("paper", font_scale=1.1),
            # Ships with matplotlib: the same letters, and the same bytes, on every machine.
            "font.sans-serif": ["DejaVu Sans"],
            "axes.edgecolor": "#555b65",
            "axes.titleweight": "bold",
            "figure.titleweight": "bold",
            "figure.titlesize": "medium",
            "axes.titlesize": "medium",
            "grid.color": "#e8eaed",
            "grid.linewidth": 0.8,
        }
    )


def _legend_below(figure: Figure, handles: Sequence[Line2D], columns: int = 3) -> None:
    """Put a legend under the axes, where it hides no data."""
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=min(len(handles), columns),
        frameon=False,
    )


def _draw_pairs(axes: Axes, name: str, reference: Floats, other: Floats) -> None:
    order = np.lexsort((other, reference))
    before, after = reference[order], other[order]
    episodes = np.arange(1, len(order) + 1)
    colour = scheme_colour(name)
    # Many episodes need smaller dots, or they merge into a band.
    size = float(np.clip(900 / len(order), 2.0, 14.0))
    width = min(0.8, 50 / len(order))
    # Unsnapped: on whole pixels, some neighbouring lines would merge and others not.
    axes.vlines(episodes, before, after, color=colour, lw=width, alpha=0.6, snap=False)
    axes.scatter(episodes, before, s=2 * size, facecolor="none", edgecolor=_GREY, linewidth=0.6)
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
    sns.despine(ax=axes)


def _draw_histogram(axes: Axes, values: npt.NDArray[np.float32], bits: int) -> None:
    sns.histplot(values.ravel(), bins=80, ax=axes, color=_GREY, element="step", linewidth=0.6)
    for value in _grid_values(values, bits):
        axes.axvline(value, color=scheme_colour(f"ptq_w{bits}"), lw=0.9)
    axes.set_yscale("log")
    axes.set(xlabel="", ylabel="")
    axes.grid(visible=False)
    sns.despine(ax=axes)


def _channel_axis(values: npt.NDArray[np.float32]) -> int | None:
    """Return the axis of output channels that has a grid each; None for one grid in all.

    TensorFlow Lite stores convolutions as [channel, height, width, input].
    """
    return 0 if values.ndim > 2 else None


def _grid_values(values: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """Return the values that a layer may take in n bits; of the widest channel, if it has many."""
    if _channel_axis(values) is not None:
        flat = values.reshape(len(values), -1)
        values = flat[np.argmax(np.ptp(flat, axis=1))]
    return dequantize(np.arange(2**bits), affine_grid(values, bits))


def _layer_title(name: str, values: npt.NDArray[np.float32]) -> str:
    shape = " by ".join(map(str, values.shape))
    # Converters join the paths of all operations they fused; the end of the first names the layer.
    first = name.partition(";")[0]
    short = first if len(first) <= 34 else f"…{first[-33:]}"
    return f"{short} ({shape})"


def _draw_sweep(
    axes: Axes, points: Sequence[BitsPoint], sweep: _Sweep, places: Mapping[str, float]
) -> None:
    """Join the simulated schemes of one kind, from fp32 on; lightly for each of several runs."""
    # 32 bits is where a sweep starts: its grid would be finer than float32 itself.
    joined = [p for p in points if _sweep(p.scheme) == sweep or p.scheme.name == "fp32"]
    joined.sort(key=lambda point: -point.scheme.weight_bits)
    x = [places[point.scheme.name] for point in joined]
    axes.plot(x, [p.returns.mean for p in joined], color=_GREY, ls=sweep.line, lw=1.2, zorder=2)
    runs = len(joined[0].runs)
    for run in range(runs if runs > 1 else 0):
        y = [point.runs[run] for point in joined]
        axes.plot(x, y, color=_LIGHT_GREY, ls=sweep.line, lw=0.9, zorder=1)


def _draw_point(axes: Axes, point: BitsPoint, position: float) -> None:
    returns = point.returns
    reach = [[returns.mean - returns.low], [returns.high - returns.mean]]
    sweep = _sweep(point.scheme)
    axes.errorbar(
        position,
        returns.mean,
        yerr=reach if returns.bounded else None,
        color=scheme_colour(point.scheme.name),
        marker=sweep.marker if sweep else "o",
        ms=7,
        mec="white",
        elinewidth=1.4,
        capsize=3,
        zorder=3,
    )


def _dodge(point: BitsPoint, points: Sequence[BitsPoint]) -> float:
    """Return the sideways shift that keeps schemes of equally many bits apart."""
    peers = [p.scheme for p in points if p.scheme.weight_bits == point.scheme.weight_bits]
    native = [scheme.name for scheme in peers if scheme.native]
    simulated = [scheme.name for scheme in peers if not scheme.native]
    # Simulated schemes stand in the middle: their lines stay straight.
    half = len(native) // 2
    order = [*native[:half], *simulated, *native[half:]]
    return 0.2 * (order.index(point.scheme.name) - (len(order) - 1) / 2)


def _bits_legend(points: Sequence[BitsPoint], chance: float | None) -> list[Line2D]:
    handles = [
        Line2D([], [], ls="", marker="o", ms=7, color=scheme_colour(name), label=name)
        for name in (point.scheme.name for point in points if point.scheme.native)
    ]
    for sweep in _SWEEPS.values():
        names = [point.scheme.name for point in points if _sweep(point.scheme) == sweep]
        if names:
            handles.append(
                Line2D(
                    [],
                    [],
                    color=_GREY,
                    ls=sweep.line,
                    marker=sweep.marker,
                    ms=6,
                    mfc=scheme_colour(names[len(names) // 2]),
                    mec="white",
                    label=sweep.label,
                )
            )
    if chance is not None:
        colour = scheme_colour("random")
        handles.append(Line2D([], [], color=colour, ls="--", label="random policy"))
    return handles
