"""Quantisation-aware training: watched until the delay, then quantised on frozen grids."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import Patch, refused, silent

from quarl_tf import networks, presets
from quarl_tf.agents.distributions import Categorical
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Design, build_actor, build_policy, inference
from quarl_tf.networks.inference import Snapshot
from quarl_tf.quantization import qat, watching
from quarl_tf.quantization.fake_quantizer import FakeQuantizer
from quarl_tf.quantization.grid import Grid, grid_between, snap
from quarl_tf.quantization.layers import WatchedLayer
from quarl_tf.spec import QatSchedule, Quantization, Run, TensorFormat
from quarl_tf.spec.architectures import Architecture, Convolution
from quarl_tf.store.workspace import Workspace
from quarl_tf.training import checkpoint, loop


def aware(bits: int = 4, **options: Any) -> Quantization:
    return Quantization.from_mapping({"bits": bits, "delay": 1, **options})


class Quantized:
    """A quantiser with a range and its variables, outside of any network."""

    def __init__(self, quantizer: FakeQuantizer, shape: Any, low: Any, high: Any) -> None:
        self.quantizer, layer = quantizer, keras.layers.Layer()
        self.variables = quantizer.build(shape, "x", layer)
        self.variables |= quantizer.build_stretch(shape, "x", layer)
        quantizer.freeze(self.variables, np.float32(low), np.float32(high))

    def __call__(self, values: Any) -> np.ndarray:
        return np.asarray(self.quantizer(tf.convert_to_tensor(values), True, self.variables))

    @property
    def grid(self) -> Grid:
        return self.quantizer.grid({name: v.numpy() for name, v in self.variables.items()})

    def gradients(self, values: np.ndarray, upstream: np.ndarray) -> dict[str, Any]:
        """Return the gradients of the values and of the variables by name."""
        inputs = tf.Variable(values)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.quantizer(inputs, True, self.variables) * upstream)
        return tape.gradient(loss, {"values": inputs, **self.variables})


def activation(
    form: TensorFormat, low: float, high: float, limit: float = np.inf, **options: Any
) -> Quantized:
    """Return the quantiser of five features with a range."""
    quantizer = FakeQuantizer(form, QatSchedule(delay=1, **options), limit=limit)
    return Quantized(quantizer, (None, 5), low, high)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


BATCHES = [np.float32([[1, -1, 3]]), np.float32([[5, -2, 0]]), np.float32([[0, 0, 1]])]
WHOLE = np.random.default_rng(0).permutation(np.arange(-1000, 1001, dtype=np.float32))


@pytest.mark.parametrize(
    ("ranges", "batches", "low", "high"),
    [
        ("extremes", BATCHES, -2, 5),
        # The first batch's; then 0.99 of the previous value and 0.01 of the batch's.
        *[("moving_average", BATCHES[:1], -1, 3), ("moving_average", BATCHES[:2], -1.01, 3.02)],
        ("moving_average", BATCHES, 0.99 * -1.01, 0.99 * 3.02 + 0.01),
        # A thousandth is left out at each end.
        ("percentile", [WHOLE], -998, 998),
        ("percentile", [WHOLE, 2 * WHOLE], -1.01 * 998, 1.01 * 998),
    ],
)
def test_ranges_by_hand(ranges: str, batches: list[np.ndarray], low: float, high: float) -> None:
    # Without training nothing is seen, and the ends stay as they began.
    for training, expected in ((True, [low, high]), (False, [1, -1])):
        layer = WatchedLayer(keras.layers.Activation("linear"), {}, ranges)
        for batch in batches:
            np.testing.assert_array_equal(layer(batch, training=training), batch)
        ends = [float(layer.output_range[end]) for end in ("low", "high")]
        assert ends == pytest.approx(expected, rel=1e-6)


KINDS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "symmetric": {"symmetric": True},
    "floor": {"rounding": "floor", "step": "paper"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    ("low", "high"), [(-1.3, 2.9), (0, 0.007), (-600, 11), (2, 5), (-5, -2), (0, 0)]
)
def test_quantised_values_are_those_of_numpy_bit_for_bit_and_0_stays(
    low: float, high: float, bits: int, kind: str
) -> None:
    random, form = np.random.default_rng(0), TensorFormat(bits=bits, **KINDS[kind])
    values = random.uniform(2 * min(low, 0), 2 * max(high, 0), (200, 5)).astype(np.float32)
    values[0] = 0
    quantized = activation(form, low, high)
    grid, actual = quantized.grid, quantized(values)
    assert not actual[0].any()
    np.testing.assert_array_equal(actual, snap(values, grid, form))
    np.testing.assert_array_equal(actual, quantized.quantizer.exported(tf.constant(values), grid))
    expected = grid_between(np.float32(low), np.float32(high), form)
    np.testing.assert_allclose(grid, expected, rtol=1e-6)
    half = tf.constant(values, tf.bfloat16)
    assert quantized.quantizer(half, False, quantized.variables).dtype == tf.bfloat16


def test_pre_activations_of_tanh_end_where_its_table_does() -> None:
    low, high, _ = activation(TensorFormat(bits=8), -40, 2, limit=3.5).grid
    np.testing.assert_allclose((low, high), (-3.5, 2), atol=0.03)


UPSTREAM = np.float32([[0.1, -0.3, 7, 1e-9, -2]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", ["straight_through", "clipped"])
def test_gradients_are_the_upstream_ones(gradient: str, kind: str) -> None:
    quantized = activation(TensorFormat(bits=4, **KINDS[kind]), -1, 1, gradient=gradient)
    gradients = quantized.gradients(np.float32([[-9, -0.7, 0.2, 0.9, 9]]), UPSTREAM)
    passing = np.bool_([1, 1, 1, 1, 1] if gradient == "straight_through" else [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(gradients["values"], np.where(passing, UPSTREAM, 0))


LEARNED: dict[str, Any] = {"learned_steps": True, "gradient": "clipped"}


def test_learned_steps_have_the_gradient_of_their_paper() -> None:
    # Three bits from 0 to 3.5: a step of a half, seven times.
    quantized = activation(TensorFormat(bits=3), 0, 3.5, **LEARNED)
    values = np.float32([[-5, 0.65, 0.2, 1.35, 4.5]])
    np.testing.assert_array_equal(quantized(values), [[0, 0.5, 0, 1.5, 3.5]])
    gradients = quantized.gradients(values, UPSTREAM)
    np.testing.assert_allclose(gradients["values"], UPSTREAM * [0, 1, 1, 1, 0])
    by_hand = (UPSTREAM * [0, 1 - 1.3, 0 - 0.4, 3 - 2.7, 7]).sum()
    # Five features share the step. A logarithm moves its argument by as much times as large.
    expected = 0.5 * by_hand / np.sqrt(5 * 7)
    np.testing.assert_allclose(gradients["log_stretch"], expected, rtol=1e-5)
    # All weights of a kernel share it, and the largest code is 3.
    form, schedule = TensorFormat(bits=3, symmetric=True), QatSchedule(delay=1, **LEARNED)
    kernel = Quantized(FakeQuantizer(form, schedule, kernel=True), (2, 2), -1, 3)
    gradients = kernel.gradients(np.float32([[-9, 0.4], [1.3, 2.7]]), np.ones((2, 2), np.float32))
    by_hand = -3 + (0 - 0.4) + (1 - 1.3) + (3 - 2.7)
    np.testing.assert_allclose(gradients["log_stretch"], by_hand / np.sqrt(4 * 3), rtol=1e-5)


def test_a_learned_step_stretches_the_range_and_keeps_0() -> None:
    quantized = activation(TensorFormat(bits=3), -4, 3, **LEARNED)
    quantized.variables["log_stretch"].assign(np.log(np.float32(2)))
    values = np.float32([[-20, -2.9, 0.9, 1.1, 20]])
    np.testing.assert_allclose(quantized(values), [[-8, -2, 0, 2, 6]], rtol=1e-6)
    np.testing.assert_allclose(quantized.grid, (-8, 6, 2), rtol=1e-6)


VECTORS = EnvSpec((6,), "float32", 3)
CONTROL = EnvSpec((6,), "float32", None, (-2.0, -1.0), (2.0, 3.0))
IMAGES = EnvSpec((12, 12, 2), "uint8", 3)
SMALL = Architecture((16, 16))
CONVOLUTIONS = Architecture((16,), (Convolution(4, 4, 2), Convolution(8, 3, 1)))
NETWORKS: dict[str, tuple[Any, EnvSpec, Design]] = {
    "relu": (build_policy, VECTORS, Design(SMALL, 3)),
    "tanh": (build_policy, VECTORS, Design(SMALL, 3, "tanh", 0.01)),
    "dueling": (build_policy, VECTORS, Design(SMALL, 3, dueling=True)),
    "deterministic": (build_actor, CONTROL, Design(SMALL, 2)),
    "images": (build_policy, IMAGES, Design(CONVOLUTIONS, 3)),
}


def observations_of(name: str, count: int = 300) -> np.ndarray:
    if name == "images":
        return np.random.default_rng(1).integers(0, 256, (count, 12, 12, 2), dtype=np.uint8)
    return 2 * normal(count, 6, seed=1)


def watched(name: str, quantization: Quantization) -> keras.Model:
    build, spec, design = NETWORKS[name]
    return watching(quantization)(build(spec, design, 0))


def frozen(name: str, quantization: Quantization) -> keras.Model:
    network = watched(name, quantization)
    network(observations_of(name), training=True)
    network = qat.quantized(network)
    qat.freeze(network)
    return network


def values_of(network: keras.Model, name: str) -> dict[str, int]:
    """Return the number of different outputs of every quantised layer."""
    layers = qat.quantized_layers(network)
    model = keras.Model(network.input, [layer.output for layer in layers])
    outputs = model(observations_of(name, 2000))
    return {layer.name: len(np.unique(out)) for layer, out in zip(layers, outputs, strict=True)}


def kernel_shapes(network: keras.Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of the grids of every kernel."""
    layers = [x for x in qat.quantized_layers(network) if "kernel" in x.quantizers]
    return {layer.name: layer.grid("kernel").high.shape for layer in layers}


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
    network = frozen(name, aware(5, edge_bits=7))
    counts = values_of(network, name)
    assert counts.keys() == widths.keys()
    for layer, width in widths.items():
        assert 2 ** (width - 1) - 2 < counts[layer] <= 2**width
    channels, shapes = {"convolution_0": (4,), "convolution_1": (8,)}, kernel_shapes(network)
    assert shapes == {layer: channels.get(layer, ()) for layer in shapes}
    expected = [(7 if layer == "head" else 5, layer in channels) for layer in shapes]
    assert qat.kernel_grids(network) == expected


