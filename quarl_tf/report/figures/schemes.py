"""Draw schemes over all cells: what they keep of the return, and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from quarl_tf.report.figures.style import (
    FAMILIES,
    Floats,
    family,
    grid,
    legend_below,
    scheme_colour,
    styled,
)
from quarl_tf.spec import Scheme

# Percent of fp32's return; what lies beyond is drawn at the edge.
_RANGE = (-20.0, 120.0)


@styled
def performance_profile(kept: Mapping[str, Floats]) -> Figure:
    """Draw the share of trainings that keep so much of the return, in percent, one line a scheme.

    The profile is that of Agarwal et al. (arXiv 2108.13264), over trainings and cells alike.
    """
    labels = ("", "normalised return: 0 % a random policy, 100 % fp32", "trainings with as much")
    figure, (axes,) = grid(1, 1, 3.6, labels)
    for name, shares in kept.items():
        kind = family(Scheme.parse(name))
        x = np.sort(np.clip(shares, *_RANGE))
        y = 100 * (1 - np.arange(len(x)) / len(x))
        line = "-" if kind is None else FAMILIES[kind].line
        axes.step([_RANGE[0], *x, _RANGE[1]], [100, *y, 0], color=scheme_colour(name), ls=line)
    axes.set_xlim(_RANGE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter())
    legend_below(figure, [Line2D([], [], color=scheme_colour(name), label=name) for name in kept])
    return figure
