"""Steps of the optimizers by hand; their state is there before the first of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarl_tf import presets
from quarl_tf.agents import tf_agents
from quarl_tf.foundation.keras import tf

START = np.array([1.0, -2.0, 3.0, 0.5])
#: Of very different sizes, so that each epsilon shows.
GRADIENTS = np.array([[10.0, -1.0, 1e-3, 1e-6], [-2.0, 4.0, 2e-3, -3e-6], [5.0, 0.0, 1e-3, 1e-6]])

PRESET = presets.load("a2c", "CartPole-v1", {"learning_rate_decay": False})


def adam(rate: float, preset: Any, changed: list[Any]) -> Any:
    return tf_agents.adam(rate, preset, changed)


def rmsprop(rate: float, preset: Any, changed: list[Any]) -> Any:
    return tf_agents.rmsprop(replace(preset, learning_rate=rate), changed)


def variables() -> list[Any]:
    return [tf.Variable(START[:3], dtype=tf.float32), tf.Variable(START[3:], dtype=tf.float32)]


def steps(optimizer: Any, changed: list[Any], gradients: np.ndarray) -> np.ndarray:
    """Take a step for each row of gradients; return where each led to."""
    places = []
    for row in gradients.astype(np.float32):
        optimizer.apply_gradients(zip([row[:3], row[3:]], changed, strict=True))
        places.append(np.concatenate([variable.numpy() for variable in changed]))
    return np.stack(places)


@pytest.mark.parametrize("epsilon", [1e-7, 1e-5])
def test_adam_by_hand(epsilon: float) -> None:
    changed = variables()
    found = steps(tf_agents.adam(0.01, PRESET, changed, epsilon), changed, GRADIENTS)
    place, mean, square = START.copy(), np.zeros(4), np.zeros(4)
    for t, gradient in enumerate(GRADIENTS, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        # Section 2 of the paper (arXiv 1412.6980): the order that changes what epsilon means.
        rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        place = place - rate * mean / (np.sqrt(square) + epsilon)
        np.testing.assert_allclose(found[t - 1], place, rtol=0, atol=2e-6)


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_rmsprop_is_that_of_a2c_by_hand(epsilon: float) -> None:
    """As OpenAI's baselines (a2c.py): decay 0.99, and epsilon under the root."""
    changed = variables()
    preset = replace(PRESET, learning_rate=0.01, epsilon=epsilon)
    found = steps(tf_agents.rmsprop(preset, changed), changed, GRADIENTS)
    place, square = START.copy(), np.zeros(4)
    for t, gradient in enumerate(GRADIENTS):
        square = 0.99 * square + 0.01 * gradient**2
        place = place - 0.01 * gradient / np.sqrt(square + epsilon)
        np.testing.assert_allclose(found[t], place, rtol=0, atol=2e-6)


@pytest.mark.parametrize("make", [adam, rmsprop])
def test_step_size_falls_linearly_to_0_and_stays_there(make: Any) -> None:
    def moved(decay: bool) -> np.ndarray:
        changed = variables()
        # Five gradient steps in all.
        preset = replace(PRESET, learning_rate_decay=decay, steps=5 * PRESET.minibatch_size)
        optimizer = make(0.5, preset, changed)
        places = steps(optimizer, changed, np.full((7, 4), 3.0))
        return np.diff(places, axis=0, prepend=START[None].astype(np.float32))

    # All gradients are equal, so each step differs from that without decay by its size alone.
    found = moved(True)
    share = np.array([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])[:, None]
    np.testing.assert_allclose(found, share * moved(False), rtol=1e-3)
    assert not found[5:].any()