def test_single_layers_may_have_bits_of_their_own_and_kernels_a_grid_per_output() -> None:
    bits = {"hidden_0.bits": 2, "head.bits": 6}
    network = frozen("tanh", aware(4, per_channel=True, **bits))
    counts = values_of(network, "tanh")
    assert counts["hidden_0_tanh"] <= 4 < counts["hidden_1_tanh"] <= 16 < counts["head"] <= 64
    assert qat.kernel_grids(network) == [(2, True), (4, True), (6, True)]
    assert kernel_shapes(network) == {"hidden_0": (16,), "hidden_1": (16,), "head": (3,)}
    with pytest.raises(UsageError, match="did you mean hidden_0"):
        watched("tanh", aware(4, **{"hiden_0.bits": 2}))


#: The first two are tried with every network.
OPTIONS: list[dict[str, Any]] = [
    *({}, {"bits": 2}, {"bits": 8}, {"edge_bits": 3}, {"rule": "paper"}, {"ranges": "percentile"}),
    *({"ranges": "following"}, {"gradient": "clipped"}, {"per_channel": True}),
    *({"learned_steps": True}, {"learned_steps": True, "per_channel": True, "bits": 8}),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("tanh", options) for options in OPTIONS),
        *((name, options) for name in ("relu", "deterministic") for options in OPTIONS[:2]),
        ("images", {}),
    ],
    ids=str,
)
def test_every_way_of_computing_a_quantised_network_is_the_same(
    name: str, options: dict[str, Any]
) -> None:
    network = frozen(name, aware(**options))
    for variable in network.trainable_variables:
        if "log_stretch" in variable.name:
            variable.assign(variable - 0.1)  # Learned since.
    observations = observations_of(name, 1000)
    in_tensorflow = network(observations).numpy()
    ways = [Snapshot(network), qat.exported(network, rounded=True)]
    if options in ({}, {"learned_steps": True}):
        ways.append(inference.forward(network))  # By XLA.
    for way in ways:
        steps_apart = np.abs(way(observations) - in_tensorflow) / qat.head_step(network)
        # Sums in another order may round to the other one of two codes if they lie halfway between
        # them, which by the published rule they do at every code.
        assert (steps_apart > 1e-3).mean() < 0.03
        assert steps_apart.max() < 10 or "rule" in options


