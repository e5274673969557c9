"""Networks as others build them keep in integers what they compute in float."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compiled
import numpy as np
import pytest
from samples import SIDECAR, refused

from quarl_tf.export import auto, preparation
from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.graph import Graph
from quarl_tf.export.ptq import quantized
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import sha256
from quarl_tf.foundation.keras import tf
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme, actions
from quarl_tf.store.workspace import sidecar_path

OBSERVATIONS = np.random.default_rng(2).normal(size=(300, 6)).astype(np.float32)
INTEGERS = ("int8", "int8_tensor", "ptq_opt_w8a8")
Network = Callable[[Any], Any]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    scale = np.sqrt(1 / np.prod(shape[:-1]))
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def hidden(x: Any, seed: int = 1, width: int = 6) -> Any:
    return x @ drawn(6, width, seed=seed) + 0.3 * drawn(width, seed=seed)


def head(x: Any) -> Any:
    return tf.nn.relu(x @ drawn(x.shape[-1], 16, seed=3) + 0.1) @ drawn(16, 3, seed=4)


def by_rows(x: Any) -> Any:
    rows = tf.nn.relu(tf.reshape(x, (1, 2, 3)) @ drawn(3, 8))
    return head(tf.reshape(rows, (1, 16)))


def on_a_small_image(x: Any, dilations: int = 1) -> Any:
    image = tf.reshape(x, (1, 2, 3, 1))
    features = tf.nn.relu(tf.nn.conv2d(image, drawn(3, 3, 1, 8), 1, "SAME", dilations=dilations))
    return head(tf.reshape(features, (1, 48)))


def grouped(x: Any) -> Any:
    image = tf.reshape(x, (1, 3, 2, 1))
    features = tf.nn.depthwise_conv2d(image, drawn(2, 2, 1, 4), (1, 1, 1, 1), "SAME")
    return head(tf.reshape(features, (1, 24)))


def products_of_a_batch(x: Any) -> Any:
    return head(tf.reshape(tf.reshape(x, (2, 1, 3)) @ drawn(2, 3, 8), (1, 16)))


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
    "tanh beside its input": lambda x: head(3 * hidden(x) + tf.tanh(3 * hidden(x))),
    "half of a layer": lambda x: head(tf.split(hidden(x), 2, axis=1)[1]),
    "a layer of several vectors": by_rows,
    "an image smaller than a kernel": on_a_small_image,
    "a channel that is mostly its bias": mostly_bias,
    "the observation beside a layer": lambda x: head(tf.concat([x, tf.nn.relu(hidden(x))], axis=1)),
}


def heads(content: bytes, observations: np.ndarray, outputs: int = 3) -> np.ndarray:
    policy = Policy(content, replace(SIDECAR, num_actions=outputs, observation_shape=[6]))
    return auto.heads(content, policy, observations)


def error(network: Network, scheme: str) -> float:
    """Return the largest difference of heads, in standard deviations of fp32's."""
    content = converted(of_function(network, (6,), "float32"))
    quantized_content = quantized(content, Scheme.parse(scheme), OBSERVATIONS)
    expected, actual = (heads(file, OBSERVATIONS) for file in (content, quantized_content))
    return float(np.abs(actual - expected).max() / expected.std())


