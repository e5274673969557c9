"""Weights and activations are quantised from flatbuffer to flatbuffer."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compiled
import numpy as np
import pytest
from samples import SIDECAR, Artifacts, Copy, Describe, Patch, refused, snapshot

from quarl_tf.cli import main
from quarl_tf.environments import EnvSpec
from quarl_tf.export import activations, auto, c_source, int4, integer, preparation, ptq, rounding
from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.graph import Graph, in_float16, in_float32, with_scaled_head
from quarl_tf.export.ptq import quantize, quantized
from quarl_tf.foundation.files import sha256
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Design, build_policy
from quarl_tf.quantization.grid import fake_quantize, own_grid
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme, actions
from quarl_tf.spec.architectures import architecture
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path

INT8 = Scheme.parse("int8").recipe
OBSERVATIONS = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
#: Of networks as others build them.
FEATURES = np.random.default_rng(2).normal(size=(300, 6)).astype(np.float32)
SCALE = np.array([1, 1, 1, 1, 1, 100], np.float32)
Network = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *((name, (name,) * 3) for name in ("ptq_w2", "ptq_w8", "ptq_paper_w4", "ptq_w32")),
        ("ptq_w2-head=8-hidden_0=4", ("ptq_w4", "ptq_w2", "ptq_w8")),
    ],
)
def test_only_kernels_are_put_on_grids(content: bytes, name: str, layers: Any) -> None:
    changed = quantized(content, Scheme.parse(name))
    forms: list[Any] = [Scheme.parse(layer).recipe.default.weights for layer in layers]
    before, after = flatbuffer.weights(content), flatbuffer.weights(changed)
    kernels = map(fake_quantize, before.values(), forms)
    np.testing.assert_equal(after, dict(zip(before, kernels, strict=True)))
    differing = np.frombuffer(content, np.uint8) != np.frombuffer(changed, np.uint8)
    assert 0 < differing.sum() <= sum(kernel.nbytes for kernel in before.values())
    np.testing.assert_equal(*(vars(flatbuffer.audit(one)) for one in (content, changed)))


def test_convolutions_have_a_grid_for_each_output_channel() -> None:
    random, layers = np.random.default_rng(0), keras.layers
    parts = [layers.Conv2D(4, 3), layers.DepthwiseConv2D(3), layers.Flatten()]
    network = keras.Sequential([keras.Input((6, 6, 3)), *parts])
    for variable in network.trainable_variables:
        sizes = 10.0 ** random.integers(-2, 3, variable.shape[-1])  # Far apart.
        variable.assign(random.normal(0, 1, variable.shape) * sizes)
    depthwise = network.layers[1].depthwise_kernel
    depthwise.assign(depthwise * np.array([1e-2, 1, 10, 100])[:, None])
    content = converted(of_function(network, (6, 6, 3), "float32"))
    weights = flatbuffer.weights(quantized(content, Scheme.parse("ptq_w4"))).values()
    kernels = [kernel for kernel in weights if kernel.ndim > 1]
    assert [kernel.shape for kernel in kernels] == [(4, 3, 3, 3), (1, 3, 3, 4)]
    for kernel, axis in zip(kernels, (0, 3), strict=True):
        counts = [len(np.unique(np.take(kernel, channel, axis))) for channel in range(4)]
        assert 3 < min(counts) <= max(counts) <= 16


def test_the_copy_has_a_sidecar_and_acts(copy_artifact: Copy) -> None:
    path, scheme = copy_artifact("frames"), Scheme.parse("ptq_w6")
    assert main(["quantize", str(path), "--scheme", "ptq_w6"]) == 0
    copied = path.with_name("ptq_w6.tflite")
    policy = Policy.load(copied)
    assert (policy.sidecar.scheme, policy.sidecar.native) == ("ptq_w6", False)
    assert policy.act(np.zeros((6, 6, 2), np.uint8)) in (0, 1)
    content = copied.read_bytes()
    # A deleted flatbuffer is made again, and its sidecar kept.
    replace(policy.sidecar, check={"a": 1}).save(sidecar_path(copied))
    recorded = sidecar_path(copied).read_text()
    copied.unlink()
    quantize(path, scheme)
    assert (copied.read_bytes(), sidecar_path(copied).read_text()) == (content, recorded)
    sidecar_path(copied).unlink()  # As after a process that was killed in between.
    quantize(path, scheme)
    assert Policy.load(copied).sidecar == policy.sidecar


def test_what_was_made_of_the_same_network_is_kept(copy_artifact: Copy) -> None:
    path, scheme = copy_artifact("fp32"), Scheme.parse("int8")
    copied = quantize(path, scheme)
    made = copied.read_bytes()
    copied.write_bytes(quantize(path, Scheme.parse("int8_tensor")).read_bytes())
    sidecar = Sidecar.load(sidecar_path(copied))
    for calibration in ("ab" * 32, None):  # What a training was exported to, and a former copy.
        facts = {"sha256": sha256(copied), "calibration_sha256": calibration}
        replace(sidecar, **facts).save(sidecar_path(copied))
        before = snapshot(path.parent)
        assert quantize(path, scheme) == copied
        assert snapshot(path.parent) == before
    replace(sidecar, sha256=sha256(copied), network_sha256="ab" * 32).save(sidecar_path(copied))
    assert quantize(path, scheme).read_bytes() == made
    copied.write_bytes(b"damaged")
    assert quantize(path, scheme).read_bytes() == made


def test_files_without_names_and_with_old_codes_are_quantised(content: bytes) -> None:
    graph = Graph(content)
    for tensor in graph.tensors:
        tensor.name = None
    for code in graph.model.operatorCodes:
        code.deprecatedBuiltinCode, code.builtinCode = code.builtinCode, 0
    files = (quantized(x, Scheme.parse("int8"), OBSERVATIONS) for x in (content, graph.pack()))
    np.testing.assert_array_equal(*map(heads, files))


def test_layers_of_one_kernel_have_the_same_bits() -> None:
    content = converted(of_function(lambda x: head(hidden(hidden(x))), (6,), "float32"))
    scheme = Scheme.parse("ptq_w2-hidden_1=8")
    assert "share a kernel" in refused(quantized, content, scheme, code=2)
    halves, floats = (flatbuffer.audit(x).weight_dtypes for x in (in_float16(content), content))
    assert halves == {"float16": floats["float32"]}
    changed = quantized(content, Scheme.parse("ptq_w2-hidden_0=8-hidden_1=8"))
    counts = [len(np.unique(kernel)) for kernel in flatbuffer.weights(changed).values()]
    assert sorted(counts)[:2] == [4, 4] < sorted(counts)[2:]


def test_weights_of_one_name_count_each_and_shared_ones_once(content: bytes) -> None:
    graph = Graph(content)
    layers = list(graph.layers().values())
    for layer in layers:
        graph.tensors[layer.inputs[1]].name = b"kernel"
    assert len(flatbuffer.weights(graph.pack())) == len(layers) == 3
    layers[1].inputs[1] = layers[0].inputs[1]
    assert len(flatbuffer.weights(graph.pack())) == 2


def test_halves_are_widened(artifacts: Artifacts) -> None:
    half = artifacts["fp16"].read_bytes()
    full = in_float32(half)
    assert "float16" in flatbuffer.audit(half).weight_dtypes
    assert "float16" not in flatbuffer.audit(full).tensor_dtypes
    halves, floats = ([*flatbuffer.weights(x).values()] for x in (half, full))
    np.testing.assert_equal(floats, halves)
    np.testing.assert_allclose(*map(heads, (half, full)), atol=1e-5)
    assert in_float32(full) == full
    np.testing.assert_equal([*flatbuffer.weights(in_float16(full)).values()], floats)


@pytest.mark.parametrize("name", ["int8", "ptq_w4"])
def test_a_policy_of_halves_is_quantised(copy_artifact: Copy, name: str) -> None:
    path, scheme = copy_artifact("fp16"), Scheme.parse(name)
    of_half = quantize(path, scheme)
    assert Policy.load(of_half).sidecar.check["source"] == "fp16"
    assert "can become" in refused(quantize, path, Scheme.parse("fp16"), code=2)
    full = copy_artifact("fp32")
    assert f"not {name} made from the same" in refused(quantize, full, scheme, code=2)
    audit = flatbuffer.audit(of_half)
    sidecar_path(of_half).unlink()
    of_half.unlink()
    np.testing.assert_equal(vars(flatbuffer.audit(quantize(full, scheme))), vars(audit))


def test_other_schemes_and_files_are_refused(artifacts: Artifacts) -> None:
    for name, scheme, received in (("fp32", "qat_int8", "qat_int8"), ("int8", "ptq_w4", "int8")):
        message = refused(quantize, artifacts[name], Scheme.parse(scheme), code=2)
        assert f"scheme='{received}'" in message
    assert "identifier" in refused(quantized, b"none", Scheme.parse("ptq_w4"))
    content, scheme = artifacts["fp32"].read_bytes(), Scheme.parse("ptq_w2-hiden_0=4")
    assert "hidden_0" in refused(quantized, content, scheme, code=2)


@pytest.mark.parametrize("description", [None, '{"env_id": "CartPole-v1"}', "of ptq_w4"])
def test_a_copy_replaces_no_other_file(copy_artifact: Copy, description: str | None) -> None:
    path = copy_artifact("frames")
    target, other = path.with_name("ptq_w8.tflite"), quantize(path, Scheme.parse("ptq_w4"))
    shutil.copy(other, target)
    if description == "of ptq_w4":
        shutil.copy(sidecar_path(other), sidecar_path(target))
    elif description is not None:
        sidecar_path(target).write_text(description)
    before, message = snapshot(path.parent), f"would replace {target}, which is not ptq_w8"
    assert message in refused(quantize, path, Scheme.parse("ptq_w8"), code=2)
    # A scheme that needs a training is refused beside what that was exported to.
    assert "can become" in refused(quantize, path, Scheme.parse("fp32"), code=2)
    assert snapshot(path.parent) == before


@pytest.fixture(scope="module")
def content(artifacts: Artifacts) -> bytes:
    return artifacts["fp32"].read_bytes()


def policy_of(content: bytes, observations: np.ndarray) -> Policy:
    (head,) = flatbuffer.audit(content).outputs
    shape, dtype = list(observations.shape[1:]), observations.dtype.name
    sidecar = replace(SIDECAR, observation_shape=shape, observation_dtype=dtype)
    return Policy(content, replace(sidecar, num_actions=head.shape[1]))


def heads(content: bytes, observations: np.ndarray = OBSERVATIONS) -> np.ndarray:
    return auto.heads(content, policy_of(content, observations), observations)


def test_an_odd_number_of_weights_is_stored_as_int4() -> None:
    kernel = np.array([[3.5, -1.5, 0.5]], np.float32)
    content = converted(of_function(lambda x: x @ kernel.T, (3,), "float32"))
    scheme = Scheme.parse("qat_int4")
    form: Any = scheme.recipe.default.weights
    grid = own_grid(kernel, form, None)
    # With the input's factor, a finer grid would contain the kernel's.
    grids = [{"output": grid._replace(step=np.float32(1 / 15))}, {"kernel": grid, "output": grid}]
    packed = int4.pack(content, scheme.recipe, grids, 255)
    other = grid._replace(step=grid.step * np.float32(1.3))
    message = refused(int4.pack, content, scheme.recipe, [{"kernel": other, "output": grid}], 255)
    assert "on no grid of its training" in message
    audit = flatbuffer.audit(packed)
    assert (audit.weight_dtypes["int4"], audit.kernel_scales) == (3, [1])
    inputs = FEATURES[:, :3]
    np.testing.assert_allclose(heads(packed, inputs), inputs @ kernel.T, rtol=1e-4, atol=1e-5)


def test_layers_are_integers_with_one_scale_or_one_for_each_output(content: bytes) -> None:
    for name, of_head in (("int8", "int8"), ("int8_tensor", "int8"), ("int8_head32", "float32")):
        int8 = quantized(content, Scheme.parse(name), OBSERVATIONS)
        audit = flatbuffer.audit(int8)
        layers = [op for op in audit.operators if "CONNECTED" in op]
        assert {*layers[:-1]} == {"FULLY_CONNECTED int8"}
        assert layers[-1] == f"FULLY_CONNECTED {of_head}"
        graph = Graph(int8)
        outputs = [graph.tensors[op.inputs[1]].shape[0] for op in graph.layers().values()]
        expected = {"int8": outputs, "int8_tensor": [1] * len(outputs)}
        assert audit.kernel_scales == expected.get(name, [*outputs[:-1], 0])
    mixed = quantized(content, Scheme.parse("int8-hidden_1=32"), OBSERVATIONS)
    layers = [op for op in flatbuffer.audit(mixed).operators if "CONNECTED" in op]
    assert [layer.split()[1] for layer in layers] == ["int8", "float32", "int8"]
    unknown = content, Scheme.parse("int8-hidden_3=32"), OBSERVATIONS
    assert "did you mean hidden_" in refused(quantized, *unknown, code=2)


@pytest.mark.parametrize("kind", ["residual", "concatenated", "shared"])
def test_what_is_no_chain_of_layers_is_computed_alike(kind: str) -> None:
    random = np.random.default_rng(1)

    def dense(*inputs: int) -> Any:  # Channels of very different sizes.
        sizes = 10.0 ** random.uniform(-1.5, 1.5, inputs[1])
        return (random.normal(size=inputs) * sizes / np.sqrt(inputs[0])).astype(np.float32)

    first, second, third, head = dense(4, 16), dense(16, 16), dense(16, 16), dense(16, 2)
    wide, bias = dense(32, 2), np.full(16, 0.1, np.float32)

    def network(x: Any) -> Any:
        hidden = tf.nn.relu(x @ first + bias)
        beside = tf.nn.relu(hidden @ second + 2 * bias)
        if kind == "residual":
            return tf.nn.relu((hidden + beside) @ third + bias) @ head
        if kind == "concatenated":
            return tf.concat([hidden, beside], axis=1) @ wide
        return tf.nn.relu(beside @ second + 2 * bias) @ head  # The kernel is used twice.

    content = converted(of_function(network, (4,), "float32"))
    expected = heads(content)
    size = np.abs(expected).max()
    for prepared in (preparation.equalised(content), preparation.smoothed(content, OBSERVATIONS)):
        np.testing.assert_allclose(heads(prepared), expected, rtol=0, atol=1e-5 * size)
    # A head without a bias; the converter's own has no other operators.
    stock = ["int8_stock"] if kind == "shared" else []
    for name in ("int8", "int8_head32", "ptq_opt_w8", *stock):
        actual = heads(quantized(content, Scheme.parse(name), OBSERVATIONS))
        assert np.abs(actual - expected).max() < 0.1 * size, name


def _of_images(edge: int) -> tuple[Any, np.ndarray]:
    """Return a convolutional network, and images."""
    spec = EnvSpec((edge, edge, 4), "uint8", 4)
    images = np.random.default_rng(0).integers(0, 256, (50, *spec.observation_shape), np.uint8)
    return build_policy(spec, Design(architecture("li"), 4), 0), images


def test_images_of_one_point_behind_convolutions() -> None:
    network, images = _of_images(20)
    content = converted(of_function(network, images.shape[1:], "uint8"))
    int8 = quantized(content, Scheme.parse("int8"), images, 4)
    expected, actual = (actions.centred(heads(x, images), 4) for x in (content, int8))
    assert np.abs(actual - expected).max() < 0.1 * np.ptp(expected)


def test_smoothed_networks_compute_the_same_and_lose_less_in_int8() -> None:
    network, images = _of_images(36)
    loud = np.float32(10) ** np.random.default_rng(0).uniform(-1, 1, 256)
    for layer in network.layers[:-1]:
        for variable in layer.weights:  # Kernels and biases, whose channels come last.
            variable.assign(variable.numpy() * loud[: variable.shape[-1]])
    content = converted(of_function(network, images.shape[1:], "uint8"))
    smoothed = preparation.smoothed(content, images)
    expected, actual = (heads(x, images) for x in (content, smoothed))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    files = [integer.quantized(x, images, INT8) for x in (content, smoothed)]
    error, smoothed_error = (np.square(heads(x, images) - expected).mean() for x in files)
    assert smoothed_error < 0.5 * error


def normalised(deviation: list[float], weight: float) -> bytes:
    """Return a policy of four normalised features; the last one's weights are larger."""
    network = build_policy(EnvSpec((4,), "float32", 2), Design(architecture([64, 64]), 2), 0)
    network.get_layer("normalizer").inverse_deviation.assign(1 / np.maximum(deviation, 1e-2))
    kernel = network.get_layer("hidden_0").kernel
    kernel.assign(kernel.numpy() * np.float32([[1], [1], [1], [weight]]))
    return converted(of_function(network, (4,), "float32"))


