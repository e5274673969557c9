"""TensorFlow's converter to TFLite, and int8 files by it alone."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from quarl_tf.export.graph import FLOAT32, Graph
from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.keras import keras, tf

#: Options of operators that a flatbuffer may leave out, as runtimes have defaults for them.
_OPTIONS = {"ADD": schema.AddOptionsT, "MUL": schema.MulOptionsT, "SUB": schema.SubOptionsT}

#: Observations of the representative dataset, as in TensorFlow's guide.
_REPRESENTATIVE = 500


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
    return _made_by(converter.convert)


def _made_by(convert: Callable[[], bytes]) -> bytes:
    with native_output.caught() as output, warnings.catch_warnings():
        # It takes any network with ranges to have integer inputs; ours are floats, or bytes.
        warnings.filterwarnings("ignore", "Statistics for quantized inputs", UserWarning)
        try:
            content = convert()
        except Exception as error:
            raise QuarlError(
                f"The TFLite converter failed: {one_line(error)[:300]} {output()[-300:]}"
            ) from error
    return content


def stock_int8(content: bytes, observations: NDArray[Any]) -> bytes:
    """Quantise a float flatbuffer as `TFLiteConverter` does: `Optimize.DEFAULT`, int8 in and out.

    The representative dataset is evenly sampled from the observations [n, ...]. Raises a QuarlError
    where the converter fails.
    """
    # What the converter calls on the float flatbuffer that it has made.
    from tensorflow.lite.python.convert import mlir_quantize
    from tensorflow.lite.python.optimize.calibrator import Calibrator, add_intermediate_tensors

    sample = observations[:: max(1, len(observations) // _REPRESENTATIVE)].astype(np.float32)
    floats = _with_options(_of_floats(content))

    def quantise() -> bytes:
        calibrator = Calibrator(add_intermediate_tensors(floats))
        statistics = calibrator.calibrate(lambda: ([observation[None]] for observation in sample))
        return bytes(mlir_quantize(statistics, input_data_type=tf.int8, output_data_type=tf.int8))

    return _made_by(quantise)


def _with_options(content: bytes) -> bytes:
    """Give sums and products options where they have none: the converter reads them unchecked."""
    graph = Graph(content)
    for position, operator in enumerate(graph.operators):
        make = _OPTIONS.get(graph.name(operator))
        if make is not None and operator.builtinOptions is None:
            ends = list(operator.inputs), list(operator.outputs)
            graph.operators[position] = graph.operator(graph.name(operator), *ends, make())
    return graph.pack()


def _of_floats(content: bytes) -> bytes:
    """Return a flatbuffer whose observation is in floats, also where it was in bytes."""
    graph = Graph(content)
    if graph.takes_floats:
        return content
    (source,) = graph.inputs
    for operator in graph.operators:
        for position, index in enumerate(operator.inputs):
            is_float = index >= 0 and graph.tensors[index].type == FLOAT32
            if is_float and graph.path(index, ["CAST"])[1:] == [source]:
                operator.inputs[position] = source
    graph.tensors[source].type = FLOAT32
    return graph.pack()
