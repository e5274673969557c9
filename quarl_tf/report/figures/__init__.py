"""Draw the figures of a report: pure functions from numbers to a figure and its caption.

Figures are `Figure` objects of their own: nothing is registered with pyplot, no window opens, and
a scheme has the same colour in every one of them.
"""

from quarl_tf.report.figures.curves import (
    MOST_PRECISIONS,
    Curve,
    PrecisionCurves,
    action_variance,
    learning_curve,
    learning_curves,
    mean_line,
    reward_trend,
    smoothed,
)
from quarl_tf.report.figures.precisions import (
    PrecisionPanel,
    PrecisionPoint,
    reward_against_precision,
    reward_by_setting,
)
from quarl_tf.report.figures.schemes import (
    BitsPoint,
    paired_returns,
    reward_against_bits,
    weight_histograms,
)
from quarl_tf.report.figures.style import Floats, Plot, scheme_colour

__all__ = [
    "MOST_PRECISIONS",
    "BitsPoint",
    "Curve",
    "Floats",
    "Plot",
    "PrecisionCurves",
    "PrecisionPanel",
    "PrecisionPoint",
    "action_variance",
    "learning_curve",
    "learning_curves",
    "mean_line",
    "paired_returns",
    "reward_against_bits",
    "reward_against_precision",
    "reward_by_setting",
    "reward_trend",
    "scheme_colour",
    "smoothed",
    "weight_histograms",
]
