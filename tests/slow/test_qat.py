"""Quantisation-aware training: plain until the delay, quantised on frozen grids from then on."""

from __future__ import annotations

import copy
import csv
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarl_tf import agents, networks, presets
from quarl_tf.agents.distributions import Categorical
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import inference
from quarl_tf.networks.build import Design, actor_factory, policy_factory
from quarl_tf.networks.inference import Snapshot
from quarl_tf.quantization import preparing, qat
from quarl_tf.quantization.fake_quantizer import DelayedQuantizer
from quarl_tf.quantization.grid import fake_quantize, frozen_grid, grid_between, snap
from quarl_tf.spec import Quantization, Run, TensorFormat
from quarl_tf.spec.architectures import Architecture, Convolution
from quarl_tf.store.records import TrainingRecord
from quarl_tf.store.workspace import Workspace
from quarl_tf.study.trunks import trunk_path
from quarl_tf.training import checkpoint, loop

BITS = range(2, 9)


def aware(bits: int = 4, **options: Any) -> Quantization:
    return Quantization.from_mapping({"bits": bits, "delay": 1, **options})


class Quantized:
    """A quantiser with its variables, outside of any network."""

    def __init__(self, quantizer: DelayedQuantizer, shape: tuple[int | None, ...]) -> None:
        self.quantizer = quantizer
        self.variables = quantizer.build(shape, "x", keras.layers.Layer())

    def __call__(self, values: Any, *, training: bool = False) -> np.ndarray:
        found = self.quantizer(tf.convert_to_tensor(values), training, self.variables)
        return np.asarray(found)

    def freeze(self, kernel: np.ndarray | None = None) -> Quantized:
        self.quantizer.freeze(self.variables, kernel)
        return self

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        return self.variables["low"].numpy(), self.variables["high"].numpy()

    def gradients(self, values: np.ndarray, upstream: np.ndarray, *of: Any) -> list[np.ndarray]:
        inputs = tf.constant(values)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(self.quantizer(inputs, True, self.variables) * upstream)
        return [np.asarray(g) for g in tape.gradient(loss, [inputs, *of])]


def activation(quantization: Quantization, features: int = 5, **options: Any) -> Quantized:
    quantizer = DelayedQuantizer(quantization, quantization.bits, **options)
    return Quantized(quantizer, (None, features))


def watched(quantization: Quantization, low: float, high: float, **options: Any) -> Quantized:
    """Return the frozen quantiser of an activation that reached from low to high."""
    quantized = activation(quantization, **options)
    quantized(np.float32([[low, high]]), training=True)
    return quantized.freeze()


def of_kernel(quantization: Quantization, kernel: np.ndarray, **options: Any) -> Quantized:
    quantizer = DelayedQuantizer(quantization, quantization.bits, kernel=True, **options)
    return Quantized(quantizer, kernel.shape).freeze(kernel)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# What is watched.

BATCHES = [np.float32([[1, -1, 3]]), np.float32([[5, -2, 0]]), np.float32([[0, 0, 1]])]


@pytest.mark.parametrize(
    ("ranges", "low", "high"),
    [
        ("extremes", -2, 5),
        # The first batch's, then 99 parts of what was with one of what is.
        ("moving_average", 0.99 * (0.99 * -1 + 0.01 * -2), 0.99 * (0.99 * 3 + 0.01 * 5) + 0.01),
    ],
)
def test_ranges_by_hand(ranges: str, low: float, high: float) -> None:
    quantized = activation(aware(ranges=ranges))
    for batch in BATCHES:
        np.testing.assert_array_equal(quantized(batch, training=True), batch)
    np.testing.assert_allclose(quantized.ends, (low, high), rtol=1e-6)


def test_percentiles_leave_out_a_thousandth_at_each_end() -> None:
    quantized = activation(aware(ranges="percentile"))
    batch = np.random.default_rng(0).permutation(np.arange(-1000, 1001, dtype=np.float32))
    quantized(batch[None], training=True)
    np.testing.assert_array_equal(quantized.ends, (-998, 998))
    quantized(2 * batch[None], training=True)
    np.testing.assert_allclose(quantized.ends, (-0.99 * 998 - 0.01 * 1996, 0.99 * 998 + 19.96))


def test_only_training_passes_are_watched() -> None:
    quantized = activation(aware())
    quantized(BATCHES[0])
    # As it was made: nothing lies between them.
    np.testing.assert_array_equal(quantized.ends, (1, -1))


def test_a_tensor_that_is_always_0_was_watched_all_the_same() -> None:
    quantized = activation(aware(ranges="extremes"))
    quantized(np.zeros((1, 5), np.float32), training=True)
    assert not quantized.freeze()(np.zeros((1, 5), np.float32)).any()


def test_ranges_of_bfloat16_layers_are_float32() -> None:
    quantized = activation(aware(8, ranges="extremes"), dtype="bfloat16")
    seen = tf.constant([[-1.0, 0.0, 3.0, 0.5, 2.0]], tf.bfloat16)
    tensor = quantized.quantizer(seen, True, quantized.variables)
    assert tensor.dtype == tf.bfloat16
    np.testing.assert_array_equal(tensor.numpy(), seen.numpy())
    np.testing.assert_array_equal(quantized.ends, (-1, 3))