def test_a_feature_that_hardly_moves_counts_in_int8() -> None:
    deviation = [1, 2, 0.3, 1e-4]
    content = normalised(deviation, 10)
    observations = np.random.default_rng(0).normal(0, deviation, (500, 4)).astype(np.float32)
    # Observations that differ in that feature alone.
    probes = np.float32([0, 0, 0, 1]) * np.linspace(-3e-4, 3e-4, 61, dtype=np.float32)[:, None]
    expected = heads(content, probes)
    actual = heads(quantized(content, Scheme.parse("int8"), observations), probes)
    coarse = heads(integer.quantized(preparation.equalised(content), observations, INT8), probes)
    assert len(np.unique(coarse, axis=0)) <= 3
    assert np.abs(actual - expected).mean() < 0.3 * expected.std()


def test_prepared_networks_compute_the_same_and_their_int8_sees_more(content: bytes) -> None:
    equalised = preparation.equalised(content)
    np.testing.assert_allclose(heads(equalised), heads(content), rtol=1e-4, atol=1e-5)
    first, second, _ = (np.abs(kernel) for kernel in flatbuffer.weights(equalised).values())
    np.testing.assert_allclose(first.max(axis=1), second.max(axis=0), rtol=1e-3)
    refined = preparation.refined(content, OBSERVATIONS)
    np.testing.assert_allclose(heads(refined), heads(content), rtol=1e-4, atol=1e-5)
    kernel, doubled = (next(iter(flatbuffer.weights(x).values())) for x in (content, refined))
    np.testing.assert_allclose(doubled, np.concatenate([kernel, kernel / 16], axis=1))
    # Two steps of the observation's grid in one feature.
    shifts = np.linspace(0, 0.05, 40, dtype=np.float32)[:, None]
    close = OBSERVATIONS[0] + np.float32([1, 0, 0, 0]) * shifts
    files = [integer.quantized(x, OBSERVATIONS, INT8) for x in (content, refined)]
    coarse, fine = (len(np.unique(heads(x, close), axis=0)) for x in files)
    assert coarse <= 3 < fine