@pytest.mark.parametrize("scheme", INTEGERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_integers_compute_what_the_network_does(name: str, scheme: str) -> None:
    assert error(NETWORKS[name], scheme) < 0.25


def test_layers_of_several_vectors_become_c(tmp_path: Path) -> None:
    content = converted(of_function(by_rows, (6,), "float32"))
    artifact = tmp_path / "int8_tensor.tflite"
    artifact.write_bytes(quantized(content, Scheme.parse("int8_tensor"), OBSERVATIONS))
    sidecar = replace(SIDECAR, num_actions=3, observation_shape=[6], sha256=sha256(artifact))
    sidecar.save(sidecar_path(artifact))
    compiled.check(artifact, OBSERVATIONS, compiled.SANITIZED)


def test_flatbuffers_of_before_2021_name_their_operators() -> None:
    graph = Graph(converted(of_function(head, (6,), "float32")))
    names = [graph.name(operator) for operator in graph.operators]
    for code in graph.model.operatorCodes:
        code.builtinCode = 0
    assert [graph.name(operator) for operator in Graph(graph.pack()).operators] == names


def test_a_bias_beyond_32_bits_widens_the_scale_of_its_channel() -> None:
    small = drawn(16, 3, seed=4) * np.array([1, 1e-7, 1e-42], np.float32)
    bias = np.array([0.1, 0.6, 0.2], np.float32)
    assert error(lambda x: tf.nn.relu(hidden(x, width=16)) @ small + bias, "int8") < 0.25
    # One scale for all of a kernel.
    tiny = converted(of_function(lambda x: x @ drawn(6, 3) * 1e-9 + bias, (6,), "float32"))
    int8 = quantized(tiny, Scheme.parse("int8_tensor"), OBSERVATIONS)
    np.testing.assert_allclose(heads(int8, OBSERVATIONS), heads(tiny, OBSERVATIONS), atol=0.01)


@pytest.mark.parametrize(
    "network",
    [
        lambda x: head(tf.nn.relu(np.float32(1) - x)),
        lambda x: 2 * tf.tanh(head(x)) + 1,
        lambda x: head(tf.nn.relu6(4 * hidden(x))),
        lambda x: on_a_small_image(x, dilations=2),
        lambda x: head(tf.reshape(tf.nn.relu(tf.reshape(x, (2, 3)) @ drawn(3, 8)), (1, 16))),
    ],
)
def test_the_converters_own_int8_is_of_the_same_network(network: Network) -> None:
    assert error(network, "int8_stock") < 0.25


@pytest.mark.parametrize(
    ("network", "schemes", "name"),
    [
        (grouped, ("int8", "ptq_opt_w4"), "DEPTHWISE_CONV_2D"),
        (products_of_a_batch, ("int8_tensor", "ptq_w2"), "BATCH_MATMUL"),
    ],
)
def test_weights_that_would_stay_in_float_are_refused(
    network: Network, schemes: tuple[str, ...], name: str
) -> None:
    content = converted(of_function(network, (6,), "float32"))
    for scheme in schemes:
        message = refused(quantized, content, Scheme.parse(scheme), OBSERVATIONS, error=UsageError)
        assert f"Received: operator={name}" in message


def test_the_converters_own_int8_refuses_what_it_would_change() -> None:
    content = converted(of_function(NETWORKS["whole numbers"], (6,), "float32"))
    scheme = Scheme.parse("int8_stock")
    message = refused(quantized, content, scheme, OBSERVATIONS, error=QuarlError)
    assert "operator=CAST" in message


def test_heads_are_centred_by_choice_and_only_where_nothing_follows() -> None:
    offset = np.array([9, 9, 9, 1, 1], np.float32)

    def several(x: Any) -> Any:
        return tf.nn.relu(hidden(x, width=16)) @ drawn(16, 5) + offset

    content = converted(of_function(several, (6,), "float32"))
    for choices, ends in ((5, []), ([3, 2], [3])):
        centred = preparation.centred(content, choices)
        expected, actual = (heads(file, OBSERVATIONS, 5) for file in (content, centred))
        np.testing.assert_allclose(actual, actions.centred(expected, choices), atol=1e-5)
        for part in np.split(actual, ends, axis=1):
            np.testing.assert_allclose(part.mean(axis=1), 0, atol=1e-5)
    for follows in (tf.nn.relu, tf.nn.softmax):
        activated = converted(of_function(lambda x, f=follows: f(several(x)), (6,), "float32"))
        assert not preparation.separable(Graph(activated))
        assert preparation.centred(activated, choices) == activated
    assert preparation.centred(content, None) == content
