"""Make an integer flatbuffer of a float one, from observations or the grids of a training.

Weights, biases and activations become integers from the first layer to the head. The scaling of
the observation before it and of the action after it stays in float, but images go in as bytes.
Kernels have one scale per output channel, fully-connected ones too where the recipe has it, which
fake-quantised graphs cannot express to the converter.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from quarl_tf.export.activations import heads, ranges
from quarl_tf.export.graph import NONE, UINT8, VALID, Graph
from quarl_tf.export.preparation import separable
from quarl_tf.export.rounding import round_kernel
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.quantization.grid import BYTE, Array, Grid, grid_between, own_grid
from quarl_tf.spec import LayerFormat, Recipe, TensorFormat
from quarl_tf.training.rollout import IMAGE_RANK

#: Shares of its range over all images that a tensor may have.
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
_ROUNDS = 2  #: How often each tensor's share is chosen, given those of the others.
_COMPARED = 500  #: About how many images these are compared on at most.

#: Error of a head, as a share of the deviation of all, beyond which an image is as bad as any:
#: images like those between two lives are rare, far from the others, and decide little.
_MOST_ERROR = 0.1

#: How much farther than over the observations a head in two stages reaches: a state that none of
#: them is like may decide a life, and actions beyond the end tie.
ROOM = 3
FINER = 256  #: Codes of the second stage in one of the first.
_LARGEST = 127  #: The largest weight, and code of the first stage.
_MOST_COPIES = 512  #: Of the first stage's codes, as inputs of the second.

#: The finest step of an output's kernel, as a share of the coarsest: a quiet one needs no more.
_FINEST = 1 / 8

#: Scale and zero point of outputs of -1 to 1 and of 0 to 1.
_UNIT_GRIDS = {"TANH": (1 / 128, 0), "LOGISTIC": (1 / 256, -128)}

#: The least and the greatest value of activations, by tensor.
_Ends = dict[int, tuple[float, float]]
#: The grid of activations, by tensor, in a format.
_Grids = Callable[[int, TensorFormat], Grid]
#: The steps of kernels that are on their grids already, by layer.
_Steps = Mapping[str, Array | None]


def quantized(content: bytes, observations: Array, recipe: Recipe) -> bytes:
    """Return a float32 flatbuffer with integers where a recipe has formats.

    Observations [n, ...] give activations their ranges. A QuarlError where a kernel is no constant.
    """
    graph = Graph(content)
    _fold_byte_scaling(graph)
    _fold_elus(graph)
    steps = {
        name: round_kernel(graph, operator, observations, recipe.of(name).weights)
        for name, operator in graph.layers().items()
    }
    rounded = graph.pack()
    ends = ranges(rounded, observations)
    if observations.ndim == 1 + IMAGE_RANK:
        images = observations[:: math.ceil(len(observations) / _COMPARED)]
        ends = _narrowed(rounded, recipe, ends, steps, images, heads(content, images))
    return _Writer(Graph(rounded), recipe, partial(_grid, ends), steps, two_stages=True).write()


def _narrowed(
    content: bytes, recipe: Recipe, whole: _Ends, steps: _Steps, images: Array, reference: Array
) -> _Ends:
    """Narrow the ranges of one tensor after the other, for heads [n, ...] nearest to a reference.

    A few images may make a range several times as wide as the others need.
    """
    # The error is that of the layers before the head.
    float_head = recipe.without("head")
    limit = _MOST_ERROR * (reference - reference.mean(axis=0)).std()

    def error(ends: _Ends) -> float:
        copy = _Writer(Graph(content), float_head, partial(_grid, ends), steps).write()
        errors = np.square(heads(copy, images) - reference).reshape(len(images), -1).mean(axis=1)
        return float(np.minimum(np.sqrt(errors), limit).mean())

    searched: list[int] = []

    def noted(index: int, form: TensorFormat) -> Grid:
        searched.append(index)
        return _grid(whole, index, form)

    _Writer(Graph(content), float_head, noted, steps).write()
    ends, least = whole, error(whole) if searched else 0.0
    for index in searched * _ROUNDS:
        for part in _PARTS:
            low, high = whole[index]
            candidate = {**ends, index: (part * low, part * high)}
            if candidate != ends and (found := error(candidate)) < least:
                least, ends = found, candidate
    return ends


def _grid(ends: _Ends, index: int, form: TensorFormat) -> Grid:
    """Return the grid between the ends of a range."""
    low, high = np.array(ends[index], np.float32)
    return grid_between(low, high, form)


def trained(
    content: bytes, recipe: Recipe, grids: Sequence[Mapping[str, Grid]], byte_unit: float
) -> bytes:
    """Return a float32 flatbuffer with integers on the 8-bit grids of its training.

    Its kernels are on them. `grids` has the "kernel" and the "output" of each layer in order; the
    scaling of the observation comes first if it has an "output". The first kernel contains the
    division of bytes by `byte_unit`.
    """
    graph = Graph(content)
    _fold_byte_scaling(graph)
    factor = 1.0 if graph.takes_floats else 1 / byte_unit
    kernel_grids = [grid for grid in grids if "kernel" in grid]
    steps: dict[str, Array | None] = {}
    outputs: dict[int, Grid] = {}
    for (name, layer), grid in zip(graph.layers().items(), kernel_grids, strict=True):
        steps[name] = np.asarray(grid["kernel"].step, np.float64) * factor
        outputs[layer.outputs[0]], factor = grid["output"], 1.0
    observation = grids[0]["output"]
    return _Writer(graph, recipe, lambda index, _: outputs.get(index, observation), steps).write()


def _fold_byte_scaling(graph: Graph) -> None:
    """Move the scaling of bytes into the first layer, so that bytes are its input."""
    for layer in graph.layers().values():
        path, kernel = graph.path(layer.inputs[0], ["RESHAPE"]), graph.constant(layer.inputs[1])
        if kernel is None or any(graph.readers(index) > 1 for index in path):
            continue
        numbers, factor = _operand(graph, path[-1], "MUL")
        source, zero = _operand(graph, numbers, "SUB")
        if graph.origin(source) != "CAST" or factor is None:
            continue
        if zero is not None:
            bias = graph.kernel_and_bias(layer)[1]
            # Zeros around an image are not the byte that becomes 0.
            if bias is None or getattr(layer.builtinOptions, "padding", VALID) != VALID:
                continue
            sums = kernel.reshape(len(kernel), -1).sum(axis=1)
            graph.set_constant(layer.inputs[2], bias - zero * factor * sums)
        reader = next(op for op in graph.operators if path[-1] in op.inputs)
        reader.inputs[0] = source
        graph.set_constant(layer.inputs[1], kernel * factor)


def _fold_elus(graph: Graph) -> None:
    """Replace choices between x and exp(x) - 1, to which PyTorch's ELU is converted, by ELU."""
    for position, operator in enumerate(graph.operators):
        if graph.name(operator) not in ("SELECT", "SELECT_V2"):
            continue
        condition, source, other = operator.inputs
        exponential, one = _operand(graph, other, "SUB")
        of_source = graph.path(exponential, ["EXP"]) == [exponential, source]
        for kind in ("GREATER", "GREATER_EQUAL"):
            compared, zero = _operand(graph, condition, kind)
            if (compared == source and zero == 0) and (of_source and one == 1):
                graph.operators[position] = graph.operator("ELU", [source], operator.outputs)


