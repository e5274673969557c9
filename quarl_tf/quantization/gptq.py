"""Round a kernel so that its layer's outputs change least on recorded inputs.

GPTQ (Frantar et al., arXiv 2210.17323): the weights of one input after the other are rounded, and
the weights that are not yet rounded compensate for the error of the outputs.
"""

import numpy as np

from quarl_tf.quantization.grid import Array, Grid, grid_between, snap
from quarl_tf.spec import TensorFormat

#: Damping of the inputs' second moments, as a share of their mean, to make them invertible.
_DAMPING = 0.01
_FIT_DAMPING = 0.02  #: The same in `fitted`, times inputs / observations.
_BLOCK = 2048  #: Inputs that compensate for each other; their moments are a matrix of this size.
_BATCH = 128  #: Inputs whose errors are passed on to all later weights at once.
_PARTS = np.linspace(0.4, 1.0, 25)  #: Candidate ranges of a channel's grid, as shares of its range.


def gptq(kernel: Array, inputs: Array, form: TensorFormat) -> tuple[Array, Grid]:
    """Return a kernel [outputs, inputs] rounded to a grid for each output, and the grids.

    The error of the outputs is least on `inputs` [n, inputs] of the layer.
    """
    weights = kernel.astype(np.float64)
    importance = np.square(inputs, dtype=np.float64).mean(axis=0)
    grid = best_grid(weights, importance, form)
    damping = max(_DAMPING * importance.mean(), 1e-12)
    rounded = np.empty_like(kernel)
    for start in range(0, len(importance), _BLOCK):
        block = slice(start, start + _BLOCK)
        rounded[:, block] = _round_block(weights[:, block], inputs[:, block], damping, grid, form)
    return rounded, grid


def fitted(kernel: Array, inputs: Array, float_inputs: Array) -> tuple[Array, Array]:
    """Fit a kernel [outputs, inputs] to the inputs of a layer behind rounded layers.

    With these `inputs`, its outputs are nearest to those of the original kernel with the
    `float_inputs` when nothing is rounded, both [n, inputs]. Least squares in the change of the
    kernel, which damping keeps small. Returns the kernel and what to add to the bias [outputs].
    """
    weights, mean = kernel.astype(np.float64), inputs.mean(axis=0, dtype=np.float64)
    float_mean, deviations = float_inputs.mean(axis=0, dtype=np.float64), inputs - mean
    errors = (float_inputs - float_mean - deviations) @ weights.T
    # The same solution by the smaller system: of the inputs, or of the observations.
    count, size = inputs.shape
    products = deviations @ deviations.T if size > count else deviations.T @ deviations
    # The fewer observations for the weights, the stronger the damping.
    damping = _FIT_DAMPING * size * max(np.trace(products) / size, 1e-12) / count
    products += np.eye(len(products)) * damping
    if size > count:
        change = deviations.T @ np.linalg.solve(products, errors)
    else:
        change = np.linalg.solve(products, deviations.T @ errors)
    fitted_weights = weights + change.T
    shift = float_mean @ weights.T - mean @ fitted_weights.T
    return fitted_weights.astype(np.float32), shift.astype(np.float32)


def _round_block(
    weights: Array, inputs: Array, damping: float, grid: Grid, form: TensorFormat
) -> Array:
    moments = inputs.T.astype(np.float64) @ inputs / len(inputs)
    moments += np.eye(len(moments)) * damping
    order = np.argsort(-np.diag(moments))
    # Row i of the inverse's factor is for the inputs from i on: those before are rounded.
    factor = np.linalg.cholesky(np.linalg.inv(moments[np.ix_(order, order)])).T
    # A row for each input, so that one input's weights lie side by side.
    corrected = np.ascontiguousarray(weights[:, order].T)
    rounded, row_grid = np.empty_like(corrected), Grid(*(ends[:, 0] for ends in grid))
    for start in range(0, len(order), _BATCH):
        end = min(start + _BATCH, len(order))
        errors = np.empty((end - start, len(weights)))
        for i in range(start, end):
            rounded[i] = snap(corrected[i], row_grid, form)
            errors[i - start] = (corrected[i] - rounded[i]) / factor[i, i]
            corrected[i:end] -= factor[i, i:end, None] * errors[i - start]
        corrected[end:] -= factor[start:end, end:].T @ errors
    return rounded[np.argsort(order)].T


def best_grid(weights: Array, importance: Array, form: TensorFormat) -> Grid:
    """Return the grid with the least squared error for each output of weights [outputs, inputs].

    `importance` [inputs] is the mean square of each input.
    """
    low, high = weights.min(axis=1, keepdims=True), weights.max(axis=1, keepdims=True)
    grids = [grid_between(part * low, part * high, form) for part in _PARTS]
    errors = [((snap(weights, grid, form) - weights) ** 2 @ importance) for grid in grids]
    best, rows = np.argmin(errors, axis=0), np.arange(len(weights))
    return Grid(*(np.stack(ends)[best, rows] for ends in zip(*grids, strict=True)))
