"""Behaviour of the affine grids and the half rounding."""

from typing import get_args

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quarl_tf.quantization.grid import (
    Mode,
    affine_grid,
    dequantize,
    fake_quantize,
    grid_within,
    quantize,
    round_to_half,
    snap,
)

quick = settings(max_examples=100)

MODES = get_args(Mode)
FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST_SUBNORMAL = 2.0**-149


def tensors(**elements: object) -> st.SearchStrategy[np.ndarray]:
    """Draw float32 tensors of rank 1 to 3; every finite value unless limited."""
    limits = {"allow_nan": False, "allow_infinity": False, "width": 32} | elements
    shapes = hnp.array_shapes(min_dims=1, max_dims=3, max_side=5)
    return hnp.arrays(np.float32, shapes, elements=st.floats(**limits))


all_bits = st.integers(2, 32)
all_modes = st.sampled_from(MODES)


def float32_rounding(values: np.ndarray) -> np.ndarray:
    """Bound half a float32 ulp: 2**-24 of the value, or half the smallest subnormal."""
    return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-24, SMALLEST_SUBNORMAL / 2)


# Hand-computed grids.


@pytest.mark.parametrize(
    ("mode", "values", "zero_point", "codes", "decoded"),
    [
        # Range 4 over 2**2: steps of 1. W = max is code 4, the fifth of an alleged four.
        ("paper", [-1, -0.5, 0, 2.75, 3], 1, [0, 0, 1, 3, 4], [-1, -1, 0, 2, 3]),
        ("code", [-1, -0.5, 0, 0.4, 1.5, 3], 1, [0, 1, 1, 1, 3, 3], [-1, 0, 0, 0, 2, 2]),
        # -min / scale = 1.5 is not whole: the extra code is at the lower end.
        ("paper", [-1.5, 0, 1, 2.5], 1, [-1, 1, 2, 3], [-2, 0, 1, 2]),
        # Rounded, both ends move inwards: by half a step each, then by 3/4 and 1/4 of a step.
        ("code", [-1.5, 0, 1, 2.5], 1, [0, 1, 2, 3], [-1, 0, 1, 2]),
        ("code", [-1.75, -0.75, 0, 2.25], 1, [0, 0, 1, 3], [-1, -1, 0, 2]),
        # No positive weight: the paper's zero point is code 4 itself.
        ("paper", [-4, -1.5, 0], 4, [0, 2, 4], [-4, -2, 0]),
        ("code", [-4, -1.5, 0], 3, [0, 2, 3], [-3, -1, 0]),
        # No negative weight: the range still starts at 0.
        ("paper", [1, 2.5, 4], 0, [1, 2, 4], [1, 2, 4]),
        ("code", [1, 2.5, 4], 0, [1, 3, 3], [1, 3, 3]),
        # Symmetric: -2 ... 1, as in two's complement.
        ("code", [-2, -0.5, 0.5, 2], 2, [0, 2, 3, 3], [-2, 0, 1, 1]),
    ],
)
def test_two_bits_by_hand(
    mode: Mode,
    values: list[float],
    zero_point: int,
    codes: list[int],
    decoded: list[float],
) -> None:
    grid = affine_grid(values, 2, mode=mode)
    assert (grid.scale, grid.zero_point) == (1, zero_point)
    np.testing.assert_array_equal(quantize(values, grid), codes)
    np.testing.assert_array_equal(dequantize(codes, grid), np.float32(decoded))
    np.testing.assert_array_equal(fake_quantize(values, 2, mode=mode), np.float32(decoded))


@pytest.mark.parametrize(
    ("mode", "codes"),
    [
        ("paper", [0, 1, 2, 2, 3, 8]),
        # 0.3 and 0.9 are 0.6 and 1.8 steps: rounded up, where the paper rounds down.
        ("code", [0, 1, 2, 3, 4, 7]),
    ],
)
def test_three_bits_by_hand(mode: Mode, codes: list[int]) -> None:
    values = [-1.0, -0.5, 0.0, 0.3, 0.9, 3.0]
    grid = affine_grid(values, 3, mode=mode)
    assert (grid.scale, grid.zero_point) == (0.5, 2)
    np.testing.assert_array_equal(quantize(values, grid), codes)


@pytest.mark.parametrize("bits", [2, 5, 8, 16, 32])
def test_the_paper_gives_one_code_too_many(bits: int) -> None:
    for values, extra in (([-1.0, 1.0], 2**bits), ([0.0, 1.0], 2**bits), ([-1.0, 0.0], 2**bits)):
        codes = quantize(values, affine_grid(values, bits, mode="paper"))
        assert codes.max() == extra
        assert codes.min() == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_monitored_range_makes_a_grid_and_values_beyond_it_saturate(mode: Mode) -> None:
    grid = affine_grid([-1.0, 3.0], 2, mode=mode)
    codes = quantize([-100.0, 100.0, FLOAT32_MAX], grid)
    # The published formula has no clip; 2**53 keeps its integers exact.
    assert codes.tolist() == ([-99, 101, 2**53] if mode == "paper" else [0, 3, 3])


