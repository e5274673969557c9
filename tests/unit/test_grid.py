"""Grids by hand and by their properties, and kernels rounded by what their layer computes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from samples import Patch

from quarl_tf.quantization.gptq import best_grid, fitted, gptq
from quarl_tf.quantization.grid import fake_quantize, grid_between, snap
from quarl_tf.spec import TensorFormat

#: Everything but the bits.
KINDS: dict[str, dict[str, Any]] = {"runtime": {}, "symmetric": {"symmetric": True}}
KINDS |= {"paper": {"step": "paper"}, "floor": {"step": "paper", "rounding": "floor"}}
FOUR = TensorFormat(bits=4, symmetric=True, per_channel=True)
KERNEL = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)


def form(kind: str, bits: int) -> TensorFormat:
    return TensorFormat(bits=bits, **KINDS[kind])


forms = st.builds(form, st.sampled_from(sorted(KINDS)), st.integers(2, 32))
numbers = st.floats(np.float32(-1e30), np.float32(1e30), width=32)
tensors = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=numbers)


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
        ("floor", [-4, -1.5, 0], [-4, -2, 0]),  # Nothing beyond 0: the range still ends there.
        ("paper", [-4, -1.5, 0], [-3, -1, 0]),
        ("floor", [1, 2.5, 4], [1, 2, 4]),
        ("paper", [1, 2.5, 4], [1, 3, 3]),
        ("paper", [-2, -0.5, 0.5, 2], [-2, 0, 1, 1]),  # As in two's complement.
        # Range 3 over 3 steps of 1, moved for 0 to be on it.
        ("runtime", [-1, 0.4, 0.6, 2], [-1, 0, 1, 2]),
        ("runtime", [-0.7, 0.4, 2.3], [-1, 0, 2]),
        ("runtime", [-0.3, 0.4, 0.6, 2.7], [0, 0, 1, 3]),
        ("symmetric", [-0.4, 0.6, 2], [0, 0, 2]),  # 3 codes, as wide below as above.
        ("symmetric", [-2, -0.9, 0, 1.1], [-2, 0, 0, 2]),
    ],
)
def test_two_bits_by_hand(kind: str, values: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(fake_quantize(values, form(kind, 2)), expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 5, 8, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_grids_have_as_many_values_as_codes(kind: str, bits: int) -> None:
    missing = {"symmetric": 1, "floor": -1}.get(kind, 0)
    grid = grid_between(np.float64(-0.7), np.float64(1), form(kind, bits))
    assert len(grid.values()) in (2**bits - missing, 2**bits - missing + (kind == "floor"))
    np.testing.assert_allclose(np.diff(grid.values()), grid.step)


@given(tensors, forms)
def test_zero_stays_zero_and_order_is_kept(values: np.ndarray, form: TensorFormat) -> None:
    ordered = np.sort(np.append(values, [0, -0.0]).astype(np.float32))
    quantized = fake_quantize(ordered, form)
    assert quantized.dtype == np.float32
    assert np.isfinite(quantized).all()
    assert not quantized[ordered == 0].any()
    assert (np.diff(quantized) >= 0).all()


@given(tensors, forms)
def test_the_error_is_half_a_step_but_for_floor(values: np.ndarray, form: TensorFormat) -> None:
    low, high, step = grid_between(values.min().astype("f8"), values.max().astype("f8"), form)
    error = fake_quantize(values, form).astype("f8") - values
    rounding = np.abs(values).max() * 2.0**-23 + step * 1e-6 + 1e-44
    limit = np.where((values < low) | (values > high), step, step / 2)
    lowest, highest = (-step, 0.0) if form.rounding == "floor" else (-limit, limit)
    assert (error >= lowest - rounding).all()
    assert (error <= highest + rounding).all()


@given(tensors, forms, st.data())
def test_channels_are_slices(values: np.ndarray, form: TensorFormat, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-values.ndim, values.ndim - 1))
    quantized = fake_quantize(values, form, axis)
    for i in range(values.shape[axis]):
        channel = fake_quantize(values.take(i, axis), form)
        np.testing.assert_array_equal(quantized.take(i, axis), channel)


@pytest.mark.parametrize(("importance", "end"), [([0, 1, 1], 0.4), ([1, 0, 0], 1.0)])
def test_the_best_grid_suits_the_weights_that_matter(importance: list[int], end: float) -> None:
    grid = best_grid(np.array([[1.0, 0.4, -0.4]]), np.array(importance), form("symmetric", 2))
    assert grid.high.item() == pytest.approx(end)


def test_uncorrelated_inputs_round_to_the_nearest() -> None:
    inputs = np.repeat(np.eye(24, dtype=np.float32), 4, axis=0)
    grid = best_grid(KERNEL.astype(np.float64), np.full(24, 1 / 24), FOUR)
    np.testing.assert_allclose(gptq(KERNEL, inputs, FOUR)[0], snap(KERNEL, grid, FOUR), atol=1e-6)


def test_outputs_change_less_than_by_rounding_to_the_nearest() -> None:
    rng = np.random.default_rng(1)
    inputs = (rng.normal(size=(500, 6)) @ rng.normal(size=(6, 24))).astype(np.float32)
    nearest, compensated = fake_quantize(KERNEL, FOUR, axis=0), gptq(KERNEL, inputs, FOUR)[0]
    errors = [np.square(inputs @ (x - KERNEL).T).mean() for x in (compensated, nearest)]
    assert errors[0] < 0.3 * errors[1]


@pytest.mark.parametrize("name", ["_BATCH", "_BLOCK"])
def test_steps_through_wide_kernels_change_nothing(name: str, monkeypatch: Patch) -> None:
    # The halves of the inputs are uncorrelated, so neither compensates for the other.
    halves = np.random.default_rng(2).normal(size=(2, 400, 12)).astype(np.float32)
    inputs = np.zeros((800, 24), np.float32)
    inputs[:400, :12], inputs[400:, 12:] = halves
    at_once, grid = gptq(KERNEL, inputs, FOUR)
    monkeypatch.setattr(f"quarl_tf.quantization.gptq.{name}", 12)
    stepped, stepped_grid = gptq(KERNEL, inputs, FOUR)
    np.testing.assert_allclose(stepped, at_once, atol=1e-6)
    np.testing.assert_array_equal(grid.step, stepped_grid.step)


def test_a_fitted_kernel_compensates_for_changed_inputs() -> None:
    rng = np.random.default_rng(0)
    inputs, kernel = rng.normal(size=(2000, 4)), rng.normal(size=(3, 4)).astype(np.float32)
    unchanged, shift = fitted(kernel, inputs, inputs)
    np.testing.assert_allclose(unchanged, kernel, atol=1e-6)
    np.testing.assert_allclose(shift, 0, atol=1e-6)
    halved, shift = fitted(kernel, 2 * inputs + 1, inputs)
    np.testing.assert_allclose(halved, kernel / 2, atol=1e-3)
    np.testing.assert_allclose(shift, -kernel.sum(axis=1) / 2, atol=1e-2)


def test_wide_kernels_are_fitted_by_a_system_of_the_observations(monkeypatch: Patch) -> None:
    rng = np.random.default_rng(0)
    inputs, kernel = rng.normal(size=(20, 5000)), rng.normal(size=(3, 5000)).astype(np.float32)
    other_inputs = inputs + rng.normal(0, 0.1, inputs.shape)
    deviations = other_inputs - other_inputs.mean(axis=0)
    errors = (inputs - inputs.mean(axis=0) - deviations) @ kernel.T.astype(np.float64)
    damping = 0.02 * np.square(deviations).sum() / 20
    # By the identity (X'X + d)^-1 X' = X' (XX' + d)^-1, here with the inverse of a singular value.
    u, s, vt = np.linalg.svd(deviations, full_matrices=False)
    change = vt.T @ np.diag(s / (s**2 + damping)) @ u.T @ errors
    shapes, solve = [], np.linalg.solve
    monkeypatch.setattr(np.linalg, "solve", lambda a, b: shapes.append(a.shape) or solve(a, b))
    actual = fitted(kernel, other_inputs, inputs)[0]
    np.testing.assert_allclose(actual, kernel + change.T, atol=1e-6)
    assert shapes == [(20, 20)]
