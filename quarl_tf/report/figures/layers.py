"""Draw what int8 does to each layer of a policy."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quarl_tf.report.figures.style import GREY, grid, scheme_colour, styled

#: Columns of `quarl blame` by what is written below their panel, with their factors.
_SHOWN = {
    "share of the head's error, %": ("share", 100),
    "outputs at the ends of the grid, %": ("saturated", 100),
    "codes used, of 256": ("codes", 1),
}

_OPEN = [-np.inf, np.inf]


@styled
def blamed_layers(layers: pd.DataFrame, title: str = "") -> Figure:
    """Draw a table of `quarl blame`: one panel a measure, one row a layer, the first one on top."""
    figure, panels = grid(4, 4, 0.35 * len(layers) + 0.6, (title, "", "layer"), sharey=True)
    for axes, (label, (column, factor)) in zip(panels[:3], _SHOWN.items(), strict=True):
        bars = axes.barh(layers["layer"], factor * layers[column], color=scheme_colour("int8"))
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize="small")
        axes.margins(x=0.2)  # Room for the numbers.
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
    axes, colour = panels[3], scheme_colour("int8")
    # Tables of earlier versions have no ends; those of too few episodes have infinite ones.
    gain = layers.reindex(columns=["gain", "gain_low", "gain_high"]).replace(_OPEN, np.nan)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.hlines(layers["layer"], gain["gain_low"], gain["gain_high"], color=colour)
    axes.plot(gain["gain"], layers["layer"], "o", color=colour)
    axes.set_xlabel("return gained in float")
    axes.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    return figure
