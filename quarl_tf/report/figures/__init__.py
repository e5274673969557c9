"""Draw the figures of a report: pure functions from numbers to a figure.

Figures are `Figure` objects of their own: nothing is registered with pyplot, no window opens, and
a scheme has the same colour in every one of them.
"""

from quarl_tf.report.figures.curves import (
    MOST_LINES,
    Curve,
    learning_curves,
    mean_curves,
    mean_line,
)
from quarl_tf.report.figures.returns import Panel, Point, paired_returns, return_against_bits
from quarl_tf.report.figures.style import SWEEPS, Floats, family, png, scheme_colour
from quarl_tf.report.figures.weights import weight_histograms

__all__ = [
    "MOST_LINES",
    "SWEEPS",
    "Curve",
    "Floats",
    "Panel",
    "Point",
    "family",
    "learning_curves",
    "mean_curves",
    "mean_line",
    "paired_returns",
    "png",
    "return_against_bits",
    "scheme_colour",
    "weight_histograms",
]
