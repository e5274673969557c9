"""Steps of the optimizers by hand; their state is there before the first of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from quarl_tf.agents import tf_agents
from quarl_tf.foundation.keras import tf

START = np.array([1.0, -2.0, 3.0, 0.5])
#: Of very different sizes, so that each epsilon shows.
GRADIENTS = np.array([[10.0, -1.0, 1e-3, 1e-6], [-2.0, 4.0, 2e-3, -3e-6], [5.0, 0.0, 1e-3, 1e-6]])

MAKERS: dict[str, Callable[..., Any]] = {
    "adam": tf_agents.adam,
    "rmsprop": partial(tf_agents.rmsprop, epsilon=1e-5),
}


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
    found = steps(tf_agents.adam(0.01, changed, epsilon=epsilon), changed, GRADIENTS)
    place, mean, square = START.copy(), np.zeros(4), np.zeros(4)
    for t, gradient in enumerate(GRADIENTS, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        # Section 2 of the paper (arXiv 1412.6980): the order that changes what epsilon means.
        rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        place = place - rate * mean / (np.sqrt(square) + epsilon)
        np.testing.assert_allclose(found[t - 1], place, rtol=0, atol=2e-6)


def test_adam_s_epsilon_is_1e_7_unless_given() -> None:
    (first, *_), (second, *_) = (
        steps(tf_agents.adam(1.0, changed, **options), changed, GRADIENTS)
        for changed, options in ((variables(), {}), (variables(), {"epsilon": 1e-7}))
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_rmsprop_is_that_of_a2c_by_hand(epsilon: float) -> None:
    """As OpenAI's baselines (a2c.py): decay 0.99, and epsilon under the root."""
    changed = variables()
    found = steps(tf_agents.rmsprop(0.01, changed, epsilon=epsilon), changed, GRADIENTS)
    place, square = START.copy(), np.zeros(4)
    for t, gradient in enumerate(GRADIENTS):
        square = 0.99 * square + 0.01 * gradient**2
        place = place - 0.01 * gradient / np.sqrt(square + epsilon)
        np.testing.assert_allclose(found[t], place, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_step_size_falls_linearly_to_0_and_stays_there(name: str) -> None:
    def moved(decay: int | None) -> np.ndarray:
        changed = variables()
        optimizer = MAKERS[name](0.5, changed, decay)
        places = steps(optimizer, changed, np.full((7, 4), 3.0))
        return np.diff(places, axis=0, prepend=START[None].astype(np.float32))

    # All gradients are equal, so each step differs from that without decay by its size alone.
    found = moved(5)
    share = np.array([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])[:, None]
    np.testing.assert_allclose(found, share * moved(None), rtol=1e-3)
    assert not found[5:].any()


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_state_can_be_saved_and_restored_before_the_first_step(name: str) -> None:
    changed, others = variables(), variables()
    first, second = (MAKERS[name](0.01, v, 100) for v in (changed, others))
    state = first.variables()
    # What counts the steps, and one or two moments a variable.
    assert len(state) >= 1 + len(changed) * (2 if name == "adam" else 1)
    kept = [variable.numpy() for variable in state]
    steps(first, changed, GRADIENTS)
    assert len(first.variables()) == len(kept)
    assert not all(np.array_equal(v.numpy(), k) for v, k in zip(state, kept, strict=True))
    # A fresh one goes on where the other stands.
    for target, source in zip(
        [*second.variables(), *others], [*first.variables(), *changed], strict=True
    ):
        target.assign(source)
    np.testing.assert_array_equal(
        steps(second, others, GRADIENTS), steps(first, changed, GRADIENTS)
    )
