"""int8 as TensorFlow's converter makes it, untouched: what a user gets without this package."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.integer import Graph
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.keras import tf

#: Observations of the representative dataset, as many as TensorFlow's guide takes.
_REPRESENTATIVE = 500

_ACTIVATIONS: Mapping[int, Callable[[Any], Any]] = {0: lambda x: x, 1: tf.nn.relu}


def quantized(content: bytes, observations: NDArray[Any]) -> bytes:
    """Convert a float flatbuffer's network: `Optimize.DEFAULT`, int8 in and out.

    The representative dataset is evenly spread among the observations [n, ...]. A QuarlError says
    that an operator is none of our policies', or that the converter failed.
    """
    seen = observations[:: max(1, len(observations) // _REPRESENTATIVE)].astype(np.float32)

    def representative() -> Iterator[list[NDArray[Any]]]:
        yield from ([observation[None]] for observation in seen)

    converter = of_function(function(content), observations.shape[1:], "float32")
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = representative
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    return converted(converter)


def function(content: bytes) -> Callable[[Any], Any]:
    """Return what a float flatbuffer computes, in TensorFlow; errors as of `quantized`."""
    graph = Graph(content)
    for operator in graph.operators:
        if graph.name(operator) not in _OPERATIONS:
            raise QuarlError(
                "int8_stock is made of dense and convolutional policies; name other schemes. "
                f"Received: operator={graph.name(operator)}"
            )

    def call(observation: Any) -> Any:
        values = {graph.inputs[0]: observation}
        for operator in graph.operators:
            arguments = [
                values[i] if i in values else graph.constant(i) for i in operator.inputs if i >= 0
            ]
            values[operator.outputs[0]] = _OPERATIONS[graph.name(operator)](operator, *arguments)
        return values[graph.outputs[0]]

    return call


def _dense(operator: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
    activation = _ACTIVATIONS[operator.builtinOptions.fusedActivationFunction]
    return activation(tf.matmul(inputs, kernel, transpose_b=True) + bias)


def _convolution(operator: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
    options = operator.builtinOptions
    padding = ("SAME", "VALID")[options.padding]
    moved = np.transpose(kernel, (1, 2, 3, 0))
    product = tf.nn.conv2d(inputs, moved, (options.strideH, options.strideW), padding)
    return _ACTIVATIONS[options.fusedActivationFunction](product + bias)


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "CAST": lambda _, x: x,
    "SUB": lambda _, x, y: x - y,
    "MUL": lambda _, x, y: x * y,
    "MINIMUM": lambda _, x, y: tf.minimum(x, y),
    "MAXIMUM": lambda _, x, y: tf.maximum(x, y),
    "TANH": lambda _, x: tf.tanh(x),
    "RESHAPE": lambda _, x, shape: tf.reshape(x, (1, -1)),
    "FULLY_CONNECTED": _dense,
    "CONV_2D": _convolution,
}
