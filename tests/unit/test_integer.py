"""Integer flatbuffers are made of float ones, and compute what they did."""

from dataclasses import replace

import numpy as np
import pytest
from samples import SIDECAR, Artifacts

from quarl_tf.environments import EnvSpec
from quarl_tf.export import integer
from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.ptq import quantized
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.networks import Design, policy_factory
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import LayerFormat, Recipe, Scheme, TensorFormat
from quarl_tf.spec.architectures import architecture

INT8 = Scheme.parse("int8").recipe


@pytest.fixture(scope="module")
def content(artifacts: Artifacts) -> bytes:
    return artifacts["fp32"].read_bytes()


@pytest.fixture(scope="module")
def observations() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)


def heads(made: bytes, artifacts: Artifacts, observations: np.ndarray) -> np.ndarray:
    sidecar = Policy.load(artifacts["fp32"]).sidecar
    policy = Policy(made, sidecar)
    return np.array([policy.head(observation) for observation in observations])


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
    artifacts: Artifacts,
    content: bytes,
    observations: np.ndarray,
    name: str,
    of_head: str,
    ends: str,
    error: float,
) -> None:
    made = quantized(content, Scheme.parse(name), observations)
    audit = flatbuffer.audit(made)
    *inside, head = [op for op in audit.operators if "CONNECTED" in op]
    assert set(inside) == {"FULLY_CONNECTED int8"}
    assert head == f"FULLY_CONNECTED {of_head}"
    assert {tensor.dtype for tensor in (*audit.inputs, *audit.outputs)} == {ends}
    graph = integer.Graph(made)
    for operator in graph.layers().values():
        kernel = graph.tensors[operator.inputs[1]]
        if name in ("int8", "int8_tensor"):
            assert len(kernel.quantization.scale) == (kernel.shape[0] if name == "int8" else 1)
    wanted, found = (heads(x, artifacts, observations) for x in (content, made))
    assert np.abs(found - wanted).max() < error * np.ptp(wanted)


def test_graphs_pack_again_after_what_nothing_uses_is_gone(content: bytes) -> None:
    graph = integer.Graph(content)
    head = list(graph.layers().values())[-1]
    # A tensor in front of the others, so that their numbers change.
    graph.tensors.insert(0, graph.tensors[head.inputs[1]])
    for operator in graph.operators:
        operator.inputs = [i + 1 if i >= 0 else i for i in operator.inputs]
        operator.outputs = [i + 1 for i in operator.outputs]
    graph.inputs[:] = [i + 1 for i in graph.inputs]
    graph.outputs[:] = [i + 1 for i in graph.outputs]
    graph.model.signatureDefs = []
    assert graph.pack() == graph.pack()


def test_equalised_networks_compute_the_same_with_equal_channels(
    artifacts: Artifacts, content: bytes, observations: np.ndarray
) -> None:
    made = integer.equalised(content)
    wanted, found = (heads(x, artifacts, observations) for x in (content, made))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    graph = integer.Graph(made)
    first, second = list(graph.layers().values())[:2]
    out = np.abs(graph.constant(first.inputs[1])).max(axis=1)
    into = np.abs(graph.constant(second.inputs[1])).max(axis=0)
    if first.builtinOptions.fusedActivationFunction == 1:
        np.testing.assert_allclose(out, into, rtol=1e-3)


def test_images_that_convolutions_leave_one_point_of() -> None:
    spec = EnvSpec((20, 20, 4), "uint8", 4)
    network = policy_factory(spec, Design(architecture("li"), 4), 0)()
    content = converted(of_function(network, spec.observation_shape, "uint8"))
    seen = np.random.default_rng(0).integers(0, 256, (50, 20, 20, 4)).astype(np.uint8)
    sidecar = replace(
        SIDECAR, num_actions=4, observation_shape=[20, 20, 4], observation_dtype="uint8"
    )
    wanted, found = (
        np.array([Policy(each, sidecar).head(one) for one in seen])
        for each in (content, quantized(content, Scheme.parse("int8"), seen))
    )
    assert np.abs(found - wanted).max() < 0.1 * np.ptp(wanted)


def normalised(deviation: list[float], weight: float) -> bytes:
    """Return a policy of four features behind a normaliser; the last one's weights are larger."""
    design = Design(architecture([64, 64]), 2)
    network = policy_factory(EnvSpec((4,), "float32", 2), design, 0)()
    network.get_layer("normalizer").inverse_deviation.assign(1 / np.maximum(deviation, 1e-2))
    kernel = network.get_layer("hidden_0").kernel
    kernel.assign(kernel.numpy() * np.float32([[1], [1], [1], [weight]]))
    return converted(of_function(network, (4,), "float32"))