@pytest.mark.parametrize("ranges", ["following", "extremes"])
def test_only_a_following_range_grows_with_the_next_freeze(ranges: str) -> None:
    network, far = frozen("relu", aware(8, ranges=ranges)), 100 * observations_of("relu")
    before, follows = qat.head_step(network), ranges == "following"
    values = network(far, training=True).numpy()
    assert qat.head_step(network) == before
    qat.freeze(network)
    # It moved a hundredth of the way to a range 100 times as wide.
    assert (qat.head_step(network) > before) == follows
    assert np.array_equal(network(far), values) != follows


def test_ranges_that_are_not_finite_or_unknown_are_refused() -> None:
    network = watched("relu", aware())
    assert "Received: delay=7" in refused(qat.require_watched, network, 7, error=UsageError)
    network(np.full((4, 6), 2.0, np.float32), training=True)
    qat.require_watched(network, 7)
    kernel = network.get_layer("hidden_1").trainable_variables[0]
    kernel.assign(kernel * np.float32(np.inf))
    assert "Received: layer='hidden_1'" in refused(qat.freeze, qat.quantized(network))


DELAY = 500
_COMMON: dict[str, Any] = {"steps": 800, "num_envs": 2, "network": [8], "train_frequency": 32}
_COMMON |= {"evaluation_every": 200, "evaluation_episodes": 2, "checkpoint_every": 200}
_OFF_POLICY = {**_COMMON, "learning_starts": 64, "batch_size": 8, "gradient_steps": 2}
_IMAGES = {**_OFF_POLICY, "network": "li", "buffer_size": 400, "evaluation_every": 800}
_PPO = {**_COMMON, "minibatch_size": 16, "epochs": 1}
POLE, CARS = "CartPole-v1", "MountainCarContinuous-v0"


