"""Quantised flatbuffers of float ones compute nearly the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import SIDECAR, Artifacts

from quarl_tf.environments import EnvSpec
from quarl_tf.export import activations, auto, integer, preparation, rounding
from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.graph import Graph
from quarl_tf.export.ptq import quantized
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.keras import tf
from quarl_tf.networks import Design, build_policy
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import LayerFormat, Recipe, Scheme, TensorFormat, actions
from quarl_tf.spec.architectures import architecture

INT8 = Scheme.parse("int8").recipe
Heads = Callable[[bytes, np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def content(artifacts: Artifacts) -> bytes:
    return artifacts["fp32"].read_bytes()


@pytest.fixture(scope="module")
def observations() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (200, 6, 6, 2), np.uint8)


@pytest.fixture(scope="module")
def heads(artifacts: Artifacts) -> Heads:
    """Return a function that computes the heads of a flatbuffer."""
    policy = Policy.load(artifacts["fp32"])
    return lambda content, observations: auto.heads(content, policy, observations)


def test_codes_and_scales_of_a_kernel() -> None:
    kernel = np.array([[1.27, -0.64], [0.0, 2.54]], np.float32)
    form = TensorFormat(bits=8, symmetric=True)
    codes, scales = integer.integers(kernel, form, per_channel=True)
    np.testing.assert_allclose(scales, [0.01, 0.02], rtol=1e-6)
    np.testing.assert_array_equal(codes, [[127, -64], [0, 127]])
    codes, scales = integer.integers(kernel, form, per_channel=False)
    np.testing.assert_allclose(scales, [0.02], rtol=1e-6)
    np.testing.assert_array_equal(codes, [[64, -32], [0, 127]])


@pytest.mark.parametrize(
    ("name", "of_head", "ends", "error"),
    [
        ("int8", "int8", "float32", 0.05),
        ("int8_tensor", "int8", "float32", 0.05),
        ("int8_head32", "float32", "float32", 0.05),
        ("int8_stock", "int8", "int8", 0.2),
    ],
)
def test_layers_are_integers_and_heads_stay_close(
    heads: Heads,
    content: bytes,
    observations: np.ndarray,
    name: str,
    of_head: str,
    ends: str,
    error: float,
) -> None:
    int8 = quantized(content, Scheme.parse(name), observations)
    audit = flatbuffer.audit(int8)
    *inside, head = [op for op in audit.operators if "CONNECTED" in op]
    assert set(inside) == {"FULLY_CONNECTED int8"}
    assert head == f"FULLY_CONNECTED {of_head}"
    assert {tensor.dtype for tensor in (*audit.inputs, *audit.outputs)} == {ends}
    graph = Graph(int8)
    for operator in graph.layers().values():
        kernel = graph.tensors[operator.inputs[1]]
        if name in ("int8", "int8_tensor"):
            assert len(kernel.quantization.scale) == (kernel.shape[0] if name == "int8" else 1)
    expected, actual = (heads(x, observations) for x in (content, int8))
    assert np.abs(actual - expected).max() < error * np.ptp(expected)


def test_graphs_pack_again_after_unused_tensors_are_dropped(
    heads: Heads, content: bytes, observations: np.ndarray
) -> None:
    graph = Graph(content)
    # A tensor before the others, so that their numbers change.
    graph.tensors.insert(0, graph.tensors[graph.layers()["head"].inputs[1]])
    for operator in graph.operators:
        operator.inputs = [i + 1 if i >= 0 else i for i in operator.inputs]
        operator.outputs = [i + 1 for i in operator.outputs]
    graph.inputs[:] = [i + 1 for i in graph.inputs]
    graph.outputs[:] = [i + 1 for i in graph.outputs]
    graph.model.signatureDefs = []
    first = graph.pack()
    assert graph.pack() == first
    np.testing.assert_array_equal(heads(first, observations), heads(content, observations))


def _branching(kind: str) -> bytes:
    """Return a flatbuffer whose layers are no chain, with channels of very different sizes."""
    random = np.random.default_rng(1)

    def dense(*inputs: int) -> Any:
        sizes = 10.0 ** random.uniform(-1.5, 1.5, inputs[1])
        return (random.normal(size=inputs) * sizes / np.sqrt(inputs[0])).astype(np.float32)

    first, second, third, head = dense(4, 16), dense(16, 16), dense(16, 16), dense(16, 2)
    wide, bias = dense(32, 2), np.full(16, 0.1, np.float32)

    def network(x: Any) -> Any:
        hidden = tf.nn.relu(x @ first + bias)
        beside = tf.nn.relu(hidden @ second + 2 * bias)
        if kind == "residual":
            return tf.nn.relu((hidden + beside) @ third + bias) @ head
        if kind == "branches":
            return (beside + tf.nn.relu(hidden @ third + bias)) @ head
        if kind == "concatenated":
            return tf.concat([hidden, beside], axis=1) @ wide
        return tf.nn.relu(beside @ second + 2 * bias) @ head  # The kernel is used twice.

    return converted(of_function(network, (4,), "float32"))


@pytest.mark.parametrize("kind", ["residual", "branches", "concatenated", "shared"])
def test_what_is_no_chain_of_layers_is_computed_alike(
    kind: str, observations: np.ndarray, heads: Heads
) -> None:
    content = _branching(kind)
    expected = heads(content, observations)
    size = np.abs(expected).max()
    for prepared in (preparation.equalised(content), preparation.smoothed(content, observations)):
        actual = heads(prepared, observations)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * size)
    schemes = ["int8", "int8_head32", "ptq_opt_w8"]
    if kind == "shared":  # A head without a bias; the converter's own has no other operators.
        schemes.append("int8_stock")
    for name in schemes:
        actual = heads(quantized(content, Scheme.parse(name), observations), observations)
        assert np.abs(actual - expected).max() < 0.1 * size, name


def test_equalised_networks_compute_the_same_with_equal_channels(
    heads: Heads, content: bytes, observations: np.ndarray
) -> None:
    equalised = preparation.equalised(content)
    expected, actual = (heads(x, observations) for x in (content, equalised))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    first, second, _ = (np.abs(kernel) for kernel in flatbuffer.weights(equalised).values())
    np.testing.assert_allclose(first.max(axis=1), second.max(axis=0), rtol=1e-3)


def _of_images(edge: int) -> tuple[Any, np.ndarray, Callable[[bytes], np.ndarray]]:
    """Return a convolutional network, images, and a function that computes their heads."""
    spec = EnvSpec((edge, edge, 4), "uint8", 4)
    network = build_policy(spec, Design(architecture("li"), 4), 0)
    images = np.random.default_rng(0).integers(0, 256, (50, *spec.observation_shape), np.uint8)
    shape = list(spec.observation_shape)
    sidecar = replace(SIDECAR, num_actions=4, observation_shape=shape, observation_dtype="uint8")
    return network, images, lambda content: auto.heads(content, Policy(content, sidecar), images)


@pytest.mark.parametrize("choices", [None, 4])
def test_images_of_one_point_behind_convolutions(choices: int | None) -> None:
    network, images, heads = _of_images(20)
    content = converted(of_function(network, images.shape[1:], "uint8"))
    int8 = quantized(content, Scheme.parse("int8"), images, choices)
    expected, actual = map(heads, (content, int8))
    if choices is not None:
        expected, actual = (actions.centred(x, choices) for x in (expected, actual))
    assert np.abs(actual - expected).max() < 0.1 * np.ptp(expected)


def test_smoothed_networks_compute_the_same_and_lose_less_in_int8() -> None:
    network, images, heads = _of_images(36)
    loud = np.float32(10) ** np.random.default_rng(0).uniform(-1, 1, 256)
    for layer in network.layers[:-1]:
        for variable in layer.weights:  # Kernels and biases, whose channels come last.
            variable.assign(variable.numpy() * loud[: variable.shape[-1]])
    content = converted(of_function(network, images.shape[1:], "uint8"))
    expected = heads(content)
    smoothed = preparation.smoothed(content, images)
    np.testing.assert_allclose(
        heads(smoothed), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )
    error, smoothed_error = (
        np.square(heads(integer.quantized(x, images, INT8)) - expected).mean()
        for x in (content, smoothed)
    )
    assert smoothed_error < 0.5 * error


def normalised(deviation: list[float], weight: float) -> bytes:
    """Return a policy of four normalised features; the last one's weights are larger."""
    design = Design(architecture([64, 64]), 2)
    network = build_policy(EnvSpec((4,), "float32", 2), design, 0)
    network.get_layer("normalizer").inverse_deviation.assign(1 / np.maximum(deviation, 1e-2))
    kernel = network.get_layer("hidden_0").kernel
    kernel.assign(kernel.numpy() * np.float32([[1], [1], [1], [weight]]))
    return converted(of_function(network, (4,), "float32"))