def test_features_far_from_zero_have_twelve_bits(content: bytes) -> None:
    """The grid of features contains 0, so that its step is wider than their range tells."""
    offset = np.array([30, 31, 30, 31], np.float32)
    observations = OBSERVATIONS + offset
    graph = Graph(content)
    layer = next(iter(graph.layers().values()))
    kernel, bias = graph.kernel_and_bias(layer)
    graph.set_constant(layer.inputs[2], bias - kernel @ offset)
    content = graph.pack()
    sources = content, preparation.refined(content, observations)
    files = content, *(integer.quantized(x, observations, INT8) for x in sources)
    exact, coarse, fine = (heads(x, observations) for x in files)
    coarse_error, error = (np.abs(x - exact).mean() for x in (coarse, fine))
    assert error < 0.4 * coarse_error


def test_heads_of_images_have_sixteen_bits(artifacts: Artifacts, monkeypatch: Patch) -> None:
    content = artifacts["frames"].read_bytes()
    frames = np.random.default_rng(0).integers(0, 256, (200, 6, 6, 2), np.uint8)

    def made(scheme: str, images: np.ndarray = frames) -> np.ndarray:
        return heads(quantized(content, Scheme.parse(scheme), images, 2), frames)

    float_head, head = made("int8_head32"), made("int8")
    calm = frames[np.abs(head).max(axis=1) < 0.6 * np.abs(head).max()]
    wide = made("int8", calm)  # It reaches farther than over these.
    monkeypatch.setattr(integer, "has_two_stages", lambda _: False)
    coarse = made("int8")
    assert np.abs(coarse - float_head).max() > 0.002 * np.ptp(head)
    assert np.abs(head - float_head).max() < 0.002 * np.ptp(head)
    assert np.abs(wide - head).max() < 0.05 * np.ptp(head)
    assert len(np.unique(coarse)) <= 256


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("factors", [(1, 9, 0.01), (1, 1e-3, 1e3), (0, 0, 0), (1e-2, 0, 1e-2)])
def test_heads_in_two_stages_of_any_scale(factors: tuple[float, ...], bias: int) -> None:
    """Most of an output may be its bias, and all of it 0."""
    inputs = np.random.default_rng(0).integers(0, 256, (20, 6), np.uint8)
    last, biases = drawn(16, 3) * np.float32(factors), np.float32([1, -5, 2]) * bias
    content = converted(of_function(lambda x: of_bytes(x, last) + biases, (6,), "uint8"))
    recipes = INT8.without("head"), INT8
    expected, actual = (heads(integer.quantized(content, inputs, x), inputs) for x in recipes)
    # Weights of quiet outputs need no finer steps than an eighth of the others'.
    assert np.abs(actual - expected).max() < 0.01 * max(np.abs(expected).max(), 1e-6)


