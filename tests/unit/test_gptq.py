"""Kernels are rounded so that what their layer computes changes least."""

from __future__ import annotations

import numpy as np
import pytest
from samples import Artifacts

from quarl_tf.export.ptq import quantized
from quarl_tf.quantization.gptq import best_grid, gptq
from quarl_tf.quantization.grid import fake_quantize, snap
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import Scheme, TensorFormat

FOUR = TensorFormat(bits=4, symmetric=True, per_channel=True)


@pytest.fixture
def kernel() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)


def test_inputs_that_have_nothing_in_common_make_nothing_up(kernel: np.ndarray) -> None:
    inputs = np.repeat(np.eye(24, dtype=np.float32), 4, axis=0)
    grid = best_grid(kernel.astype(np.float64), np.full(24, 1 / 24), FOUR)
    np.testing.assert_allclose(gptq(kernel, inputs, FOUR), snap(kernel, grid, FOUR), atol=1e-6)


def test_outputs_change_less_than_by_rounding_to_the_nearest(kernel: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    inputs = (rng.normal(size=(500, 6)) @ rng.normal(size=(6, 24))).astype(np.float32)
    wanted = inputs @ kernel.T
    nearest = inputs @ fake_quantize(kernel, FOUR, axis=0).T
    found = inputs @ gptq(kernel, inputs, FOUR).T
    assert np.square(found - wanted).mean() < 0.3 * np.square(nearest - wanted).mean()


def test_kernels_on_a_grid_stay_as_they_are() -> None:
    kernel = np.array([[-7, 3, 7, 0], [0.5, -3.5, 1, 2]], np.float32)
    inputs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.testing.assert_allclose(gptq(kernel, inputs, FOUR), kernel, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4])
def test_all_kernels_have_few_values_and_the_head_more(artifacts: Artifacts, bits: int) -> None:
    content = artifacts["fp32"].read_bytes()
    observations = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    made = quantized(content, Scheme.parse(f"ptq_opt_w{bits}"), observations)
    *kernels, head = flatbuffer.weights(made).values()
    for kernel in kernels:
        assert max(len(np.unique(channel)) for channel in kernel) < 2**bits
    assert max(len(np.unique(channel)) for channel in head) > 2**bits