# Freezing.


@pytest.mark.parametrize("rule", ["nearest", "paper"])
@pytest.mark.parametrize(("low", "high"), [(2, 5), (-5, -2), (-1, 3), (-0.037, 8.1)])
@pytest.mark.parametrize("bits", BITS)
def test_frozen_ranges_hold_0_exactly(bits: int, low: float, high: float, rule: str) -> None:
    quantized = watched(aware(bits, rule=rule), low, high)
    frozen = quantized.ends
    assert frozen[0] <= 0 <= frozen[1]
    assert not quantized(np.zeros((1, 5), np.float32)).any()
    step = (frozen[1] - frozen[0]) / (2**bits - (rule == "nearest"))
    # It is moved by less than a step to have 0 among its codes.
    np.testing.assert_allclose(frozen, (min(low, 0), max(high, 0)), atol=float(step))


def test_frozen_ranges_stay() -> None:
    quantized = watched(aware(ranges="extremes"), -1, 1)
    before = quantized.ends
    quantized(np.float32([[-100, 100]]), training=True)
    np.testing.assert_array_equal(quantized.ends, before)
    assert np.abs(quantized(np.float32([[-100, 100]]))).max() <= 1.1


def test_a_following_range_grows_with_the_next_freeze() -> None:
    quantized = watched(aware(8, ranges="following"), -1, 1)
    first = quantized.ends
    reached = np.float32([[-1, 101]])
    np.testing.assert_array_equal(quantized(reached, training=True).max(), first[1])
    np.testing.assert_array_equal(quantized.ends, first)
    quantized.freeze()
    # A hundredth of the way, from the range seen and not from the one on the grid.
    np.testing.assert_allclose(quantized.ends, (-1, 2), atol=3 / 255)


def test_what_was_never_watched_cannot_be_frozen() -> None:
    with pytest.raises(UsageError, match=r"Nothing was learned .* longer\. Received: delay=1"):
        activation(aware()).freeze()


def test_pre_activations_of_tanh_end_where_its_table_does() -> None:
    quantized = watched(aware(8), -40, 2, limit=3.5)
    low, high = quantized.ends
    assert low == pytest.approx(-3.5, abs=0.03)
    assert high == pytest.approx(2, abs=0.03)


@pytest.mark.parametrize("bits", BITS)
def test_kernels_are_symmetric_and_have_no_lowest_code(bits: int) -> None:
    kernel = normal(30, 40) + np.float32(0.5)
    quantized = of_kernel(aware(bits), kernel)
    low, high = quantized.ends
    assert -low == high == np.abs(kernel).max()
    found = np.unique(quantized(np.linspace(low, high, 1200, dtype=np.float32)))
    assert len(found) == 2**bits - 1
    np.testing.assert_allclose(found, -found[::-1])
    step = high / (2 ** (bits - 1) - 1)
    np.testing.assert_allclose(quantized(kernel), np.rint(kernel / step) * step, atol=1e-5)


def test_each_output_channel_has_its_own_grid() -> None:
    kernel = normal(3, 3, 2, 4) * np.float32([0.1, 1, 10, 0])
    quantized = of_kernel(aware(3), kernel, per_channel=True)
    low, high = quantized.ends
    np.testing.assert_array_equal(high[:3], np.abs(kernel).max(axis=(0, 1, 2))[:3])
    np.testing.assert_array_equal(low, -high)
    found = quantized(kernel)
    alone = [of_kernel(aware(3), kernel[..., i])(kernel[..., i]) for i in range(4)]
    np.testing.assert_array_equal(found, np.stack(alone, axis=-1))
    assert not found[..., 3].any()


# Quantised values.


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("low", "high"), [(-1.3, 2.9), (0, 0.007), (-600, 11)])
def test_quantised_values_are_snapped_bit_for_bit(bits: int, low: float, high: float) -> None:
    quantized = watched(aware(bits), low, high)
    ends = quantized.ends
    values = np.random.default_rng(0).uniform(2 * low, 2 * high, (200, 5)).astype(np.float32)
    found = quantized(values)
    form = TensorFormat(bits=bits)
    np.testing.assert_array_equal(found, snap(values, frozen_grid(*ends, form), form))
    theirs = tf.quantization.fake_quant_with_min_max_vars(values, *ends, num_bits=bits)
    np.testing.assert_array_equal(found, theirs)
    assert 2 <= len(np.unique(found)) <= 2**bits
    inside = values.clip(*ends)
    assert np.abs(found - inside).max() <= (ends[1] - ends[0]) / (2**bits - 1) / 2 * 1.0001


@pytest.mark.parametrize("bits", BITS)
def test_the_published_rule_is_that_of_the_affine_quantiser(bits: int) -> None:
    values = normal(50, 20)
    low, high = values.min(), values.max()
    step = (high - low) / 2**bits
    # Beside a multiple of the step float32 may take the other one.
    apart = np.abs(values / step - np.rint(values / step)) > 1e-3
    expected = fake_quantize(values, TensorFormat(bits=bits, step="paper", rounding="floor"))
    for quantized in (
        watched(aware(bits, rule="paper"), float(low), float(high), features=20),
        of_kernel(aware(bits, rule="paper"), values),
    ):
        np.testing.assert_allclose(quantized(values)[apart], expected[apart], rtol=1e-5)
        assert len(np.unique(quantized(values))) <= 2**bits + 1  # As published: one too many.


