"""Networks compute what their design and weights say; those by name are the papers'."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import random_weights, refused

from quarl_tf import networks
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras
from quarl_tf.networks import Design, Weights, acting, build_actor, build_policy
from quarl_tf.networks.inference import Snapshot, forward
from quarl_tf.networks.normalizer import RunningStatistics
from quarl_tf.spec.architectures import Architecture, Convolution, architecture

SPEC = EnvSpec((3,), "float32", 2)
MLP = Design(architecture((5, 4)), 2)
build = partial(build_policy, SPEC, MLP, seed=0)
IMAGES = EnvSpec((20, 20, 2), "uint8", 3)
CONVOLUTIONAL = Architecture((16,), (Convolution(4, 8, 4),))
#: What the papers say of Pong's networks, in millions of weights and biases.
MILLIONS = {"nature": 1.69, "li": 0.68, "policy_a": 1.25, "policy_b": 19.5, "policy_c": 129}


def test_the_same_seed_gives_the_same_initial_weights() -> None:
    options = {"seed": 0}, {"seed": 0}, {"seed": 1}, {"seed": 0, "purpose": "value weights"}
    first, again, *different = (networks.weights(build_policy(SPEC, MLP, **o)) for o in options)
    kinds = {"normalizer": ("mean", "inverse_deviation")}
    kinds |= dict.fromkeys(("hidden_0", "hidden_1", "head"), ("kernel", "bias"))
    assert set(first) == {f"{layer}/{kind}:0" for layer in kinds for kind in kinds[layer]}
    np.testing.assert_equal(again, first)
    for name, value in first.items():
        if name.endswith("/kernel:0"):
            assert not any(np.array_equal(value, weights[name]) for weights in different)


def dense(x: np.ndarray, values: Weights, layer: str) -> np.ndarray:
    return x @ values[f"{layer}/kernel:0"] + values[f"{layer}/bias:0"]


def convolve(images: np.ndarray, values: Weights, layer: str, stride: int) -> np.ndarray:
    """Slide a kernel over images [n, height, width, channels], without padding."""
    kernel = values[f"{layer}/kernel:0"]
    windows = np.lib.stride_tricks.sliding_window_view(images, kernel.shape[:2], axis=(1, 2))
    strided = windows[:, ::stride, ::stride]
    return np.einsum("nhwcij,ijcf->nhwf", strided, kernel) + values[f"{layer}/bias:0"]


def test_images_go_through_convolutions_by_hand() -> None:
    layers = Architecture((5,), (Convolution(3, 8, 4), Convolution(4, 3, 1)))
    design = Design(layers, 6, byte_zero=87, byte_unit=64)
    network = build_policy(EnvSpec((24, 20, 2), "uint8", 6), design, seed=0)
    values = random_weights(network)
    images = np.random.default_rng(0).integers(0, 256, (7, 24, 20, 2), np.uint8)
    maps = np.maximum(convolve((images - 87.0) / 64, values, "convolution_0", 4), 0)
    assert maps.shape == (7, 5, 4, 3)
    maps = np.maximum(convolve(maps, values, "convolution_1", 1), 0)
    expected = dense(np.maximum(dense(maps.reshape(7, -1), values, "hidden_0"), 0), values, "head")
    for actual in (network(images).numpy(), forward(network)(images), Snapshot(network)(images)):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_critics_see_images_beside_actions_between_ones() -> None:
    spec = EnvSpec((8, 8, 1), "uint8", None, (-2.0, 0.0), (2.0, 10.0))
    layers = Architecture((5,), (Convolution(3, 4, 2),))
    network = networks.build_critic(spec, Design(layers, 1), seed=0)
    values, random = random_weights(network), np.random.default_rng(0)
    images = random.integers(0, 256, (7, 8, 8, 1), np.uint8)
    actions = random.uniform([-2, 0], [2, 10], (7, 2)).astype(np.float32)
    maps = np.maximum(convolve(images / 255, values, "convolution_0", 2), 0).reshape(7, -1)
    joined = np.concatenate([maps, (actions - [0, 5]) / [2, 5]], axis=1)
    expected = dense(np.maximum(dense(joined, values, "hidden_0"), 0), values, "head")
    np.testing.assert_allclose(network([images, actions]), expected, rtol=1e-4, atol=1e-5)


FRAMES = EnvSpec((4, 3, 2), "uint8", 2)
STEERED = EnvSpec((3,), "float32", None, (-2.0, 0.0), (2.0, 10.0))
DUELING = Design(architecture((6, 5)), 3, dueling=True)

#: Every kind of network without convolutions.
KINDS_OF_MLP: dict[str, tuple[EnvSpec, Callable[[], keras.Model]]] = {
    "relu": (SPEC, build),
    "tanh": (SPEC, partial(build_policy, SPEC, replace(MLP, activation="tanh", head_gain=1.0), 0)),
    "layer norm": (SPEC, partial(build_policy, SPEC, replace(MLP, layer_norm=True), 0)),
    "dueling": (SPEC, lambda: acting(build_policy(SPEC, DUELING, 0))),
    "frames": (FRAMES, partial(build_policy, FRAMES, MLP, 0)),
    "squashed action": (STEERED, partial(build_actor, STEERED, MLP, 0)),
    "open action": (STEERED, partial(build_actor, STEERED, MLP, 0, stochastic=True)),
}


def observations_of(spec: EnvSpec, rows: int = 50) -> np.ndarray:
    random, shape = np.random.default_rng(2), (rows, *spec.observation_shape)
    if spec.observation_dtype == "uint8":
        return random.integers(0, 256, shape, np.uint8)
    return random.normal(0, 3, shape).astype(np.float32)


@pytest.mark.parametrize("kind", sorted(KINDS_OF_MLP))
def test_snapshot_is_the_network_as_it_stood_at_the_last_refresh(kind: str) -> None:
    spec, factory = KINDS_OF_MLP[kind]
    network, observations = factory(), observations_of(spec)
    random_weights(network, 1)
    snapshot, heads = Snapshot(network), network(observations).numpy()
    np.testing.assert_allclose(snapshot(observations), heads, rtol=1e-5, atol=1e-5)
    assert snapshot(observations).dtype == np.float32
    # Every variable counts, those of the normaliser and of layer normalisation too.
    for variable in network.variables:
        before = snapshot(observations)
        increments = np.linspace(0.1, 0.5, variable.shape.num_elements())
        variable.assign_add(increments.reshape(variable.shape))
        np.testing.assert_array_equal(snapshot(observations), before)
        snapshot.refresh()
        after = network(observations).numpy()
        np.testing.assert_allclose(snapshot(observations), after, rtol=1e-5, atol=1e-5)
        assert ("log_deviation" in variable.name) == np.array_equal(snapshot(observations), before)


def test_dueling_values_are_those_of_the_two_streams_by_hand() -> None:
    network, x = build_policy(SPEC, DUELING, seed=0), observations_of(SPEC, 2000)
    values, choosing = random_weights(network, 3), acting(network)
    shared = np.maximum(dense(network.get_layer("normalizer")(x).numpy(), values, "hidden_0"), 0)
    advantage = dense(np.maximum(dense(shared, values, "hidden_1"), 0), values, "head")
    value = dense(np.maximum(dense(shared, values, "value_hidden"), 0), values, "value")
    assert (advantage.shape, value.shape) == ((2000, 3), (2000, 1))
    expected = value + advantage - advantage.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(network(x).numpy(), expected, rtol=1e-4, atol=1e-5)
    heads = choosing(x).numpy()  # The part that acts shares the weights and has no value.
    np.testing.assert_array_equal(heads.argmax(axis=1), network(x).numpy().argmax(axis=1))
    assert len(np.unique(heads.argmax(axis=1))) == 3
    assert not np.allclose(heads, expected, atol=0.1)
    missing = set(values) - set(networks.weights(choosing))
    assert {name.split("/")[0] for name in missing} == {"value_hidden", "value"}


def test_open_actions_are_in_half_ranges_around_the_middle() -> None:
    network = build_actor(STEERED, MLP, seed=0, stochastic=True)
    values, x = random_weights(network), observations_of(STEERED)
    inner = Snapshot(keras.Model(network.input, network.get_layer("head").output))(x)
    np.testing.assert_allclose(network(x).numpy(), inner * [2, 5] + [0, 5], rtol=1e-5, atol=1e-5)
    squashed = build_actor(STEERED, MLP, seed=0)
    networks.set_weights(squashed, {n: v for n, v in values.items() if "log_deviation" not in n})
    expected = np.tanh(inner) * [2, 5] + [0, 5]
    np.testing.assert_allclose(squashed(x).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "design"),
    [
        (SPEC, Design(architecture((16, 16)), 3)),
        (SPEC, Design(architecture((16, 16)), 3, "tanh", 0.01, layer_norm=True)),
        (SPEC, Design(architecture((16, 16)), 3, dueling=True)),
        (IMAGES, Design(CONVOLUTIONAL, 3, byte_zero=87, byte_unit=60)),
    ],
)
def test_bfloat16_networks_have_a_twin_in_float32(spec: EnvSpec, design: Design) -> None:
    half = build_policy(spec, replace(design, precision="bfloat16"), seed=0)
    twin = build_policy(spec, design, seed=0)
    initial = networks.weights(half)  # Same names, and the same initial weights, all in float32.
    assert list(initial) == list(networks.weights(twin))
    np.testing.assert_equal(initial, networks.weights(twin))
    assert {value.dtype for value in initial.values()} == {np.dtype(np.float32)}
    hidden = [layer for layer in half.layers if layer.name.startswith(("hidden", "conv", "value_"))]
    assert {layer.compute_dtype for layer in hidden} == {"bfloat16"}
    assert half.get_layer("head").compute_dtype == half.output.dtype == "float32"
    choosing, observations = acting(half), observations_of(spec)
    snapshot = Snapshot(choosing)
    before = snapshot(observations)
    np.testing.assert_array_equal(before, forward(choosing)(observations))
    # The twin takes trained weights, and computes nearly the same.
    networks.set_weights(twin, random_weights(half))
    np.testing.assert_array_equal(snapshot(observations), before)
    snapshot.refresh()
    np.testing.assert_array_equal(snapshot(observations), forward(choosing)(observations))
    assert not np.array_equal(snapshot(observations), before)
    rough, exact = half(observations).numpy(), twin(observations).numpy()
    assert 1e-5 < np.abs(rough - exact).max() < 0.05 * np.abs(exact).max()


def test_weights_of_another_network_are_refused() -> None:
    network = build()
    before = networks.weights(network)
    fewer = {name: value for name, value in before.items() if name != "head/bias:0"}
    for values in (fewer, before | {"head/kernel:0": np.zeros((4, 3), np.float32)}):
        assert "do not fit the network" in refused(networks.set_weights, network, values)
    np.testing.assert_equal(networks.weights(network), before)


@pytest.mark.parametrize(("offset", "tolerance"), [(0, 1e-9), (1e6, 1e-6)])  # Also far from zero.
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), seed=st.integers(0, 2**16))
def test_running_statistics(sizes: list[int], seed: int, offset: float, tolerance: float) -> None:
    random, shape = np.random.default_rng(seed), (sum(sizes), 3)
    observations = random.normal([0, -3, 100], [1, 0.02, 30], shape).astype(np.float32)
    observations += np.float32(offset)
    collected = RunningStatistics(SPEC)
    for batch in np.split(observations, np.cumsum(sizes)[:-1]):
        collected.update(batch)
    exact, variance = observations.astype(np.float64), collected.squares / collected.count
    assert collected.count == len(observations)
    np.testing.assert_allclose(collected.mean, exact.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(variance, exact.var(axis=0), rtol=tolerance, atol=1e-9)


def test_normaliser_cuts_off_at_five_deviations() -> None:
    network = build()
    layer = network.get_layer("normalizer")
    layer.mean.assign([1.0, 2.0, 3.0])
    layer.inverse_deviation.assign([1.0, 0.5, 2.0])
    observation = np.array([[7.0, 11.0, 1.0], [-3.5, 3.0, -1e9]], np.float32)
    np.testing.assert_array_equal(layer(observation).numpy(), [[5.0, 4.5, -4.0], [-4.5, 0.5, -5.0]])
    collected = RunningStatistics(SPEC)
    collected.update(np.full((50, 3), 7, np.float32))
    collected.apply_to([network])
    assert np.abs(layer(np.full((1, 3), 7.001, np.float32)).numpy()).max() < 0.11


@pytest.mark.parametrize("name", MILLIONS)
def test_networks_for_images_are_those_of_the_papers(name: str) -> None:
    (units,), convolutions = architecture(name)
    kernels = [(kernel, stride) for _, kernel, stride in convolutions]
    assert kernels == [(8, 4), (4, 2), (3, 1)][: len(kernels)]
    edge, maps, count = 84, 4, 0
    for filters, kernel, stride in convolutions:
        count += filters * (maps * kernel**2 + 1)
        edge, maps = (edge - kernel) // stride + 1, filters
    count += (edge**2 * maps + 1) * units + (units + 1) * 6
    assert count / 1e6 == pytest.approx(MILLIONS[name], rel=5e-3)
