"""TensorFlow's converter; only this module and `convert` know it."""

import warnings
from collections.abc import Callable
from typing import Any

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.keras import keras, tf


def of_function(network: Callable[[Any], Any], shape: tuple[int, ...], dtype: str) -> Any:
    """Return a converter of a function of one observation, with the signature of all our files."""
    signature = [tf.TensorSpec((1, *shape), dtype, name="observation")]
    serve = tf.function(lambda observation: {"head": network(observation)}, signature)
    variables = network if isinstance(network, keras.Model) else tf.Module()
    return tf.lite.TFLiteConverter.from_concrete_functions(
        [serve.get_concrete_function()], variables
    )


def converted(converter: Any) -> bytes:
    """Return the flatbuffer that a converter makes; a QuarlError where it fails."""
    with native_output.caught() as said, warnings.catch_warnings():
        # It takes whatever has ranges for a network with integer inputs; ours are floats, or bytes.
        warnings.filterwarnings("ignore", "Statistics for quantized inputs", UserWarning)
        try:
            content: bytes = converter.convert()
        except Exception as error:
            raise QuarlError(
                f"The TFLite converter failed: {one_line(error)[:300]} {said()[-300:]}"
            ) from error
    return content