# Gradients.

REACHING_OUT = np.float32([[-9, -0.7, 0.2, 0.9, 9]])
UPSTREAM = np.float32([[0.1, -0.3, 7, 1e-9, -2]])


@pytest.mark.parametrize("rule", ["nearest", "paper"])
@pytest.mark.parametrize("gradient", ["straight_through", "clipped"])
def test_gradients_are_the_upstream_ones(gradient: str, rule: str) -> None:
    quantized = activation(aware(gradient=gradient, rule=rule))
    (before,) = quantized.gradients(REACHING_OUT, UPSTREAM)
    np.testing.assert_array_equal(before, UPSTREAM)
    (after,) = watched(aware(gradient=gradient, rule=rule), -1, 1).gradients(REACHING_OUT, UPSTREAM)
    passing = np.bool_([1, 1, 1, 1, 1] if gradient == "straight_through" else [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(after, np.where(passing, UPSTREAM, 0))


def test_learned_steps_have_the_gradient_of_their_paper() -> None:
    # Three bits from 0 to 3.5: a step of a half, seven times.
    quantized = watched(aware(3, learned_steps=True), 0, 3.5)
    stretch = quantized.variables["log_stretch"]
    values = np.float32([[-5, 0.65, 0.2, 1.35, 4.5]])
    np.testing.assert_array_equal(quantized(values), [[0, 0.5, 0, 1.5, 3.5]])
    to_inputs, to_stretch = quantized.gradients(values, UPSTREAM, stretch)
    np.testing.assert_allclose(to_inputs, UPSTREAM * [0, 1, 1, 1, 0])
    by_hand = (UPSTREAM * [0, 1 - 1.3, 0 - 0.4, 3 - 2.7, 7]).sum()
    # Five features share the step. A logarithm moves its argument by as much times as large.
    np.testing.assert_allclose(to_stretch, 0.5 * by_hand / np.sqrt(5 * 7), rtol=1e-5)


def test_a_learned_step_stretches_the_range_and_keeps_0() -> None:
    quantized = watched(aware(3, learned_steps=True), -4, 3)
    quantized.variables["log_stretch"].assign(np.log(np.float32(2)))
    values = np.float32([[-20, -2.9, 0.9, 1.1, 20]])
    np.testing.assert_allclose(quantized(values), [[-8, -2, 0, 2, 6]], rtol=1e-6)
    ends = quantized.quantizer.ends({k: v.numpy() for k, v in quantized.variables.items()})
    np.testing.assert_allclose(ends, (-8, 6), rtol=1e-6)


@pytest.mark.parametrize("learning_rate", [1e-3, 0.1])
def test_steps_move_in_proportion(learning_rate: float) -> None:
    quantized = of_kernel(aware(8, learned_steps=True), normal(30, 40) / 1000)
    stretch = quantized.variables["log_stretch"]
    optimizer = keras.optimizers.legacy.Adam(learning_rate)
    for _ in range(50):  # Down: the smaller the step, the smaller the loss.
        with tf.GradientTape() as tape:
            values = quantized.quantizer(normal(30, 40), True, quantized.variables)
            loss = tf.reduce_sum(values**2)
        optimizer.apply_gradients([(tape.gradient(loss, stretch), stretch)])
    assert -60 * learning_rate < stretch.numpy() < -10 * learning_rate


def test_the_gradient_of_a_kernels_step_is_scaled_by_all_its_weights() -> None:
    quantized = of_kernel(aware(3, learned_steps=True), np.float32([[-1, 0], [2, 3]]))
    kernel = np.float32([[-9, 0.4], [1.3, 2.7]])
    ones = np.ones((2, 2), np.float32)
    _, to_stretch = quantized.gradients(kernel, ones, quantized.variables["log_stretch"])
    by_hand = -3 + (0 - 0.4) + (1 - 1.3) + (3 - 2.7)
    # The largest code is 3.
    np.testing.assert_allclose(to_stretch, by_hand / np.sqrt(4 * 3), rtol=1e-5)


def test_learned_steps_wait_for_the_delay() -> None:
    quantized = activation(aware(learned_steps=True))
    np.testing.assert_array_equal(quantized(REACHING_OUT, training=True), REACHING_OUT)
    gradients = quantized.gradients(REACHING_OUT, UPSTREAM, quantized.variables["log_stretch"])
    np.testing.assert_array_equal(gradients[0], UPSTREAM)
    assert gradients[1] == 0


# Networks.

VECTORS = EnvSpec((6,), "float32", 3)
CONTROL = EnvSpec((6,), "float32", None, (-2.0, -1.0), (2.0, 3.0))
IMAGES = EnvSpec((12, 12, 2), "uint8", 3)
SMALL = Architecture((16, 16))
FACTORIES: dict[str, networks.NetworkFactory] = {
    "relu": policy_factory(VECTORS, Design(SMALL, 3), 0),
    "tanh": policy_factory(VECTORS, Design(SMALL, 3, "tanh", 0.01), 0),
    "dueling": policy_factory(VECTORS, Design(SMALL, 3, dueling=True), 0),
    "deterministic": actor_factory(CONTROL, Design(SMALL, 2), 0),
    "stochastic": actor_factory(CONTROL, Design(SMALL, 2, "tanh"), 0, stochastic=True),
    "images": policy_factory(
        IMAGES, Design(Architecture((16,), (Convolution(4, 4, 2), Convolution(8, 3, 1))), 3), 0
    ),
}


def seen(name: str, count: int = 300) -> np.ndarray:
    if name == "images":
        return np.random.default_rng(1).integers(0, 256, (count, 12, 12, 2), dtype=np.uint8)
    return 2 * normal(count, 6, seed=1)


def frozen(name: str, quantization: Quantization) -> keras.Model:
    network = qat.quantize(FACTORIES[name](), quantization)
    qat.watch(network, seen(name))
    qat.freeze(network)
    return network


@pytest.mark.parametrize("name", FACTORIES)
def test_until_the_delay_a_network_is_the_plain_one(name: str) -> None:
    plain, network = FACTORIES[name](), qat.quantize(FACTORIES[name](), aware(2))
    observations = seen(name)
    expected = plain(observations).numpy()
    for training_pass in (True, False):
        found = network(observations, training=training_pass).numpy()
        np.testing.assert_array_equal(found, expected)
    named = networks.weights(network)
    assert len(named) == len(network.variables)  # No two have the same name.
    for variable, value in networks.weights(plain).items():
        np.testing.assert_array_equal(named[variable], value)

    def gradients(model: keras.Model) -> dict[str, np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(observations, training=True) ** 2)
        variables = [v for v in model.trainable_variables if "log_deviation" not in v.name]
        found = tape.gradient(loss, variables)
        return {v.name: g.numpy() for v, g in zip(variables, found, strict=True)}

    of_plain, of_network = gradients(plain), gradients(network)
    assert of_plain.keys() == of_network.keys()
    for variable, gradient in of_plain.items():
        np.testing.assert_array_equal(of_network[variable], gradient)


def layers_of(network: keras.Model, name: str) -> dict[str, np.ndarray]:
    """Return what every quantised layer puts out."""
    layers = qat.quantized_layers(network)
    model = keras.Model(network.input, [layer.output for layer in layers])
    outputs = model(seen(name, 2000))
    return {layer.name: out.numpy() for layer, out in zip(layers, outputs, strict=True)}


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("relu", {"normalizer": 7, "hidden_0": 5, "hidden_1": 5, "head": 7}),
        # What feeds a tanh is an index into a table of 8 bits.
        (
            "tanh",
            {"normalizer": 7, "hidden_0": 8, "hidden_0_tanh": 5}
            | {"hidden_1": 8, "hidden_1_tanh": 5, "head": 7},
        ),
        ("dueling", {"normalizer": 7, "hidden_0": 5, "hidden_1": 5, "head": 7}),
        (
            "deterministic",
            {"normalizer": 7, "hidden_0": 5, "hidden_1": 5, "head": 8, "squash": 7},
        ),
        (
            "images",
            {"byte_scaling": 7, "convolution_0": 5, "convolution_1": 5, "hidden_0": 5, "head": 7},
        ),
    ],
)
def test_every_layers_output_has_its_width(name: str, widths: dict[str, int]) -> None:
    network = frozen(name, aware(5, edge_bits=7))
    found = layers_of(network, name)
    counts = {layer: len(np.unique(values)) for layer, values in found.items()}
    assert counts.keys() == widths.keys()
    for layer, width in widths.items():
        assert 2 ** (width - 1) - 2 < counts[layer] <= 2**width
    for layer in qat.quantized_layers(network):
        for quantizer, variables, kernel in layer.quantizers():
            if kernel is None:
                continue
            assert quantizer.bits == (7 if layer.name == "head" else 5)
            channels = kernel.shape[-1:] if layer.name.startswith("conv") else ()
            assert variables["high"].shape == channels
            values = quantizer(kernel, False, variables).numpy()
            assert len(np.unique(values)) <= 2**quantizer.bits * (channels[0] if channels else 1)