@pytest.mark.parametrize("weight", [1, 10, 100])
def test_a_feature_that_hardly_moves_counts_in_int8(heads: Heads, weight: float) -> None:
    deviation = [1, 2, 0.3, 1e-4]
    content = normalised(deviation, weight)
    observations = np.random.default_rng(0).normal(0, deviation, (500, 4)).astype(np.float32)
    widened = preparation.widened(preparation.equalised(content), observations)
    np.testing.assert_allclose(
        heads(widened, observations), heads(content, observations), rtol=1e-4, atol=1e-5
    )
    # Observations that differ in that feature alone.
    probes = np.float32([0, 0, 0, 1]) * np.linspace(-3e-4, 3e-4, 61, dtype=np.float32)[:, None]
    expected = heads(content, probes)
    actual = heads(quantized(content, Scheme.parse("int8"), observations), probes)
    unwidened = heads(integer.quantized(preparation.equalised(content), observations, INT8), probes)
    assert len(np.unique(unwidened, axis=0)) <= 3
    if weight > 1:  # Else it is less than a step of the head.
        error, unwidened_error = (np.abs(x - expected).mean() for x in (actual, unwidened))
        assert error < 0.4 * unwidened_error
        assert error < 0.3 * expected.std()


@pytest.mark.parametrize("deviation", [[1, 2, 0.3, 0], [1, 2, 0.3, 0.011], [1e-4] * 4])
def test_features_that_never_moved_or_move_enough_are_unchanged(
    deviation: list[float],
) -> None:
    content = normalised(deviation, 1)
    observations = np.random.default_rng(0).normal(0, deviation, (50, 4)).astype(np.float32)
    assert preparation.widened(content, observations) == content


