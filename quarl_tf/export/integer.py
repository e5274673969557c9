"""Make an integer flatbuffer of a float one, and of observations or trained grids, by NumPy.

Weights, biases and activations become integers from the first layer to the head; what scales the
observation in front of it and the action behind it stays in float, but for images, which go in as
the bytes they are. Kernels have one scale per output channel, fully-connected ones too where the
recipe says so, which fake-quantised graphs cannot express to the converter.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.quantization.gptq import fitted, gptq
from quarl_tf.quantization.grid import Grid, grid_between, snap
from quarl_tf.runtime.flatbuffer import IDENTIFIER
from quarl_tf.spec import Recipe, TensorFormat, require_layers
from quarl_tf.spec.architectures import LEAST_DEVIATION

Array = NDArray[Any]

_OPERATORS = vars(schema.BuiltinOperator)
_NAMES = {code: name for name, code in _OPERATORS.items() if not name.startswith("_")}
_TYPES = {np.dtype(np.int8): schema.TensorType.INT8, np.dtype(np.int32): schema.TensorType.INT32}

#: Operators with a kernel, and the axis of its output channels.
_WEIGHTED = ("FULLY_CONNECTED", "CONV_2D")

#: Versions of the operators that take int8.
_VERSIONS = {"FULLY_CONNECTED": 4, "CONV_2D": 3, "TANH": 2, "QUANTIZE": 1, "DEQUANTIZE": 2}

#: What int8 kernels compute without a kernel of weights; their grids are those of their inputs.
_MOVING = ("RESHAPE",)

#: How much finer than the observation's grid that is on which lies what its rounding leaves.
_FINER = 16

#: The normaliser's cut: the end of the observation's range does the same.
_CUTS = ("MINIMUM", "MAXIMUM")

#: Where an int8 tanh has its last code; its output is a fraction of 128.
_TANH_END, _TANH_STEP = 3.5, 1 / 128

#: Codes of int8 start here.
_LOWEST = -128

#: What a normalised feature may move by rounding, over all observations.
_ROUNDING = 1e-6

_BITS = 8
_BYTE = TensorFormat(bits=_BITS)

Ranges = dict[int, tuple[float, float]]


class Graph:
    """A flatbuffer of one graph that can be changed; operators are in the order of computation."""

    def __init__(self, content: bytes) -> None:
        """Unpack a flatbuffer."""
        self.model = schema.ModelT.InitFromPackedBuf(bytearray(content), 0)
        (graph,) = self.model.subgraphs
        self.tensors: list[Any] = graph.tensors
        self.operators: list[Any] = graph.operators
        self.inputs, self.outputs = list(graph.inputs), list(graph.outputs)
        self._graph = graph

    @property
    def takes_floats(self) -> bool:
        """Whether observations are float32, and not bytes."""
        return bool(self.tensors[self.inputs[0]].type == schema.TensorType.FLOAT32)

    def name(self, operator: Any) -> str:
        """Return what an operator computes."""
        name: str = _NAMES[self.model.operatorCodes[operator.opcodeIndex].builtinCode]
        return name

    def layers(self) -> dict[str, Any]:
        """Return the operators with a kernel by the names that recipes have for them, in order."""
        found = [op for op in self.operators if self.name(op) in _WEIGHTED]
        kinds = ["convolution" if self.name(op) == "CONV_2D" else "hidden" for op in found]
        names = [f"{kind}_{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
        return dict(zip([*names[:-1], "head"], found, strict=True))

    def constant(self, index: int) -> Array | None:
        """Return a float32 constant; None for other tensors and for none, -1."""
        if index < 0:
            return None
        tensor = self.tensors[index]
        data = self.model.buffers[tensor.buffer].data
        if data is None or tensor.type != schema.TensorType.FLOAT32:
            return None
        shape = () if tensor.shape is None else tensor.shape
        return np.frombuffer(bytes(data), np.float32).reshape(shape)

    def set_constant(self, index: int, values: Array) -> None:
        """Put other values of the same shape and type into a constant."""
        data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        self.model.buffers[self.tensors[index].buffer].data = data

    def add(self, like: int, dtype: Any, scales: Array, zero: int, values: Array | None) -> int:
        """Add an integer tensor of the shape of another; a constant if it has values."""
        index = self._add_like(like, b"_int", _TYPES[np.dtype(dtype)])
        tensor = self.tensors[index]
        tensor.quantization = schema.QuantizationParametersT()
        tensor.quantization.scale = np.atleast_1d(scales).astype(np.float32)
        tensor.quantization.zeroPoint = np.full(tensor.quantization.scale.shape, zero, np.int64)
        tensor.quantization.quantizedDimension = 0
        if values is not None:
            self._fill(tensor, values.astype(dtype))
        return index

    def add_codes(self, like: int, grid: Grid) -> int:
        """Add an int8 tensor on a grid, of the shape of another."""
        zero = _LOWEST - round(float(grid.low / grid.step))
        return self.add(like, np.int8, np.asarray(grid.step), zero, None)

    def _add_like(self, like: int, suffix: bytes, kind: Any) -> int:
        tensor, template = schema.TensorT(), self.tensors[like]
        tensor.name, tensor.shape = template.name + suffix, template.shape
        tensor.shapeSignature, tensor.type = template.shapeSignature, kind
        tensor.hasRank, tensor.buffer = template.hasRank, 0
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def add_float(self, like: int, suffix: bytes, shape: Sequence[int], values: Any = None) -> int:
        """Add a float tensor of another shape, named after another; a constant if it has values."""
        index = self._add_like(like, suffix, schema.TensorType.FLOAT32)
        tensor = self.tensors[index]
        tensor.shape, tensor.shapeSignature = np.array(shape, np.int32), None
        if values is not None:
            self._fill(tensor, np.asarray(values, np.float32))
        return index

    def _fill(self, tensor: Any, values: Array) -> None:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(values.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        tensor.buffer = len(self.model.buffers) - 1

    def round(self, index: int, grid: Grid) -> None:
        """Put a float tensor on a grid of at most 256 codes, by QUANTIZE and DEQUANTIZE.

        Codes begin at the lowest of int8; what is above the grid's range is cut by MINIMUM.
        """
        kind = schema.TensorType.FLOAT32
        other, cut = (self._add_like(index, s, kind) for s in (b"_grid", b"_cut"))
        end = self.add_float(index, b"_end", (), grid.high)
        place = next((i for i, op in enumerate(self.operators, 1) if index in op.outputs), 0)
        if place:  # What computed it computes another now.
            whole, rounded, self.operators[place - 1].outputs = other, index, [other]
        else:
            whole, rounded = index, other
            for operator in self.operators:
                operator.inputs = [other if i == index else i for i in operator.inputs]
        codes = self.add_codes(index, grid)
        self.operators[place:place] = [
            self.operator("MINIMUM", [whole, end], [cut]),
            self.operator("QUANTIZE", [cut], [codes]),
            self.operator("DEQUANTIZE", [codes], [rounded]),
        ]

    def operator(self, name: str, inputs: list[int], outputs: list[int], like: Any = None) -> Any:
        """Make an operator, with the options of another if there is one."""
        made = schema.OperatorT()
        made.inputs, made.outputs = inputs, outputs
        if like is not None:
            made.builtinOptionsType = like.builtinOptionsType
            made.builtinOptions = like.builtinOptions
        elif name == "CONCATENATION":
            made.builtinOptionsType = schema.BuiltinOptions.ConcatenationOptions
            made.builtinOptions = schema.ConcatenationOptionsT()
            made.builtinOptions.axis = -1
        codes = self.model.operatorCodes
        version = _VERSIONS.get(name, 1)
        known = [(code.builtinCode, code.version) for code in codes]
        if (wanted := (_OPERATORS[name], version)) not in known:
            code = schema.OperatorCodeT()
            code.builtinCode, code.version = wanted
            code.deprecatedBuiltinCode = min(code.builtinCode, 127)
            codes.append(code)
            known.append(wanted)
        made.opcodeIndex = known.index(wanted)
        return made

    def pack(self) -> bytes:
        """Return the flatbuffer, without operators and tensors that nothing uses."""
        self._drop_unused()
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(self.model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    def _drop_unused(self) -> None:
        needed, kept = set(self.outputs), []
        for operator in reversed(self.operators):
            if needed & set(operator.outputs):
                kept.append(operator)
                needed |= set(operator.inputs)
        used = sorted({i for op in kept for i in (*op.inputs, *op.outputs) if i >= 0})
        used = sorted({*used, *self.inputs, *self.outputs})
        place = {old: new for new, old in enumerate(used)}
        for operator in kept:
            operator.inputs = [place.get(i, -1) for i in operator.inputs]
            operator.outputs = [place[i] for i in operator.outputs]
        self.operators[:] = kept[::-1]
        self.tensors[:] = [self.tensors[i] for i in used]
        self.inputs[:] = self._graph.inputs = [place[i] for i in self.inputs]
        self.outputs[:] = self._graph.outputs = [place[i] for i in self.outputs]
        for signature in self.model.signatureDefs or []:
            for entry in (*signature.inputs, *signature.outputs):
                entry.tensorIndex = place[entry.tensorIndex]
        self._keep_only_used_buffers()

    def _keep_only_used_buffers(self) -> None:
        metadata = self.model.metadata or []
        used = sorted({0, *(t.buffer for t in self.tensors), *(m.buffer for m in metadata)})
        place = {old: new for new, old in enumerate(used)}
        for owner in (*self.tensors, *metadata):
            owner.buffer = place[owner.buffer]
        self.model.buffers = [self.model.buffers[i] for i in used]
        codes = sorted({op.opcodeIndex for op in self.operators})
        for operator in self.operators:
            operator.opcodeIndex = codes.index(operator.opcodeIndex)
        self.model.operatorCodes = [self.model.operatorCodes[i] for i in codes]


def quantized(content: bytes, observations: Array, recipe: Recipe) -> bytes:
    """Return a float32 flatbuffer with integers where a recipe has them.

    Args:
        content: The flatbuffer, one observation in and the head out.
        observations: [n, ...] observations to take the ranges of activations from.
        recipe: Formats by layer; a layer without one stays in float.

    Raises:
        UsageError: The recipe names a layer that is not there.
        QuarlError: A format is not that of int8 kernels.
    """
    graph = Graph(content)
    require_layers(recipe, graph.layers())
    _fold_byte_scaling(graph)
    steps = {
        name: round_kernel(graph, operator, observations, recipe.of(name).weights)
        for name, operator in graph.layers().items()
    }
    found = ranges(graph.pack(), observations)
    _Writer(graph, recipe, _reaching(graph, found), steps).write()
    return graph.pack()


def trained(content: bytes, recipe: Recipe, grids: Sequence[Mapping[str, Grid]]) -> bytes:
    """Return a float32 flatbuffer with integers on the grids that a training had.

    Args:
        content: The flatbuffer; its kernels are on their grids.
        recipe: Of 8 bits throughout.
        grids: Those of each layer's "kernel" and "output", from the one that scales observations,
            if that has one, to the last.
    """
    graph = Graph(content)
    _fold_byte_scaling(graph)
    # What scales bytes is in the first kernel now, by the converter or by us.
    factor = 1.0 if graph.takes_floats else 1 / 255
    weighted = [grid for grid in grids if "kernel" in grid]
    steps: dict[str, Array | None] = {}
    of: dict[int, Grid] = {}
    for (name, layer), grid in zip(graph.layers().items(), weighted, strict=True):
        steps[name] = np.asarray(grid["kernel"].step, np.float64) * factor
        of[layer.outputs[0]], factor = grid["output"], 1.0
    _Writer(graph, recipe, lambda index, _: of.get(index, grids[0]["output"]), steps).write()
    return graph.pack()


def _reaching(graph: Graph, ranges_: Ranges) -> Callable[[int, TensorFormat], Grid]:
    """Return what gives tensors the grids of their ranges, and of a tanh's table before it."""
    before_tanh = {op.inputs[0] for op in graph.operators if graph.name(op) == "TANH"}

    def grid(index: int, form: TensorFormat) -> Grid:
        low, high = ranges_[index]
        if index in before_tanh:
            low, high = max(low, -_TANH_END), min(high, _TANH_END)
        return grid_between(np.array(low, np.float32), np.array(high, np.float32), form)

    return grid