# Properties.


@quick
@given(tensors(), all_bits, all_modes)
def test_zero_stays_exactly_zero(values: np.ndarray, bits: int, mode: Mode) -> None:
    grid = affine_grid(values, bits, mode=mode)
    assert np.isfinite(grid.scale)
    assert grid.scale > 0
    np.testing.assert_array_equal(quantize(np.float32([0.0, -0.0]), grid), grid.zero_point)
    np.testing.assert_array_equal(dequantize(grid.zero_point, grid), 0.0)


@quick
@given(tensors(), all_bits, all_modes)
def test_the_error_is_at_most_half_a_step_but_for_floor_and_an_end_without_a_code(
    values: np.ndarray, bits: int, mode: Mode
) -> None:
    grid = affine_grid(values, bits, mode=mode)
    decoded = fake_quantize(values, bits, mode=mode).astype(np.float64)
    # 1 + 1e-6: the rounding of float64, seen from a step that is 2**-32 of the range.
    step = grid.scale * (1 + 1e-6)
    if mode == "paper":
        lowest, highest = -step, step * 1e-6
    else:
        first, last = grid.scale * (np.array([0, 2**bits - 1]) - grid.zero_point)
        lowest = np.where(values > last, -step, -step / 2)
        highest = np.where(values < first, step, step / 2)
    rounding = float32_rounding(np.maximum(np.abs(decoded), np.abs(values)))
    error = decoded - values
    assert (error >= lowest - rounding).all()
    assert (error <= highest + rounding).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("mode", "steps"), [("paper", -0.5), ("code", 0.0)])
def test_only_floor_shifts_gaussian_weights(mode: Mode, steps: float, bits: int) -> None:
    values = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    error = fake_quantize(values, bits, mode=mode).astype(np.float64) - values
    assert error.mean() / affine_grid(values, bits, mode=mode).scale == pytest.approx(
        steps, abs=0.02
    )


def test_one_whole_step_is_lost_where_an_end_has_no_code() -> None:
    np.testing.assert_array_equal(fake_quantize([-1.0, 1.0], 8), [-1, 1 - 2 / 256])
    np.testing.assert_array_equal(fake_quantize([-1.0, 0.0], 8), [-1 + 1 / 256, 0])


@quick
@given(tensors(), all_bits)
def test_code_mode_stays_inside_the_range(values: np.ndarray, bits: int) -> None:
    decoded = fake_quantize(values, bits)
    assert decoded.min() >= min(values.min(), 0)
    assert decoded.max() <= max(values.max(), 0)


@quick
@given(tensors(), all_bits)
def test_codes_fit_n_bits(values: np.ndarray, bits: int) -> None:
    grid = affine_grid(values, bits)
    for codes in (quantize(values, grid), grid.zero_point):
        assert codes.min() >= 0
        assert codes.max() < 2**bits


@quick
@given(tensors(), all_bits)
def test_the_paper_needs_codes_minus_one_to_n(values: np.ndarray, bits: int) -> None:
    codes = quantize(values, affine_grid(values, bits, mode="paper"))
    assert codes.min() >= -1
    assert codes.max() <= 2**bits


@quick
@given(tensors(), all_modes)
def test_32_bits_is_the_identity_within_float32(values: np.ndarray, mode: Mode) -> None:
    decoded = fake_quantize(values, 32, mode=mode)
    # Float32 keeps 24 bits of the largest value; a step is 2**-31 of it at most.
    error = np.abs(decoded.astype(np.float64) - values)
    assert error.max() <= float32_rounding(np.abs(values).max())


@quick
@given(tensors(), all_bits, all_modes)
def test_codes_are_monotonic(values: np.ndarray, bits: int, mode: Mode) -> None:
    ordered = np.sort(np.append(values, np.nextafter(values, np.float32(0))))
    codes = quantize(ordered, affine_grid(values, bits, mode=mode))
    assert (np.diff(codes) >= 0).all()


@quick
@given(tensors(), st.integers(2, 16))
def test_quantising_twice_on_one_grid_changes_nothing(values: np.ndarray, bits: int) -> None:
    grid = affine_grid(values, bits)
    once = dequantize(quantize(values, grid), grid)
    np.testing.assert_array_equal(dequantize(quantize(once, grid), grid), once)


@quick
@given(st.floats(-1e30, -1e-30), st.floats(1e-30, 1e30), st.integers(2, 12))
def test_every_code_survives_a_round_trip(low: float, high: float, bits: int) -> None:
    grid = affine_grid([low, high], bits)
    codes = np.arange(2**bits)
    np.testing.assert_array_equal(quantize(dequantize(codes, grid), grid), codes)