def test_a_refined_network_computes_the_same_and_its_int8_sees_more(
    heads: Heads, content: bytes, observations: np.ndarray
) -> None:
    refined = preparation.refined(content, observations)
    expected, actual = (heads(x, observations) for x in (content, refined))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    kernel, doubled = (next(iter(flatbuffer.weights(x).values())) for x in (content, refined))
    np.testing.assert_allclose(doubled, np.concatenate([kernel, kernel / 16], axis=1))
    # Two steps of the observation's grid in one feature.
    close = observations[0] + np.float32([1, 0, 0, 0]) * np.linspace(0, 0.05, 40)[:, None]
    coarse, fine = (
        len(np.unique(heads(integer.quantized(x, observations, INT8), close), axis=0))
        for x in (content, refined)
    )
    assert coarse <= 3 < fine


def test_bytes_are_not_refined(artifacts: Artifacts) -> None:
    frames = artifacts["frames"].read_bytes()
    assert preparation.refined(frames, np.zeros((1, 6, 6, 2), np.uint8)) == frames


def test_a_spread_head_computes_the_same_and_ties_less_in_int8(
    artifacts: Artifacts, frames: np.ndarray
) -> None:
    policy, content = Policy.load(artifacts["frames"]), artifacts["frames"].read_bytes()
    spread = preparation.spread(content, frames)
    expected, actual = (auto.heads(x, policy, frames) for x in (content, spread))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    graph = Graph(spread)
    assert list(graph.layers()) == list(Graph(content).layers())
    weights = [flatbuffer.weights(x) for x in (content, spread)]
    assert [len(list(kernels.values())[-1]) for kernels in weights] == [2, 32]
    counts = []
    for source in (content, spread):
        heads = auto.heads(integer.quantized(source, frames, INT8), policy, frames)
        difference = actions.centred(heads, 2) - actions.centred(expected, 2)
        assert np.abs(difference).max() < 0.05 * np.ptp(expected)
        counts.append(len(np.unique(heads)))
    assert counts[1] > 256 > counts[0]


@pytest.mark.parametrize(("scheme", "size"), [("int8", 32), ("int8_head32", 2), ("int8_tensor", 2)])
def test_only_the_head_of_int8_is_spread(
    artifacts: Artifacts, frames: np.ndarray, scheme: str, size: int
) -> None:
    int8 = quantized(artifacts["frames"].read_bytes(), Scheme.parse(scheme), frames, 2)
    assert len(list(flatbuffer.weights(int8).values())[-1]) == size


