"""Values of a float flatbuffer's tensors over observations."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from numpy.lib.stride_tricks import sliding_window_view

from quarl_tf.export.graph import FLOAT32, Graph
from quarl_tf.foundation import native_output
from quarl_tf.quantization.grid import TANH_END, Array

#: From where to where int8 tells inputs apart; below, an ELU is within 0.01 of -1.
_CLIPS = {"TANH": (-TANH_END, TANH_END), "ELU": (-5.0, math.inf)}
_PATCHES = 5000  #: About as many patches of images represent the inputs of a convolution.


def visit(content: bytes, observations: Array) -> Iterator[tuple[int, Array]]:
    """Yield the index and the values of each computed float tensor, per observation.

    The input of a tanh or an ELU is clipped to where that saturates.
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
    clipped = graph.before(_CLIPS)
    computed_tensors = [*graph.inputs, *(i for op in graph.operators for i in op.outputs)]
    float_tensors = [i for i in computed_tensors if graph.tensors[i].type == FLOAT32]
    for observation in observations:
        interpreter.set_tensor(source["index"], observation[None].astype(source["dtype"]))
        interpreter.invoke()
        for index in float_tensors:
            values = interpreter.get_tensor(index)
            yield index, np.clip(values, *_CLIPS[clipped[index]]) if index in clipped else values


def heads(content: bytes, observations: Array) -> Array:
    """Return the first output of a flatbuffer for observations, [n, ...]."""
    with native_output.caught():
        interpreter = Interpreter(model_content=content)
        interpreter.allocate_tensors()
    (source,), (head, *_) = interpreter.get_input_details(), interpreter.get_output_details()
    rows = []
    for observation in observations:
        interpreter.set_tensor(source["index"], observation[None].astype(source["dtype"]))
        interpreter.invoke()
        rows.append(interpreter.get_tensor(head["index"]))
    return np.concatenate(rows)


def ranges(content: bytes, observations: Array) -> dict[int, tuple[float, float]]:
    """Return the least and the greatest value of each computed float tensor, by index."""
    ends: dict[int, tuple[float, float]] = {}
    for index, values in visit(content, observations):
        low, high = ends.get(index, (math.inf, -math.inf))
        ends[index] = min(low, float(values.min())), max(high, float(values.max()))
    return ends


def tensor_values(graph: Graph, operator: Any, side: str, observations: Array) -> Array:
    """Return the values of an operator's first tensor of its "inputs" or "outputs", [n, ...]."""
    content = graph.pack()
    # Read after packing, which renumbers tensors.
    index = getattr(operator, side)[0]
    # What follows takes time for nothing, but for what tells `visit` to clip.
    if index not in graph.inputs and index not in graph.before(_CLIPS):
        part = Graph(content)
        part.model.signatureDefs = None
        part.outputs[:] = [index]
        content, index = part.pack(), part.outputs[0]
    return np.concatenate([values for i, values in visit(content, observations) if i == index])


def kernel_inputs(graph: Graph, layer: Any, observations: Array) -> Array:
    """Return the inputs of a layer's kernel, [n, weights per output] float32.

    Those of a convolution are patches of the images, evenly sampled, from all places of them.
    """
    values = tensor_values(graph, layer, "inputs", observations)
    shape = tuple(map(int, graph.tensors[layer.inputs[1]].shape))
    if graph.name(layer) == "CONV_2D":
        patches = _patches(values, shape[1:3], layer.builtinOptions)
        count, places = len(patches), math.prod(patches.shape[1:3])
        sample = np.arange(0, count * places, sample_step(count, places, _PATCHES))
        # Without a copy of all patches, which takes gigabytes.
        return patches[np.unravel_index(sample, patches.shape[:3])].reshape(len(sample), -1)
    # A dense layer may take several vectors of an observation, or an image that it flattens.
    return values.reshape(-1, shape[-1])


def sample_step(count: int, places: int, most: int) -> int:
    """Return the stride that takes about `most` of the numbers of `count` observations.

    It shares no divisor with the `places` of an observation, so that it comes to all of them.
    """
    step = max(1, count * places // most)
    while math.gcd(step, places) > 1:
        step += 1
    return step


def _patches(images: Array, size: Sequence[int], options: Any) -> Array:
    """Return what a convolution multiplies, [n, rows, columns, height, width, channels]."""
    strides = options.strideH, options.strideW
    dilations = options.dilationHFactor, options.dilationWFactor
    extents = [(n - 1) * d + 1 for n, d in zip(size, dilations, strict=True)]
    if options.padding == schema.Padding.SAME:
        padding = []
        for n, extent, stride in zip(images.shape[1:3], extents, strides, strict=True):
            total = max((-(-n // stride) - 1) * stride + extent - n, 0)
            padding.append((total // 2, total - total // 2))
        images = np.pad(images, [(0, 0), *padding, (0, 0)])
    windows: Array = sliding_window_view(images, extents, axis=(1, 2))  # type: ignore[call-overload]
    patches = windows[:, :: strides[0], :: strides[1], :, :: dilations[0], :: dilations[1]]
    return patches.transpose(0, 1, 2, 4, 5, 3)