@quick
@given(tensors(), all_bits, all_modes, st.data())
def test_per_axis_is_per_tensor_on_each_slice(
    values: np.ndarray, bits: int, mode: Mode, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-values.ndim, values.ndim - 1))
    grid = affine_grid(values, bits, axis=axis, mode=mode)
    codes = quantize(values, grid)
    decoded = fake_quantize(values, bits, axis, mode)
    assert grid.scale.size == grid.zero_point.size == values.shape[axis]
    for i in range(values.shape[axis]):
        piece = values.take(i, axis)
        own = affine_grid(piece, bits, mode=mode)
        np.testing.assert_array_equal(codes.take(i, axis), quantize(piece, own))
        np.testing.assert_array_equal(decoded.take(i, axis), fake_quantize(piece, bits, mode=mode))


def test_per_axis_grid_keeps_the_rank() -> None:
    kernel = np.arange(24.0).reshape(2, 3, 4) - 12
    grid = affine_grid(kernel, 8, axis=-1)
    assert grid.scale.shape == (1, 1, 4)
    # Channel 0 holds -12, -8, -4, 0, 4, 8 and channel 3 holds -9 ... 11: range 20 over 256 each.
    np.testing.assert_array_equal(grid.scale[0, 0, [0, 3]], 20 / 256)
    np.testing.assert_array_equal(grid.zero_point[0, 0, [0, 3]], [153, 115])


# Special tensors.


@pytest.mark.parametrize("bits", [2, 8, 32])
@pytest.mark.parametrize("mode", MODES)
def test_all_zero_tensors_stay_zero(mode: Mode, bits: int) -> None:
    for axis in (None, 0):
        decoded = fake_quantize(np.zeros((2, 3)), bits, axis, mode)
        np.testing.assert_array_equal(decoded, np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("value", [7.0, -7.0, SMALLEST_SUBNORMAL, FLOAT32_MAX, -FLOAT32_MAX])
def test_constant_tensors_keep_their_value_or_lose_one_step(value: float) -> None:
    values = np.full(3, value, np.float32)
    np.testing.assert_array_equal(fake_quantize(values, 8, mode="paper"), values)
    np.testing.assert_array_equal(fake_quantize(values, 8), np.float32(value * 255 / 256))


@pytest.mark.parametrize("mode", MODES)
def test_the_widest_range_stays_finite(mode: Mode) -> None:
    values = [-FLOAT32_MAX, -1.0, 0.3 * FLOAT32_MAX]
    assert np.isfinite(fake_quantize(values, 3, mode=mode)).all()


def test_results_have_the_documented_types() -> None:
    grid = affine_grid([[-1.0, 1.0]], 8, axis=1)
    assert (grid.scale.dtype, grid.zero_point.dtype) == (np.float64, np.int64)
    codes = quantize([[-1.0, 1.0]], grid)
    assert (codes.dtype, codes.shape) == (np.int64, (1, 2))
    # Stored as bytes, codes decode to the same values.
    decoded = dequantize(codes.astype(np.uint8), grid)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, dequantize(codes, grid))


def test_arguments_are_left_alone() -> None:
    values = np.float32([-1.0, 0.4, 3.0])
    before = values.copy()
    fake_quantize(values, 3)
    round_to_half(values)
    np.testing.assert_array_equal(values, before)


# TensorFlow's own fake quantiser.

ends = st.floats(2.0**-10, 2.0**10, width=32)