def test_a_head_keeps_the_rounding_by_outputs() -> None:
    """Its sums may be far larger than a code: the first stage's codes are copied then."""
    inputs = np.random.default_rng(0).integers(0, 256, (300, 6), np.uint8)
    content = converted(of_function(lambda x: of_bytes(x, drawn(512, 3)), (6,), "uint8"))
    schemes = map(Scheme.parse, ("int8", "int8_head32"))
    copy, float_head = (quantized(content, scheme, inputs, 3) for scheme in schemes)
    expected = heads(float_head, inputs)
    assert np.abs(heads(copy, inputs) - expected).std() < 0.002 * expected.std()
    copies = next(op for op in flatbuffer.parsed(copy)[0].operators if op.name == "BROADCAST_TO")
    assert flatbuffer.parsed(copy)[0].tensors[copies.outputs[0]].shape[0] > 20


def test_samples_come_to_all_places_of_an_observation() -> None:
    for count, places, most in ((2000, 400, 5000), (300, 3136, 200_000), (50, 7, 5000), (9, 1, 2)):
        step = activations.sample_step(count, places, most)
        chosen = np.arange(count * places)[::step]
        assert len(np.unique(chosen % places)) == places
        assert most / 2 <= len(chosen) <= 2 * most or step == 1


@pytest.mark.parametrize("options", [((2, 1), "SAME"), (1, "VALID", "NHWC", (1, 2))])
def test_a_kernel_times_its_inputs_is_its_convolution(options: Any) -> None:
    """By strides, padding, layout and dilations."""

    def convolved(image: Any) -> Any:
        return tf.reshape(tf.nn.conv2d(image, drawn(4, 3, 2, 5), *options), (1, -1))

    images = np.random.default_rng(0).normal(size=(9, 7, 6, 2)).astype(np.float32)
    graph = Graph(converted(of_function(convolved, (7, 6, 2), "float32")))
    (layer,) = graph.layers().values()
    kernel = graph.constant(layer.inputs[1]).reshape(5, -1)
    actual = activations.kernel_inputs(graph, layer, images) @ kernel.T
    outputs = activations.tensor_values(graph, layer, "outputs", images)
    np.testing.assert_allclose(actual, outputs.reshape(-1, 5), rtol=1e-4, atol=1e-5)


