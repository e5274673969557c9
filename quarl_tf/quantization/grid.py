"""Round float tensors to n-bit grids.

A grid is all multiples of a step between two ends, 0 among them. It is computed from the tensor's
range, widened to contain 0, by its `TensorFormat`:

* The "runtime" step is range / (2**bits - 1), as in TensorFlow's fake quantisers and integer
  kernels. The range is moved by less than a step, so that 0 is one of the codes.
* The "paper" step is range / 2**bits (QuaRL, Krishnan et al., arXiv 1910.01055, section 3). Rounded
  to the nearest value, the ends move inwards by one step in total, since 2**bits codes span one
  step less.
* Rounded down ("floor"), as in the published formula, the ends stay: one code too many for n bits.
  Every weight is shifted down, by half a step on average, so that errors add up.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quarl_tf.spec.recipe import TensorFormat

Array = npt.NDArray[Any]

BYTE = TensorFormat(bits=8)  #: The format of integer activations.
#: Largest absolute input of a tanh that an int8 tanh tells apart: it reaches its last code there.
TANH_END = 3.5


class Grid(NamedTuple):
    """The multiples of a step from `low` to `high`, for a tensor or for each of its channels."""

    low: Array
    high: Array
    step: Array

    def values(self) -> Array:
        """Return all values of a tensor's grid."""
        first_code, last_code = (np.rint(end / self.step) for end in (self.low, self.high))
        return np.arange(first_code, last_code + 1) * self.step


def grid_between(low: Array, high: Array, form: TensorFormat) -> Grid:
    """Return the grid of a tensor's range, or of each channel's, in the dtype of its ends."""
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    # If all values are 0, any step will do.
    high = np.where(high > low, high, low + 1)
    if form.symmetric:
        high = np.maximum(-low, high)
        return frozen_grid(-high, high, form)
    if form.rounding == "floor":
        return frozen_grid(low, high, form)
    last_code = form.steps
    if form.step == "paper":
        step = (high - low) / (last_code + 1)
        zero = np.minimum(np.floor(-low / step), last_code)
    else:
        step = np.maximum((high - low) / last_code, np.finfo(np.float32).tiny)
        zero = np.clip(np.floor(-low / step + 0.5), 0, last_code)
    return Grid(-zero * step, (last_code - zero) * step, step)


def own_grid(array: Array, form: TensorFormat, axis: int | None) -> Grid:
    """Return the grid of a tensor's own range; with an `axis`, that of each of its slices."""
    axes = None if axis is None else tuple(np.delete(np.arange(array.ndim), axis).tolist())
    low, high = (end(array, axis=axes, keepdims=axis is not None) for end in (np.min, np.max))
    return grid_between(low, high, form)


def frozen_grid(low: Array, high: Array, form: TensorFormat) -> Grid:
    """Return the grid with given ends."""
    return Grid(low, high, (high - low) / form.steps)


def snap(values: Array, grid: Grid, form: TensorFormat, library: Any = np) -> Array:
    """Round values to a grid, with the elementary operations of NumPy or of TensorFlow.

    Only a grid that rounds down may have TensorFlow's tensors as its ends.

    The order of operations is that of TensorFlow's `fake_quant_with_min_max_vars`, and so are the
    results in float32, except halfway between two codes.
    """
    low, high, step = grid
    clipped = library.minimum(library.maximum(values, low), high)
    if form.rounding == "floor":
        codes = library.floor(clipped / step)
    else:
        inverse = 1 / step
        # Codes are counted from that of 0, so that 0 stays exactly 0.
        zero = np.floor(-low * inverse + 0.5)
        codes = library.floor((clipped - low) * inverse - zero + 0.5)
    rounded: Array = codes * step
    return rounded


def fake_quantize(
    values: npt.ArrayLike, form: TensorFormat, axis: int | None = None
) -> npt.NDArray[np.float32]:
    """Round a float32 tensor to the grid of its own range, in float64.

    With an `axis`, each of its slices has its own grid.
    """
    array = np.asarray(values, np.float64)
    rounded = snap(array, own_grid(array, form, axis), form) + 0  # Without -0.
    return rounded.astype(np.float32)
