"""Draw returns against bits, the performance profile, and each episode beside that of fp32."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from quarl_tf.evaluation.compare import differences
from quarl_tf.report.figures import style
from quarl_tf.report.figures.style import GREY, Floats, grid, legend_below, styled
from quarl_tf.report.results import CellResults, Row
from quarl_tf.spec import REFERENCE, Scheme

_RANGE = (-20.0, 120.0)  # In percent; values beyond are drawn at the edge.


@styled
def return_against_bits(cells: Sequence[CellResults]) -> Figure:
    """Draw mean return against bits per weight; cells of one task share their y limits."""
    columns = {1: 1, 2: 2, 4: 2}.get(len(cells), 3)
    labels = ("", "bits per weight", "mean return per episode")
    figure, panels = grid(len(cells), columns, 3.4 if columns == 1 else 2.6, labels)
    schemes = {row.scheme: Scheme.parse(row.scheme) for cell in cells for row in cell.rows}
    widths = sorted({scheme.weight_bits for scheme in schemes.values()}, reverse=True)
    for axes, cell in zip(panels, cells, strict=True):
        _draw_cell(axes, cell, widths)
        same_task = [other for other in cells if other.cell.task == cell.cell.task]
        if values := [value for other in same_task for value in _visible(other)]:
            room = 0.08 * (max(values) - min(values)) or 1.0
            axes.set_ylim(min(values) - room, max(values) + room)
        axes.set_title(style.wrapped(cell.cell.title, columns), fontsize="small")
    marks: dict[str, Any] = {"ms": 6, "mec": "white"}
    handles = [
        Line2D([], [], color=style.scheme_colour(name), label=name, ls="", marker="o", **marks)
        for name, scheme in schemes.items()
        if scheme.native
    ]
    for kind, look in style.FAMILIES.items():
        if names := [name for name, scheme in schemes.items() if style.family(scheme) == kind]:
            line = Line2D([], [], color=GREY, ls=look.line, marker=look.marker, **marks)
            line.set_markerfacecolor(style.scheme_colour(names[len(names) // 2]))
            line.set_label(f"{kind}… (simulated)")
            handles.append(line)
    if any(cell.baseline is not None for cell in cells):
        handles.append(Line2D([], [], color=GREY, ls="--", label="random policy"))
    legend_below(figure, handles)
    return figure


def _visible(cell: CellResults) -> list[float]:
    """Return what must be visible: means of trainings, or the interval of a single one."""
    values = [] if cell.baseline is None else [cell.baseline.mean]
    values += [row.returns.mean for row in cell.trainings if row.returns is not None]
    for row in cell.rows:
        if row.runs == 1 and row.returns is not None and row.returns.bounded:
            values += [row.returns.low, row.returns.high]
    return values


def _draw_cell(axes: Axes, cell: CellResults, widths: Sequence[int]) -> None:
    """Draw points, and lines that join families: their means, with gaps, and light trainings."""
    rows = cell.rows
    places = [widths.index(row.weight_bits) + _dodge(row, rows) for row in rows]
    missing: dict[int, list[float]] = {}
    lines: dict[tuple[str, str, int | None], list[int]] = {}
    look: dict[str, Any] = {"ms": 6, "mec": "white", "elinewidth": 1.4, "capsize": 2.5, "zorder": 3}
    for number, row in enumerate(rows):
        kind = style.family(Scheme.parse(row.scheme))
        if (returns := row.returns) is None:
            missing.setdefault(row.weight_bits, []).append(places[number])
        else:
            error = [[returns.mean - returns.low], [returns.high - returns.mean]]
            axes.errorbar(
                places[number],
                returns.mean,
                yerr=error if returns.bounded else None,
                color=style.scheme_colour(row.scheme),
                marker="o" if kind is None else style.FAMILIES[kind].marker,
                **look,
            )
        if kind is not None:
            # Every line starts at fp32.
            lines.setdefault((kind, style.form(row.scheme), row.delay), [0]).append(number)
    for (kind, *_), numbers in lines.items():
        numbers.sort(key=lambda number: places[number])
        x, dashes = [places[number] for number in numbers], style.FAMILIES[kind].line
        means = [math.nan if (r := rows[number].returns) is None else r.mean for number in numbers]
        axes.plot(x, means, color=GREY, ls=dashes, lw=1.2, zorder=2)
        trainings = [cell.trainings_of(number) for number in numbers]
        training_means = [[row.returns.mean for row in one if row.returns] for one in trainings]
        if len(set(map(len, training_means))) == 1 and len(training_means[0]) > 1:
            axes.plot(x, np.array(training_means), color="#c9ccd1", ls=dashes, lw=0.9, zorder=1)
    text_style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "rotation": 90}
    text_style |= {"ha": "center", "color": GREY, "bbox": {"fc": "white", "ec": "none", "pad": 1}}
    for missing_places in missing.values():
        axes.text(float(np.mean(missing_places)), 0.5, "missing", **text_style)
    if cell.baseline is not None:
        axes.axhline(cell.baseline.mean, color=GREY, ls="--", lw=1.2, zorder=1)
    if not np.isfinite(axes.dataLim.height):  # Nothing is drawn but words.
        axes.set_yticks([])
    axes.set_xticks(range(len(widths)), [str(bits) for bits in widths])
    axes.set_xlim(-0.6, len(widths) - 0.4)
    axes.grid(axis="x", visible=False)


def _dodge(row: Row, rows: Sequence[Row]) -> float:
    """Return the horizontal offset that separates schemes of the same width."""
    peers = [peer for peer in rows if peer.weight_bits == row.weight_bits]
    native = [peer for peer in peers if peer.native]
    # Simulated schemes are in the middle, so that their lines stay straight.
    half = len(native) // 2
    order = [*native[:half], *(peer for peer in peers if not peer.native), *native[half:]]
    place = next(i for i, peer in enumerate(order) if peer is row)
    return min(0.24, 0.8 / len(order)) * (place - (len(order) - 1) / 2)


@styled
def performance_profile(kept_percent: Mapping[str, Floats]) -> Figure:
    """Draw the share of trainings against the return they keep, in percent, a line for each scheme.

    The profile is that of Agarwal et al. (arXiv 2108.13264), over the trainings of all cells.
    """
    labels = ("", "normalised return: 0 % a random policy, 100 % fp32", "trainings with as much")
    figure, (axes,) = grid(1, 1, 3.6, labels)
    handles: list[Line2D] = []
    for name, percentages in kept_percent.items():
        kind = style.family(Scheme.parse(name))
        x = [_RANGE[0], *np.sort(np.clip(percentages, *_RANGE)), _RANGE[1]]
        y = [100, *(100 * (1 - np.arange(len(percentages)) / len(percentages))), 0]
        line = "-" if kind is None else style.FAMILIES[kind].line
        handles += axes.step(x, y, color=style.scheme_colour(name), ls=line, label=name)
    axes.set_xlim(_RANGE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(symbol=" %"))
    legend_below(figure, handles)
    return figure


@styled
def paired_returns(pairs: Mapping[str, tuple[Floats, Floats]], title: str = "") -> Figure:
    """Draw each episode under fp32 and under a scheme, one panel for each scheme.

    Pairs are the returns [n] of fp32 and of the scheme on the same seeds, by a label that begins
    with the scheme's name. Episodes are sorted by both returns.
    """
    columns = math.ceil(len(pairs) / math.ceil(len(pairs) / 5))
    labels = (title, "episodes, sorted", "return per episode")
    figure, panels = grid(len(pairs), columns, 2.2, labels, sharex=True, sharey=True)
    for axes, (name, (reference, other)) in zip(panels, pairs.items(), strict=True):
        order = np.lexsort((other, reference))
        ring_y, dot_y = reference[order], other[order]
        episodes, colour = np.arange(1, len(order) + 1), style.scheme_colour(name.partition(" ")[0])
        # Dots of many episodes must be smaller to stay apart.
        size, width = float(np.clip(900 / len(order), 2.0, 14.0)), min(0.8, 50 / len(order))
        # Snapped to pixels, some neighbouring lines would merge.
        axes.vlines(episodes, ring_y, dot_y, color=colour, lw=width, alpha=0.6, snap=False)
        axes.scatter(episodes, ring_y, s=2 * size, facecolor="none", edgecolor=GREY, linewidth=0.6)
        axes.scatter(episodes, dot_y, s=size, color=colour, linewidth=0)
        gains = differences(other, reference)
        worse, better = int((gains < 0).sum()), int((gains > 0).sum())
        counts = f"↓ {worse}    = {len(order) - worse - better}    ↑ {better}"
        axes.set_title(name, color=colour, pad=16)
        axes.text(0.5, 1.02, counts, transform=axes.transAxes, ha="center", fontsize="small")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.grid(axis="x", visible=False)
    ring = Line2D([], [], ls="", marker="o", ms=5, mfc="none", mec=GREY, label=REFERENCE)
    dot = Line2D([], [], color=GREY, marker="o", ms=4, label="scheme of the panel, same seed")
    signs = Line2D([], [], ls="", label="episodes: ↓ worse   = equal   ↑ better")
    legend_below(figure, [ring, dot, signs])
    return figure