def test_only_the_value_of_a_dueling_network_stays_in_float() -> None:
    network = frozen("dueling", aware(2))
    names = {layer.name for layer in qat.quantized_layers(network)}
    assert names == {"normalizer", "hidden_0", "hidden_1", "head"}
    # Advantages add up to 0, so the mean is the value.
    values = network(seen("dueling", 2000)).numpy().mean(axis=1)
    assert len(np.unique((1e4 * values / np.abs(values).max()).round())) > 2**8


def test_dense_kernels_have_a_grid_per_output_if_asked_for() -> None:
    network = frozen("relu", aware(per_channel=True))
    shapes = {
        layer.name: variables["high"].shape
        for layer in qat.quantized_layers(network)
        for _, variables, kernel in layer.quantizers()
        if kernel is not None
    }
    assert shapes == {"hidden_0": (16,), "hidden_1": (16,), "head": (3,)}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bits": 2},
    {"bits": 8},
    {"edge_bits": 3},
    {"rule": "paper"},
    {"ranges": "extremes"},
    {"ranges": "percentile"},
    {"ranges": "following"},
    {"gradient": "clipped"},
    {"per_channel": True},
    {"learned_steps": True},
    {"learned_steps": True, "per_channel": True, "bits": 8},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("tanh", options) for options in OPTIONS),
        *((name, options) for name in ("relu", "deterministic") for options in OPTIONS[:2]),
    ],
    ids=str,
)
def test_every_way_of_computing_a_frozen_network_is_the_same(
    name: str, options: dict[str, Any]
) -> None:
    network = frozen(name, aware(**options))
    for variable in network.trainable_variables:
        if variable.name.endswith("log_stretch:0"):
            variable.assign(variable - 0.1)  # Learned since.
    observations = seen(name, 1000)
    in_tensorflow = network(observations).numpy()
    step = qat.head_step(network)
    ways = [Snapshot(network)(observations), network(observations, training=True).numpy()]
    if options in ({}, {"learned_steps": True}):
        ways.append(inference.forward(network)(observations))  # By XLA.
    for heads in ways:
        assert heads.dtype == np.float32
        off = np.abs(heads - in_tensorflow) / step
        # Sums in another order take the other one of two codes where they lie between them, which
        # by the published rule is on every code.
        assert (off > 1e-3).mean() < 0.03
        assert off.max() < 10 or "rule" in options


