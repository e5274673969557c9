"""Rewrite a float flatbuffer so that it loses less when it is quantised.

Each step but `centred` leaves what the network computes on the observations as it is.
"""

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from quarl_tf.export.activations import ranges, visit
from quarl_tf.export.graph import LAYERS, NONE, RELU, Graph
from quarl_tf.foundation.errors import UsageError
from quarl_tf.quantization.grid import BYTE, Array, grid_between
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import actions
from quarl_tf.spec.actions import Choices

#: Operators that multiply by weights.
_PRODUCTS = {*flatbuffer.WEIGHTED, "BATCH_MATMUL", "CONV_3D"}
_ROUNDS = 20  #: How often `equalised` goes through all layers.

#: Largest ratio of a channel's bias to its weights that `equalised` ignores. A channel that is
#: mostly its bias would, with weights like the others', take the grid that all share.
_MOST_BIAS = 32

#: How much of the unevenness of channels `smoothed` moves into the next kernel, and the least peak
#: of a channel, as a share of the greatest: one that was quieter may be louder elsewhere.
_MIGRATION, _QUIETEST = 0.8, 0.3

_FINER = 16  #: How much finer the grid of rounding residuals is than that of the observation.


def prepared(content: bytes, observations: Array, choices: Choices | None) -> bytes:
    """Return the float flatbuffer from which `int8` and `int8_head32` are made.

    A UsageError for one with weights that int8 would leave in float.
    """
    require_quantisable(content, LAYERS)
    content = centred(content, choices)
    if Graph(content).takes_floats:
        return refined(equalised(content), observations)
    return smoothed(content, observations)


def require_quantisable(content: bytes, names: Collection[str]) -> None:
    """Refuse a flatbuffer without weights to quantise, or with some that would stay in float.

    The latter are those of other operators than these, and kernels computed from constants.
    Products of what is computed from the observation have no weights.
    """
    has_weights = False
    for graph in flatbuffer.parsed(content):
        observed = {*graph.inputs}
        for op in graph.operators:
            if observed & {*op.inputs}:
                observed |= {*op.outputs}
            weights, kind = {*op.inputs[:2]} - observed, op.name
            if kind == "CONV_2D":
                channels, of_kernel = (graph.tensors[i].shape[-1] for i in op.inputs[:2])
                # One in groups takes what a depthwise one takes.
                kind = kind if of_kernel == channels else "DEPTHWISE_CONV_2D"
            if kind in names:
                has_weights |= graph.tensors[op.inputs[1]].data is not None
                weights = {i for i in weights & {op.inputs[1]} if graph.tensors[i].data is None}
            if kind in _PRODUCTS and weights:
                raise UsageError(
                    f"Only constant kernels of {', '.join(sorted(names))} are quantised here; "
                    f"another scheme may take others. Received: operator={kind}"
                )
    if not has_weights:
        raise UsageError(
            "A flatbuffer without weights has nothing to quantise; keep it in float. "
            f"Received: no constant kernel of {', '.join(sorted(names))}"
        )


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
    is_last = head.outputs[0] in graph.outputs and graph.readers(head.outputs[0]) == 1
    return is_last and graph.activation(head) == NONE


def equalised(content: bytes) -> bytes:
    """Scale neighbouring ReLU layers until their channels have equal ranges.

    Cross-layer equalisation (Nagel et al., arXiv 1906.04721, section 4.1): a positive factor of a
    channel passes through ReLU, so the network computes the same.
    """
    graph = Graph(content)
    layers = list(graph.layers().values())
    for _ in range(_ROUNDS):
        for first, second in pairwise(layers):
            same_kind = graph.name(first) == graph.name(second)
            adjacent = first.outputs[0] == second.inputs[0]
            if same_kind and adjacent and _passes_factors(graph, first, second):
                kernel, bias = graph.kernel_and_bias(first)
                if kernel is None:
                    continue
                peak = np.abs(kernel).reshape(len(kernel), -1).max(axis=1)
                peak = peak if bias is None else np.maximum(peak, bias / _MOST_BIAS)
                _rescale(graph, first, second, peak, lambda x, y: np.sqrt(x / y))
    return graph.pack()