def test_the_mean_of_what_a_rounded_layer_computes_stays(content: bytes) -> None:
    graph, form = Graph(content), Scheme.parse("ptq_opt_w2").recipe.default.weights
    rounding.round_kernel(graph, graph.layers()["head"], OBSERVATIONS, form)
    before, after = heads(content), heads(graph.pack())
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-5)


def test_kernels_rounded_by_outputs_change_the_head_less(content: bytes) -> None:
    rng = np.random.default_rng(1)
    inputs = (rng.normal(size=(300, 2)) @ rng.normal(size=(2, 4))).astype(np.float32)
    recipes, expected = (INT8, Scheme.parse("qat_int8").recipe), heads(content, inputs)
    files = [integer.quantized(content, inputs, recipe) for recipe in recipes]
    error, nearest_error = (np.square(heads(x, inputs) - expected).mean() for x in files)
    assert error < 0.8 * nearest_error


@pytest.mark.parametrize(
    ("scheme", "step"),
    [("ptq_opt_w4", "fit_kernel"), ("ptq_opt_w4a4", "fit_kernel"), ("ptq_opt_w4a4", "smoothed")],
)
def test_each_step_loses_less(content: bytes, scheme: str, step: str, monkeypatch: Patch) -> None:
    observations = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)

    def error() -> float:
        few_bits = quantized(content, Scheme.parse(scheme), observations[:500])
        actual, expected = (heads(x, observations[500:]) for x in (few_bits, content))
        return float(np.square(actual - expected).mean())

    whole_error = error()
    monkeypatch.setattr(rounding, step, lambda content, *_: content)
    assert whole_error < 0.8 * error()


def test_all_kernels_have_few_values_and_the_head_more(content: bytes) -> None:
    few_bits = quantized(content, Scheme.parse("ptq_opt_w2"), OBSERVATIONS)
    *kernels, head = flatbuffer.weights(few_bits).values()
    for kernel in kernels:
        assert max(len(np.unique(channel)) for channel in kernel) < 4
    assert max(len(np.unique(channel)) for channel in head) > 4


def test_images_have_the_ranges_that_bring_heads_nearest(monkeypatch: Patch) -> None:
    network, images = _of_images(36)
    images //= 12
    images[7] = 255
    content = converted(of_function(network, images.shape[1:], "uint8"))
    expected, errors = heads(content, images), []
    for parts in (integer._PARTS, (1.0,)):
        monkeypatch.setattr(integer, "_PARTS", parts)
        actual = heads(integer.quantized(content, images, INT8), images)
        errors.append(np.median(np.abs(actual - expected)))
    assert errors[0] < 0.9 * errors[1]


def test_one_loud_image_widens_a_range_less_than_one_loud_vector() -> None:
    images, steps = np.random.default_rng(0).integers(0, 4, (400, 2, 3, 1), np.uint8), []
    images[7] = 255
    for x in (images, images.reshape(-1, 6)):
        content = converted(of_function(lambda x: of_bytes(x, drawn(16, 3)), x.shape[1:], "uint8"))
        graph = Graph(quantized(content, Scheme.parse("int8"), x))
        steps.append(graph.tensors[graph.layers()["hidden_0"].outputs[0]].quantization.scale[0])
    assert steps[0] < 0.8 * steps[1]