def test_copies_get_the_ranges_at_the_delay() -> None:
    network, target = (qat.quantize(FACTORIES["relu"](), aware()) for _ in range(2))
    observations = seen("relu")
    qat.watch(network, observations)
    np.testing.assert_array_equal(target(observations), FACTORIES["relu"]()(observations))
    qat.freeze(network, [target])
    np.testing.assert_array_equal(target(observations), network(observations))


def test_a_layer_without_a_rule_is_named() -> None:
    factory = policy_factory(VECTORS, Design(SMALL, 3, layer_norm=True), 0)
    with pytest.raises(UsageError, match=r"Received: layer='hidden_0_norm' \(LayerNormalization\)"):
        qat.quantize(factory(), aware())


def test_ranges_that_are_not_finite_are_refused_naming_the_layer() -> None:
    network = qat.quantize(FACTORIES["relu"](), aware(ranges="extremes"))
    qat.watch(network, np.full((4, 6), 2.0, np.float32))
    kernel = network.get_layer("hidden_1").trainable_variables[0]
    kernel.assign(kernel * np.float32(np.inf))
    with pytest.raises(QuarlError, match=r"not finite.*layer='hidden_1'"):
        qat.freeze(network)


# Agents that see images: policy and value share layers.


@pytest.mark.parametrize("precision", presets.PRECISIONS)
def test_agents_of_images_are_plain_until_the_delay_and_quantised_after(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EnvSpec((36, 36, 2), "uint8", 3)
    overrides = {
        "network": "li",
        "num_envs": 2,
        "train_frequency": 16,
        "minibatch_size": 8,
        "epochs": 2,
        "precision": precision,
    }
    preset = presets.load("ppo", "PongNoFrameskip-v4", overrides)
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (9, 2, 36, 36, 2), dtype=np.uint8)
    rewards = random.normal(size=(8, 2)).astype(np.float32)

    def play(agent: agents.Agent) -> dict[str, float]:
        nowhere, everywhere = np.zeros(2, np.bool_), np.ones(2, np.bool_)
        for observations, reward in zip(frames, rewards, strict=False):
            actions = agent.act(observations, 0.5)
            agent.observe(Tick(observations, actions, reward, nowhere, everywhere))
        return agent.learn(frames[-1])

    plain = agents.build("ppo", spec, preset, 0)
    agent = agents.build("ppo", spec, preset, 0, preparing(aware(3)))
    assert [play(agent) for _ in range(2)] == [play(plain) for _ in range(2)]
    found = networks.weights(agent.network)
    for name, value in networks.weights(plain.network).items():
        np.testing.assert_array_equal(found[name], value)

    qat.freeze(agent.network, agent.targets)
    agent.refresh()
    before = networks.weights(agent.network)
    play(agent)
    after = networks.weights(agent.network)
    for name, value in before.items():
        ended = name.removesuffix(":0").rsplit("_", 1)[-1]
        moved = not np.array_equal(after[name], value)
        assert moved == (ended in ("kernel", "bias") or name.endswith(("/kernel:0", "/bias:0")))
    many = random.integers(0, 256, (600, 36, 36, 2), dtype=np.uint8)
    heads, values = agent._model.predict(many)  # type: ignore[attr-defined]
    np.testing.assert_allclose(heads, agent.network(many), rtol=1e-5, atol=1e-6)
    assert len(np.unique(heads)) <= 2**8 < len(np.unique(values))


# Whole trainings.

_COMMON = {
    "steps": 800,
    "num_envs": 2,
    "network": [8],
    "train_frequency": 32,
    "evaluation_every": 200,
    "evaluation_episodes": 2,
    "checkpoint_every": 200,
}
_OFF_POLICY = {"learning_starts": 64, "batch_size": 8, "gradient_steps": 2}
_PPO = {"minibatch_size": 16, "epochs": 1}
DELAY = 500