def played(content: bytes, observations: np.ndarray) -> np.ndarray:
    policy = Policy(content, replace(SIDECAR, num_actions=2))
    return np.array([policy.head(observation) for observation in observations])


@pytest.mark.parametrize("weight", [1, 10, 100])
def test_a_feature_that_hardly_moves_counts_in_int8(weight: float) -> None:
    deviation = [1, 2, 0.3, 1e-4]
    content = normalised(deviation, weight)
    seen = np.random.default_rng(0).normal(0, deviation, (500, 4)).astype(np.float32)
    widened = integer.widened(integer.equalised(content), seen)
    np.testing.assert_allclose(played(widened, seen), played(content, seen), rtol=1e-4, atol=1e-5)
    # What only that feature changes.
    alone = np.float32([0, 0, 0, 1]) * np.linspace(-3e-4, 3e-4, 61, dtype=np.float32)[:, None]
    wanted = played(content, alone)
    found = played(quantized(content, Scheme.parse("int8"), seen), alone)
    without = played(integer.quantized(integer.equalised(content), seen, INT8), alone)
    assert len(np.unique(without, axis=0)) <= 3
    if weight > 1:  # Else it is less than a step of the head.
        error, before = (np.abs(x - wanted).mean() for x in (found, without))
        assert error < 0.4 * before
        assert error < 0.3 * wanted.std()


@pytest.mark.parametrize("deviation", [[1, 2, 0.3, 0], [1, 2, 0.3, 0.011], [1e-4] * 4])
def test_features_that_never_moved_or_move_enough_stay_as_they_are(
    deviation: list[float],
) -> None:
    content = normalised(deviation, 1)
    seen = np.random.default_rng(0).normal(0, deviation, (50, 4)).astype(np.float32)
    assert integer.widened(content, seen) == content


def test_a_refined_network_computes_the_same_and_its_int8_sees_more(
    artifacts: Artifacts, content: bytes, observations: np.ndarray
) -> None:
    refined = integer.refined(content, observations)
    wanted, found = (heads(x, artifacts, observations) for x in (content, refined))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    before, after = (next(iter(flatbuffer.weights(x).values())) for x in (content, refined))
    np.testing.assert_allclose(after, np.concatenate([before, before / 16], axis=1))
    # Two steps of the observation's grid in one feature.
    close = observations[0] + np.float32([1, 0, 0, 0]) * np.linspace(0, 0.05, 40)[:, None]
    coarse, fine = (
        len(np.unique(heads(integer.quantized(x, observations, INT8), artifacts, close), axis=0))
        for x in (content, refined)
    )
    assert coarse <= 3 < fine


def test_bytes_are_not_refined(artifacts: Artifacts) -> None:
    frames = artifacts["frames"].read_bytes()
    assert integer.refined(frames, np.zeros((1, 6, 6, 2), np.uint8)) == frames


def test_kernels_rounded_by_outputs_change_the_head_less(
    artifacts: Artifacts, content: bytes
) -> None:
    rng = np.random.default_rng(1)
    seen = (rng.normal(size=(300, 2)) @ rng.normal(size=(2, 4))).astype(np.float32)
    nearest = Recipe(
        **{
            part: replace(form, weights=form.weights and replace(form.weights, rounding="nearest"))
            for part, form in vars(INT8).items()
            if part != "by_layer"
        }
    )
    wanted = heads(content, artifacts, seen)
    errors = [
        np.square(heads(integer.quantized(content, seen, r), artifacts, seen) - wanted).mean()
        for r in (INT8, nearest)
    ]
    assert errors[0] < 0.8 * errors[1]


def test_centred_heads_have_no_common_part_and_the_same_choice(
    artifacts: Artifacts, content: bytes, observations: np.ndarray
) -> None:
    wanted, found = (heads(x, artifacts, observations) for x in (content, integer.centred(content)))
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(found, wanted - wanted.mean(axis=1, keepdims=True), atol=1e-5)


def test_what_nothing_uses_is_dropped(content: bytes, observations: np.ndarray) -> None:
    made = integer.quantized(content, observations, INT8)
    audit = flatbuffer.audit(made)
    assert audit.weight_dtypes["int8"] == sum(w.size for w in flatbuffer.weights(content).values())
    assert len(made) < len(content)


def test_recipes_that_do_not_fit_are_refused(content: bytes, observations: np.ndarray) -> None:
    by_layer = {"hiden_0": LayerFormat()}
    with pytest.raises(UsageError, match="hidden_0"):
        integer.quantized(content, observations, replace(INT8, by_layer=by_layer))
    four = TensorFormat(bits=4, symmetric=True)
    recipe = Recipe(default=LayerFormat(weights=four, activations=four))
    with pytest.raises(QuarlError, match="weights of 4 bits"):
        integer.quantized(content, observations, recipe)