@pytest.mark.parametrize(("name", "bits"), [("fp32", 2), ("steering", 3)])
def test_inner_activations_have_few_values(artifacts: Artifacts, name: str, bits: int) -> None:
    inputs = OBSERVATIONS[:, :2] if name == "steering" else OBSERVATIONS
    scheme = Scheme.parse(f"ptq_opt_w{bits}a{bits}")
    few_bits = quantized(artifacts[name].read_bytes(), scheme, inputs)
    graph = Graph(few_bits)
    levels: dict[int, set[float]] = {}
    for index, values in activations.visit(few_bits, inputs):
        levels.setdefault(index, set()).update(values.flat)
    *layers, head = graph.layers().values()
    first, *inner = (levels[layer.inputs[0]] for layer in (*layers, head))
    assert all(1 < len(values) <= 2**bits for values in inner)
    rounded_head = head.outputs[0]
    for operator in ("MINIMUM", "QUANTIZE", "DEQUANTIZE"):  # Behind the head itself.
        (user,) = (op for op in graph.operators if rounded_head in op.inputs)
        assert graph.name(user) == operator
        rounded_head = user.outputs[0]
    for outer in (first, levels[rounded_head]):
        assert 2**bits < len(outer) <= 256


def test_a_tensor_that_several_layers_read_has_one_grid() -> None:
    content = converted(of_function(NETWORKS["maximum of two layers"], (6,), "float32"))
    graph = Graph(quantized(content, Scheme.parse("ptq_opt_w2a2"), FEATURES))
    for name in ("hidden_0", "hidden_1"):
        inputs = activations.tensor_values(graph, graph.layers()[name], "inputs", FEATURES)
        assert 4 < len(np.unique(inputs)) <= 256


def test_an_error_that_all_actions_share_is_none() -> None:
    shared = of_function(lambda x: head(hidden(x)) + 100 * hidden(x, 9, 1), (6,), "float32")
    graph = Graph(content := converted(shared))
    errors = auto.errors(content, policy_of(content, FEATURES), FEATURES)
    shapes = {name: graph.tensors[op.outputs[0]].shape for name, op in graph.layers().items()}
    (value,) = (name for name, shape in shapes.items() if shape[-1] == 1)
    assert errors[value] < 0.01 * max(errors.values())


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    scale = np.sqrt(1 / np.prod(shape[:-1]))
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def hidden(x: Any, seed: int = 1, width: int = 6) -> Any:
    return x @ drawn(6, width, seed=seed) + 0.3 * drawn(width, seed=seed)


def head(x: Any) -> Any:
    return tf.nn.relu(x @ drawn(x.shape[-1], 16, seed=3) + 0.1) @ drawn(16, 3, seed=4)


def selected(x: Any, end: float = 0) -> Any:
    return tf.where(x >= end, x, tf.exp(x) - 1)


def of_bytes(x: Any, kernel: np.ndarray) -> Any:
    features = tf.reshape(tf.cast(x, tf.float32) / 255, (1, 6))
    return tf.nn.relu(hidden(features, width=len(kernel))) @ kernel


def by_rows(x: Any) -> Any:
    return head(tf.reshape(tf.nn.relu(tf.reshape(x, (1, 2, 3)) @ drawn(3, 8)), (1, 16)))


def on_a_small_image(x: Any, dilations: int = 1) -> Any:
    image = tf.reshape(x, (1, 2, 3, 1))
    features = tf.nn.relu(tf.nn.conv2d(image, drawn(3, 3, 1, 8), 1, "SAME", dilations=dilations))
    return head(tf.reshape(features, (1, 48)))


def mostly_bias(x: Any) -> Any:
    kernel, bias = drawn(6, 16), np.full(16, 0.1, np.float32)
    kernel[:, 0] *= 1e-6
    bias[0] = 0.3
    return tf.nn.relu(x @ kernel + bias) @ drawn(16, 3, seed=4)


ENDS = np.linspace(0.3, 0.8, 6, dtype=np.float32)
NETWORKS: dict[str, Network] = {
    "maximum of two layers": lambda x: head(tf.maximum(hidden(x), hidden(x, 5))),
    "another end for each feature": lambda x: head(tf.clip_by_value(hidden(x), -ENDS, ENDS)),
    "a floor above zero": lambda x: head(tf.maximum(np.float32(0.5), hidden(x))),
    "whole numbers": lambda x: head(tf.cast(tf.cast(9 * hidden(x), tf.int32), tf.float32) / 3),
    "elu": lambda x: head(tf.nn.elu(hidden(tf.nn.elu(9 * x @ drawn(6, 6)), 6))),
    "elu of PyTorch": lambda x: head(selected(hidden(selected(9 * x @ drawn(6, 6)), 6))),
    "silu": lambda x: head(tf.nn.silu(hidden(tf.nn.silu(9 * x @ drawn(6, 6)), 6))),
    "a choice that is no elu": lambda x: head(selected(hidden(x), end=0.5)),
    "tanh beside its input": lambda x: head(3 * hidden(x) + tf.tanh(3 * hidden(x))),
    "a layer of several vectors": by_rows,
    "an image smaller than a kernel": on_a_small_image,
    "a channel that is mostly its bias": mostly_bias,
    "the observation beside a layer": lambda x: head(tf.concat([x, tf.nn.relu(hidden(x))], axis=1)),
}


def error_of(network: Network, *schemes: str, inputs: np.ndarray = FEATURES) -> float:
    """Return the largest difference of heads, in standard deviations of fp32's."""
    content = converted(of_function(network, (6,), inputs.dtype.name))
    expected = heads(content, inputs)
    files = (quantized(content, Scheme.parse(scheme), inputs) for scheme in schemes)
    differences = [np.abs(heads(file, inputs) - expected).max() for file in files]
    return float(max(differences) / expected.std())