@quick
@given(ends, ends, st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_snapping_is_tensorflow_bit_for_bit_but_between_two_codes(
    low: float, high: float, bits: int, seed: int
) -> None:
    levels = 2**bits - 1
    bottom, top = grid_within(-low, high, levels)
    random = np.random.default_rng(seed)
    values = random.uniform(-2 * low, 2 * high, 200).astype(np.float32)
    values[:3] = 0, -low, high
    ours = snap(values, bottom, top, levels)
    theirs = tf.quantization.fake_quant_with_min_max_vars(values, bottom, top, num_bits=bits)
    assert ours[0] == 0
    step = (top - bottom) / levels
    parts = (values.astype(np.float64) - bottom) / step % 1
    between = np.abs(parts - 0.5) < 1e-4
    np.testing.assert_array_equal(ours[~between], theirs.numpy()[~between])
    np.testing.assert_allclose(ours, theirs, atol=1.001 * step)
    # The same from the range as it was: TensorFlow moves it likewise.
    theirs = tf.quantization.fake_quant_with_min_max_vars(values, -low, high, num_bits=bits)
    np.testing.assert_allclose(ours[~between], theirs.numpy()[~between], atol=1e-4 * step)


@quick
@given(ends, st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_snapping_symmetric_ranges_is_tensorflow_bit_for_bit_but_between_two_codes(
    end: float, bits: int, seed: int
) -> None:
    values = np.random.default_rng(seed).uniform(-2 * end, 2 * end, (50, 2)).astype(np.float32)
    top = np.float32([end, end / 3])
    ours = snap(values, -top, top, 2**bits - 2)
    theirs = tf.quantization.fake_quant_with_min_max_vars_per_channel(
        values, -top, top, num_bits=bits, narrow_range=True
    )
    parts = (values.astype(np.float64) + top) / (2 * top / (2**bits - 2)) % 1
    between = np.abs(parts - 0.5) < 1e-4
    np.testing.assert_array_equal(ours[~between], theirs.numpy()[~between])


@pytest.mark.parametrize("bits", range(2, 9))
def test_floored_snapping_is_the_published_formula(bits: int) -> None:
    # Steps of 1/8, exact in float32.
    low, high = -(2**bits) / 16, 2**bits / 16
    values = np.random.default_rng(0).uniform(low, high, 500).astype(np.float32)
    values[:2] = low, high
    ours = snap(values, low, high, 2**bits, floored=True)
    np.testing.assert_array_equal(ours, fake_quantize(values, bits, mode="paper"))
    assert snap(np.float32([9e9]), low, high, 2**bits, floored=True) == high


@quick
@given(st.floats(0, 1e3, width=32), ends, st.integers(2, 8))
def test_ranges_are_moved_by_less_than_a_step_to_have_0_on_the_grid(
    low: float, high: float, bits: int
) -> None:
    levels = 2**bits - 1
    bottom, top = grid_within(-low, high, levels)
    step = (low + high) / levels
    assert bottom <= 0 <= top
    assert abs(bottom + low) <= step * 0.5001
    assert abs(top - high) <= step * 0.5001
    zero = -bottom / step
    assert abs(zero - np.rint(zero)) < 1e-3


# Errors.


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        (([1.0], 1), "bits=1"),
        (([1.0], 33), "bits=33"),
        (([1.0], 2.5), "bits=2.5"),
        (([1.0], 8, 1), "axis=1"),
        (([1.0], 8, -2), "axis=-2"),
        ((1.0, 8, 0), "axis=0"),
        (([1.0], 8, None, "round"), "mode='round'"),
        (([], 8), "shape=(0,)"),
        ((np.zeros((2, 0)), 8), "shape=(2, 0)"),
        (([1.0, np.nan], 8), "value=nan"),
        (([1.0, -np.inf], 8), "value=-inf"),
        (([1e39], 8), "value=inf"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[object, ...], received: str) -> None:
    with pytest.raises(ValueError, match="Received: ") as caught:
        fake_quantize(*arguments)
    assert str(caught.value).endswith(f"Received: {received}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 4), (1, 2, 3)])
def test_a_tensor_must_fit_the_grid(shape: tuple[int, ...]) -> None:
    grid = affine_grid(np.ones((2, 3)), 8, axis=1)
    for function in (quantize, dequantize):
        with pytest.raises(ValueError, match=r"Received: shape="):
            function(np.ones(shape), grid)


@pytest.mark.parametrize("values", [[], [np.nan], [np.inf]])
def test_halves_are_of_the_same_tensors(values: list[float]) -> None:
    with pytest.raises(ValueError, match="Received: "):
        round_to_half(values)


# IEEE half.


@quick
@given(tensors(min_value=-65504, max_value=65504))
def test_half_is_numpys_half(values: np.ndarray) -> None:
    halves = round_to_half(values)
    assert halves.dtype == np.float32
    np.testing.assert_array_equal(halves, values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("value", "half"),
    [
        # 11 significant bits: even integers only above 2048, ties to the even significand.
        (2049.0, 2048.0),
        (2051.0, 2052.0),
        (2049.5, 2050.0),
        (-2049.0, -2048.0),
        (1 + 2**-11, 1.0),
        (1 + 3 * 2**-11, 1 + 2**-9),
        # Halfway below the smallest subnormal, 2**-24.
        (2.0**-25, 0.0),
        (2.0**-25 * 1.5, 2.0**-24),
        (65504.0, 65504.0),
        # 65520 is the tie with 2**16, which half does not have.
        (65519.0, 65504.0),
    ],
)
def test_half_rounds_to_nearest_even(value: float, half: float) -> None:
    assert round_to_half([value]) == np.float32(half)


@pytest.mark.parametrize("largest", [65520.0, -70000.0, 1e38])
def test_half_overflow_names_the_largest_value(largest: float) -> None:
    with pytest.raises(ValueError, match="65504") as caught:
        round_to_half([1.0, largest, 65000.0])
    assert str(caught.value).endswith(f"largest value={np.float32(largest)}")
