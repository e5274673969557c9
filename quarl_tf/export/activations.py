"""Values of a float flatbuffer's tensors over observations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from numpy.lib.stride_tricks import sliding_window_view

from quarl_tf.export.graph import FLOAT32, Graph
from quarl_tf.foundation import native_output
from quarl_tf.quantization.grid import Array

#: Input at which an int8 tanh reaches its last code.
_TANH_END = 3.5

#: About as many patches of images represent the inputs of a convolution.
_PATCHES = 5000


def visit(content: bytes, observations: Array, see: Callable[[int, Array], None]) -> None:
    """Call `see` with the index and the values of each computed float tensor, per observation.

    The values are valid during the call only.
    """
    with native_output.caught():
        interpreter = Interpreter(
            model_content=content,
            # The default delegate hides its intermediate tensors.
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            experimental_preserve_all_tensors=True,
        )
        interpreter.allocate_tensors()
    (source,) = interpreter.get_input_details()
    graph = Graph(content)
    computed = [*graph.inputs, *(i for operator in graph.operators for i in operator.outputs)]
    floats = [i for i in computed if graph.tensors[i].type == FLOAT32]
    for observation in observations:
        interpreter.set_tensor(source["index"], observation[None].astype(source["dtype"]))
        interpreter.invoke()
        for index in floats:
            see(index, interpreter.get_tensor(index))


def ranges(content: bytes, observations: Array) -> dict[int, tuple[float, float]]:
    """Return the least and the greatest value of each computed float tensor, by index.

    The range of a tanh's input ends where an int8 tanh saturates.
    """
    found: dict[int, tuple[float, float]] = {}
    saturating = Graph(content).before_tanh()

    def widen(index: int, values: Array) -> None:
        low, high = found.get(index, (np.inf, -np.inf))
        kept = np.clip(values, -_TANH_END, _TANH_END) if index in saturating else values
        found[index] = min(low, float(kept.min())), max(high, float(kept.max()))

    visit(content, observations, widen)
    return found


def tensor_values(graph: Graph, operator: Any, side: str, observations: Array) -> Array:
    """Return the values of an operator's first tensor of its "inputs" or "outputs", [n, ...].

    The input of a tanh is clipped to where an int8 tanh saturates.
    """
    seen: list[Array] = []
    content = graph.pack()
    # Read after packing, which renumbers tensors.
    wanted = getattr(operator, side)[0]

    def see(index: int, values: Array) -> None:
        if index == wanted:
            seen.append(values.copy())

    visit(content, observations, see)
    values = np.concatenate(seen)
    return np.clip(values, -_TANH_END, _TANH_END) if wanted in graph.before_tanh() else values


def kernel_inputs(graph: Graph, layer: Any, observations: Array) -> Array:
    """Return the inputs of a layer's kernel, [n, weights per output] float32.

    Those of a convolution are patches of the images, evenly sampled.
    """
    values = tensor_values(graph, layer, "inputs", observations)
    kernel = tuple(map(int, graph.tensors[layer.inputs[1]].shape))
    if graph.name(layer) == "CONV_2D":
        patches = _patches(values, kernel[1:3], layer.builtinOptions)
        values = patches.reshape(-1, math.prod(kernel[1:]))
        return values[:: max(1, len(values) // _PATCHES)]
    # A dense layer may take several vectors of an observation, or an image that it flattens.
    return values.reshape(-1, kernel[-1])


def _patches(images: Array, size: Sequence[int], options: Any) -> Array:
    """Return what a convolution multiplies, [n, rows, columns, height, width, channels]."""
    strides = options.strideH, options.strideW
    apart = options.dilationHFactor, options.dilationWFactor
    reach = [(n - 1) * d + 1 for n, d in zip(size, apart, strict=True)]
    if options.padding == schema.Padding.SAME:
        ends = []
        for n, r, stride in zip(images.shape[1:3], reach, strides, strict=True):
            added = max((-(-n // stride) - 1) * stride + r - n, 0)
            ends.append((added // 2, added - added // 2))
        images = np.pad(images, [(0, 0), *ends, (0, 0)])
    windows: Array = sliding_window_view(images, reach, axis=(1, 2))  # type: ignore[call-overload]
    kept = windows[:, :: strides[0], :: strides[1], :, :: apart[0], :: apart[1]]
    return kept.transpose(0, 1, 2, 4, 5, 3)