@pytest.mark.parametrize("name", NETWORKS)
def test_integers_compute_what_the_network_does(name: str) -> None:
    assert error_of(NETWORKS[name], "int8", "int8_tensor", "ptq_opt_w8a8") < 0.25


def test_a_clip_behind_the_scaling_of_bytes_is_kept() -> None:
    def clipped(x: Any) -> Any:
        return head(tf.nn.relu6(0.1 * tf.cast(x, tf.float32)))

    inputs = np.random.default_rng(0).integers(0, 256, (200, 6), np.uint8)
    assert error_of(clipped, "int8", "int8_tensor", inputs=inputs) < 0.25


def test_layers_of_several_vectors_become_c_but_not_of_several_images(describe: Describe) -> None:
    def by_images(x: Any) -> Any:
        images = tf.nn.conv2d(tf.reshape(x, (2, 3, 1, 1)), drawn(2, 1, 1, 4), 1, "VALID")
        return head(tf.reshape(tf.nn.relu(images), (1, 16)))

    files = {}
    for network in (by_rows, by_images):
        content = converted(of_function(network, (6,), "float32"))
        int8 = quantized(content, Scheme.parse("int8_tensor"), FEATURES)
        files[network] = describe(int8, network.__name__, num_actions=3, observation_shape=[6])
    assert "several images" in refused(c_source.write, files[by_images], code=2)
    compiled.check(files[by_rows], FEATURES, compiled.SANITIZED)


@pytest.mark.parametrize("name", ["elu", "elu of PyTorch", "silu"])
def test_elu_and_silu_are_integer_tables_in_c_too(name: str, describe: Describe) -> None:
    content = converted(of_function(NETWORKS[name], (6,), "float32"))
    int8 = quantized(content, Scheme.parse("int8"), FEATURES)
    artifact = describe(int8, num_actions=3, observation_shape=[6])
    operators = flatbuffer.audit(artifact).operators
    assert operators.count("ELU int8" if "elu" in name.split() else "MUL int8") == 2
    assert not {"EXP float32", "LOGISTIC float32"} & {*operators}
    # The reference kernels lack it.
    in_c, _ = compiled.run(artifact, FEATURES, compiled.SANITIZED)
    assert (in_c == heads(int8, FEATURES)).all(axis=1).mean() == 1.0


def test_numbers_between_layers_are_not_clipped_as_observations_are(describe: Describe) -> None:
    mean = np.array([10, 0, 0, 0, 0, 0], np.float32)
    inputs = FEATURES + mean

    def network(x: Any) -> Any:
        return head(tf.nn.relu(hidden(tf.clip_by_value(x, mean - 1, mean + 1))) - ENDS)

    content = converted(of_function(network, (6,), "float32"))
    int8 = quantized(content, Scheme.parse("int8_tensor"), inputs)
    artifact = describe(int8, num_actions=3, observation_shape=[6])
    fixed_heads, _ = compiled.run(artifact, np.rint(inputs * 65536), fixed=True) / 65536
    expected = heads(int8, inputs)
    assert np.abs(fixed_heads - expected).max() < 0.1 * np.ptp(expected)


def test_weights_in_loops_are_rounded_or_refused() -> None:
    def step(i: Any, y: Any) -> Any:
        return i + 1, tf.tanh(y @ drawn(6, 6))

    def looped(x: Any) -> Any:
        return head(tf.while_loop(lambda i, _: i < 3, step, (0, x))[1])

    content = converted(of_function(looped, (6,), "float32"))
    assert "unroll" in refused(quantized, content, Scheme.parse("int8"), FEATURES, code=2)
    assert error_of(looped, "ptq_w8") < 0.25


def test_a_bias_beyond_32_bits_widens_the_scale_of_its_channel() -> None:
    small = drawn(16, 3, seed=4) * np.array([1, 1e-7, 1e-42], np.float32)
    bias = np.array([0.1, 0.6, 0.2], np.float32)
    assert error_of(lambda x: tf.nn.relu(hidden(x, width=16)) @ small + bias, "int8") < 0.25


