"""TensorFlow's converter to TFLite, and int8 files by it alone."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from quarl_tf.export.graph import NONE, RELU, UINT8, Graph
from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.keras import keras, tf

#: Observations of the representative dataset, as in TensorFlow's guide.
_REPRESENTATIVE = 500

_ACTIVATIONS: Mapping[int, Callable[[Any], Any]] = {
    NONE: lambda x: x,
    RELU: tf.nn.relu,
    schema.ActivationFunctionType.RELU6: tf.nn.relu6,
    schema.ActivationFunctionType.TANH: tf.tanh,
}


def of_function(network: Callable[[Any], Any], shape: tuple[int, ...], dtype: str) -> Any:
    """Return a converter of a function of one observation, from "observation" to "head"."""
    signature = [tf.TensorSpec((1, *shape), dtype, name="observation")]
    serve = tf.function(lambda observation: {"head": network(observation)}, signature)
    # With the network itself, the converter would trace and save each of its layers, too.
    owner = tf.Module()
    owner.kept = network.variables if isinstance(network, keras.Model) else []
    return tf.lite.TFLiteConverter.from_concrete_functions([serve.get_concrete_function()], owner)


def converted(converter: Any) -> bytes:
    """Return the flatbuffer that a converter makes; a QuarlError where it fails."""
    with native_output.caught() as output, warnings.catch_warnings():
        # It takes any network with ranges to have integer inputs; ours are floats, or bytes.
        warnings.filterwarnings("ignore", "Statistics for quantized inputs", UserWarning)
        try:
            content: bytes = converter.convert()
        except Exception as error:
            raise QuarlError(
                f"The TFLite converter failed: {one_line(error)[:300]} {output()[-300:]}"
            ) from error
    return content


def stock_int8(content: bytes, observations: NDArray[Any]) -> bytes:
    """Convert a float flatbuffer to `int8_stock`: `Optimize.DEFAULT`, int8 in and out.

    The representative dataset is evenly sampled from the observations [n, ...]. Raises a QuarlError
    for an unsupported operator, or where the converter fails.
    """
    sample = observations[:: max(1, len(observations) // _REPRESENTATIVE)].astype(np.float32)
    converter = of_function(_function(content), observations.shape[1:], "float32")
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([observation[None]] for observation in sample)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    return converted(converter)


def _function(content: bytes) -> Callable[[Any], Any]:
    """Return what a float flatbuffer computes, in TensorFlow."""
    graph = Graph(content)
    for operator in graph.operators:
        kind, source = graph.name(operator), graph.tensors[operator.inputs[0]]
        supported = kind in _OPERATIONS and graph.activation(operator) in _ACTIVATIONS
        # The bytes of an observation are floats here.
        if not supported or (kind == "CAST" and source.type != UINT8):
            raise QuarlError(
                "int8_stock is made of dense and convolutional policies; name other schemes. "
                f"Received: operator={kind} of {source.name.decode()}"
            )

    def call(observation: Any) -> Any:
        values = {graph.inputs[0]: observation}
        for operator in graph.operators:
            arguments = [
                values[i] if i in values else graph.constant(i) for i in operator.inputs if i >= 0
            ]
            if graph.name(operator) == "RESHAPE":
                rows, *sizes = graph.tensors[operator.outputs[0]].shape
                # Published files of one row have -1, which the converter writes as it is given.
                arguments[1:] = [(rows, *sizes) if rows > 1 or len(sizes) > 1 else (1, -1)]
            outputs = _OPERATIONS[graph.name(operator)](operator, *arguments)
            values[operator.outputs[0]] = _ACTIVATIONS[graph.activation(operator)](outputs)
        return values[graph.outputs[0]]

    return call


def _convolution(operator: Any, inputs: Any, kernel: Any, bias: Any = 0.0) -> Any:
    options = operator.builtinOptions
    strides = options.strideH, options.strideW
    padding = ("SAME", "VALID")[options.padding]
    dilations = options.dilationHFactor, options.dilationWFactor
    filters = np.transpose(kernel, (1, 2, 3, 0))
    return tf.nn.conv2d(inputs, filters, strides, padding, dilations=dilations) + bias


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "CAST": lambda _, x: x,
    "ADD": lambda _, x, y: x + y,
    "SUB": lambda _, x, y: x - y,
    "MUL": lambda _, x, y: x * y,
    "MINIMUM": lambda _, x, y: tf.minimum(x, y),
    "MAXIMUM": lambda _, x, y: tf.maximum(x, y),
    "TANH": lambda _, x: tf.tanh(x),
    "RESHAPE": lambda _, x, shape: tf.reshape(x, shape),
    "FULLY_CONNECTED": lambda _, x, kernel, bias=0.0: tf.matmul(x, kernel, transpose_b=True) + bias,
    "CONV_2D": _convolution,
}
