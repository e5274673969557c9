"""What all figures have in common: colours, sizes, legends and the picture itself."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from quarl_tf.spec import BASELINE, PTQ_BITS, Scheme

Floats = npt.NDArray[np.floating[Any]]

# Inches; at 150 dots per inch a figure is 1350 pixels wide, sharp at twice a report's column.
WIDTH = 9.0
_DPI = 150
# As many as stand above one of two panels.
TITLE_LETTERS = 40
GREY = "#8a8f98"
LIGHT_GREY = "#c9ccd1"
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
class Sweep:
    """The look of the simulated schemes that are made in the same way."""

    label: str
    palette: str
    marker: str
    line: Literal["-", ":", "-."]


SWEEPS = {
    "nearest": Sweep("ptq_w… (simulated)", "flare_r", "D", "-"),
    "floor": Sweep("ptq_paper_w… (simulated)", "blend:#4f4200,#c9ae35", "^", ":"),
    "aware": Sweep("qat_w… (simulated)", "blend:#3a0f5e,#b79be0", "s", "-."),
}


def sweep_of(scheme: Scheme) -> Sweep | None:
    """Return the look of a simulated scheme; None for a native one."""
    kind = "aware" if scheme.aware else scheme.rounding
    return None if scheme.native or kind is None else SWEEPS[kind]


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


def scheme_colour(name: str) -> str:
    """Return a scheme's colour as `#rrggbb`, the same in every figure; `BASELINE` is grey.

    Raises:
        UsageError: No scheme has that name.
    """
    if name == BASELINE:
        return GREY
    scheme = Scheme.parse(name)
    sweep = sweep_of(scheme)
    if sweep is None:
        return _NATIVE_COLOURS[name]
    # The palette spans 2 ... 8 bits, what is exported by default; wider grids share the lightest.
    steps = 7
    palette = sns.color_palette(sweep.palette, steps).as_hex()
    return str(palette[min(scheme.weight_bits - PTQ_BITS.start, steps - 1)])


def style() -> Any:
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


def legend_below(figure: Figure, handles: Sequence[Line2D], columns: int = 3) -> None:
    """Put a legend under the axes, where it hides no data."""
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=min(len(handles), columns),
        frameon=False,
    )


def label_lowest(panels: Sequence[Axes], used: int, columns: int, label: str) -> None:
    """Remove panels without data; label the lowest of each column, maybe not in the last row."""
    for axes in panels[used:]:
        axes.remove()
    for axes in panels[:used][-columns:]:
        axes.set_xlabel(label)
        axes.tick_params(labelbottom=True)
