"""Round a float flatbuffer's kernels by what their layers compute (GPTQ)."""

from typing import Any

import numpy as np

from quarl_tf.export.activations import kernel_inputs, sample_step, tensor_values
from quarl_tf.export.graph import Graph
from quarl_tf.export.preparation import equalised, smoothed
from quarl_tf.quantization.gptq import best_grid, fitted, gptq
from quarl_tf.quantization.grid import Array, Grid
from quarl_tf.spec import Recipe, TensorFormat

_MOST_VALUES = 200_000  #: About as many values of a tensor choose its range.


def round_kernel(
    graph: Graph, layer: Any, observations: Array, form: TensorFormat | None
) -> Array | None:
    """Put a kernel on the grids of a format with rounding "gptq"; return their steps.

    The bias absorbs the mean error (Nagel et al., arXiv 1906.04721, section 4.2). Other formats
    change nothing and give None.
    """
    if form is None or form.rounding != "gptq":
        return None
    kernel, bias = graph.kernel_and_bias(layer)
    if kernel is None:
        return None
    inputs, weights = kernel_inputs(graph, layer, observations), kernel.reshape(len(kernel), -1)
    rounded, grid = gptq(weights, inputs, form)
    graph.set_constant(layer.inputs[1], rounded.reshape(kernel.shape))
    if bias is not None:
        shift = (rounded - weights) @ inputs.mean(axis=0)
        graph.set_constant(layer.inputs[2], (bias - shift).astype(np.float32))
    return grid.step


def fit_kernel(graph: Graph, layer: Any, observations: Array, float_inputs: Array) -> None:
    """Fit a layer to compute from its rounded inputs what it computed from those in float."""
    kernel, bias = graph.kernel_and_bias(layer)
    if kernel is not None and bias is not None:
        inputs = kernel_inputs(graph, layer, observations)
        weights, shift = fitted(kernel.reshape(len(kernel), -1), inputs, float_inputs)
        graph.set_constant(layer.inputs[1], weights.reshape(kernel.shape))
        graph.set_constant(layer.inputs[2], bias + shift)


def optimised(content: bytes, observations: Array, recipe: Recipe) -> bytes:
    """Round kernels and activations, simulated in float, layer by layer.

    Each kernel is first fitted to the rounded inputs that its layer gets.
    """
    content = equalised(content)
    if recipe.default.activations is not None:
        content = smoothed(content, observations)
    graph, float_graph = Graph(content), Graph(content)
    formats = recipe.observation
    for name, layer in graph.layers().items():
        _round_tensor(graph, layer, "inputs", observations, formats.activations)
        float_inputs = kernel_inputs(float_graph, float_graph.layers()[name], observations)
        fit_kernel(graph, layer, observations, float_inputs)
        formats = recipe.of(name)
        round_kernel(graph, layer, observations, formats.weights)
    head_format = recipe.of("head").activations
    _round_tensor(graph, graph.layers()["head"], "outputs", observations, head_format)
    return graph.pack()


def _round_tensor(
    graph: Graph, operator: Any, side: str, observations: Array, form: TensorFormat | None
) -> None:
    """Put an operator's first input or output on the best grid of a format, if there is one.

    QUANTIZE and DEQUANTIZE do it with at most 256 codes from the lowest of int8; MINIMUM clips what
    is above the grid.
    """
    # Of a tensor that several layers read, the first grid counts.
    if form is None or graph.origin(getattr(operator, side)[0]) == "DEQUANTIZE":
        return
    values = tensor_values(graph, operator, side, observations)
    step = sample_step(len(values), values[0].size, _MOST_VALUES)
    values = values.reshape(1, -1)[:, ::step].astype(np.float64)
    grid = Grid(*(end.item() for end in best_grid(values, np.ones(values.size), form)))
    index = getattr(operator, side)[0]
    new_index, clipped = (graph.add(index, suffix) for suffix in (b"_grid", b"_cut"))
    end = graph.add(index, b"_end", values=grid.high)
    position = next((i for i, op in enumerate(graph.operators, 1) if index in op.outputs), 0)
    if position:  # Its producer computes the new tensor instead.
        unrounded, rounded, producer = new_index, index, graph.operators[position - 1]
        producer.outputs = [new_index if i == index else i for i in producer.outputs]
    else:
        unrounded, rounded = index, new_index
        for user in graph.operators:
            user.inputs = [new_index if i == index else i for i in user.inputs]
    codes = graph.add_codes(index, grid)
    graph.operators[position:position] = [
        graph.operator("MINIMUM", [unrounded, end], [clipped]),
        graph.operator("QUANTIZE", [clipped], [codes]),
        graph.operator("DEQUANTIZE", [codes], [rounded]),
    ]
