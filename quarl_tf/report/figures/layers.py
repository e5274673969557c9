"""Draw the layers of a policy: weights with the grids of few bits, and errors of int8."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from quarl_tf.quantization.grid import own_grid
from quarl_tf.report.figures.style import GREY, grid, legend_below, scheme_colour, styled
from quarl_tf.spec import Scheme

#: Few enough bits to tell the lines of a grid apart.
HISTOGRAM_SCHEMES = ("ptq_w4", "ptq_w2")

#: Columns of `quarl blame` with their factors, by x label.
_MEASURES = {
    "share of the error, %": ("share", 100),
    "at the grid's ends, %": ("saturated", 100),
    "codes used": ("codes", 1),
}


@styled
def weight_histograms(weights: Mapping[str, npt.NDArray[np.float32]], title: str = "") -> Figure:
    """Draw the weights of each layer, of rank 2 or more, with their grids of few bits."""
    columns = len(HISTOGRAM_SCHEMES)
    labels = (title, "weight", "number of weights (log scale)")
    figure, panels = grid(columns * len(weights), columns, 2.0, labels, sharey="row")
    for row, (name, values) in enumerate(weights.items()):
        row_panels = panels[columns * row :][:columns]
        for axes, scheme in zip(row_panels, HISTOGRAM_SCHEMES, strict=True):
            sns.histplot(
                values.ravel(), bins=80, ax=axes, color=GREY, element="step", linewidth=0.6
            )
            for value in _grid_values(values, scheme):
                axes.axvline(value, color=scheme_colour(scheme), lw=0.9)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))  # Not powers of ten.
            axes.xaxis.set_major_locator(MaxNLocator(5))  # Small weights have long labels.
            axes.set_ylabel("")
            axes.grid(visible=False)
        # Of the paths of all fused operations, the end of the first names the layer.
        path, shape = name.partition(";")[0], " by ".join(map(str, values.shape))
        layer = path if len(path) <= 34 else f"…{path[-33:]}"
        row_panels[0].set_title(f"{layer} ({shape})", loc="left", fontsize="small")
    handles = [
        Line2D([], [], color=scheme_colour(name), label=f"the values of {name}")
        for name in HISTOGRAM_SCHEMES
    ]
    legend_below(figure, handles)
    return figure


def _grid_values(values: npt.NDArray[np.float32], scheme: str) -> npt.NDArray[np.float64]:
    """Return the grid of a layer; for a convolution that of the widest channel, its first axis."""
    if values.ndim > 2:
        channels = values.reshape(len(values), -1)
        values = channels[np.argmax(np.ptp(channels, axis=1))]
    form: Any = Scheme.parse(scheme).recipe.default.weights
    return own_grid(values.astype(np.float64), form, None).values()


@styled
def blamed_layers(layers: pd.DataFrame, title: str = "") -> Figure:
    """Draw a table of `quarl blame`: a panel for each measure, a row for each layer."""
    figure, panels = grid(4, 4, 0.35 * len(layers) + 0.6, (title, "", "layer"), sharey=True)
    *measure_panels, gain_panel = panels
    colour = scheme_colour("int8")
    for axes, (label, (column, factor)) in zip(measure_panels, _MEASURES.items(), strict=True):
        bars = axes.barh(layers["layer"], factor * layers[column], color=colour)
        fmt = "{:,.0f}" if column == "codes" else "{:.3g}"
        axes.bar_label(bars, fmt=fmt, padding=2, fontsize="small")
        axes.margins(x=0.2)  # Room for the numbers.
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel(label)
        if column == "codes" and layers["codes"].max() > 256:  # Of a head in two stages.
            axes.set_xscale("log")
            axes.set_xlim(1, 30 * layers["codes"].max())
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    # Limits are infinite for too few episodes.
    gain = layers[["gain", "gain_low", "gain_high"]].replace([-np.inf, np.inf], np.nan)
    gain_panel.axvline(0, color=GREY, linewidth=0.8)
    gain_panel.hlines(layers["layer"], gain["gain_low"], gain["gain_high"], color=colour)
    gain_panel.plot(gain["gain"], layers["layer"], "o", color=colour)
    gain_panel.set_xlabel("return gained in float")
    for axes in panels:
        axes.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    return figure