def test_only_heads_of_images_that_end_the_network_are_spread(
    content: bytes, observations: np.ndarray
) -> None:
    assert preparation.spread(content, observations) == content
    tanh = converted(of_function(lambda x: tf.tanh(_flat(x) @ np.ones((8, 2))), (2, 4), "uint8"))
    assert preparation.spread(tanh, np.ones((3, 2, 4), np.uint8)) == tanh
    zeros = converted(of_function(lambda x: _flat(x) @ np.zeros((8, 2)), (2, 4), "uint8"))
    assert preparation.spread(zeros, np.ones((3, 2, 4), np.uint8)) == zeros


def _flat(images: Any) -> Any:
    return tf.reshape(tf.cast(images, tf.float32), (1, -1))


def test_kernels_rounded_by_outputs_change_the_head_less(heads: Heads, content: bytes) -> None:
    rng = np.random.default_rng(1)
    inputs = (rng.normal(size=(300, 2)) @ rng.normal(size=(2, 4))).astype(np.float32)
    nearest = Scheme.parse("qat_int8").recipe
    expected = heads(content, inputs)
    errors = [
        np.square(heads(integer.quantized(content, inputs, recipe), inputs) - expected).mean()
        for recipe in (INT8, nearest)
    ]
    assert errors[0] < 0.8 * errors[1]


def test_recipes_that_do_not_fit_are_refused(content: bytes, observations: np.ndarray) -> None:
    by_layer = {"hiden_0": LayerFormat()}
    with pytest.raises(UsageError, match="hidden_0"):
        integer.quantized(content, observations, replace(INT8, by_layer=by_layer))
    four_bits = TensorFormat(bits=4, symmetric=True)
    recipe = Recipe(default=LayerFormat(weights=four_bits, activations=four_bits))
    with pytest.raises(QuarlError, match="weights of 4 bits"):
        integer.quantized(content, observations, recipe)


@pytest.mark.parametrize("scheme", ["ptq_opt_w3", "ptq_opt_w4", "ptq_opt_w4a4"])
def test_fitted_kernels_change_the_head_less(
    heads: Heads, content: bytes, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observations = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)

    def error() -> float:
        few_bits = quantized(content, Scheme.parse(scheme), observations[:500])
        actual, expected = (heads(x, observations[500:]) for x in (few_bits, content))
        return float(np.square(actual - expected).mean())

    fitted_error = error()
    monkeypatch.setattr(rounding, "fit_kernel", lambda *_: None)
    assert fitted_error < 0.8 * error()


@pytest.mark.parametrize("shape", [(9, 8), (9,), (0, 4)])
def test_observations_of_another_environment_are_refused(
    content: bytes, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match=r"\[n, 4\]. Received: shape="):
        quantized(content, Scheme.parse("int8"), np.zeros(shape, "f4"))


@pytest.mark.parametrize("bits", [2, 4])
def test_all_kernels_have_few_values_and_the_head_more(
    content: bytes, observations: np.ndarray, bits: int
) -> None:
    few_bits = quantized(content, Scheme.parse(f"ptq_opt_w{bits}"), observations)
    *kernels, head = flatbuffer.weights(few_bits).values()
    for kernel in kernels:
        assert max(len(np.unique(channel)) for channel in kernel) < 2**bits
    assert max(len(np.unique(channel)) for channel in head) > 2**bits


@pytest.mark.parametrize(("name", "bits"), [("fp32", 4), ("fp32", 2), ("steering", 3)])
def test_activations_have_few_values_and_the_ends_more(
    artifacts: Artifacts, observations: np.ndarray, name: str, bits: int
) -> None:
    inputs = observations[:, :2] if name == "steering" else observations
    scheme = Scheme.parse(f"ptq_opt_w{bits}a{bits}")
    few_bits = quantized(artifacts[name].read_bytes(), scheme, inputs)
    graph = Graph(few_bits)
    levels: dict[int, set[float]] = {}
    for index, values in activations.visit(few_bits, inputs):
        levels.setdefault(index, set()).update(values.flat)
    *layers, head = graph.layers().values()
    first, *inner = (levels[layer.inputs[0]] for layer in (*layers, head))
    assert all(1 < len(values) <= 2**bits for values in inner)
    for outer in (first, levels[rounded_output(graph, head)]):
        assert 2**bits < len(outer) <= 256


def rounded_output(graph: Graph, layer: Any) -> int:
    """Return the tensor behind the MINIMUM, QUANTIZE and DEQUANTIZE of a layer's output."""
    index = layer.outputs[0]
    for name in ("MINIMUM", "QUANTIZE", "DEQUANTIZE"):
        (user,) = (op for op in graph.operators if index in op.inputs)
        assert graph.name(user) == name
        index = user.outputs[0]
    return int(index)