def _passes_factors(graph: Graph, first: Any, second: Any) -> bool:
    """Tell whether a layer's channels, behind ReLU, go to a second layer alone."""
    path = graph.path(second.inputs[0], ("RESHAPE",))
    if path[-1] != first.outputs[0] or any(graph.readers(index) > 1 for index in path):
        return False
    sizes = [graph.tensors[index].shape[-1] for index in path]
    return bool(sizes[0] % sizes[-1] == 0) and graph.activation(first) == RELU


def _rescale(
    graph: Graph, first: Any, second: Any, peak: Array, ratio: Callable[[Array, Array], Array]
) -> None:
    """Divide a layer's channels by a ratio of two peaks, by which the next layer multiplies.

    They are the given `peak` and that of the weights of the next layer, for each channel. Where one
    of them is 0, the channel stays.
    """
    (kernel, bias), (next_kernel, _) = map(graph.kernel_and_bias, (first, second))
    if kernel is None or next_kernel is None:
        return
    # Behind a RESHAPE, channels are the last part of an image.
    next_kernel = next_kernel.reshape(-1, len(peak))
    next_peak = np.abs(next_kernel).max(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where((peak > 0) & (next_peak > 0), ratio(peak, next_peak), 1)
    graph.set_constant(first.inputs[1], kernel / factor.reshape(-1, *[1] * (kernel.ndim - 1)))
    if bias is not None:
        graph.set_constant(first.inputs[2], bias / factor)
    graph.set_constant(second.inputs[1], next_kernel * factor)


def smoothed(content: bytes, observations: Array) -> bytes:
    """Scale neighbouring ReLU layers until the peaks of their channels are similar.

    All channels share a grid, so the loud ones leave few codes to the others (SmoothQuant, Xiao et
    al., arXiv 2211.10438, equation 4, with `_MIGRATION`).
    """
    graph, peaks = Graph(content), dict[int, Array]()
    layers = list(graph.layers().values())
    outputs = {layer.outputs[0] for layer in layers}
    for index, values in visit(content, observations):
        if index in outputs:
            peak = np.abs(values).reshape(-1, values.shape[-1]).max(axis=0)
            peaks[index] = np.maximum(peaks.get(index, 0), peak)

    def ratio(peak: Array, next_peak: Array) -> Array:
        loudness = np.maximum(peak, _QUIETEST * peak.max())
        migrated: Array = loudness**_MIGRATION / next_peak ** (1 - _MIGRATION)
        return migrated

    for first, second in pairwise(layers):
        if _passes_factors(graph, first, second):
            _rescale(graph, first, second, peaks[first.outputs[0]], ratio)
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
    # A residual is at most half a step of the grid, which contains 0 and the margin.
    codes_aside = 2**BYTE.bits - 1 - _FINER / 2
    margin = (np.maximum(high, 0) - np.minimum(low, 0)) * _FINER / 2 / codes_aside
    grid = grid_between(np.minimum(low, -margin), np.maximum(high, margin), BYTE)
    rounded, residual, scaled_residual = (
        graph.add(source, suffix, shape=shape) for suffix in (b"_near", b"_rest", b"_fine")
    )
    features = graph.add(source, b"_both", shape=(*shape[:-1], 2 * size))
    factor = graph.add(source, b"_times", values=_FINER)
    codes, position = graph.add_codes(source, grid), graph.operators.index(layer)
    last_axis = schema.ConcatenationOptionsT(axis=-1)
    graph.operators[position:position] = [
        graph.operator("QUANTIZE", [source], [codes]),
        graph.operator("DEQUANTIZE", [codes], [rounded]),
        graph.operator("SUB", [source, rounded], [residual]),
        graph.operator("MUL", [residual, factor], [scaled_residual]),
        graph.operator("CONCATENATION", [rounded, scaled_residual], [features], last_axis),
    ]
    weights = np.concatenate([kernel, kernel / _FINER], axis=1)
    layer.inputs[:2] = features, graph.add(layer.inputs[1], b"_wide", values=weights)
    return graph.pack()
