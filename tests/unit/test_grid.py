"""Grids by hand and by their properties."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quarl_tf.quantization.grid import fake_quantize, grid_between, round_to_half
from quarl_tf.spec import TensorFormat

quick = settings(max_examples=100)

#: Everything but the bits.
KINDS = {
    "runtime": {},
    "symmetric": {"symmetric": True},
    "paper": {"step": "paper"},
    "floor": {"step": "paper", "rounding": "floor"},
}
LARGEST = 1e30


def form(kind: str, bits: int) -> TensorFormat:
    return TensorFormat(bits=bits, **KINDS[kind])


def tensors(largest: float = LARGEST) -> st.SearchStrategy[np.ndarray]:
    """Draw float32 tensors of rank 1 to 3."""
    elements = st.floats(np.float32(-largest), np.float32(largest), width=32)
    shapes = hnp.array_shapes(min_dims=1, max_dims=3, max_side=5)
    return hnp.arrays(np.float32, shapes, elements=elements)


all_bits = st.integers(2, 32)
all_kinds = st.sampled_from(sorted(KINDS))


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        # Range 4 over 2**2: steps of 1. The maximum is the fifth of an alleged four codes.
        ("floor", [-1, -0.5, 0, 2.75, 3], [-1, -1, 0, 2, 3]),
        ("paper", [-1, -0.5, 0, 0.4, 1.5, 3], [-1, 0, 0, 0, 2, 2]),
        # -min / step = 1.5 is not whole: the extra code is at the lower end.
        ("floor", [-1.5, 0, 1, 2.5], [-2, 0, 1, 2]),
        # Rounded, both ends move inwards: by half a step each, then by 3/4 and 1/4 of a step.
        ("paper", [-1.5, 0, 1, 2.5], [-1, 0, 1, 2]),
        ("paper", [-1.75, -0.75, 0, 2.25], [-1, -1, 0, 2]),
        # Nothing on one side of 0: the range still ends there.
        ("floor", [-4, -1.5, 0], [-4, -2, 0]),
        ("paper", [-4, -1.5, 0], [-3, -1, 0]),
        ("floor", [1, 2.5, 4], [1, 2, 4]),
        ("paper", [1, 2.5, 4], [1, 3, 3]),
        # As in two's complement.
        ("paper", [-2, -0.5, 0.5, 2], [-2, 0, 1, 1]),
        # Range 3 over 3 steps of 1, moved for 0 to be on it.
        ("runtime", [-1, 0.4, 0.6, 2], [-1, 0, 1, 2]),
        ("runtime", [-0.7, 0.4, 2.3], [-1, 0, 2]),
        ("runtime", [-0.3, 0.4, 0.6, 2.7], [0, 0, 1, 3]),
        # 3 codes, as wide below as above.
        ("symmetric", [-0.4, 0.6, 2], [0, 0, 2]),
        ("symmetric", [-2, -0.9, 0, 1.1], [-2, 0, 0, 2]),
    ],
)
def test_two_bits_by_hand(kind: str, values: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(fake_quantize(values, form(kind, 2)), expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 5, 8, 12])
@pytest.mark.parametrize(
    ("kind", "missing"), [("runtime", 0), ("symmetric", 1), ("paper", 0), ("floor", -1)]
)
def test_grids_have_as_many_values_as_codes(kind: str, bits: int, missing: int) -> None:
    grid = grid_between(np.float64(-0.7), np.float64(1), form(kind, bits))
    assert len(grid.values()) in (2**bits - missing, 2**bits - missing + (kind == "floor"))
    np.testing.assert_allclose(np.diff(grid.values()), grid.step)


@quick
@given(tensors(), all_bits, all_kinds)
def test_zero_stays_zero_and_order_is_kept(values: np.ndarray, bits: int, kind: str) -> None:
    ordered = np.sort(np.append(values, [0, -0.0]).astype(np.float32))
    quantized = fake_quantize(ordered, form(kind, bits))
    assert quantized.dtype == np.float32
    assert np.isfinite(quantized).all()
    assert not quantized[ordered == 0].any()
    assert (np.diff(quantized) >= 0).all()


@quick
@given(tensors(), all_bits, all_kinds)
def test_the_error_is_half_a_step_but_for_floor(values: np.ndarray, bits: int, kind: str) -> None:
    low, high = values.min().astype("f8"), values.max().astype("f8")
    low, high, step = grid_between(low, high, form(kind, bits))
    error = fake_quantize(values, form(kind, bits)).astype("f8") - values
    rounding = np.abs(values).max() * 2.0**-23 + step * 1e-6 + 1e-44
    beyond = (values < low) | (values > high)
    limit = np.where(beyond, step, step / 2)
    lowest, highest = (-step, 0.0) if kind == "floor" else (-limit, limit)
    assert (error >= lowest - rounding).all()
    assert (error <= highest + rounding).all()


@quick
@given(tensors(), all_bits, all_kinds, st.data())
def test_channels_are_slices(values: np.ndarray, bits: int, kind: str, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-values.ndim, values.ndim - 1))
    quantized = fake_quantize(values, form(kind, bits), axis)
    for i in range(values.shape[axis]):
        channel = fake_quantize(values.take(i, axis), form(kind, bits))
        np.testing.assert_array_equal(quantized.take(i, axis), channel)


@pytest.mark.parametrize(
    ("values", "received"),
    [
        ([], "shape=(0,)"),
        (np.zeros((2, 0)), "shape=(2, 0)"),
        ([1.0, np.nan], "value=nan"),
        ([1.0, -np.inf], "value=-inf"),
        ([1e39], "value=inf"),
    ],
)
def test_what_cannot_be_quantised_is_named(values: list[float], received: str) -> None:
    for function in (lambda x: fake_quantize(x, form("paper", 8)), round_to_half):
        with pytest.raises(ValueError, match=re.escape(f"Received: {received}") + "$"):
            function(values)


@pytest.mark.parametrize("largest", [65520.0, -70000.0, 1e38])
def test_half_overflow_names_the_largest_value(largest: float) -> None:
    assert round_to_half([65519.0]) == 65504
    with pytest.raises(ValueError, match=re.escape(f"largest value={np.float32(largest)}")):
        round_to_half([1.0, largest, 65000.0])