def round_kernel(
    graph: Graph, layer: Any, observations: Array, form: TensorFormat | None
) -> Array | None:
    """Put a layer's kernel on the grids of a format that rounds by what the layer computes.

    The mean of what is left goes into the bias (Nagel et al., arXiv 1906.04721, section 4.2).

    Returns:
        The grids' steps; None for other formats, which change nothing.
    """
    kernel, bias = (graph.constant(i) for i in [*layer.inputs, -1][1:3])
    if kernel is None or form is None or form.rounding != "gptq":
        return None
    seen, flat = inputs(graph, layer, observations), kernel.reshape(len(kernel), -1)
    rounded, grid = gptq(flat, seen, form)
    graph.set_constant(layer.inputs[1], rounded.reshape(kernel.shape))
    if bias is not None:
        shift = (rounded - flat) @ seen.mean(axis=0)
        graph.set_constant(layer.inputs[2], (bias - shift).astype(np.float32))
    return grid.step


def fit_kernel(graph: Graph, layer: Any, observations: Array, given: Array) -> None:
    """Make a layer compute of what it meets what it would of `given`, its inputs in float."""
    kernel, bias = (graph.constant(i) for i in [*layer.inputs, -1][1:3])
    if kernel is not None and bias is not None:
        flat = kernel.reshape(len(kernel), -1)
        made, shift = fitted(flat, inputs(graph, layer, observations), given)
        graph.set_constant(layer.inputs[1], made.reshape(kernel.shape))
        graph.set_constant(layer.inputs[2], bias + shift)


