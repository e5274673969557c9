"""Measure the cost of a precision of hidden layers on this machine."""

import timeit
from typing import Any

from quarl_tf.foundation.keras import tf

_REPETITIONS = 4


def slowdown(precision: str) -> float:
    """Return the time of a convolution's gradient, as a multiple of that in float32.

    The layer is the first of Nature's network (Mnih et al. 2015), the time the least of several.
    """
    return _gradient_seconds(precision) / _gradient_seconds("float32")


def _gradient_seconds(precision: str) -> float:
    images = tf.ones([8, 84, 84, 4], precision)
    kernel = tf.Variable(tf.ones([8, 8, 4, 32]))

    @tf.function(autograph=False)  # type: ignore[misc]
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            product = tf.nn.conv2d(images, tf.cast(kernel, precision), strides=4, padding="VALID")
            loss = tf.reduce_sum(tf.cast(product, tf.float32))
        return tape.gradient(loss, kernel)

    gradient()  # Compiles it.
    return min(timeit.repeat(lambda: gradient().numpy(), number=1, repeat=_REPETITIONS))
