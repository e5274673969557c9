"""Round a kernel so that what its layer computes changes least, on inputs that were seen.

GPTQ (Frantar et al., arXiv 2210.17323): inputs are rounded one after the other, and what each
rounding does to the outputs is made up for by the weights that are still to be rounded.
"""

from __future__ import annotations

import numpy as np

from quarl_tf.quantization.grid import Array, Grid, grid_between, snap
from quarl_tf.spec import TensorFormat

#: Added to the inputs' second moments, as a share of their mean, so that they can be inverted.
_DAMPING = 0.01

#: The same where a kernel is fitted, times inputs over observations.
_FIT_DAMPING = 0.02

#: Inputs that make up for each other's rounding. Their moments are a matrix of that size squared.
_BLOCK = 2048

#: Inputs after which the weights behind them are told of their errors, all at once.
_LAZY = 512

#: Parts of a channel's range that its grid may span.
_PARTS = np.linspace(0.4, 1.0, 25)


def gptq(kernel: Array, inputs: Array, form: TensorFormat) -> tuple[Array, Grid]:
    """Return a kernel on a grid for each output, and the grids.

    Args:
        kernel: [outputs, inputs] float32 weights.
        inputs: [n, inputs] inputs that the layer meets.
        form: Bits and kind of the grid.
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


def fitted(kernel: Array, seen: Array, given: Array) -> tuple[Array, Array]:
    """Return the kernel that makes of the inputs that a layer meets most nearly what it should.

    Least squares, by the change from the kernel as it is, which damping keeps small.

    Args:
        kernel: [outputs, inputs] float32 weights.
        seen: [n, inputs] inputs that the layer meets, of rounded layers before it.
        given: [n, inputs] inputs that it met when nothing was rounded.

    Returns:
        The kernel, and what the bias takes: [outputs].
    """
    weights, centre = kernel.astype(np.float64), seen.mean(axis=0, dtype=np.float64)
    moved = seen - centre
    missing = (given - given.mean(axis=0, dtype=np.float64) - moved) @ weights.T
    moments = moved.T @ moved
    # Few observations say little of many weights.
    damping = _FIT_DAMPING * moments.shape[0] * max(np.diag(moments).mean(), 1e-12) / len(seen)
    change = np.linalg.solve(moments + np.eye(len(moments)) * damping, moved.T @ missing).T
    shift = given.mean(axis=0, dtype=np.float64) @ weights.T - centre @ (weights + change).T
    return (weights + change).astype(np.float32), shift.astype(np.float32)


def _round_block(
    weights: Array, inputs: Array, damping: float, grid: Grid, form: TensorFormat
) -> Array:
    moments = inputs.T.astype(np.float64) @ inputs / len(inputs)
    moments += np.eye(len(moments)) * damping
    order = np.argsort(-np.diag(moments))
    # Of the inverse, what is left of it once the inputs in front are rounded.
    factor = np.linalg.cholesky(np.linalg.inv(moments[np.ix_(order, order)])).T
    left, rounded = weights[:, order], np.empty_like(weights)
    for start in range(0, len(order), _LAZY):
        end = min(start + _LAZY, len(order))
        errors = np.empty((len(weights), end - start))
        for i in range(start, end):
            rounded[:, i] = snap(left[:, i : i + 1], grid, form)[:, 0]
            errors[:, i - start] = (left[:, i] - rounded[:, i]) / factor[i, i]
            left[:, i:end] -= errors[:, i - start, None] * factor[i, i:end]
        left[:, end:] -= errors @ factor[start:end, end:]
    return rounded[:, np.argsort(order)]


def best_grid(weights: Array, importance: Array, form: TensorFormat) -> Grid:
    """Return the grid of each output whose squared error, by the inputs' size, is least.

    Args:
        weights: [outputs, inputs].
        importance: [inputs] mean square of each input.
        form: Bits and kind of the grid.
    """
    low, high = weights.min(axis=1, keepdims=True), weights.max(axis=1, keepdims=True)
    grids = [grid_between(part * low, part * high, form) for part in _PARTS]
    errors = [((snap(weights, grid, form) - weights) ** 2 @ importance) for grid in grids]
    best, rows = np.argmin(errors, axis=0), np.arange(len(weights))
    return Grid(*(np.stack(ends)[best, rows] for ends in zip(*grids, strict=True)))
