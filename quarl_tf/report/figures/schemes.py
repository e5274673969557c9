"""Draw what quantisation does to policies: schemes beside fp32, and weights beside grids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from quarl_tf.evaluation.compare import Interval
from quarl_tf.quantization.grid import grid_between
from quarl_tf.report.figures.style import (
    GREY,
    LIGHT_GREY,
    SWEEPS,
    WIDTH,
    Floats,
    Plot,
    Sweep,
    label_lowest,
    legend_below,
    scheme_colour,
    style,
    sweep_of,
)
from quarl_tf.spec import BASELINE, REFERENCE, Scheme, TensorFormat

#: Grids drawn into the weight histograms: at 8 bits the lines would be a solid block.
HISTOGRAM_BITS = (4, 2)

_PANELS_PER_ROW = 5


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
    training_means: tuple[float, ...]


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
    with style():
        figure = Figure(figsize=(WIDTH, 1.2 + 2.2 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for axes, (name, (reference, other)) in zip(panels, pairs.items(), strict=False):
            _draw_pairs(axes, name, reference, other)
        label_lowest(panels, len(pairs), columns, "episodes, sorted")
        figure.suptitle(title)
        figure.supylabel("return per episode", fontsize="medium")
        legend_below(
            figure,
            [
                Line2D([], [], ls="", marker="o", ms=5, mfc="none", mec=GREY, label=REFERENCE),
                Line2D(
                    [], [], color=GREY, marker="o", ms=4, label="scheme of the panel, same seed"
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
    with style():
        figure = Figure(figsize=(WIDTH, 0.9 + 2.0 * len(weights)), layout="constrained")
        panels = figure.subplots(len(weights), len(HISTOGRAM_BITS), squeeze=False, sharey="row")
        for row, (name, values) in zip(panels, weights.items(), strict=True):
            for axes, bits in zip(row, HISTOGRAM_BITS, strict=True):
                _draw_histogram(axes, values, bits)
            row[0].set_title(_layer_title(name, values), loc="left", fontsize="small")
        for axes in panels[-1]:
            axes.set_xlabel("weight")
        figure.suptitle(title)
        figure.supylabel("number of weights (log scale)", fontsize="medium")
        legend_below(
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
    runs = len(points[0].training_means)
    with style():
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.subplots()
        places = {
            p.scheme.name: widths.index(p.scheme.weight_bits) + _dodge(p, points) for p in points
        }
        for sweep in dict.fromkeys(sweep_of(point.scheme) for point in points):
            if sweep is not None:
                _draw_sweep(axes, points, sweep, places)
        for point in points:
            _draw_point(axes, point, places[point.scheme.name])
        if chance is not None:
            axes.axhline(chance, color=scheme_colour(BASELINE), ls="--", lw=1.2, zorder=1)
        axes.set(xlabel="bits per weight", ylabel="mean return per episode", title=title)
        axes.set_xticks(range(len(widths)), [str(bits) for bits in widths])
        axes.set_xlim(-0.6, len(widths) - 0.4)
        axes.grid(axis="x", visible=False)
        sns.despine(ax=axes)
        handles = _bits_legend(points, chance)
        legend_below(figure, handles, columns=6 if len(handles) <= 6 else 4)
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
    sns.despine(ax=axes)


def _draw_histogram(axes: Axes, values: npt.NDArray[np.float32], bits: int) -> None:
    sns.histplot(values.ravel(), bins=80, ax=axes, color=GREY, element="step", linewidth=0.6)
    for value in _grid_values(values, bits):
        axes.axvline(value, color=scheme_colour(f"ptq_w{bits}"), lw=0.9)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))  # Not powers of ten.
    axes.xaxis.set_major_locator(MaxNLocator(5))  # Small weights have long labels.
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
    form = TensorFormat(bits=bits, step="paper")
    low, high = (end.astype(np.float64) for end in (values.min(), values.max()))
    return grid_between(low, high, form).values().astype(np.float32)


def _layer_title(name: str, values: npt.NDArray[np.float32]) -> str:
    shape = " by ".join(map(str, values.shape))
    # Converters join the paths of all operations they fused; the end of the first names the layer.
    first = name.partition(";")[0]
    short = first if len(first) <= 34 else f"…{first[-33:]}"
    return f"{short} ({shape})"


def _draw_sweep(
    axes: Axes, points: Sequence[BitsPoint], sweep: Sweep, places: Mapping[str, float]
) -> None:
    """Join the simulated schemes of one kind, from fp32 on; lightly for each of several runs."""
    # 32 bits is where a sweep starts: its grid is as fine as float32 at the ends of its range.
    joined = [p for p in points if sweep_of(p.scheme) == sweep or p.scheme.name == REFERENCE]
    joined.sort(key=lambda point: -point.scheme.weight_bits)
    x = [places[point.scheme.name] for point in joined]
    axes.plot(x, [p.returns.mean for p in joined], color=GREY, ls=sweep.line, lw=1.2, zorder=2)
    runs = len(joined[0].training_means)
    for run in range(runs if runs > 1 else 0):
        y = [point.training_means[run] for point in joined]
        axes.plot(x, y, color=LIGHT_GREY, ls=sweep.line, lw=0.9, zorder=1)


def _draw_point(axes: Axes, point: BitsPoint, position: float) -> None:
    returns = point.returns
    reach = [[returns.mean - returns.low], [returns.high - returns.mean]]
    sweep = sweep_of(point.scheme)
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
    for sweep in SWEEPS.values():
        names = [point.scheme.name for point in points if sweep_of(point.scheme) == sweep]
        if names:
            handles.append(
                Line2D(
                    [],
                    [],
                    color=GREY,
                    ls=sweep.line,
                    marker=sweep.marker,
                    ms=6,
                    mfc=scheme_colour(names[len(names) // 2]),
                    mec="white",
                    label=sweep.label,
                )
            )
    if chance is not None:
        colour = scheme_colour(BASELINE)
        handles.append(Line2D([], [], color=colour, ls="--", label="random policy"))
    return handles