PLAIN = {
    "dqn": Run("dqn", "CartPole-v1", 3, {**_COMMON, **_OFF_POLICY, "target_update": 10}),
    "dueling": Run("dqn", "CartPole-v1", 4, {**_COMMON, **_OFF_POLICY, "dueling": True}),
    "ddpg": Run("ddpg", "MountainCarContinuous-v0", 3, {**_COMMON, **_OFF_POLICY}),
    "ppo": Run("ppo", "CartPole-v1", 3, {**_COMMON, **_PPO}),
    "a2c": Run("a2c", "CartPole-v1", 3, {**_COMMON, "minibatch_size": 32}),
}
RUNS = {
    name: replace(run, quantization=Quantization(bits=4, delay=DELAY))
    for name, run in PLAIN.items()
}
PLAIN["following"] = PLAIN["dqn"]
RUNS["following"] = replace(
    PLAIN["dqn"], quantization=Quantization(bits=4, delay=DELAY, ranges="following")
)

#: Those that are trained to their end: A2C and PPO are of one class, a dueling network is a DQN's.
WHOLE = ("dqn", "ddpg", "ppo", "following")


class _CutError(Exception):
    """Stands for a kill."""


def silent(*_: Any) -> None:
    """Show no progress."""


def products(folder: Path) -> list[bytes]:
    names = ("network.npz", "calibration.npz", "progress.csv")
    return [(folder / name).read_bytes() for name in names]


#: Steps after which a copy of a run's folder is kept: as if it had been killed there.
CUTS = {"before": 450, "after": 700}