def _fold_byte_scaling(graph: Graph) -> None:
    """Move the factor of bytes into the first kernel, so that they can go in as they are."""
    users = {i: op for op in graph.operators for i in op.inputs}
    for operator in graph.operators:
        cast = next((o for o in graph.operators if operator.inputs[0] in o.outputs), None)
        factor = graph.constant(operator.inputs[1]) if graph.name(operator) == "MUL" else None
        if factor is None or factor.size > 1 or cast is None or graph.name(cast) != "CAST":
            continue
        layer = users[operator.outputs[0]]
        layer.inputs[0] = cast.outputs[0]
        while graph.name(layer) in _MOVING:
            layer = users[layer.outputs[0]]
        kernel = graph.constant(layer.inputs[1])
        if graph.name(layer) in _WEIGHTED and kernel is not None:
            graph.set_constant(layer.inputs[1], kernel * factor)


def ranges(content: bytes, observations: Array) -> Ranges:
    """Return the least and the greatest value of each float tensor over observations, by index."""
    found: Ranges = {}

    def widen(index: int, values: Array) -> None:
        low, high = found.get(index, (np.inf, -np.inf))
        found[index] = min(low, float(values.min())), max(high, float(values.max()))

    visit(content, observations, widen)
    return found


def visit(content: bytes, observations: Array, see: Callable[[int, Array], None]) -> None:
    """Call `see` with the index and the values of each computed float tensor, for each one."""
    with native_output.caught():
        interpreter = Interpreter(
            model_content=content,
            # The delegate keeps tensors to itself.
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            experimental_preserve_all_tensors=True,
        )
        interpreter.allocate_tensors()
    (source,) = interpreter.get_input_details()
    graph = Graph(content)
    seen = [*graph.inputs, *(i for operator in graph.operators for i in operator.outputs)]
    wanted = [i for i in seen if graph.tensors[i].type == schema.TensorType.FLOAT32]
    for observation in observations:
        interpreter.set_tensor(source["index"], observation[None].astype(source["dtype"]))
        interpreter.invoke()
        for index in wanted:
            see(index, interpreter.get_tensor(index))


