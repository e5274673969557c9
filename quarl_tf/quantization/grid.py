"""Map float tensors to integer codes and back: n-bit affine grids and IEEE half.

An affine grid has a step `scale` and a code `zero_point` that stands for 0; a code q means
scale * (q - zero_point). Its range is [min(W, 0), max(W, 0)], so that zero lies on the grid.
With N = 2**bits and range = |min(W, 0)| + |max(W, 0)|, the two modes are:

* "paper": the published formula (QuaRL, Krishnan et al., arXiv 1910.01055, section 3), unclipped:
  scale = range / N, zero_point = floor(-min(W, 0) / scale), code = floor(W / scale) + zero_point.
  It has N + 1 codes, one too many for n bits: if -min(W, 0) / scale is whole, W = max is code N;
  if not, W = min is code -1.
* "code": the same scale and zero point, but W / scale is rounded half up, and codes and zero point
  are clipped to 0 ... N - 1, a true n-bit code. N codes span N - 1 steps, so the ends of the range
  move inwards, by one step together. The error is at most half a step between the end codes and at
  most one step beyond them. A zero point of N (no positive weight) must be clipped as well, or zero
  itself would be lost.

"code" rounds because the authors' published code does (`rint`) where their formula has floor. Floor
shifts every weight down, by half a step on average: the errors of a layer's inputs all lean to the
same side and add up instead of cancelling. What that costs is measured with `ptq_paper_w4` against
`ptq_w4` in the reports.

Tensors are float32, the arithmetic is float64, and decoded tensors are float32 again. Up to 16
bits, quantising a decoded tensor again on its grid changes nothing in "code" mode. In "paper" mode
it may cost a step, where float32 rounds a decoded value to just below its grid line.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Mode = Literal["paper", "code"]

_MIN_BITS, _MAX_BITS = 2, 32
# "paper" has no clip; past this magnitude float64 no longer holds every integer.
_UNCLIPPED = 2**53
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class AffineGrid:
    """An affine grid as `affine_grid` builds it.

    Attributes:
        scale: step between neighbouring codes, > 0, in the unit of the tensor; shape () for a whole
            tensor, else the tensor's shape with 1 everywhere but at the channel axis.
        zero_point: code of 0, same shape as `scale`.
        bits: width of a code, 2 ... 32.
        mode: rule by which values become codes, see the module docstring.
    """

    scale: npt.NDArray[np.float64]
    zero_point: npt.NDArray[np.int64]
    bits: int
    mode: Mode

    @property
    def code_limits(self) -> tuple[int, int]:
        """Smallest and largest code; beyond any tensor's reach in "paper" mode."""
        return (-_UNCLIPPED, _UNCLIPPED) if self.mode == "paper" else (0, 2**self.bits - 1)


def affine_grid(
    values: npt.ArrayLike, bits: int, *, axis: int | None = None, mode: Mode = "code"
) -> AffineGrid:
    """Build the grid that spans a tensor and zero.

    A monitored range is a tensor of two: `affine_grid([v_min, v_max], bits)`.

    Args:
        values: finite float32 tensor, not empty.
        bits: width of a code, 2 ... 32.
        axis: channel axis for one grid per slice (convolutions), None for one grid.
        mode: "paper" or "code", see the module docstring.

    Raises:
        ValueError: if an argument is outside the above.
    """
    array = _float32_tensor(values)
    if bits not in range(_MIN_BITS, _MAX_BITS + 1):
        raise ValueError(f"bits must be an integer from 2 to 32. Received: bits={bits!r}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {get_args(Mode)}. Received: mode={mode!r}")
    if axis is not None and not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis must exist in a tensor of rank {array.ndim}. Received: axis={axis}")

    others = None if axis is None else tuple(np.delete(np.arange(array.ndim), axis).tolist())
    lowest = np.minimum(array.min(axis=others, keepdims=axis is not None), 0.0)
    highest = np.maximum(array.max(axis=others, keepdims=axis is not None), 0.0)
    levels = 2 ** int(bits)
    scale = np.asarray((highest - lowest) / levels)
    # All weights zero: any step will do, but 0 would divide by zero.
    scale = np.where(scale > 0.0, scale, 1.0)
    zero_point = np.floor(-lowest / scale)
    if mode != "paper":
        zero_point = np.minimum(zero_point, levels - 1)
    return AffineGrid(scale, np.asarray(zero_point, dtype=np.int64), int(bits), mode)


