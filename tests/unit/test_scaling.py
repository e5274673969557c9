"""What goes into a network is scaled by what was seen."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from samples import seen, statistics

from quarl_tf import networks
from quarl_tf.environments import EnvSpec
from quarl_tf.networks import Design, policy_factory
from quarl_tf.spec.architectures import architecture

SPEC = EnvSpec((3,), "float32", 2)
MLP = Design(architecture((5, 4)), 2)
build = policy_factory(SPEC, MLP, seed=0)


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
    statistics(np.full((50, 3), 7, np.float32)).apply_to([network])
    normalised = network.get_layer("normalizer")
    assert np.abs(normalised(np.full((1, 3), 7.001, np.float32)).numpy()).max() < 0.11


def test_all_bytes_are_spread_evenly_over_0_to_1() -> None:
    network = policy_factory(EnvSpec((256,), "uint8", 2), MLP, seed=0)()
    every = np.arange(256, dtype=np.uint8)[None]
    scaled = network.get_layer("byte_scaling")(every).numpy()
    np.testing.assert_allclose(scaled, np.arange(256)[None] / 255, rtol=1e-6)
    assert scaled.max() == 1
    assert network.input.dtype == "uint8"
    # A byte's range is known: there is nothing to normalise with.
    assert not [name for name in networks.weights(network) if "normalizer" in name]
