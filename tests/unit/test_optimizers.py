"""Steps of the optimizers, and of float16 loss scaling, by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from quarl_tf import presets
from quarl_tf.agents import tf_agents
from quarl_tf.foundation.keras import keras, tf

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


@pytest.mark.parametrize("epsilon", [1e-7, 1e-5])
def test_adam_by_hand(epsilon: float) -> None:
    places = steps(partial(tf_agents.adam, 0.01, PRESET, epsilon=epsilon), GRADIENTS)
    place, mean, square = START.copy(), np.zeros(4), np.zeros(4)
    for t, gradient in enumerate(GRADIENTS, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        # The order at the end of section 2 of the paper (arXiv 1412.6980) changes epsilon.
        rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        place = place - rate * mean / (np.sqrt(square) + epsilon)
        np.testing.assert_allclose(places[t - 1], place, rtol=0, atol=2e-6)


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


class Half:
    """A weight of 1, whose loss is `slope` times it, computed in float16."""

    def __init__(self, clip: Any = lambda gradients: gradients) -> None:
        self.weight = tf.Variable(1.0)
        optimizer = keras.optimizers.legacy.SGD(0.25)
        self.step = tf_agents.GradientStep(optimizer, "float16", clip)

    def take(self, slope: float) -> float:
        """Take a step; return its size."""
        before = float(self.weight)

        def loss() -> Any:
            return tf.cast(tf.cast(self.weight, tf.float16), tf.float32) * slope

        np.testing.assert_allclose(self.step(loss, [self.weight]), before * slope, rtol=1e-3)
        return before - float(self.weight)

    @property
    def scaling(self) -> tuple[float, ...]:
        """Return the scale and the number of good steps."""
        return tuple(map(float, self.step.variables()[-2:]))


def test_small_gradients_survive_float16() -> None:
    half = Half()
    half.weight.assign(0.0)
    assert np.float16(2e-8) == 0
    assert half.take(2e-8) == pytest.approx(0.25 * 2e-8, rel=1e-3)
    assert half.scaling == (2.0**15, 1)


def test_steps_that_overflow_are_left_out_and_lower_the_scale() -> None:
    half = Half()
    # 2**15 times 8 is beyond float16, and twice; 2**13 times 7 is not.
    assert [half.take(slope) for slope in (1.0, 8.0, 7.0)] == [0.25, 0, 0]
    assert half.scaling == (2.0**13, 0)
    assert [half.take(7.0), half.scaling] == [1.75, (2.0**13, 1)]
    assert [half.take(np.inf) for _ in range(14)] == [0] * 14
    assert half.scaling == (1, 0)


def test_many_good_steps_in_a_row_double_the_scale_up_to_a_limit(monkeypatch: Any) -> None:
    monkeypatch.setattr(tf_agents, "GOOD_STEPS", 2)
    monkeypatch.setattr(tf_agents, "LARGEST_SCALE", 2.0**16)
    half, scalings = Half(), []
    for slope in (0.5, 0.5, 0.25, 0.25, 8.0, 0.25, 0.25):
        half.take(slope)
        scalings.append(half.scaling)
    high, low = 2.0**16, 2.0**15
    assert scalings == [(low, 1), (high, 0), (high, 1), (high, 0), (low, 0), (low, 1), (high, 0)]


def test_what_is_clipped_is_the_gradient_without_the_scale() -> None:
    def clip(gradients: list[Any]) -> list[Any]:
        return [tf.clip_by_norm(gradient, 1.0) for gradient in gradients]

    assert [Half(clip).take(slope) for slope in (0.5, 1.5)] == [0.125, 0.25]
