"""Quantisation-aware training: watched until the delay, then quantised on frozen grids."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from samples import Patch, begun, built, quantised, refused, train

from quarl_tf import agents, networks, presets
from quarl_tf.agents.distributions import Categorical
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Design, build_actor, build_policy, inference
from quarl_tf.quantization import qat, quantizing, watching
from quarl_tf.quantization.fake_quantizer import FakeQuantizer
from quarl_tf.quantization.grid import own_grid, snap
from quarl_tf.quantization.layers import WatchedLayer
from quarl_tf.spec import QatSchedule, Quantization, Run, TensorFormat
from quarl_tf.spec.architectures import Architecture, Convolution
from quarl_tf.store.workspace import Workspace
from quarl_tf.training import checkpoint, loop

BITS = range(2, 9)
schedule, aware = partial(QatSchedule, delay=1), partial(quantised, delay=1)
BATCHES = [np.float32([[1, -1, 3]]), np.float32([[5, -2, 0]]), np.float32([[0, 0, 1]])]
KINDS = {"nearest": {}, "floor": {"rounding": "floor", "step": "paper"}}
UPSTREAM = np.float32([[0.1, -0.3, 7, 1e-9, -2]])
LEARNED: dict[str, Any] = {"learned_steps": True, "gradient": "clipped"}
#: The first two are tried with every network.
OPTIONS: list[dict[str, Any]] = [
    *({}, {"bits": 2}, {"bits": 8}, {"edge_bits": 3}, {"rule": "paper"}, {"per_channel": True}),
    *({"learned_steps": True}, {"learned_steps": True, "per_channel": True, "bits": 8}),
]
#: Overrides by which acting depends on the head alone: no noise, no exploration, one draw.
_GREEDY = {"exploration_final": 0.0}
_CERTAIN = {"ddpg": {"noise": 0.0}, "dqn": _GREEDY, "pqn": _GREEDY, "ppo": {}}


class Quantized:
    """A quantiser with its variables, outside of any network."""

    def __init__(self, quantizer: FakeQuantizer, shape: tuple[int | None, ...]) -> None:
        self.quantizer, layer = quantizer, keras.layers.Layer()
        self.variables = quantizer.build(shape, "x", layer)
        self.variables |= quantizer.build_stretch(shape, "x", layer)

    def freeze(self, low: Any, high: Any) -> Self:
        self.quantizer.freeze(self.variables, np.float32(low), np.float32(high))
        return self

    def __call__(self, values: Any) -> np.ndarray:
        return np.asarray(self.quantizer(tf.convert_to_tensor(values), True, self.variables))

    @property
    def values(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in self.variables.items()}

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        return self.values["low"], self.values["high"]

    def gradients(self, values: np.ndarray, upstream: np.ndarray, *of: Any) -> list[np.ndarray]:
        inputs = tf.constant(values)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(self.quantizer(inputs, True, self.variables) * upstream)
        return [np.asarray(g) for g in tape.gradient(loss, [inputs, *of])]


def activation(
    form: TensorFormat, low: float, high: float, limit: float = np.inf, **options: Any
) -> Quantized:
    """Return the quantiser of five features with a range."""
    quantizer = FakeQuantizer(form, schedule(**options), limit=limit)
    return Quantized(quantizer, (None, 5)).freeze(low, high)


def of_kernel(bits: int, kernel: Any, *, per_channel: bool = False, **options: Any) -> Quantized:
    form = TensorFormat(bits=bits, symmetric=True)
    quantizer = FakeQuantizer(form, schedule(**options), kernel=True, per_channel=per_channel)
    axes = tuple(range(kernel.ndim - 1)) if per_channel else None
    return Quantized(quantizer, kernel.shape).freeze(kernel.min(axes), kernel.max(axes))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def watched_ends(ranges: str, *batches: np.ndarray, training: bool = True) -> list[float]:
    layer = WatchedLayer(keras.layers.Activation("linear"), {}, ranges)
    for batch in batches:
        np.testing.assert_array_equal(layer(batch, training=training), batch)
    return [float(layer.output_range[end]) for end in ("low", "high")]


@pytest.mark.parametrize(
    ("ranges", "low", "high"),
    [
        ("extremes", -2, 5),
        # The first batch's; then 0.99 of the previous value and 0.01 of the batch's.
        ("moving_average", 0.99 * (0.99 * -1 + 0.01 * -2), 0.99 * (0.99 * 3 + 0.01 * 5) + 0.01),
    ],
)
def test_ranges_by_hand(ranges: str, low: float, high: float) -> None:
    assert watched_ends(ranges, *BATCHES) == pytest.approx([low, high], rel=1e-6)
    assert watched_ends(ranges, *BATCHES, training=False) == [1, -1]  # Nothing was seen.


def test_percentiles_leave_out_a_thousandth_at_each_end() -> None:
    batch = np.random.default_rng(0).permutation(np.arange(-1000, 1001, dtype=np.float32))
    assert watched_ends("percentile", batch) == [-998, 998]
    expected = 0.99 * 998 + 0.01 * 1996
    assert watched_ends("percentile", batch, 2 * batch) == pytest.approx([-expected, expected])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("ends", [(-1.3, 2.9), (0, 0.007), (-600, 11), (2, 5), (-5, -2), (0, 0)])
def test_values_are_numpys_bit_for_bit(ends: Any, bits: int, kind: str) -> None:
    random, form = np.random.default_rng(0), TensorFormat(bits=bits, **KINDS[kind])
    low, high = ends
    values = random.uniform(2 * min(low, 0), 2 * max(high, 0), (200, 5)).astype(np.float32)
    values[0] = 0
    quantized = activation(form, low, high)
    grid, actual = quantized.quantizer.grid(quantized.values), quantized(values)
    assert not actual[0].any()
    np.testing.assert_array_equal(actual, snap(values, grid, form))
    np.testing.assert_array_equal(actual, snap(tf.constant(values), grid, form, tf))
    if low or high:
        np.testing.assert_allclose(quantized.ends, (min(low, 0), max(high, 0)), atol=grid.step)
    half = tf.constant(values, tf.bfloat16)
    assert quantized.quantizer(half, False, quantized.variables).dtype == tf.bfloat16


def test_pre_activations_of_tanh_end_where_its_table_does() -> None:
    grid = frozen("tanh", aware()).get_layer("hidden_0").grid("output")
    np.testing.assert_allclose((grid.low, grid.high), (-3.5, 3.5), atol=0.03)
    ends = activation(TensorFormat(bits=8), -40, 2, limit=3.5).ends
    np.testing.assert_allclose(ends, (-3.5, 2), atol=0.03)


@pytest.mark.parametrize("axis", [None, 3])
@pytest.mark.parametrize("bits", BITS)
def test_kernels_are_rounded_as_by_numpy(bits: int, axis: int | None) -> None:
    kernel = (normal(3, 3, 20, 4) + np.float32(0.5)) * np.float32([0.1, 1, 10, 0])
    form = TensorFormat(bits=bits, symmetric=True)
    quantized, grid = of_kernel(bits, kernel, per_channel=axis == 3), own_grid(kernel, form, axis)
    np.testing.assert_array_equal(quantized.ends, [np.squeeze(end) for end in grid[:2]])
    np.testing.assert_array_equal(quantized(kernel), snap(kernel, grid, form))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", ["straight_through", "clipped"])
def test_gradients_are_the_upstream_ones(gradient: str, kind: str) -> None:
    quantized = activation(TensorFormat(bits=4, **KINDS[kind]), -1, 1, gradient=gradient)
    (to_inputs,) = quantized.gradients(np.float32([[-9, -0.7, 0.2, 0.9, 9]]), UPSTREAM)
    passing = np.bool_([1, 1, 1, 1, 1] if gradient == "straight_through" else [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(to_inputs, np.where(passing, UPSTREAM, 0))


def test_learned_steps_have_the_gradient_of_their_paper() -> None:
    # Three bits from 0 to 3.5: a step of a half, seven times.
    quantized = activation(TensorFormat(bits=3), 0, 3.5, **LEARNED)
    values = np.float32([[-5, 0.65, 0.2, 1.35, 4.5]])
    np.testing.assert_array_equal(quantized(values), [[0, 0.5, 0, 1.5, 3.5]])
    stretch = quantized.variables["log_stretch"]
    to_inputs, to_stretch = quantized.gradients(values, UPSTREAM, stretch)
    np.testing.assert_allclose(to_inputs, UPSTREAM * [0, 1, 1, 1, 0])
    by_hand = (UPSTREAM * [0, 1 - 1.3, 0 - 0.4, 3 - 2.7, 7]).sum()
    # Five features share the step. A logarithm moves its argument by as much times as large.
    np.testing.assert_allclose(to_stretch, 0.5 * by_hand / np.sqrt(5 * 7), rtol=1e-5)


def test_the_gradient_of_a_kernels_step_is_scaled_by_all_its_weights() -> None:
    quantized = of_kernel(3, np.float32([[-1, 0], [2, 3]]), **LEARNED)
    kernel, ones = np.float32([[-9, 0.4], [1.3, 2.7]]), np.ones((2, 2), np.float32)
    _, to_stretch = quantized.gradients(kernel, ones, quantized.variables["log_stretch"])
    by_hand = -3 + (0 - 0.4) + (1 - 1.3) + (3 - 2.7)
    np.testing.assert_allclose(to_stretch, by_hand / np.sqrt(4 * 3), rtol=1e-5)  # Codes go to 3.


def test_a_learned_step_stretches_the_range_and_keeps_0() -> None:
    quantized = activation(TensorFormat(bits=3), -4, 3, **LEARNED)
    quantized.variables["log_stretch"].assign(np.log(np.float32(2)))
    values = np.float32([[-20, -2.9, 0.9, 1.1, 20]])
    np.testing.assert_allclose(quantized(values), [[-8, -2, 0, 2, 6]], rtol=1e-6)


VECTORS = EnvSpec((6,), "float32", 3)
CONTROL = EnvSpec((6,), "float32", None, (-2.0, -1.0), (2.0, 3.0))
IMAGES = EnvSpec((12, 12, 2), "uint8", 3)
SMALL, SCALED = Architecture((16, 16)), {"byte_zero": 87, "byte_unit": 60.0}
SMALL_OF_IMAGES = Architecture((16,), (Convolution(4, 4, 2), Convolution(8, 3, 1)))
FACTORIES: dict[str, Callable[[], keras.Model]] = {
    "relu": partial(build_policy, VECTORS, Design(SMALL, 3), 0),
    "tanh": partial(build_policy, VECTORS, Design(SMALL, 3, "tanh", 0.01), 0),
    "dueling": partial(build_policy, VECTORS, Design(SMALL, 3, dueling=True), 0),
    "deterministic": partial(build_actor, CONTROL, Design(SMALL, 2), 0),
    "images": partial(build_policy, IMAGES, Design(SMALL_OF_IMAGES, 3, **SCALED), 0),
}


def observations_of(name: str, count: int = 300) -> np.ndarray:
    if name == "images":
        return np.random.default_rng(1).integers(0, 256, (count, 12, 12, 2), dtype=np.uint8)
    return 2 * normal(count, 6, seed=1)


def frozen(name: str, quantization: Quantization) -> keras.Model:
    network = watching(quantization)(FACTORIES[name]())
    network(observations_of(name), training=True)
    network = qat.quantized(network)
    qat.freeze(network)
    return network


def layers_of(network: keras.Model, name: str) -> dict[str, np.ndarray]:
    """Return the output of every quantised layer."""
    layers = qat.quantized_layers(network)
    model = keras.Model(network.input, [layer.output for layer in layers])
    outputs = model(observations_of(name, 2000))
    return {layer.name: out.numpy() for layer, out in zip(layers, outputs, strict=True)}


MLP = {"normalizer": 7, "hidden_0": 5, "hidden_1": 5, "head": 7}
#: The inputs of a tanh are indices into a table of 8 bits.
TANH = MLP | {"hidden_0": 8, "hidden_0_tanh": 5, "hidden_1": 8, "hidden_1_tanh": 5}
CONVOLUTIONAL = {"byte_scaling": 7, "convolution_0": 5, "convolution_1": 5, "hidden_0": 5}


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("relu", MLP),
        ("tanh", TANH),
        ("dueling", MLP),  # Its value stays in float.
        ("deterministic", MLP | {"head": 8, "squash": 7}),
        ("images", CONVOLUTIONAL | {"head": 7}),
    ],
)
def test_every_layers_output_has_its_width(name: str, widths: dict[str, int]) -> None:
    outputs = layers_of(frozen(name, aware(bits=5, edge_bits=7)), name)
    counts = {layer: len(np.unique(values)) for layer, values in outputs.items()}
    assert counts.keys() == widths.keys()
    for layer, width in widths.items():
        assert 2 ** (width - 1) - 2 < counts[layer] <= 2**width


def test_single_layers_may_have_bits_of_their_own() -> None:
    network = frozen("tanh", aware(bits=4, **{"hidden_0.bits": 2, "head.bits": 6}))
    counts = {k: len(np.unique(v)) for k, v in layers_of(network, "tanh").items()}
    assert counts["hidden_0_tanh"] <= 4 < counts["hidden_1_tanh"] <= 16 < counts["head"] <= 64
    kernels = [layer.quantizers.get("kernel") for layer in qat.quantized_layers(network)]
    assert [kernel.form.bits for kernel in kernels if kernel is not None] == [2, 4, 6]
    misspelt = watching(aware(bits=4, **{"hiden_0.bits": 2}))
    assert "did you mean hidden_0" in refused(misspelt, FACTORIES["tanh"](), code=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("tanh", options) for options in OPTIONS),
        *((name, options) for name in ("relu", "deterministic") for options in OPTIONS[:2]),
    ],
    ids=str,
)
def test_every_way_of_computing_a_network_is_the_same(name: str, options: dict[str, Any]) -> None:
    network = frozen(name, aware(**options))
    for variable in network.trainable_variables:
        if "log_stretch" in variable.name:
            variable.assign(variable - 0.1)  # Learned since.
    observations = observations_of(name, 1000)
    in_tensorflow, step = network(observations).numpy(), qat.head_step(network)
    ways = [inference.Snapshot(network)]
    if options in ({}, {"learned_steps": True}):
        ways.append(inference.forward(network))  # By XLA.
    for way in ways:
        steps_apart = np.abs(way(observations) - in_tensorflow) / step
        # Sums halfway between two codes may round to either; by the published rule all codes are.
        assert (steps_apart > 1e-3).mean() < 0.03
        assert steps_apart.max() < 10 or "rule" in options


def test_training_at_two_bits_beats_rounding_to_them() -> None:
    observations = observations_of("relu")
    network, expected = frozen("relu", aware(bits=2)), FACTORIES["relu"]()(observations)
    network.compile(keras.optimizers.Adam(0.01), "mse")
    losses = network.fit(observations, expected, 300, epochs=50, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]  # The first is that of rounding alone.


def test_a_following_range_grows_with_the_next_freeze() -> None:
    far = 100 * observations_of("relu")
    for ranges in ("following", "extremes"):
        network = frozen("relu", aware(bits=8, ranges=ranges))
        before, values = qat.head_step(network), network(far, training=True).numpy()
        assert qat.head_step(network) == before
        qat.freeze(network)
        # It moved a hundredth of the way to a range 100 times as wide.
        assert (qat.head_step(network) > before) == (ranges == "following")
        assert np.array_equal(network(far), values) == (ranges == "extremes")


def test_ranges_that_are_not_finite_or_unknown_are_refused() -> None:
    network = watching(aware(ranges="extremes"))(FACTORIES["relu"]())
    assert "Received: delay=7" in refused(qat.require_watched, network, 7, code=2)
    network(np.full((4, 6), 2.0, np.float32), training=True)
    qat.require_watched(network, 7)
    kernel = network.get_layer("hidden_1").trainable_variables[0]
    kernel.assign(kernel * np.float32(np.inf))
    assert "Received: layer='hidden_1'" in refused(qat.freeze, qat.quantized(network))


@pytest.mark.parametrize("precision", presets.PRECISIONS)
def test_agents_of_images_learn_kernels_and_biases_alone_once_quantised(precision: str) -> None:
    sizes = {"num_envs": 2, "train_frequency": 16, "minibatch_size": 8, "epochs": 2}
    overrides = {**sizes, "network": "li", "precision": precision}
    preset = presets.load("ppo", "PongNoFrameskip-v4", overrides)
    spec, random = EnvSpec((36, 36, 2), "uint8", 3), np.random.default_rng(0)
    frames = random.integers(0, 256, (9, 2, 36, 36, 2), dtype=np.uint8)
    rewards = random.normal(size=(8, 2)).astype(np.float32)
    agent = agents.build("ppo", spec, preset, 0, watching(aware(bits=3)))

    def learn() -> dict[str, np.ndarray]:
        nowhere, everywhere = np.zeros(2, np.bool_), np.ones(2, np.bool_)
        for observations, reward in zip(frames, rewards, strict=False):
            actions = agent.act(observations, 0.5)
            agent.observe(Tick(observations, actions, reward, nowhere, everywhere))
        agent.learn(frames[-1])
        return networks.weights(agent.network)

    learn()
    agent.change_network(qat.quantized)
    qat.freeze(agent.network, agent.targets)
    agent.refresh()
    before = networks.weights(agent.network)
    after = learn()
    for name, value in before.items():
        assert np.array_equal(after[name], value) != name.endswith(("/kernel:0", "/bias:0"))
    images = random.integers(0, 256, (600, 36, 36, 2), dtype=np.uint8)
    heads, values = agent._predict(images)  # type: ignore[attr-defined]
    # As a graph: TensorFlow fuses convolutions there, which rounds bfloat16 sums otherwise.
    expected = inference.forward(agent.network)(images)
    np.testing.assert_allclose(heads, expected, rtol=1e-5, atol=1e-6)
    assert len(np.unique(heads)) <= 2**8 < len(np.unique(values))


_COMMON: dict[str, Any] = {"steps": 800, "num_envs": 2, "network": [8], "train_frequency": 32}
_COMMON |= {"evaluation_every": 200, "evaluation_episodes": 2, "checkpoint_every": 200}
_OFF_POLICY = {"learning_starts": 64, "batch_size": 8, "gradient_steps": 2}
DELAY = 500
PLAIN = {
    "dqn": Run("dqn", "CartPole-v1", 3, {**_COMMON, **_OFF_POLICY, "target_update": 10}),
    "ddpg": Run("ddpg", "MountainCarContinuous-v0", 3, {**_COMMON, **_OFF_POLICY}),
    "ppo": Run("ppo", "CartPole-v1", 3, {**_COMMON, "minibatch_size": 16, "epochs": 1}),
    "pqn": Run("pqn", "CartPole-v1", 3, {**_COMMON, "minibatch_size": 16, "epochs": 1}),
    "a2c with learned steps": Run("a2c", "CartPole-v1", 3, {**_COMMON, "minibatch_size": 32}),
}


def at_delay(run: Run, **options: Any) -> Run:
    values = {"delay": DELAY, "ranges": "moving_average", **options}
    return replace(run, quantization=quantised(**values))


RUNS = {name: at_delay(run, learned_steps=run.algo == "a2c") for name, run in PLAIN.items()}


@pytest.mark.parametrize("name", RUNS)
def test_until_the_delay_training_is_the_plain_one(name: str, tmp_path: Path) -> None:
    def trained(run: Run) -> tuple[dict[str, np.ndarray], Any]:
        state = begun(tmp_path / run.run_id, run)
        state.resume()
        while state.step <= 450:
            state.burst()
        saved = checkpoint.load_newest(tmp_path / run.run_id / "checkpoints")
        assert saved is not None
        return saved

    plain_arrays, plain_state = trained(PLAIN[name])
    aware_arrays, aware_state = trained(RUNS[name])
    assert 400 <= aware_state["step"] == plain_state["step"] < 450
    assert aware_state.pop("run") != plain_state.pop("run")
    # Ranges are among the numbered variables.
    assert len(aware_state.pop("copies")) >= len(plain_state.pop("copies"))
    for state in (aware_state, plain_state):
        for timed in (state, *state["rows"]):
            del timed["seconds"]
    assert aware_state == plain_state  # Including losses, returns and draws.
    # Ranges shift the numbers of variables that have no names: targets, moments, critics.
    aware_values = {array.tobytes() for array in aware_arrays.values()}
    assert {array.tobytes() for array in plain_arrays.values()} <= aware_values


@pytest.mark.parametrize(
    ("name", "options"), [("dqn", {}), ("pqn", {}), ("ddpg", {}), ("ddpg", {"until": 1.0})]
)
def test_the_best_since_the_delay_is_kept_with_its_grids(
    name: str, options: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    falling, played = iter(range(1000, 0, -1)), loop.rollout.rollout

    def worse_every_time(*arguments: Any) -> Any:
        return played(*arguments)._replace(returns=[next(falling)])

    monkeypatch.setattr("quarl_tf.training.loop.rollout.rollout", worse_every_time)
    workspace = Workspace(tmp_path)
    plain = replace(PLAIN[name], overrides=PLAIN[name].overrides | options)
    run = replace(plain, quantization=presets.quantization(name, {"bits": 4, "delay": DELAY}))
    notes: list[str] = []
    record = train(workspace, run, lambda *a: notes.append(a[2]))
    assert DELAY <= record.best_step < 660
    assert record.selection_return == 998
    assert not any("inf" in note for note in notes)
    # Grids follow: those in the file are of the network that is kept.
    weights = networks.load_weights(workspace.run_dir(run.run_id) / "network.npz")
    network = quantizing(run.quantization)(built(run))
    networks.set_weights(network, weights)
    qat.freeze(network)
    np.testing.assert_equal(networks.weights(network), weights)


@pytest.mark.parametrize("name", _CERTAIN)
def test_from_the_delay_on_the_network_acts_on_fixed_grids(name: str, tmp_path: Path) -> None:
    overrides = {**PLAIN[name].overrides, **_CERTAIN[name], "evaluation_every": 800}
    state = begun(tmp_path, replace(RUNS[name], overrides=overrides))
    state.resume()
    while not state._quantized:
        state.burst()
    network, preset = state.agent.network, state._preset
    assert DELAY < state.step < DELAY + 2 * preset.train_frequency + 1
    # Batches as large as the number of environments.
    pairs = 0.3 * normal(200, 2, *state._spec.observation_shape)
    heads = np.stack([inference.Snapshot(network)(pair) for pair in pairs])
    draws = copy.deepcopy(state.agent._act_random)
    actions = np.stack([state.agent.act(pair, 1.0) for pair in pairs])
    expected = {
        "ddpg": lambda: heads.clip(-1, 1),
        **dict.fromkeys(("dqn", "pqn"), lambda: heads.argmax(axis=2)),
        "ppo": lambda: [Categorical(heads.shape[-1]).draw(pair, draws)[0] for pair in heads],
    }
    np.testing.assert_array_equal(actions, expected[name]())
    assert qat.quantized_layers(network)
    before = networks.weights(network)  # Targets share grids that never move, critics have none.
    ends = [key for key in before if key.endswith(("_low:0", "_high:0"))]
    assert len(ends) >= 2 * 5
    grids = {key: before[key] for key in ends}
    for target in state.agent.targets:
        weights = networks.weights(target)
        np.testing.assert_equal({key: weights[key] for key in ends}, grids)
    if name in ("ppo", "ddpg"):
        agent = state.agent
        critic = agent._value if name == "ppo" else agent._normalised_networks[0]
        assert not qat.quantized_layers(critic)
    for _ in range(3):
        state.burst()
    after = networks.weights(network)
    np.testing.assert_equal({key: after[key] for key in ends}, grids)
    assert any((after[key] != before[key]).any() for key in after if key.endswith("/kernel:0"))


def test_a_delay_behind_the_end_is_refused_before_the_training(tmp_path: Path) -> None:
    run = Run("ppo", "CartPole-v1", 0, {"steps": 512}, aware(delay=10**6))
    assert "delay=1000000" in refused(train, Workspace(tmp_path), run, code=2)
    assert not (tmp_path / "runs").exists()