def _operand(graph: Graph, index: int, kind: str) -> tuple[int, Array | None]:
    """Return the input and the number of a plain operator by one number; else itself and None."""
    operator = graph.producer(index)
    if graph.origin(index) != kind or graph.activation(operator) != NONE:
        return index, None
    number = graph.constant(operator.inputs[1])
    return (index, None) if number is None or number.size > 1 else (operator.inputs[0], number)


class _Writer:
    """Replaces operators by integer ones, and converts between integers and floats."""

    def __init__(
        self, graph: Graph, recipe: Recipe, grid: _Grids, steps: _Steps, *, two_stages: bool = False
    ) -> None:
        self._grid, self._steps = grid, steps
        self._two_stages = two_stages and has_two_stages(graph)
        self._graph, self._recipe = graph, recipe
        self._names = {id(op): name for name, op in graph.layers().items()}
        self._unweighted = {id(op) for op in _unweighted(graph)}
        self._integers: dict[int, int] = {}  #: Integer tensors by the float ones they replace.
        self._operators: list[Any] = []

    def write(self) -> bytes:
        graph = self._graph
        for operator in graph.operators:
            name = graph.name(operator)
            layer = self._names.get(id(operator))
            form = self._recipe.of(layer) if layer is not None else LayerFormat()
            if layer is not None and form.weights and form.activations:
                self._write_layer(operator, layer, form.weights, form.activations)
            elif operator.inputs[0] in self._integers and id(operator) in self._unweighted:
                self._write_unweighted(operator, name)
            else:
                self._to_float(operator.inputs)
                self._operators.append(operator)
        self._to_float(graph.outputs)
        graph.operators[:] = self._operators
        return graph.pack()

    def _write_layer(
        self, operator: Any, layer: str, weights: TensorFormat, activations: TensorFormat
    ) -> None:
        graph = self._graph
        source = self._integer(operator.inputs[0])
        kernel, bias = graph.kernel_and_bias(operator)
        if kernel is None:
            raise QuarlError(f"Kernels of int8 layers are constants. Received: layer={layer!r}")
        name, steps = graph.name(operator), self._steps[layer]
        if steps is None:
            axis = 0 if name == "CONV_2D" or weights.per_channel else None
            steps = own_grid(kernel.astype(np.float64), weights, axis).step
        source_scale = graph.tensors[source].quantization.scale[0]
        # Below these the bias leaves int32, or the scale float32.
        sizes = np.zeros(1) if bias is None else np.abs(bias.astype(np.float64))
        least_scales = np.maximum(sizes / float(source_scale) / 2**30, np.finfo(np.float32).tiny)
        if steps.size == 1:
            least_scales = least_scales.max()
        scales, index = np.maximum(steps.reshape(-1), least_scales), operator.outputs[0]
        if layer == "head" and self._two_stages and weights.per_channel:
            reach = ROOM * np.abs(self._grid(index, activations)[:2]).max() / source_scale
            self._write_two_stages(operator, source, kernel, bias, scales, float(reach))
            return
        bias_scales, codes = source_scale * scales, coded(kernel, scales)
        inputs = [source, graph.add_integers(operator.inputs[1], np.int8, scales, 0, codes), -1]
        if bias is not None:
            sums = np.rint(bias.astype(np.float64) / bias_scales)
            inputs[2] = graph.add_integers(operator.inputs[2], np.int32, bias_scales, 0, sums)
        self._integers[index] = graph.add_codes(index, self._grid(index, activations))
        options = operator.builtinOptions
        self._operators.append(graph.operator(name, inputs, [self._integers[index]], options))

    def _write_two_stages(
        self,
        operator: Any,
        source: int,
        kernel: Array,
        bias: Array | None,
        steps: Array,
        reach: float,
    ) -> None:
        """Compute a head up to `reach`, in steps of the inputs, with 16 bits.

        A layer keeps 8 of the 32 bits of its sums s = kernel (x - zero) + bias. The first stage's
        codes c = round(s / units) are inputs of the second, beside x, which computes
        round(256 (s - units c) / units). Its weights of c are at most 127, so that it takes
        copies of c. All these inputs are on the grid of x, as CONCATENATION requires.
        """
        graph, index, size = self._graph, operator.outputs[0], len(kernel)
        grid = graph.tensors[source].quantization
        scale, zero = float(grid.scale[0]), int(grid.zeroPoint[0])
        coarsest = steps[kernel.any(axis=1)].max(initial=0)  # Any step will do for zeros.
        steps = np.maximum(steps, max(_FINEST * coarsest, reach / _LARGEST**2 / _MOST_COPIES))
        units = np.maximum(np.ceil(reach / steps / _LARGEST), 2)  # XNNPACK scales by less than 256.
        copies = math.ceil(units.max() / _LARGEST)
        weights = coded(kernel, steps)
        parts = (units + np.arange(copies)[:, None]) // copies
        kernels = [
            graph.add_integers(operator.inputs[1], np.int8, 1 / units, values=values)
            for values in (weights, np.hstack([weights, *map(np.diag, -parts)]))
        ]
        # A head of 0 has the code 0, not that of an input of 0.
        sums = (0 if bias is None else np.rint(bias / (scale * steps))) - zero * units
        biases = graph.add_integers(index, np.int32, scale / units, values=sums)
        rows, row, wide = (copies, size), (1, copies * size), (1, copies * size + kernel.shape[1])
        coarse, stacked, flat, joined = (
            graph.add_integers(index, np.int8, scale, zero, shape=shape)
            for shape in (None, rows, row, wide)
        )
        fine = graph.add_integers(index, np.int8, scale / FINER)
        shapes = [graph.add(index, b"_shape", np.int32, values=shape) for shape in (rows, row)]
        floats = [graph.add(index, b"_float") for _ in range(4)]
        offset = graph.add(index, b"_offset", values=scale * zero)
        factor = graph.add(index, b"_factor", values=steps * units)
        last_axis, options = schema.ConcatenationOptionsT(axis=-1), operator.builtinOptions
        self._operators += [
            graph.operator("FULLY_CONNECTED", [source, kernels[0], biases], [coarse], options),
            graph.operator("BROADCAST_TO", [coarse, shapes[0]], [stacked]),
            graph.operator("RESHAPE", [stacked, shapes[1]], [flat]),
            graph.operator("CONCATENATION", [source, flat], [joined], last_axis, version=2),
            graph.operator("FULLY_CONNECTED", [joined, kernels[1], biases], [fine], options),
            graph.operator("DEQUANTIZE", [coarse], floats[:1]),
            graph.operator("DEQUANTIZE", [fine], floats[1:2]),
            graph.operator("ADD", floats[:2], floats[2:3]),
            graph.operator("ADD", [floats[2], offset], floats[3:]),
            graph.operator("MUL", [floats[3], factor], [index]),
        ]

    def _integer(self, index: int) -> int:
        """Return the integer tensor of a float one; quantise it if it is computed in float."""
        if index in self._integers:
            return self._integers[index]
        graph, source = self._graph, index
        producer, kind = graph.producer(index), graph.origin(index)
        if kind == "RESHAPE":  # It only moves numbers: its output is on the grid of its input.
            self._integer(producer.inputs[0])
            self._write_unweighted(producer, kind)
            return self._integers[index]
        if kind == "CONCATENATION" and graph.origin(producer.inputs[0]) == "DEQUANTIZE":
            # The grid of the codes that `preparation.refined` computes it from.
            codes = self._add_like(index, graph.producer(producer.inputs[0]).inputs[0])
        elif kind == "CAST" and graph.tensors[producer.inputs[0]].type == UINT8:
            source = producer.inputs[0]
            graph.set_grid(source, 1, 0)
            codes = graph.add_integers(index, np.int8, 1, -128)
        else:
            grid = self._grid(index, self._recipe.observation.activations or BYTE)
            codes, source = graph.add_codes(index, grid), self._unclipped(index, grid)
        self._integers[index] = codes
        self._operators.append(graph.operator("QUANTIZE", [source], [codes]))
        return codes

    def _unclipped(self, index: int, grid: Grid) -> int:
        """Return the tensor before the clips that the ends of a grid repeat."""
        while (kind := self._graph.origin(index)) in ("MINIMUM", "MAXIMUM"):
            inputs = self._graph.producer(index).inputs
            constants = [self._graph.constant(i) for i in inputs]
            position = 1 if constants[0] is None else 0
            if (end := constants[position]) is None or end.size > 1:
                break
            # A step beyond the end is rounded to it or to its neighbour.
            margin = end.item() - grid.high if kind == "MINIMUM" else grid.low - end.item()
            if margin < -grid.step:
                break
            index = inputs[1 - position]
        return index

    def _add_like(self, index: int, codes: int) -> int:
        """Add the integer tensor of a float one, on the grid of other codes."""
        grid = self._graph.tensors[codes].quantization
        return self._graph.add_integers(index, np.int8, grid.scale[0], int(grid.zeroPoint[0]))

    def _write_unweighted(self, operator: Any, name: str) -> None:
        graph, source, target = self._graph, self._integers[operator.inputs[0]], operator.outputs[0]
        if name in _UNIT_GRIDS:
            codes = graph.add_integers(target, np.int8, *_UNIT_GRIDS[name])
        elif name == "ELU":
            grid = graph.tensors[source].quantization
            low, high = grid.scale[0] * (np.array([-128, 127]) - grid.zeroPoint[0])
            ends = np.array([np.expm1(low), high if high > 0 else np.expm1(high)], np.float32)
            codes = graph.add_codes(target, grid_between(ends[0], ends[1], BYTE))
        elif name == "MUL":
            codes = graph.add_codes(target, self._grid(target, BYTE))
        else:
            codes = self._add_like(target, source)
        self._integers[target] = codes
        inputs = [self._integers.get(i, i) for i in operator.inputs]
        version, options = 2 if name == "MUL" else None, operator.builtinOptions
        self._operators.append(graph.operator(name, inputs, [codes], options, version))

    def _to_float(self, indices: list[int]) -> None:
        computed = {*self._graph.inputs, *(i for op in self._operators for i in op.outputs)}
        for index in indices:
            if index in self._integers and index not in computed:
                source = self._integers[index]
                self._operators.append(self._graph.operator("DEQUANTIZE", [source], [index]))


def _unweighted(graph: Graph) -> Iterator[Any]:
    """Yield the operators without weights that compute integers of integers."""
    for operator in graph.operators:
        if graph.name(operator) in ("TANH", "ELU", "RESHAPE"):
            yield operator
        for index in operator.inputs if graph.name(operator) == "MUL" else ():
            gate = graph.producer(index)
            is_gate = graph.origin(index) == "LOGISTIC"
            if is_gate and {*operator.inputs} == {gate.inputs[0], index}:  # Of a SiLU.
                yield from (gate, operator)


def has_two_stages(graph: Graph) -> bool:
    """Tell whether `quantized` computes the head in two stages: of bytes, by one dense layer."""
    head = graph.layers()["head"]
    is_dense = graph.name(head) == "FULLY_CONNECTED"
    is_vector = [*graph.tensors[head.inputs[0]].shape][:-1] == [1]
    return is_dense and is_vector and not graph.takes_floats and separable(graph)


def coded(kernel: Array, steps: Array) -> Array:
    """Return the codes of a kernel, output channels first, by its step or those of its outputs."""
    codes: Array = np.rint(kernel.astype(np.float64) / steps.reshape(-1, *[1] * (kernel.ndim - 1)))
    return codes
