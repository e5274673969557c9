"""Draw what int8 does to each layer of a policy."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quarl_tf.report.figures.style import grid, scheme_colour, styled

#: Columns of `quarl blame` by what is written below their panel, with their factors.
_SHOWN = {
    "share of the head's error, %": ("share", 100),
    "outputs at the ends of the grid, %": ("saturated", 100),
    "codes used, of 256": ("codes", 1),
}


@styled
def blamed_layers(layers: pd.DataFrame, title: str = "") -> Figure:
    """Draw a table of `quarl blame`: one panel a measure, one bar a layer, the first one on top."""
    figure, panels = grid(3, 3, 0.35 * len(layers) + 0.6, (title, "", "layer"), sharey=True)
    for axes, (label, (column, factor)) in zip(panels, _SHOWN.items(), strict=True):
        bars = axes.barh(layers["layer"], factor * layers[column], color=scheme_colour("int8"))
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize="small")
        axes.margins(x=0.2)  # Room for the numbers.
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    return figure
