"""A network is what its factory, its weights and its statistics say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quarl_tf import networks
from quarl_tf.environments import EnvSpec
from quarl_tf.errors import QuarlError
from quarl_tf.networks import Mlp, RunningStatistics, mlp_factory

SPEC = EnvSpec((3,), "float32", 2)
MLP = Mlp((5, 4), 2)
KINDS = ("kernel", "bias")
build = mlp_factory(SPEC, MLP, seed=0)


def seen(rows: int, seed: int = 0) -> np.ndarray:
    """Return observations whose features differ in place and size."""
    random = np.random.default_rng(seed)
    return random.normal([0, -3, 100], [1, 0.02, 30], (rows, 3)).astype(np.float32)


def statistics(*batches: np.ndarray) -> RunningStatistics:
    collected = RunningStatistics((3,))
    for batch in batches:
        collected.update(batch)
    return collected


# Observation statistics.


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 2**16))
def test_statistics_are_those_of_all_observations_however_they_came(
    sizes: list[int], seed: int
) -> None:
    observations = seen(sum(sizes), seed)
    collected = statistics(*np.split(observations, np.cumsum(sizes)[:-1]))
    exact = observations.astype(np.float64)
    assert collected.count == len(observations)
    np.testing.assert_allclose(collected.mean, exact.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        collected.squares / collected.count, exact.var(axis=0), rtol=1e-9, atol=1e-9
    )


def test_statistics_are_exact_far_from_zero() -> None:
    observations = (seen(1000) + np.float32(1e6)).astype(np.float32)
    collected = statistics(*np.split(observations, 100))
    exact = observations.astype(np.float64).std(axis=0)
    np.testing.assert_allclose(np.sqrt(collected.squares / 1000), exact, rtol=1e-6)


def test_restored_statistics_go_on_as_if_they_had_not_been_away() -> None:
    whole = statistics(seen(20), seen(30, 1))
    half, restored = statistics(seen(20)), RunningStatistics((3,))
    restored.restore({name: value.copy() for name, value in half.arrays().items()})
    half.update(seen(7, 2))  # Goes its own way: the copy must not follow.
    restored.update(seen(30, 1))
    for name, value in whole.arrays().items():
        np.testing.assert_array_equal(restored.arrays()[name], value)


def test_restored_statistics_do_not_write_into_the_checkpoint() -> None:
    arrays = {name: value.copy() for name, value in statistics(seen(20)).arrays().items()}
    restored = RunningStatistics((3,))
    restored.restore(arrays)
    restored.update(seen(30, 1))
    for name, value in statistics(seen(20)).arrays().items():
        np.testing.assert_array_equal(arrays[name], value)


def test_normaliser_gives_every_feature_mean_0_and_deviation_1() -> None:
    network, observations = build(), seen(5000)
    statistics(observations).apply_to(network)
    normalised = network.get_layer("normalizer")(observations).numpy()
    np.testing.assert_allclose(normalised.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(normalised.std(axis=0), 1, rtol=1e-3)


def test_normaliser_cuts_off_at_five_deviations() -> None:
    network = build()
    layer = network.get_layer("normalizer")
    layer.mean.assign([1.0, 2.0, 3.0])
    layer.inverse_deviation.assign([1.0, 0.5, 2.0])
    observation = np.array([[7.0, 11.0, 1.0], [-3.5, 3.0, -1e9]], np.float32)
    expected = [[5.0, 4.5, -4.0], [-4.5, 0.5, -5.0]]
    np.testing.assert_array_equal(layer(observation).numpy(), expected)


def test_feature_that_never_moved_is_not_blown_up() -> None:
    network = build()
    statistics(np.full((50, 3), 7, np.float32)).apply_to(network)
    normalised = network.get_layer("normalizer")
    assert np.abs(normalised(np.full((1, 3), 7.001, np.float32)).numpy()).max() < 0.11


def test_normaliser_is_the_identity_until_it_has_seen_something() -> None:
    observation = np.array([[-4.0, 0.5, 4.0]], np.float32)
    layer = build().get_layer("normalizer")
    np.testing.assert_array_equal(layer(observation).numpy(), observation)


# Networks.


def test_head_is_that_of_the_weights_by_hand() -> None:
    network, observations = build(), seen(40)
    statistics(observations).apply_to(network)
    random = np.random.default_rng(1)
    values = {
        name: value if "normalizer" in name else random.normal(size=value.shape).astype("f4")
        for name, value in networks.weights(network).items()
    }
    networks.set_weights(network, values)
    deviation = observations.astype(np.float64).std(axis=0)
    x = np.clip((observations - observations.mean(axis=0)) / deviation, -5, 5)
    for layer in ("hidden_0", "hidden_1"):
        x = np.maximum(x @ values[f"{layer}/kernel:0"] + values[f"{layer}/bias:0"], 0)
    expected = x @ values["head/kernel:0"] + values["head/bias:0"]
    found = networks.forward(network)(observations)
    assert found.shape == (40, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(network(observations).numpy(), found, rtol=1e-4, atol=1e-4)


def test_forward_follows_the_weights() -> None:
    network = build()
    forward = networks.forward(network)
    before = forward(seen(5))
    values = networks.weights(network)
    networks.set_weights(network, values | {"head/bias:0": np.array([1, -2], np.float32)})
    # Other heads are added to, in float32.
    np.testing.assert_allclose(forward(seen(5)) - before, [[1, -2]] * 5, atol=1e-4)


def test_the_same_seed_gives_the_same_initial_weights() -> None:
    first, second = networks.weights(build()), networks.weights(build())
    third = networks.weights(mlp_factory(SPEC, MLP, seed=0)())
    others = [
        networks.weights(mlp_factory(SPEC, MLP, seed=1)()),
        networks.weights(mlp_factory(SPEC, MLP, seed=0, purpose="value weights")()),
    ]
    assert set(first) == {
        *("normalizer/mean:0", "normalizer/inverse_deviation:0"),
        *(f"{layer}/{kind}:0" for layer in ("hidden_0", "hidden_1", "head") for kind in KINDS),
    }
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
        np.testing.assert_array_equal(value, third[name])
        if name.endswith("/kernel:0"):
            assert not any(np.array_equal(value, other[name]) for other in others)


def test_layers_of_the_same_shape_start_differently() -> None:
    values = networks.weights(mlp_factory(SPEC, Mlp((6, 6, 6), 6), seed=0)())
    kernels = {values[f"{name}/kernel:0"].tobytes() for name in ("hidden_1", "hidden_2", "head")}
    assert len(kernels) == 3


def test_initial_weights_are_glorot_uniform() -> None:
    values = networks.weights(mlp_factory(SPEC, Mlp((200,), 100), seed=0)())
    for layer, inputs, outputs in (("hidden_0", 3, 200), ("head", 200, 100)):
        kernel = values[f"{layer}/kernel:0"]
        limit = np.sqrt(6 / (inputs + outputs))
        assert 0.95 * limit < np.abs(kernel).max() <= limit
        assert abs(kernel.mean()) < 5 * limit / np.sqrt(3 * kernel.size)
        assert not values[f"{layer}/bias:0"].any()


@pytest.mark.parametrize("gain", [0.01, 1.0])
def test_orthogonal_weights_keep_lengths_up_to_their_gain(gain: float) -> None:
    values = networks.weights(mlp_factory(SPEC, Mlp((8,), 4, "tanh", gain), seed=0)())
    for layer, scale in (("hidden_0", np.sqrt(2)), ("head", gain)):
        kernel = values[f"{layer}/kernel:0"] / scale
        small = kernel @ kernel.T if len(kernel) < kernel.shape[1] else kernel.T @ kernel
        np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-5)


def test_activation_is_that_of_the_architecture() -> None:
    for activation, by_hand in (("relu", lambda x: np.maximum(x, 0)), ("tanh", np.tanh)):
        network = mlp_factory(SPEC, Mlp((5,), 2, activation), seed=0)()
        values, x = networks.weights(network), np.array([[1.0, -2.0, 3.0]], np.float32)
        expected = by_hand(x @ values["hidden_0/kernel:0"]) @ values["head/kernel:0"]
        np.testing.assert_allclose(network(x).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_networks_of_a_factory_share_nothing() -> None:
    first, second = build(), build()
    before = networks.weights(second)
    for variable in first.variables:
        variable.assign(np.full(variable.shape, 7, np.float32))
    for name, value in networks.weights(second).items():
        np.testing.assert_array_equal(value, before[name])


def test_weights_are_a_copy() -> None:
    network = build()
    kept = networks.weights(network)
    before = {name: value.copy() for name, value in kept.items()}
    for variable in network.variables:
        variable.assign_add(np.ones(variable.shape, np.float32))
    for name, value in kept.items():
        np.testing.assert_array_equal(value, before[name])


def test_statistics_are_not_trained() -> None:
    network = build()
    names = {variable.name for variable in network.trainable_variables}
    assert names == {n for n in networks.weights(network) if not n.startswith("normalizer")}


# Files.


def test_weights_survive_their_file(tmp_path: Path) -> None:
    first, second = build(), mlp_factory(SPEC, MLP, seed=1)()
    statistics(seen(10)).apply_to(first)
    for name in ("a.npz", "b.npz"):
        networks.save_weights(tmp_path / name, networks.weights(first))
    # Their hash names the network, so the same weights have to be the same bytes.
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    networks.set_weights(second, networks.load_weights(tmp_path / "a.npz"))
    for name, value in networks.weights(first).items():
        np.testing.assert_array_equal(networks.weights(second)[name], value)
    np.testing.assert_array_equal(second(seen(5)).numpy(), first(seen(5)).numpy())


@pytest.mark.parametrize("change", ["shape", "missing", "unknown", "other layers"])
def test_weights_of_another_network_are_refused(change: str) -> None:
    network = build()
    before = networks.weights(network)
    values = networks.weights(network)
    if change == "shape":
        values["head/kernel:0"] = np.zeros((4, 3), np.float32)
    elif change == "missing":
        del values["head/bias:0"]
    elif change == "unknown":
        values["extra/bias:0"] = np.zeros(2, np.float32)
    else:
        values = networks.weights(mlp_factory(SPEC, Mlp((5,), 2), seed=0)())
    with pytest.raises(QuarlError, match=r"do not fit the network .* Received: ") as error:
        networks.set_weights(network, values)
    assert "\n" not in str(error.value)
    for name, value in networks.weights(network).items():
        np.testing.assert_array_equal(value, before[name])
