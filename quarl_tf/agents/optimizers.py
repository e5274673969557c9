"""Optimizers whose state can be saved before their first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quarl_tf.keras import keras


def adam(
    learning_rate: float,
    variables: Sequence[Any],
    decay_steps: int | None = None,
    epsilon: float = 1e-7,
) -> Any:
    """Return Adam with its moments.

    Keras' legacy one: each variable takes one fused operation a step instead of ten, which halves
    the time of a step of Nature's network over 32 images.

    Args:
        learning_rate: Step size at the start.
        variables: What it will change.
        decay_steps: Gradient steps over which the step size falls linearly to 0; None to keep it.
        epsilon: What keeps its quotient finite.
    """
    rate = _schedule(learning_rate, decay_steps)
    optimizer = keras.optimizers.legacy.Adam(rate, epsilon=epsilon)
    # Else created by the first step, too late for a restore.
    optimizer._create_all_weights(variables)
    return optimizer


def rmsprop(
    learning_rate: float,
    variables: Sequence[Any],
    decay_steps: int | None = None,
    *,
    epsilon: float,
) -> Any:
    """Return RMSprop with its moments; A2C's constants (OpenAI baselines, a2c.py).

    Its epsilon is under the root, as there. Keras' legacy one adds it to the root, where 1e-5
    bounds next to nothing: small gradients would take steps a hundred times as large.

    Args:
        learning_rate: Step size at the start.
        variables: What it will change.
        decay_steps: Gradient steps over which the step size falls linearly to 0; None to keep it.
        epsilon: What keeps its quotient finite.
    """
    optimizer = keras.optimizers.RMSprop(
        _schedule(learning_rate, decay_steps), rho=0.99, epsilon=epsilon
    )
    optimizer.build(variables)
    return optimizer


def _schedule(learning_rate: float, decay_steps: int | None) -> Any:
    if decay_steps is None:
        return learning_rate
    return keras.optimizers.schedules.PolynomialDecay(
        learning_rate, max(1, decay_steps), end_learning_rate=0.0
    )