def at_delay(algo: str, env_id: str, overrides: dict[str, Any], **options: Any) -> Run:
    values = {"bits": 4, "delay": DELAY, "ranges": "moving_average", **options}
    return Run(algo, env_id, 3, overrides, Quantization.from_mapping(values))


RUNS = {
    "dqn": at_delay("dqn", POLE, {**_OFF_POLICY, "target_update": 10}),
    "following": at_delay("dqn", POLE, {**_OFF_POLICY, "target_update": 10}, ranges="following"),
    "dueling": at_delay("dqn", POLE, {**_OFF_POLICY, "dueling": True}),
    "images": at_delay("dqn", "BreakoutNoFrameskip-v4", _IMAGES),
    "ddpg": at_delay("ddpg", CARS, _OFF_POLICY),
    "ppo": at_delay("ppo", POLE, _PPO),
    "continuous": at_delay("ppo", CARS, _PPO),
    "a2c": at_delay("a2c", POLE, {**_COMMON, "minibatch_size": 32}),
    "learned": at_delay("a2c", POLE, {**_COMMON, "minibatch_size": 32}, learned_steps=True),
}


def begun(folder: Path, run: Run) -> Any:
    state = loop._Training(folder, run, presets.load(run.algo, run.env_id, run.overrides))
    state.resume()
    return state


@pytest.mark.parametrize("precision", presets.PRECISIONS)
def test_agents_of_images_learn_kernels_and_biases_alone_once_quantised(
    precision: str, tmp_path: Path
) -> None:
    overrides = {**_PPO, "network": "li", "train_frequency": 16, "precision": precision}
    state = begun(tmp_path, at_delay("ppo", "PongNoFrameskip-v4", overrides, delay=16))
    state.burst()
    state._start_quantization(16)
    before = networks.weights(state.agent.network)
    state.burst()
    after = networks.weights(state.agent.network)
    for name, value in before.items():
        moved = not np.array_equal(after[name], value)
        assert moved == name.endswith(("/kernel:0", "/bias:0"))
    images = np.random.default_rng(0).integers(0, 256, (300, 84, 84, 4), dtype=np.uint8)
    heads, values = state.agent._model.predict(images)
    # As a graph: TensorFlow fuses convolutions there, which rounds bfloat16 sums otherwise.
    expected = inference.forward(state.agent.network)(images)
    np.testing.assert_allclose(heads, expected, rtol=1e-5, atol=1e-6)
    assert len(np.unique(heads)) <= 2**8 < len(np.unique(values))


