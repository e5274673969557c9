"""Rewrite a float flatbuffer so that it loses less when it is quantised.

Each step but `centred` leaves what the network computes as it is.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from quarl_tf.export.activations import kernel_inputs, ranges
from quarl_tf.export.graph import Graph
from quarl_tf.quantization.grid import Array, grid_between
from quarl_tf.spec import TensorFormat, actions
from quarl_tf.spec.actions import Choices
from quarl_tf.spec.architectures import LEAST_DEVIATION

_BYTE = TensorFormat(bits=8)
_NONE, _RELU = schema.ActivationFunctionType.NONE, schema.ActivationFunctionType.RELU

#: Largest ratio of a channel's bias to its weights that `equalised` ignores. A channel that is
#: mostly its bias would, with weights like the others', take the grid that all share.
_MOST_BIAS = 32

#: How much finer the grid of the rounding residuals is than the grid of the observation.
_FINER = 16

#: Largest movement of a normalised feature over all observations that rounding explains.
_ROUNDING = 1e-6


def prepared(content: bytes, observations: Array, choices: Choices | None) -> bytes:
    """Return the float flatbuffer from which `int8` is made."""
    content = widened(equalised(centred(content, choices)), observations)
    return refined(content, observations)


def centred(content: bytes, choices: Choices | None) -> bytes:
    """Subtract from a head of values or logits its mean over the actions of each choice.

    Greedy choice and softmax stay the same, but the part that all actions share is gone. DQN's
    values lie near 1 / (1 - discount) while the best two actions differ by a thousandth of that:
    one step of an int8 head over the raw values is wider than most differences, and actions tie.
    A continuous action (no `choices`) and a head that is not `separable` stay.
    """
    graph = Graph(content)
    if choices is None or not separable(graph):
        return content
    head = graph.layers()["head"]
    for index, values in zip(head.inputs[1:3], graph.kernel_and_bias(head), strict=False):
        if values is not None:
            graph.set_constant(index, actions.centred(values.T, choices).T)
    return graph.pack()


def separable(graph: Graph) -> bool:
    """Tell whether the last layer alone, without an activation, computes the head."""
    head = graph.layers()["head"]
    last = head.outputs[0] in graph.outputs and graph.readers(head.outputs[0]) == 1
    return last and head.builtinOptions.fusedActivationFunction == _NONE


def equalised(content: bytes, rounds: int = 20) -> bytes:
    """Scale neighbouring ReLU layers until their channels have equal ranges.

    Cross-layer equalisation (Nagel et al., arXiv 1906.04721, section 4.1): a positive factor of a
    channel passes through ReLU, so the network computes the same.
    """
    graph = Graph(content)
    layers = list(graph.layers().values())
    for _ in range(rounds):
        for first, second in pairwise(layers):
            between = first.outputs[0]
            alone = between == second.inputs[0] and graph.readers(between) == 1
            if alone and graph.name(first) == graph.name(second):
                _equalise(graph, first, second)
    return graph.pack()


def _equalise(graph: Graph, first: Any, second: Any) -> None:
    (before, bias), (after, _) = (graph.kernel_and_bias(layer) for layer in (first, second))
    relu = first.builtinOptions.fusedActivationFunction == _RELU
    if not relu or before is None or after is None:
        return
    out = np.abs(before).reshape(len(before), -1).max(axis=1)
    if bias is not None:
        out = np.maximum(out, bias / _MOST_BIAS)
    into = np.abs(after).reshape(-1, after.shape[-1]).max(axis=0)
    factor = np.ones_like(out)
    alive = (out > 0) & (into > 0)
    factor[alive] = np.sqrt(out[alive] / into[alive])
    shape = (-1, *[1] * (before.ndim - 1))
    graph.set_constant(first.inputs[1], before / factor.reshape(shape))
    if bias is not None:
        graph.set_constant(first.inputs[2], bias / factor)
    graph.set_constant(second.inputs[1], after * factor)


def widened(content: bytes, observations: Array) -> bytes:
    """Give normalised features that hardly move more codes of the grid that all features share.

    A feature with a deviation below `LEAST_DEVIATION` fills a small part of the others' range. Its
    scale is multiplied by a factor, and its weights are divided by it: by the root, as in
    `equalised`, of the others' reach over its own, times its weights over theirs.
    """
    graph = Graph(content)
    layer = next(iter(graph.layers().values()))
    scaling = next((op for op in graph.operators if graph.name(op) == "MUL"), None)
    scale = graph.constant(scaling.inputs[1]) if scaling is not None else None
    kernel = graph.constant(layer.inputs[1])
    if scaling is None or scale is None or kernel is None or kernel.shape[1:] != (scale.size,):
        return content
    if graph.readers(scaling.outputs[0]) > 1 or graph.readers(layer.inputs[0]) > 1:
        return content
    small = scale.ravel() == np.float32(1 / LEAST_DEVIATION)
    if small.all() or not small.any():
        return content
    seen = kernel_inputs(graph, layer, observations)
    moving = small & (np.ptp(seen, axis=0) > _ROUNDING)
    if not moving.any():
        return content
    reach, weights = np.abs(seen).max(axis=0), np.abs(kernel)
    beyond = np.where(moving, reach[~small].max() / np.maximum(reach, _ROUNDING), 1).clip(1)
    others = weights[:, ~small].max(axis=1, keepdims=True)
    share = (weights / np.maximum(others, _ROUNDING)).max(axis=0)
    factor = np.sqrt(beyond * share).clip(1, beyond).astype(np.float32)
    graph.set_constant(scaling.inputs[1], scale * factor.reshape(scale.shape))
    graph.set_constant(layer.inputs[1], kernel / factor)
    return graph.pack()


def refined(content: bytes, observations: Array) -> bytes:
    """Give each feature of a vector two int8 codes: the nearest one, and one of its residual.

    The first layer takes the rounded features, and beside them the residuals times `_FINER` with
    weights divided by it. Both lie on one int8 grid; together they resolve 12 bits.
    """
    graph = Graph(content)
    layer = next(iter(graph.layers().values()))
    source, kernel = layer.inputs[0], graph.constant(layer.inputs[1])
    if not graph.takes_floats or kernel is None or kernel.ndim != 2:
        return content
    size, shape = kernel.shape[1], tuple(graph.tensors[source].shape)
    if shape[-1] != size:
        return content
    low, high = np.array(ranges(content, observations)[source], np.float32)
    # A residual is at most half a step.
    margin = (high - low) / 2**_BYTE.bits / 2 * _FINER
    grid = grid_between(np.minimum(low, -margin), np.maximum(high, margin), _BYTE)
    near, rest, fine = (graph.add(source, s, shape=shape) for s in (b"_near", b"_rest", b"_fine"))
    both = graph.add(source, b"_both", shape=(*shape[:-1], 2 * size))
    times = graph.add(source, b"_times", shape=(), values=_FINER)
    codes, place = graph.add_codes(source, grid), graph.operators.index(layer)
    graph.operators[place:place] = [
        graph.operator("QUANTIZE", [source], [codes]),
        graph.operator("DEQUANTIZE", [codes], [near]),
        graph.operator("SUB", [source, near], [rest]),
        graph.operator("MUL", [rest, times], [fine]),
        graph.operator("CONCATENATION", [near, fine], [both]),
    ]
    wide = np.concatenate([kernel, kernel / _FINER], axis=1)
    layer.inputs[:2] = both, graph.add(layer.inputs[1], b"_wide", shape=wide.shape, values=wide)
    return graph.pack()
