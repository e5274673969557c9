"""Colours, sizes, legends and the PNG file of all figures."""

import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from quarl_tf.spec import BASELINE, Scheme
from quarl_tf.spec.recipe import PTQ_BITS

Floats = npt.NDArray[np.floating[Any]]

_WIDTH, _DPI = 9.0, 150  #: Inches, and dots per inch.
_TITLE_LETTERS = 80  #: Characters of the titles in a row.
GREY = "#8a8f98"
# Native schemes are cool, simulated ones warm, and darker the fewer their bits.
_NATIVE_COLOURS = {
    "fp32": "#22313f",
    "fp16": "#0173b2",
    "dynamic_int8": "#2fa7c7",
    "int8": "#029e73",
    "int8_head32": "#00b3c4",
    "int8_tensor": "#8bc7a3",
    "int8_stock": "#4455aa",
    "qat_int8": "#6aa51e",
    "qat_int4": "#3f7f3a",
}
_OTHER_NATIVE = "#5b7f95"

_STYLE: dict[Any, Any] = {
    **sns.axes_style("ticks", {"axes.grid": True}),
    **sns.plotting_context("paper", font_scale=1.1),
    # Ships with matplotlib, so that all machines draw the same bytes.
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": "#555b65",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titleweight": "bold",
    "figure.titleweight": "bold",
    "figure.titlesize": "medium",
    "axes.titlesize": "medium",
    "grid.color": "#e8eaed",
    "grid.linewidth": 0.8,
}
#: Decorates functions that draw.
styled = mpl.rc_context(_STYLE)


class Look(NamedTuple):
    """The style of a family of simulated schemes."""

    palette: str
    marker: str
    line: str


#: By the beginning of their schemes' names.
FAMILIES = {
    "ptq_w": Look("flare_r", "D", "-"),
    "ptq_opt_w": Look("blend:#6b0f3a,#e08bb0", "v", "--"),
    "ptq_paper_w": Look("blend:#4f4200,#c9ae35", "^", ":"),
    "qat_w": Look("blend:#3a0f5e,#b79be0", "s", "-."),
}


def family(scheme: Scheme) -> str | None:
    """Return the key in `FAMILIES` of a simulated scheme; None for a native one."""
    return None if scheme.native else re.split(r"\d", scheme.name, maxsplit=1)[0]


def form(name: str) -> str:
    """Return a scheme's name with N for its widths: ptq_opt_wN is another than ptq_opt_wNaN."""
    return re.sub(r"(?<=[wa])\d+", "N", name)


def scheme_colour(name: str) -> str:
    """Return a scheme's colour as `#rrggbb`, the same in every figure; `BASELINE` is grey."""
    if name == BASELINE:
        return GREY
    scheme = Scheme.parse(name)
    if (kind := family(scheme)) is None:
        return _NATIVE_COLOURS.get(name, _OTHER_NATIVE)
    # The palette spans 2 ... 8 bits; more bits share the lightest colour.
    palette = sns.color_palette(FAMILIES[kind].palette, 7).as_hex()
    return str(palette[min(scheme.weight_bits - PTQ_BITS.start, 6)])


def png(figure: Figure) -> bytes:
    """Render a figure; the same figure gives the same bytes."""
    rgb_file, palette_file = io.BytesIO(), io.BytesIO()
    figure.savefig(rgb_file, format="png", dpi=_DPI)
    # A palette makes charts 2 to 3 times smaller; the metadata, with versions, is dropped.
    image = Image.open(rgb_file).convert("RGB").quantize(256)
    image.save(palette_file, format="png", optimize=True)
    return palette_file.getvalue()


def grid(
    count: int, columns: int, height: float, labels: tuple[str, str, str], **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, `height` inches a row.

    `labels` are the title, the x label and the y label; `options` are those of `Figure.subplots`.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(_WIDTH, 1.2 + height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count][-columns:]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(labels[1])
    figure.suptitle(labels[0])
    figure.supylabel(labels[2], fontsize="medium")
    return figure, panels[:count]


def wrapped(title: str, columns: int) -> str:
    """Wrap the title of one of so many panels in a row."""
    width = _TITLE_LETTERS // columns
    return textwrap.fill(title, width, break_long_words=False, break_on_hyphens=False)


def legend_below(figure: Figure, handles: Sequence[Line2D], columns: int = 5) -> None:
    """Add a legend below the axes."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
