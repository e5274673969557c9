"""Kernels are rounded so that what their layer computes changes least."""

from typing import Any

import numpy as np
import pytest
from samples import Artifacts

from quarl_tf.export import integer
from quarl_tf.export.ptq import quantized
from quarl_tf.foundation.errors import UsageError
from quarl_tf.quantization.gptq import best_grid, fitted, gptq
from quarl_tf.quantization.grid import fake_quantize, snap
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme, TensorFormat

FOUR = TensorFormat(bits=4, symmetric=True, per_channel=True)


@pytest.fixture
def kernel() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)


def test_inputs_that_have_nothing_in_common_make_nothing_up(kernel: np.ndarray) -> None:
    inputs = np.repeat(np.eye(24, dtype=np.float32), 4, axis=0)
    grid = best_grid(kernel.astype(np.float64), np.full(24, 1 / 24), FOUR)
    np.testing.assert_allclose(gptq(kernel, inputs, FOUR)[0], snap(kernel, grid, FOUR), atol=1e-6)


def test_outputs_change_less_than_by_rounding_to_the_nearest(kernel: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    inputs = (rng.normal(size=(500, 6)) @ rng.normal(size=(6, 24))).astype(np.float32)
    wanted = inputs @ kernel.T
    nearest = inputs @ fake_quantize(kernel, FOUR, axis=0).T
    found = inputs @ gptq(kernel, inputs, FOUR)[0].T
    assert np.square(found - wanted).mean() < 0.3 * np.square(nearest - wanted).mean()


@pytest.mark.parametrize("name", ["_LAZY", "_BLOCK"])
def test_steps_through_wide_kernels_change_nothing(
    kernel: np.ndarray, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    # The inputs' halves have nothing in common, so neither half makes up for the other.
    halves = rng.normal(size=(2, 400, 12)).astype(np.float32)
    inputs = np.zeros((800, 24), np.float32)
    inputs[:400, :12], inputs[400:, 12:] = halves
    whole, grid = gptq(kernel, inputs, FOUR)
    monkeypatch.setattr(f"quarl_tf.quantization.gptq.{name}", 12)
    stepped, same = gptq(kernel, inputs, FOUR)
    np.testing.assert_allclose(stepped, whole, atol=1e-6)
    np.testing.assert_array_equal(grid.step, same.step)


def test_kernels_on_a_grid_stay_as_they_are() -> None:
    kernel = np.array([[-7, 3, 7, 0], [0.5, -3.5, 1, 2]], np.float32)
    inputs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.testing.assert_allclose(gptq(kernel, inputs, FOUR)[0], kernel, atol=1e-6)


def test_a_fitted_kernel_makes_up_for_inputs_that_changed() -> None:
    rng = np.random.default_rng(0)
    given, kernel = rng.normal(size=(2000, 4)), rng.normal(size=(3, 4)).astype(np.float32)
    same, shift = fitted(kernel, given, given)
    np.testing.assert_allclose(same, kernel, atol=1e-6)
    np.testing.assert_allclose(shift, 0, atol=1e-6)
    half, shift = fitted(kernel, 2 * given + 1, given)
    np.testing.assert_allclose(half, kernel / 2, atol=1e-3)
    np.testing.assert_allclose(shift, -kernel.sum(axis=1) / 2, atol=1e-2)


@pytest.mark.parametrize("scheme", ["ptq_opt_w3", "ptq_opt_w4", "ptq_opt_w4a4"])
def test_kernels_that_make_up_for_the_rounding_before_them_change_the_head_less(
    scheme: str, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, sidecar = artifacts["fp32"].read_bytes(), Policy.load(artifacts["fp32"]).sidecar
    seen = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)

    def error() -> float:
        made = quantized(content, Scheme.parse(scheme), seen[:500])
        found, wanted = (
            np.array([Policy(x, sidecar).head(one) for one in seen[500:]]) for x in (made, content)
        )
        return float(np.square(found - wanted).mean())

    after = error()
    monkeypatch.setattr(integer, "fit_kernel", lambda *_: None)
    assert after < 0.8 * error()


@pytest.mark.parametrize("shape", [(9, 8), (9,), (0, 4)])
def test_observations_of_another_environment_are_refused(
    artifacts: Artifacts, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match=r"\[n, 4\]. Received: shape="):
        quantized(artifacts["fp32"].read_bytes(), Scheme.parse("int8"), np.zeros(shape, "f4"))


@pytest.mark.parametrize("bits", [2, 4])
def test_all_kernels_have_few_values_and_the_head_more(artifacts: Artifacts, bits: int) -> None:
    content = artifacts["fp32"].read_bytes()
    observations = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    made = quantized(content, Scheme.parse(f"ptq_opt_w{bits}"), observations)
    *kernels, head = flatbuffer.weights(made).values()
    for kernel in kernels:
        assert max(len(np.unique(channel)) for channel in kernel) < 2**bits
    assert max(len(np.unique(channel)) for channel in head) > 2**bits


@pytest.mark.parametrize(("name", "bits"), [("fp32", 4), ("fp32", 2), ("steering", 3)])
def test_activations_have_few_values_and_the_ends_more(
    artifacts: Artifacts, name: str, bits: int
) -> None:
    content = artifacts[name].read_bytes()
    observations = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    if name == "steering":
        observations = observations[:, : Policy.load(artifacts[name]).sidecar.observation_shape[0]]
    made = quantized(content, Scheme.parse(f"ptq_opt_w{bits}a{bits}"), observations)
    graph = integer.Graph(made)
    seen: dict[int, set[float]] = {}
    integer.visit(made, observations, lambda i, v: seen.setdefault(i, set()).update(v.flat))
    *layers, head = graph.layers().values()
    first, *others = (seen[layer.inputs[0]] for layer in (*layers, head))
    assert all(1 < len(values) <= 2**bits for values in others)
    for edge in (first, seen[rounded_output(graph, head)]):
        assert 2**bits < len(edge) <= 256


def rounded_output(graph: integer.Graph, layer: Any) -> int:
    """Return the tensor behind the MINIMUM, QUANTIZE and DEQUANTIZE of a layer's output."""
    index = layer.outputs[0]
    for name in ("MINIMUM", "QUANTIZE", "DEQUANTIZE"):
        (user,) = (op for op in graph.operators if index in op.inputs)
        assert graph.name(user) == name
        index = user.outputs[0]
    return int(index)


def test_many_bits_change_nothing_but_rounding(artifacts: Artifacts) -> None:
    content = artifacts["fp32"].read_bytes()
    observations = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    made = quantized(content, Scheme.parse("ptq_opt_w8a8"), observations)
    policies = [Policy(c, Policy.load(artifacts["fp32"]).sidecar) for c in (content, made)]
    one, other = ([policy.head(x) for x in observations[:50]] for policy in policies)
    assert np.abs(np.subtract(one, other)).max() < 0.1 * np.abs(one).max()