def inputs(graph: Graph, layer: Any, observations: Array) -> Array:
    """Return what a layer's kernel is multiplied with, [n, weights of an output] float32.

    Of a convolution these are the patches of the image, some of them.
    """
    values = held(graph, layer, "inputs", observations)
    if graph.name(layer) == "CONV_2D":
        height, width = map(int, graph.tensors[layer.inputs[1]].shape[1:3])
        patches: Array = sliding_window_view(values, (height, width), axis=(1, 2))  # type: ignore[call-overload]
        options = layer.builtinOptions
        patches = patches[:, :: options.strideH, :: options.strideW].transpose(0, 1, 2, 4, 5, 3)
        values = patches.reshape(-1, height * width * values.shape[3])
        return values[:: max(1, len(values) // _PATCHES)]
    # An image of one point is taken as it is, without being flattened.
    return values.reshape(len(values), -1)


def held(graph: Graph, owner: Any, side: str, observations: Array) -> Array:
    """Return what an operator's first tensor holds, of its `side` "inputs" or "outputs", [n, ...].

    What feeds a tanh is cut to where an int8 tanh ends.
    """
    seen: list[Array] = []
    content = graph.pack()
    # Packing numbers the tensors anew, of this graph as of the packed one.
    wanted = getattr(owner, side)[0]

    def see(index: int, values: Array) -> None:
        if index == wanted:
            seen.append(values.copy())

    visit(content, observations, see)
    values = np.concatenate(seen)
    tables = [op.inputs[0] for op in graph.operators if graph.name(op) == "TANH"]
    return np.clip(values, -_TANH_END, _TANH_END) if wanted in tables else values


#: Patches of images that a convolution is rounded by, about.
_PATCHES = 5000


class _Writer:
    """Replaces operators by integer ones, and stands between integers and floats."""

    def __init__(
        self,
        graph: Graph,
        recipe: Recipe,
        grid: Callable[[int, TensorFormat], Grid],
        steps: Mapping[str, Array | None],
    ) -> None:
        #: What gives activations grids, and the steps of kernels that are on theirs.
        self._grid, self._steps = grid, steps
        self._graph, self._recipe = graph, recipe
        self._names = {id(op): name for name, op in graph.layers().items()}
        self._producer = {i: op for op in graph.operators for i in op.outputs}
        #: Integer tensors by the float tensor that each stands for.
        self._integers: dict[int, int] = {}
        self._written: list[Any] = []

    def write(self) -> None:
        graph = self._graph
        for operator in graph.operators:
            name = graph.name(operator)
            if name in _WEIGHTED:
                form = self._recipe.of(self._names[id(operator)])
                if form.weights is not None and form.activations is not None:
                    self._write_layer(operator, name, form.weights, form.activations)
                    continue
            elif operator.inputs[0] in self._integers and name in ("TANH", *_MOVING):
                self._write_unweighted(operator, name)
                continue
            self._write_float(operator)
        self._to_float(graph.outputs)
        graph.operators[:] = self._written

    def _write_layer(
        self, operator: Any, name: str, weights: TensorFormat, activations: TensorFormat
    ) -> None:
        graph = self._graph
        source = self._integer(operator.inputs[0])
        kernel, bias = (graph.constant(i) for i in operator.inputs[1:3])
        if kernel is None or weights.bits != _BITS or activations.bits != _BITS:
            raise QuarlError(
                "int8 kernels take constants of 8 bits; name a recipe of 8 bits. "
                f"Received: weights of {weights.bits} bits, activations of {activations.bits}"
            )
        per_channel = name == "CONV_2D" or weights.per_channel
        steps = self._steps[self._names[id(operator)]]
        codes, scales = integers(kernel, weights, per_channel=per_channel, steps=steps)
        scale = graph.tensors[source].quantization.scale[0] * scales
        inputs = [source, graph.add(operator.inputs[1], np.int8, scales, 0, codes), -1]
        if bias is not None:
            shifts = np.rint(bias.astype(np.float64) / scale)
            inputs[2] = graph.add(operator.inputs[2], np.int32, scale, 0, shifts)
        target = self._add(operator.outputs[0], activations)
        self._written.append(graph.operator(name, inputs, [target], operator))

    def _add(self, index: int, form: TensorFormat) -> int:
        self._integers[index] = self._graph.add_codes(index, self._grid(index, form))
        return self._integers[index]

    def _integer(self, index: int) -> int:
        """Return the integer tensor of a float one; quantise it if it is not computed as such."""
        if index in self._integers:
            return self._integers[index]
        if self._made_by(index, *_MOVING):
            producer = self._producer[index]
            self._integer(producer.inputs[0])
            self._write_unweighted(producer, self._graph.name(producer))
            return self._integers[index]
        source = index
        while self._made_by(source, *_CUTS):
            source = self._producer[source].inputs[0]
        if self._made_by(index, "CONCATENATION"):
            codes = self._producer[self._producer[index].inputs[0]].inputs[0]
            grid = self._graph.tensors[codes].quantization
            self._integers[index] = self._graph.add(
                index, np.int8, grid.scale, int(grid.zeroPoint[0]), None
            )
        elif self._made_by(index, "CAST"):
            source = self._producer[index].inputs[0]
            self._mark_bytes(source)
            self._integers[index] = self._graph.add(index, np.int8, np.ones(1), _LOWEST, None)
        else:
            self._add(index, self._recipe.observation.activations or _BYTE)
        made = self._integers[index]
        self._written.append(self._graph.operator("QUANTIZE", [source], [made]))
        return made

    def _made_by(self, index: int, *names: str) -> bool:
        return index in self._producer and self._graph.name(self._producer[index]) in names

    def _mark_bytes(self, index: int) -> None:
        """Say that bytes stand for themselves."""
        tensor = self._graph.tensors[index]
        tensor.quantization = schema.QuantizationParametersT()
        tensor.quantization.scale = np.ones(1, np.float32)
        tensor.quantization.zeroPoint = np.zeros(1, np.int64)

    def _write_unweighted(self, operator: Any, name: str) -> None:
        graph, (source, target) = self._graph, (operator.inputs[0], operator.outputs[0])
        like = graph.tensors[self._integers[source]].quantization
        scale, zero = (_TANH_STEP, 0) if name == "TANH" else (like.scale[0], like.zeroPoint[0])
        made = graph.add(target, np.int8, np.array(scale), int(zero), None)
        inputs = [self._integers[source], *operator.inputs[1:]]
        self._integers[target] = made
        self._written.append(graph.operator(name, inputs, [made], operator))

    def _write_float(self, operator: Any) -> None:
        self._to_float(operator.inputs)
        self._written.append(operator)

    def _to_float(self, indices: list[int]) -> None:
        for index in indices:
            if index in self._integers and not any(index in op.outputs for op in self._written):
                source = self._integers[index]
                self._written.append(self._graph.operator("DEQUANTIZE", [source], [index]))


def integers(
    kernel: Array, form: TensorFormat, *, per_channel: bool, steps: Array | None = None
) -> tuple[Array, Array]:
    """Return the codes of a kernel, output channels first, and its scale or scales.

    With steps it is on its grids already.
    """
    array = kernel.astype(np.float64)
    if steps is not None:
        return np.rint(array / steps.reshape(-1, *[1] * (array.ndim - 1))), steps.reshape(-1)
    axes = tuple(range(1, array.ndim)) if per_channel else None
    low, high = (end(array, axis=axes, keepdims=True) for end in (np.min, np.max))
    grid = grid_between(low, high, form)
    codes = np.rint(snap(array, grid, form) / grid.step)
    return codes, grid.step.reshape(-1)


def centred(content: bytes) -> bytes:
    """Subtract from a head of values or logits its mean over the actions.

    Greedy choice and softmax stay as they are, but the part that all actions share is gone. DQN's
    values lie near 1 / (1 - discount) while the best two actions differ by a thousandth of that:
    one step of an int8 head over the raw values is wider than most differences, and actions tie.
    """
    graph = Graph(content)
    head = graph.layers()["head"]
    for index in head.inputs[1:3] if head.outputs[0] in graph.outputs else ():
        values = graph.constant(index)
        if values is not None:
            graph.set_constant(index, values - values.mean(axis=0, keepdims=True))
    return graph.pack()


def prepared(content: bytes, observations: Array, *, discrete: bool) -> bytes:
    """Return a float flatbuffer as `int8` is made of it."""
    content = widened(equalised(centred(content) if discrete else content), observations)
    return refined(content, observations)


def refined(content: bytes, observations: Array) -> bytes:
    """Give each feature of a vector two codes: the nearest one, and one for what that leaves.

    The first layer sees what the nearest codes stand for, and beside it the rest times `_FINER`,
    with weights that much smaller. Both lie on one int8 grid; it is as one of 12 bits.
    """
    graph = Graph(content)
    layer = next(iter(graph.layers().values()))
    source, kernel = layer.inputs[0], graph.constant(layer.inputs[1])
    if not graph.takes_floats or kernel is None or kernel.ndim != 2:
        return content
    low, high = np.array(ranges(content, observations)[source], np.float32)
    # The rest reaches half a step to either side.
    margin = (high - low) / 2**_BITS / 2 * _FINER
    grid = grid_between(np.minimum(low, -margin), np.maximum(high, margin), _BYTE)
    size = kernel.shape[1]
    near, rest, fine = (
        graph.add_float(source, s, (1, size)) for s in (b"_near", b"_rest", b"_fine")
    )
    both = graph.add_float(source, b"_both", (1, 2 * size))
    times = graph.add_float(source, b"_times", (), _FINER)
    codes, place = graph.add_codes(source, grid), graph.operators.index(layer)
    graph.operators[place:place] = [
        graph.operator("QUANTIZE", [source], [codes]),
        graph.operator("DEQUANTIZE", [codes], [near]),
        graph.operator("SUB", [source, near], [rest]),
        graph.operator("MUL", [rest, times], [fine]),
        graph.operator("CONCATENATION", [near, fine], [both]),
    ]
    wide = np.concatenate([kernel, kernel / _FINER], axis=1)
    layer.inputs[:2] = both, graph.add_float(layer.inputs[1], b"_wide", wide.shape, wide)
    return graph.pack()


def widened(content: bytes, observations: Array) -> bytes:
    """Give features that hardly move more codes of the normalised observation's one grid.

    What deviates by less than `LEAST_DEVIATION` fills a small part of the others' range. A factor
    moves from its weights to its scale, by which the network computes the same: as in `equalised`
    the root of how far the others reach beyond it, times how far its weights are beyond theirs.
    """
    graph = Graph(content)
    layer = next(iter(graph.layers().values()))
    first = next((op.inputs[1] for op in graph.operators if graph.name(op) == "MUL"), -1)
    scale, kernel = graph.constant(first), graph.constant(layer.inputs[1])
    if scale is None or kernel is None or kernel.shape[1:] != (scale.size,):
        return content
    small = scale.ravel() == np.float32(1 / LEAST_DEVIATION)
    seen = inputs(graph, layer, observations) if small.any() else scale.reshape(1, -1)
    moving = small & (np.ptp(seen, axis=0) > _ROUNDING)
    if small.all() or not moving.any():
        return content
    reach, weights = np.abs(seen).max(axis=0), np.abs(kernel)
    beyond = np.where(moving, reach[~small].max() / np.maximum(reach, _ROUNDING), 1).clip(1)
    others = weights[:, ~small].max(axis=1, keepdims=True)
    share = (weights / np.maximum(others, _ROUNDING)).max(axis=0)
    factor = np.sqrt(beyond * share).clip(1, beyond).astype(np.float32)
    graph.set_constant(first, scale * factor.reshape(scale.shape))
    graph.set_constant(layer.inputs[1], kernel / factor)
    return graph.pack()


def equalised(content: bytes, rounds: int = 20) -> bytes:
    """Move scale between neighbouring ReLU layers until their channels are as wide as each other.

    Cross-layer equalisation (Nagel et al., arXiv 1906.04721, section 4.1): ReLU lets a positive
    factor of a channel pass, so the network computes the same.
    """
    graph = Graph(content)
    layers = list(graph.layers().values())
    for _ in range(rounds):
        for first, second in pairwise(layers):
            if graph.name(first) == graph.name(second) and first.outputs[0] == second.inputs[0]:
                _equalise(graph, first, second)
    return graph.pack()


_RELU = schema.ActivationFunctionType.RELU


def _equalise(graph: Graph, first: Any, second: Any) -> None:
    if first.builtinOptions.fusedActivationFunction != _RELU:
        return
    before, bias, after = (
        graph.constant(i) for i in (first.inputs[1], first.inputs[2], second.inputs[1])
    )
    if before is None or after is None:
        return
    out = np.abs(before).reshape(len(before), -1).max(axis=1)
    into = np.abs(after).reshape(-1, after.shape[-1]).max(axis=0)
    alive = (out > 0) & (into > 0)
    factor = np.where(alive, np.sqrt(np.where(alive, out / np.where(into, into, 1), 1)), 1)
    factor = factor.astype(np.float32)
    shape = (-1, *[1] * (before.ndim - 1))
    graph.set_constant(first.inputs[1], before / factor.reshape(shape))
    if bias is not None:
        graph.set_constant(first.inputs[2], bias / factor)
    graph.set_constant(second.inputs[1], after * factor)