Trained = Callable[[str], tuple[Workspace, Run]]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function that trains one of `RUNS`, once, and keeps what a kill would leave.

    What is not one of `WHOLE` is trained no further than to the first such kill.
    """
    root = tmp_path_factory.mktemp("quantized")
    done: dict[str, Workspace] = {}

    def train(name: str) -> tuple[Workspace, Run]:
        run = RUNS[name]
        if name not in done:
            workspace = Workspace(root / name / "whole")

            def update(step: int, *_: Any) -> None:
                for cut, after in CUTS.items():
                    there = root / name / cut
                    if step > after and not there.exists():
                        shutil.copytree(workspace.root, there)
                        if name not in WHOLE:
                            raise _CutError

            with nullcontext() if name in WHOLE else pytest.raises(_CutError):
                loop.train(workspace, run, update)
            done[name] = workspace
        return done[name], run

    return train


def load_checkpoint(folder: Path) -> tuple[dict[str, np.ndarray], Any]:
    found = checkpoint.load_newest(folder / "checkpoints")
    assert found is not None
    return found


@pytest.mark.parametrize("name", RUNS)
def test_until_the_delay_training_is_the_plain_one(
    name: str, quantized: Trained, tmp_path: Path
) -> None:
    workspace, run = quantized(name)

    def cut(step: int, *_: Any) -> None:
        if step > CUTS["before"]:
            raise _CutError

    with pytest.raises(_CutError):
        loop.train(Workspace(tmp_path), PLAIN[name], cut)
    plain, plain_state = load_checkpoint(Workspace(tmp_path).run_dir(PLAIN[name].run_id))
    folder = workspace.root.parent / "before" / "runs" / run.run_id
    aware_of, aware_state = load_checkpoint(folder)
    assert 400 <= aware_state["step"] == plain_state["step"] < CUTS["before"]
    learned = [key for key in plain if not key.startswith("variable/")]
    assert any("kernel" in key for key in learned)
    assert aware_state.pop("run") != plain_state.pop("run")
    assert min(aware_state.pop("seconds"), plain_state.pop("seconds")) > 0
    assert aware_state == plain_state  # Losses, returns and draws among it.
    for key in learned:
        np.testing.assert_array_equal(aware_of[key], plain[key], err_msg=key)
    # And all the others: targets, moments, critics, which ranges among them only displace.
    values = {array.tobytes() for key, array in aware_of.items() if key.startswith("variable/")}
    assert values >= {plain[key].tobytes() for key in plain.keys() - set(learned)}


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("dqn", "before"),
        ("dqn", "after"),
        ("ddpg", "after"),
        ("ppo", "after"),
        ("following", "after"),
    ],
)
def test_a_training_killed_before_or_after_the_delay_ends_with_the_same_bytes(
    name: str, cut: str, quantized: Trained, tmp_path: Path
) -> None:
    workspace, run = quantized(name)
    shutil.copytree(workspace.root.parent / cut, tmp_path, dirs_exist_ok=True)
    folder = Workspace(tmp_path).run_dir(run.run_id)
    assert (load_checkpoint(folder)[1]["step"] >= DELAY) == (cut == "after")
    loop.train(Workspace(tmp_path), run, silent)
    assert products(folder) == products(workspace.run_dir(run.run_id))


@pytest.mark.parametrize(
    ("name", "bits"), [("dqn", 2), ("ddpg", 8), ("ppo", 8), ("ppo", 3), ("following", 3)]
)
def test_a_training_that_goes_on_from_one_at_other_bits_ends_with_the_same_bytes(
    name: str, bits: int, quantized: Trained, tmp_path: Path
) -> None:
    workspace, run = quantized(name)
    trunk = tmp_path / "trunk.npz"
    ranges = RUNS[name].quantization.ranges
    values = {"bits": bits, "delay": DELAY, "ranges": ranges}
    other = replace(run, quantization=Quantization.from_mapping(values))

    def cut(step: int, *_: Any) -> None:
        if step > CUTS["before"]:
            raise _CutError

    with pytest.raises(_CutError):
        loop.train(Workspace(tmp_path / "first"), other, cut, trunk=trunk)
    steps: list[int] = []
    second = Workspace(tmp_path / "second")
    loop.train(second, run, lambda step, *_: steps.append(step), trunk=trunk)
    assert steps[0] > 400
    folder = run.run_id
    assert products(second.run_dir(folder)) == products(workspace.run_dir(folder))


def test_a_damaged_trunk_is_trained_anew(tmp_path: Path) -> None:
    trunk = tmp_path / "trunk.npz"
    trunk.write_bytes(b"PK, but no archive")
    steps: list[int] = []

    def cut(step: int, *_: Any) -> None:
        steps.append(step)
        if step > CUTS["before"]:
            raise _CutError

    with pytest.raises(_CutError):
        loop.train(Workspace(tmp_path), RUNS["ppo"], cut, trunk=trunk)
    assert steps[0] < 100
    assert checkpoint.load(trunk) is not None


def test_a_trunk_of_other_code_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = tmp_path / "trunk.npz"
    first_steps = []
    for code, end in (("other", CUTS["before"]), (provenance.source_digest(), 0)):
        monkeypatch.setattr(loop.provenance, "source_digest", lambda code=code: code)
        steps: list[int] = []

        def cut(step: int, *_: Any, steps: list[int] = steps, end: int = end) -> None:
            steps.append(step)
            if step > end:
                raise _CutError

        with pytest.raises(_CutError):
            loop.train(Workspace(tmp_path / code), RUNS["ppo"], cut, trunk=trunk)
        assert trunk.exists()
        first_steps.append(steps[0])
    assert max(first_steps) < 100


def test_a_record_names_all_commits_and_processors_of_a_training(
    tmp_path: Path, quantized: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, run = quantized("ppo")
    shutil.copytree(workspace.root.parent / "after", tmp_path, dirs_exist_ok=True)
    whole = loop.train(workspace, run, silent)
    monkeypatch.setattr(loop.provenance, "source_commit", lambda: "fedcba987654")
    monkeypatch.setattr(loop.provenance, "processor", lambda: "Beta with asimd")
    resumed = loop.train(Workspace(tmp_path), run, silent)
    assert resumed.commit == f"{whole.commit}; fedcba987654"
    assert resumed.processor == f"{whole.processor}; Beta with asimd"


def test_a_training_continued_by_other_code_leaves_no_trunk(
    tmp_path: Path, quantized: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, run = quantized("ppo")
    shutil.copytree(workspace.root.parent / "before", tmp_path, dirs_exist_ok=True)
    (last,) = (Workspace(tmp_path).run_dir(run.run_id) / "checkpoints").glob("*4??.npz")
    last.unlink()
    trunks = []
    for code in ("other", provenance.source_digest()):
        root = tmp_path / code
        shutil.copytree(tmp_path / "runs", root / "runs")
        monkeypatch.setattr(loop.provenance, "source_digest", lambda code=code: code)
        trunk = root / "trunk.npz"

        def cut(step: int, *_: Any) -> None:
            if step > CUTS["before"]:
                raise _CutError

        with pytest.raises(_CutError):
            loop.train(Workspace(root), run, cut, trunk=trunk)
        trunks.append(trunk.exists())
    assert trunks == [False, True]


def test_trunks_are_shared_by_trainings_that_differ_in_bits_alone(tmp_path: Path) -> None:
    def identify(run: Run, **overrides: Any) -> Path | None:
        preset = presets.load(run.algo, run.env_id, {**run.overrides, **overrides})
        return trunk_path(tmp_path, run, preset)

    def quantised(**options: Any) -> Run:
        values = {"bits": 4, "delay": DELAY, **options}
        return replace(PLAIN["ppo"], quantization=Quantization.from_mapping(values))

    one = identify(quantised())
    assert one is not None
    assert identify(quantised(bits=8)) == identify(quantised(bits=2)) == one
    assert identify(quantised(gradient="clipped")) == one
    others = [
        identify(quantised(delay=DELAY + 1)),
        identify(quantised(ranges="extremes")),
        identify(quantised(edge_bits=4)),
        identify(quantised(), learning_rate=1e-4),
        identify(replace(quantised(), seed=9)),
    ]
    assert len({one, *others}) == 1 + len(others)
    assert identify(PLAIN["ppo"]) is identify(quantised(learned_steps=True)) is None


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "following"])
def test_ranges_never_move_after_the_delay(name: str, tmp_path: Path) -> None:
    state = just_quantised(tmp_path, RUNS[name])
    then = networks.weights(state.agent.network)
    for _ in range(3):
        state.burst()
    now = networks.weights(state.agent.network)
    ranges = [key for key in now if key.endswith(("_low:0", "_high:0", "_frozen:0"))]
    assert len(ranges) >= 3 * 5
    for key in ranges:
        np.testing.assert_array_equal(now[key], then[key])
        assert not key.endswith("_frozen:0") or now[key] == 1
    assert any(not np.array_equal(now[key], then[key]) for key in now if key.endswith("/kernel:0"))


def test_ranges_that_follow_are_those_of_the_network_that_is_kept(quantized: Trained) -> None:
    workspace, run = quantized("following")
    kept = networks.load_weights(workspace.run_dir(run.run_id) / "network.npz")
    kernels = [key for key in kept if key.endswith("/kernel:0")]
    assert len(kernels) == 2
    for key in kernels:
        assert kept[key.replace(":0", "_high:0")] == np.abs(kept[key]).max()
    outputs = [key for key in kept if key.endswith("output_seen_high:0")]
    assert len(outputs) == 3
    for key in outputs:
        seen = [kept[key.replace("high", end)] for end in ("low", "high")]
        edge = key.startswith(("normalizer", "head"))
        ends = grid_between(*seen, TensorFormat(bits=8 if edge else 4))[:2]
        frozen_to = [kept[key.replace("seen_high", end)] for end in ("low", "high")]
        np.testing.assert_array_equal(frozen_to, ends)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_kept_was_chosen_after_the_delay(name: str, quantized: Trained) -> None:
    workspace, run = quantized(name)
    folder = workspace.run_dir(run.run_id)
    record = TrainingRecord.load(folder / "training.json")
    with (folder / "progress.csv").open() as file:
        scores = {int(row["step"]): row["greedy_return"] for row in csv.DictReader(file)}
    late = {step: float(text) for step, text in scores.items() if text and step >= DELAY}
    assert record.selection_return == max(late.values()) == late[record.best_step]
    assert json.loads((folder / "run.json").read_text())["quantization"]["bits"] == 4
    assert Run.from_dict(record.run) == run


def test_the_best_before_the_delay_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = iter(range(1000, 0, -1))
    played = loop.rollout.rollout

    def worse_every_time(*arguments: Any) -> Any:
        return played(*arguments)._replace(returns=[next(falling)])

    monkeypatch.setattr("quarl_tf.training.loop.rollout.rollout", worse_every_time)
    notes: list[str] = []
    record = loop.train(Workspace(tmp_path), RUNS["dqn"], lambda *a: notes.append(a[2]))
    assert DELAY <= record.best_step < 660
    assert record.selection_return == 998
    assert not any("inf" in note for note in notes)


#: What makes acting a function of the head: no noise, no exploration, one draw.
_CERTAIN = {"ddpg": {"noise": 0.0}, "dqn": {"exploration_final": 0.0}, "ppo": {}}


def just_quantised(folder: Path, run: Run) -> loop._Training:
    """Train until the network is quantised."""
    state = loop._Training(folder, run, presets.load(run.algo, run.env_id, run.overrides))
    state.resume()
    while not state._quantized():
        state.burst()
    return state


@pytest.mark.parametrize("name", _CERTAIN)
def test_from_the_delay_on_the_quantised_network_acts(name: str, tmp_path: Path) -> None:
    overrides = {**PLAIN[name].overrides, **_CERTAIN[name], "evaluation_every": 800}
    run = replace(RUNS[name], overrides=overrides)
    state = just_quantised(tmp_path, run)
    network, preset = state.agent.network, state._preset
    assert DELAY < state.step < DELAY + 2 * preset.train_frequency + 1
    # As many as it plays in.
    pairs = 0.3 * normal(200, 2, *state._spec.observation_shape)
    heads = np.stack([Snapshot(network)(pair) for pair in pairs])
    draws = copy.deepcopy(state.agent._explore)
    acted = np.stack([state.agent.act(pair, 1.0) for pair in pairs])
    meant = {
        "ddpg": lambda: heads.clip(-1, 1),
        "dqn": lambda: heads.argmax(axis=2),
        "ppo": lambda: np.stack([Categorical().draw(pair, draws)[0] for pair in heads]),
    }
    np.testing.assert_array_equal(acted, meant[name]())
    plain = agents.network_factory(run.algo, state._spec, preset, run.seed)()
    now = networks.weights(network)
    networks.set_weights(plain, {name: now[name] for name in networks.weights(plain)})
    assert not np.array_equal(heads, [Snapshot(plain)(pair) for pair in pairs])
    for target in state.agent.targets:
        for key, value in networks.weights(network).items():
            if key.endswith(("_low:0", "_high:0", "_frozen:0")):
                np.testing.assert_array_equal(networks.weights(target)[key], value)


def test_no_critic_is_quantised(tmp_path: Path) -> None:
    for name in ("ddpg", "ppo"):
        run = RUNS[name]
        preset = presets.load(run.algo, run.env_id, run.overrides)
        state = loop._Training(tmp_path, run, preset)
        agent: Any = state.agent
        critic = agent._learner.normalised[1] if name == "ddpg" else agent._model.value
        assert qat.quantized_layers(agent.network)
        assert not qat.quantized_layers(critic)


def test_a_delay_before_anything_is_learned_is_refused(tmp_path: Path) -> None:
    run = replace(RUNS["dqn"], quantization=Quantization(bits=4, delay=32))
    with pytest.raises(UsageError, match=r"make it longer. Received: delay=32"):
        loop.train(Workspace(tmp_path), run, silent)