@pytest.mark.parametrize("name", RUNS)
def test_until_the_delay_training_is_the_plain_one(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(loop._Training, "_elapsed", lambda _: 0.0)

    def trained(run: Run) -> tuple[dict[str, np.ndarray], Any]:
        state = begun(tmp_path / run.run_id, run)
        while state.step <= 450:
            state.burst()
        arrays, saved = checkpoint.load_newest(tmp_path / run.run_id / "checkpoints") or ({}, {})
        assert 400 <= saved["step"] < 450
        return arrays, saved

    plain_arrays, plain_state = trained(RUNS[name].plain)
    aware_arrays, aware_state = trained(RUNS[name])
    assert aware_state.pop("run") != plain_state.pop("run")
    assert (aware_state.pop("beginning") is None, plain_state.pop("beginning")) == (False, None)
    # Ranges are among the numbered variables.
    assert len(aware_state.pop("copies")) >= len(plain_state.pop("copies"))
    assert aware_state == plain_state  # Including losses, returns and draws.
    learned = {key for key in plain_arrays if not key.startswith("variable/")}
    assert any("kernel" in key for key in learned)
    for key in learned:
        np.testing.assert_array_equal(aware_arrays[key], plain_arrays[key])
    # Ranges shift the numbers of the other variables: targets, moments, critics.
    values = {array.tobytes() for key, array in aware_arrays.items() if key.startswith("variable/")}
    assert values >= {plain_arrays[key].tobytes() for key in plain_arrays.keys() - learned}
    # Steps have not been learned.
    stretches = [array for key, array in aware_arrays.items() if "log_stretch" in key]
    assert bool(stretches) == (name == "learned")
    assert not any(stretch.any() for stretch in stretches)


def test_grids_that_follow_are_those_of_the_network_that_is_kept(tmp_path: Path) -> None:
    workspace, run = Workspace(tmp_path), RUNS["following"]
    loop.train(workspace, run, silent)
    weights = networks.load_weights(workspace.run_dir(run.run_id) / "network.npz")
    kernels = [key for key in weights if key.endswith("/kernel:0")]
    assert len(kernels) == 2
    for key in kernels:
        assert weights[key.replace(":0", "_high:0")] == np.abs(weights[key]).max()
    outputs = [key for key in weights if key.endswith("output_seen_high:0")]
    assert len(outputs) == 3
    for key in outputs:
        seen_ends = [weights[key.replace("high", end)] for end in ("low", "high")]
        bits = 8 if key.startswith(("normalizer", "head")) else 4
        grid = grid_between(*seen_ends, TensorFormat(bits=bits))
        frozen_ends = [weights[key.replace("seen_high", end)] for end in ("low", "high")]
        np.testing.assert_array_equal(frozen_ends, grid[:2])


def test_the_best_before_the_delay_is_forgotten(tmp_path: Path, monkeypatch: Patch) -> None:
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


#: Overrides by which acting depends on the head alone: no noise, no exploration, one draw.
_CERTAIN = {"ddpg": {"noise": 0.0}, "dqn": {"exploration_final": 0.0}, "ppo": {}}


@pytest.mark.parametrize("name", _CERTAIN)
def test_from_the_delay_on_the_quantised_network_acts_on_fixed_grids(
    name: str, tmp_path: Path
) -> None:
    run = RUNS[name]
    overrides = {**run.overrides, **_CERTAIN[name], "evaluation_every": 800}
    state = begun(tmp_path, replace(run, overrides=overrides))
    while not state._quantized:
        state.burst()
    agent, network = state.agent, state.agent.network
    assert DELAY < state.step < DELAY + 2 * run.overrides["train_frequency"] + 1
    # Batches as large as the number of environments.
    pairs = 0.3 * normal(200, 2, *state._spec.observation_shape)
    heads = np.stack([Snapshot(network)(pair) for pair in pairs])
    draws = copy.deepcopy(agent._act_random)
    actions = np.stack([agent.act(pair, 1.0) for pair in pairs])
    if name == "ppo":
        expected = np.stack([Categorical(2).draw(pair, draws)[0] for pair in heads])
    else:
        expected = heads.clip(-1, 1) if name == "ddpg" else heads.argmax(axis=2)
    np.testing.assert_array_equal(actions, expected)
    assert len(np.unique(heads)) <= 2**8 < len(np.unique(pairs))
    # Targets have the same grids, critics none, and the grids never move.
    before = networks.weights(network)
    ends = [key for key in before if key.endswith(("_low:0", "_high:0"))]
    assert len(ends) >= 2 * 5
    critics = {"ddpg": lambda: agent._normalised_networks[1], "ppo": lambda: agent._model.value}
    assert name == "dqn" or not qat.quantized_layers(critics[name]())
    targets = [networks.weights(target) for target in agent.targets]
    for _ in range(3):
        state.burst()
    after = networks.weights(network)
    for weights in (*targets, after):
        np.testing.assert_equal({k: weights[k] for k in ends}, {k: before[k] for k in ends})
    kernels = [key for key in after if key.endswith("/kernel:0")]
    assert any(not np.array_equal(after[key], before[key]) for key in kernels)


def test_a_delay_behind_the_end_is_refused_before_the_training(tmp_path: Path) -> None:
    quantization = Quantization.from_mapping({"bits": 4, "delay": 10**6})
    run = Run("ppo", "CartPole-v1", 0, {"steps": 512}, quantization)
    message = refused(loop.train, Workspace(tmp_path), run, silent, error=UsageError)
    assert "Received: delay=1000000" in message
    assert not (tmp_path / "runs").exists()
