"""Kernels are rounded so that the outputs of their layer change least."""

import numpy as np
import pytest

from quarl_tf.quantization.gptq import best_grid, fitted, gptq
from quarl_tf.quantization.grid import fake_quantize, snap
from quarl_tf.spec import TensorFormat

FOUR = TensorFormat(bits=4, symmetric=True, per_channel=True)


@pytest.fixture
def kernel() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)


def test_uncorrelated_inputs_round_to_the_nearest(kernel: np.ndarray) -> None:
    inputs = np.repeat(np.eye(24, dtype=np.float32), 4, axis=0)
    grid = best_grid(kernel.astype(np.float64), np.full(24, 1 / 24), FOUR)
    np.testing.assert_allclose(gptq(kernel, inputs, FOUR)[0], snap(kernel, grid, FOUR), atol=1e-6)


def test_outputs_change_less_than_by_rounding_to_the_nearest(kernel: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    inputs = (rng.normal(size=(500, 6)) @ rng.normal(size=(6, 24))).astype(np.float32)
    outputs = inputs @ kernel.T
    nearest = inputs @ fake_quantize(kernel, FOUR, axis=0).T
    compensated = inputs @ gptq(kernel, inputs, FOUR)[0].T
    assert np.square(compensated - outputs).mean() < 0.3 * np.square(nearest - outputs).mean()


@pytest.mark.parametrize("name", ["_BATCH", "_BLOCK"])
def test_steps_through_wide_kernels_change_nothing(
    kernel: np.ndarray, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    # The halves of the inputs are uncorrelated, so neither compensates for the other.
    halves = rng.normal(size=(2, 400, 12)).astype(np.float32)
    inputs = np.zeros((800, 24), np.float32)
    inputs[:400, :12], inputs[400:, 12:] = halves
    at_once, grid = gptq(kernel, inputs, FOUR)
    monkeypatch.setattr(f"quarl_tf.quantization.gptq.{name}", 12)
    stepped, stepped_grid = gptq(kernel, inputs, FOUR)
    np.testing.assert_allclose(stepped, at_once, atol=1e-6)
    np.testing.assert_array_equal(grid.step, stepped_grid.step)


def test_kernels_on_a_grid_stay_as_they_are() -> None:
    kernel = np.array([[-7, 3, 7, 0], [0.5, -3.5, 1, 2]], np.float32)
    inputs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.testing.assert_allclose(gptq(kernel, inputs, FOUR)[0], kernel, atol=1e-6)


def test_a_fitted_kernel_compensates_for_changed_inputs() -> None:
    rng = np.random.default_rng(0)
    inputs, kernel = rng.normal(size=(2000, 4)), rng.normal(size=(3, 4)).astype(np.float32)
    unchanged, shift = fitted(kernel, inputs, inputs)
    np.testing.assert_allclose(unchanged, kernel, atol=1e-6)
    np.testing.assert_allclose(shift, 0, atol=1e-6)
    halved, shift = fitted(kernel, 2 * inputs + 1, inputs)
    np.testing.assert_allclose(halved, kernel / 2, atol=1e-3)
    np.testing.assert_allclose(shift, -kernel.sum(axis=1) / 2, atol=1e-2)