def quantize(values: npt.ArrayLike, grid: AffineGrid) -> npt.NDArray[np.int64]:
    """Return the codes of a tensor, same shape; values beyond the grid take its end codes.

    Raises:
        ValueError: if `values` is empty, not finite, or does not fit the grid's channels.
    """
    array = _float32_tensor(values)
    _check_channels(array.shape, grid)
    index = np.floor(array / grid.scale + (0.0 if grid.mode == "paper" else 0.5))
    # Clip before the cast: a float beyond int64 has no defined integer.
    return np.clip(index + grid.zero_point, *grid.code_limits).astype(np.int64)


def dequantize(codes: npt.ArrayLike, grid: AffineGrid) -> npt.NDArray[np.float32]:
    """Return scale * (codes - zero_point) as float32, same shape.

    Raises:
        ValueError: if `codes` does not fit the grid's channels.
    """
    array = np.asarray(codes, dtype=np.float64)
    _check_channels(array.shape, grid)
    values = grid.scale * (array - grid.zero_point)
    # A "paper" grid reaches past its range, which may end at the largest float32.
    return np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)


def fake_quantize(
    values: npt.ArrayLike, bits: int, axis: int | None = None, mode: Mode = "code"
) -> npt.NDArray[np.float32]:
    """Quantise a tensor on its own grid and decode it again; arguments as in `affine_grid`."""
    grid = affine_grid(values, bits, axis=axis, mode=mode)
    return dequantize(quantize(values, grid), grid)


def grid_within(
    low: npt.ArrayLike, high: npt.ArrayLike, steps: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Move a range that contains 0 by less than a step, so that 0 is one of its steps + 1 codes.

    Returns:
        The new ends, as TensorFlow's `fake_quant_with_min_max_vars` nudges them.
    """
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    step = np.maximum((high - low) / np.float32(steps), np.finfo(np.float32).tiny)
    zero = np.clip(np.floor(-low / step + 0.5), 0, steps).astype(np.float32)
    return -zero * step, (np.float32(steps) - zero) * step


def snap(
    values: npt.NDArray[Any],
    low: npt.ArrayLike,
    high: npt.ArrayLike,
    steps: int,
    *,
    floored: bool = False,
) -> npt.NDArray[np.float32]:
    """Return the nearest values on the grid of steps + 1 codes from `low` to `high`.

    In float32 and in the order of `fake_quant_with_min_max_vars`, so that it gives the same bits;
    but halfway between two codes it may take the other one.

    Args:
        values: float32 tensor.
        low: Lower end, a number or one for each index of the last axis.
        high: Upper end, likewise.
        steps: Steps between the two.
        floored: By the published formula instead: the next multiple of the step below.
    """
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    step = (high - low) / np.float32(steps)
    clipped = np.minimum(np.maximum(values, low), high)
    if floored:
        multiple: npt.NDArray[np.float32] = np.floor(clipped / step) * step
        return multiple
    inverse = np.float32(1.0) / step
    half = np.float32(0.5)
    # Codes counted from that of 0, so that 0 stays exactly 0.
    zero = np.floor(-low * inverse + half)
    on_grid: npt.NDArray[np.float32] = np.floor((clipped - low) * inverse - zero + half) * step
    return on_grid


def round_to_half(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Round a float32 tensor to the nearest IEEE 754 half, ties to even, and return it as float32.

    Raises:
        ValueError: if `values` is empty or not finite, or a value would overflow to infinity.
    """
    array = _float32_tensor(values)
    with np.errstate(over="ignore"):  # Reported below, with the value.
        halves = array.astype(np.float16)
    if np.isinf(halves).any():
        largest = float(array.flat[np.abs(array).argmax()])
        raise ValueError(f"values must round to at most 65504. Received: largest value={largest}")
    return halves.astype(np.float32)


def _float32_tensor(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Check a tensor and return its float32 values, held in float64 for the arithmetic."""
    with np.errstate(over="ignore"):  # A float64 beyond float32 becomes inf, refused below.
        array = np.asarray(values, dtype=np.float32)
    if array.size == 0:
        raise ValueError(f"values must not be empty. Received: shape={array.shape}")
    bad = array[~np.isfinite(array)]
    if bad.size:
        raise ValueError(f"values must be finite in float32. Received: value={bad[0]}")
    return array.astype(np.float64)


def _check_channels(shape: tuple[int, ...], grid: AffineGrid) -> None:
    per_tensor = grid.scale.ndim == 0
    if not per_tensor and not (
        len(shape) == grid.scale.ndim
        and all(n in (1, m) for n, m in zip(grid.scale.shape, shape, strict=True))
    ):
        raise ValueError(
            f"tensor must fit a grid of shape {grid.scale.shape}. Received: shape={shape}"
        )
