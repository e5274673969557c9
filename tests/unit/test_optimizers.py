"""Steps of the optimizers by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from quarl_tf import presets
from quarl_tf.agents import tf_agents
from quarl_tf.foundation.keras import tf

START = np.array([1.0, -2.0, 3.0, 0.5])
#: Of very different sizes, so that each epsilon has an effect.
GRADIENTS = np.array([[10.0, -1.0, 1e-3, 1e-6], [-2.0, 4.0, 2e-3, -3e-6], [5.0, 0.0, 1e-3, 1e-6]])

PRESET = presets.load("a2c", "CartPole-v1", {"learning_rate_decay": False})


def steps(make: Callable[[list[Any]], Any], gradients: np.ndarray) -> np.ndarray:
    """Take a step for each row of gradients; return two variables, joined, after each."""
    variables = [tf.Variable(part, dtype=tf.float32) for part in (START[:3], START[3:])]
    optimizer, places = make(variables), []
    for row in gradients.astype(np.float32):
        optimizer.apply_gradients(zip([row[:3], row[3:]], variables, strict=True))
        places.append(np.concatenate([variable.numpy() for variable in variables]))
    return np.stack(places)


def test_adams_first_step_by_hand() -> None:
    """The order at the end of section 2 of the paper (arXiv 1412.6980) changes epsilon."""
    (place,) = steps(partial(tf_agents.adam, 0.01, PRESET, epsilon=1e-5), (first := GRADIENTS[:1]))
    by_hand = START - 0.01 * first[0] / (np.abs(first[0]) + 1e-5 / np.sqrt(0.001))
    np.testing.assert_allclose(place, by_hand, rtol=0, atol=2e-6)


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_rmsprop_is_that_of_a2c_by_hand(epsilon: float) -> None:
    """As OpenAI's baselines (a2c.py): decay 0.99, and epsilon under the root."""
    preset = replace(PRESET, learning_rate=0.01, epsilon=epsilon)
    place, square = START.copy(), np.zeros(4)
    places = steps(partial(tf_agents.rmsprop, preset), GRADIENTS)
    for gradient, actual in zip(GRADIENTS, places, strict=True):
        square = 0.99 * square + 0.01 * gradient**2
        place = place - 0.01 * gradient / np.sqrt(square + epsilon)
        np.testing.assert_allclose(actual, place, rtol=0, atol=2e-6)


@pytest.mark.parametrize("make", [partial(tf_agents.adam, 0.5), tf_agents.rmsprop])
def test_step_size_falls_linearly_to_0_and_stays_there(make: Any) -> None:
    def moved(decay: bool) -> np.ndarray:
        # Five gradient steps in all.
        size = {"learning_rate": 0.5, "steps": 5 * PRESET.minibatch_size}
        preset = replace(PRESET, learning_rate_decay=decay, **size)
        places = steps(partial(make, preset), np.full((7, 4), 3))
        return np.diff(places, axis=0, prepend=START[None].astype(np.float32))

    # All gradients are equal, so each step differs from that without decay by its size alone.
    moves = moved(True)
    share = np.array([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])[:, None]
    np.testing.assert_allclose(moves, share * moved(False), rtol=1e-3)
    assert not moves[5:].any()