def test_weights_that_would_stay_in_float_are_refused() -> None:
    def products_of_a_batch(x: Any) -> Any:
        return head(tf.reshape(tf.reshape(x, (2, 1, 3)) @ drawn(2, 3, 8), (1, 16)))

    def grouped(x: Any, convolve: Any = tf.nn.depthwise_conv2d, channels: int = 2) -> Any:
        image, kernel = tf.reshape(x, (1, 3, 1, 2)), drawn(2, 2, channels, 4 // channels)
        return head(tf.reshape(convolve(image, kernel, (1, 1, 1, 1), "SAME"), (1, 12)))

    for network, schemes, name in (
        (products_of_a_batch, ("int8_tensor", "ptq_opt_w4", "ptq_w2"), "BATCH_MATMUL"),
        (grouped, ("int8", "ptq_opt_w4"), "DEPTHWISE_CONV_2D"),
        (lambda x: grouped(x, tf.nn.conv2d, 1), ("int8", "ptq_opt_w4"), "DEPTHWISE_CONV_2D"),
    ):
        content = converted(of_function(network, (6,), "float32"))
        for scheme in schemes:
            message = refused(quantized, content, Scheme.parse(scheme), FEATURES, code=2)
            assert f"Received: operator={name}" in message
        # As `int8_auto` and `quarl blame` begin.
        message = refused(preparation.prepared, content, FEATURES, None, code=2)
        assert f"Received: operator={name}" in message
    for name, place, scheme, received in (  # A kernel or a bias that is computed.
        *(("head", 1, scheme, "operator=FULLY_CONNECTED") for scheme in ("int8", "ptq_w2")),
        ("hidden_0", 2, "int8", "bias="),
    ):
        graph = Graph(converted(of_function(lambda x: head(hidden(x)), (6,), "float32")))
        layer = graph.layers()[name]
        constant, computed = layer.inputs[place], graph.add(layer.inputs[place], b"_negative")
        graph.operators.insert(0, graph.operator("NEG", [constant], [computed]))
        layer.inputs[place] = computed
        message = refused(quantized, graph.pack(), Scheme.parse(scheme), FEATURES)
        assert f"Received: {received}" in message
    # A product of what is computed from the observation has no weights.
    graph = Graph(converted(of_function(lambda x: head(tf.transpose(x) @ x), (6,), "float32")))
    assert "FULLY_CONNECTED" in {graph.name(operator) for operator in graph.operators}
    for scheme in ("ptq_w2", "ptq_opt_w4"):
        assert quantized(graph.pack(), Scheme.parse(scheme), FEATURES)


def test_int8_stock_is_what_the_converter_makes_of_the_network() -> None:
    networks: list[Network] = [
        lambda x: 2 * tf.tanh(head(tf.nn.relu(np.float32(1) - x))) + 1,
        lambda x: on_a_small_image(x, dilations=2),
        lambda x: head(tf.cast(tf.cast(9 * x, tf.int32), tf.float32)),
        *(NETWORKS[name] for name in ("whole numbers", "a layer of several vectors")),
    ]
    for network in networks:
        converter = of_function(network, (6,), "float32")
        content = converted(converter)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ([features[None]] for features in FEATURES)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = converter.inference_output_type = tf.int8
        expected = heads(converted(converter), FEATURES)
        actual = heads(quantized(content, Scheme.parse("int8_stock"), FEATURES), FEATURES)
        np.testing.assert_array_equal(actual, expected)


def test_int8_stock_of_a_scaled_action(artifacts: Artifacts) -> None:
    factors = np.float32([2, 2]), np.float32([1, 0])
    content = with_scaled_head(artifacts["fp32"].read_bytes(), *factors)
    int8 = quantized(content, Scheme.parse("int8_stock"), OBSERVATIONS)
    expected, actual = heads(content), heads(int8)
    assert np.abs(actual - expected).max() < 0.1 * np.ptp(expected)


def test_heads_are_centred_by_choice_and_only_where_nothing_follows() -> None:
    offset = np.array([9, 9, 9, 1, 1], np.float32)

    def several(x: Any) -> Any:
        return tf.nn.relu(hidden(x, width=16)) @ drawn(16, 5) + offset

    content = converted(of_function(several, (6,), "float32"))
    for choices, ends in ((5, []), ([3, 2], [3])):
        centred = preparation.centred(content, choices)
        expected, actual = (heads(file, FEATURES) for file in (content, centred))
        np.testing.assert_allclose(actual, actions.centred(expected, choices), atol=1e-5)
        for part in np.split(actual, ends, axis=1):
            np.testing.assert_allclose(part.mean(axis=1), 0, atol=1e-5)
    for follows in (tf.nn.relu, tf.nn.softmax):
        activated = converted(of_function(lambda x, f=follows: f(several(x)), (6,), "float32"))
        assert not preparation.separable(Graph(activated))
        assert preparation.centred(activated, choices) == activated
        policy = policy_of(activated, FEATURES)
        assert ptq.copied(policy, activated, Scheme.parse("int8"), FEATURES)[1].head == "q_values"
    assert preparation.centred(content, None) == content


def test_recorded_observations_widen_what_is_calibrated(copy_artifact: Copy) -> None:
    path, far = copy_artifact("fp32"), np.random.default_rng(0).uniform(-9, 9, (300, 4))
    log = path.with_name("log.npy")
    np.save(log, far)
    reference = Policy.load(path)

    def error(*recorded: Path) -> float:
        copied = quantize(path, Scheme.parse("int8"), *recorded)
        policy = Policy.load(copied)
        heads = [(policy.head(x), reference.head(x)) for x in far]
        before, other = snapshot(path.parent), [] if recorded else [log]
        assert str(copied) in refused(quantize, path, Scheme.parse("int8"), *other, code=2)
        quantize(path, Scheme.parse("int8"), *recorded)
        assert snapshot(path.parent) == before
        copied.unlink()
        sidecar_path(copied).unlink()
        # The common part of all actions is no loss.
        return max(float(np.abs(np.ptp(a) - np.ptp(b))) for a, b in heads)

    assert error(log) < error() / 4


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (np.zeros((3, 5)), "[3, 5]"),
        (np.full((3, 4), np.nan), "finite"),
        (np.zeros((3, 4), np.int64), "int64"),
        (np.zeros((0, 4)), "[0, 4]"),
        (b"\x93NUMPY\x01\x00v\x00{'descr", "numpy.save"),
        (b"PK\x03\x04x", "numpy.save"),
        (None, "No such file"),
    ],
)
def test_unfit_observations_are_refused(copy_artifact: Copy, content: Any, text: str) -> None:
    path = copy_artifact("fp32")
    log = path.with_name("log.npy")
    if isinstance(content, bytes):
        log.write_bytes(content)
    elif content is not None:
        np.save(log, content)
    before, message = snapshot(path.parent), refused(quantize, path, Scheme.parse("int8"), log)
    assert text in message
    assert "log.npy" in message
    assert snapshot(path.parent) == before
    assert "ptq_w4" in refused(quantize, path, Scheme.parse("ptq_w4"), log, code=2)
