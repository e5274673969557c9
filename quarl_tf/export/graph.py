"""A TFLite flatbuffer of one graph as objects that can be changed."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.quantization.grid import Array, Grid
from quarl_tf.runtime.flatbuffer import IDENTIFIER, WEIGHTED

FLOAT16, FLOAT32 = schema.TensorType.FLOAT16, schema.TensorType.FLOAT32
INT4, UINT8 = schema.TensorType.INT4, schema.TensorType.UINT8

VALID = schema.Padding.VALID

#: Fused activations.
NONE, RELU = schema.ActivationFunctionType.NONE, schema.ActivationFunctionType.RELU

LAYERS = ("FULLY_CONNECTED", "CONV_2D")  #: Operators that are layers of recipes.

_NAMES: dict[int, str] = {c: n for n, c in vars(schema.BuiltinOperator).items() if n[0] != "_"}
_TYPES = {
    np.dtype(name): getattr(schema.TensorType, name.upper())
    for name in ("float16", "float32", "int8", "int32")
}

#: Versions of the operators that take int8.
_VERSIONS = {
    "FULLY_CONNECTED": 4,
    "CONV_2D": 3,
    "TANH": 2,
    "LOGISTIC": 2,
    "DEQUANTIZE": 2,
    "BROADCAST_TO": 3,
}
_OF_HALVES = 3  #: Version of DEQUANTIZE that takes float16.


class Graph:
    """A flatbuffer of one graph that can be changed; operators are in the order of computation."""

    def __init__(self, content: bytes) -> None:
        """Unpack a flatbuffer."""
        self.model = schema.ModelT.InitFromPackedBuf(bytearray(content), 0)
        graph, *others = self.model.subgraphs
        if others:
            raise UsageError(
                "Of a flatbuffer with loops only ptq_wN and ptq_paper_wN are made; unroll "
                f"recurrent layers (Keras: unroll=True). Received: {1 + len(others)} graphs"
            )
        for code in self.model.operatorCodes:  # Old files have only the 8-bit field.
            code.builtinCode = max(code.builtinCode, code.deprecatedBuiltinCode)
        self.tensors: list[Any] = graph.tensors
        for tensor in self.tensors:  # Names are optional.
            tensor.name = tensor.name or b""
        self.operators: list[Any] = graph.operators
        self.inputs = graph.inputs = list(graph.inputs)
        self.outputs = graph.outputs = list(graph.outputs)
        # Give each layer constants of its own, which change without those of others.
        used_buffers: set[int] = set()
        for operator in sorted(self.operators, key=lambda op: self.name(op) in LAYERS):
            operator.inputs = list(operator.inputs)
            for position, index in enumerate(operator.inputs):
                if (values := self.constant(index)) is None:
                    continue
                if self.tensors[index].buffer in used_buffers and self.name(operator) in LAYERS:
                    operator.inputs[position] = self.add(index, b"_own", values=values)
                used_buffers.add(self.tensors[operator.inputs[position]].buffer)

    @property
    def takes_floats(self) -> bool:
        """Whether observations are float32, and not bytes."""
        return bool(self.tensors[self.inputs[0]].type == FLOAT32)

    def readers(self, index: int) -> int:
        """Return how often a tensor is read, as an output of the flatbuffer as well."""
        return [*self.outputs, *(i for op in self.operators for i in op.inputs)].count(index)

    def name(self, operator: Any) -> str:
        """Return the name of an operator's kind."""
        return _NAMES[self.model.operatorCodes[operator.opcodeIndex].builtinCode]

    @staticmethod
    def activation(operator: Any) -> int:
        """Return the activation that an operator applies to its output."""
        return int(getattr(operator.builtinOptions, "fusedActivationFunction", NONE))

    def layers(self) -> dict[str, Any]:
        """Return the operators with a kernel by their names in recipes, in order.

        The head is the last one with as many outputs as the flatbuffer: in a dueling network the
        value of the state may follow it.
        """
        kernel_operators = [op for op in self.operators if self.name(op) in LAYERS]
        size = self._size(self.outputs[0])
        heads = [op for op in kernel_operators if self._size(op.outputs[0]) == size]
        head, layers = (heads or kernel_operators)[-1], dict[str, Any]()
        for operator in kernel_operators:
            kind = "convolution" if self.name(operator) == "CONV_2D" else "hidden"
            number = sum(name.startswith(kind) for name in layers)
            layers["head" if operator is head else f"{kind}_{number}"] = operator
        return layers

    def _size(self, index: int) -> int:
        return int(math.prod(self.tensors[index].shape))

    def producer(self, index: int) -> Any:
        """Return the operator that computes a tensor; None for inputs and constants."""
        return next((op for op in self.operators if index in op.outputs), None)

    def origin(self, index: int) -> str:
        """Return the name of the operator that computes a tensor; "" for inputs and constants."""
        producer = self.producer(index)
        return "" if producer is None else self.name(producer)

    def path(self, index: int, names: Collection[str]) -> list[int]:
        """Return a tensor and, back through operators of these kinds, what it is computed from."""
        path = [index]
        while self.origin(path[-1]) in names:
            path.append(self.producer(path[-1]).inputs[0])
        return path

    def before(self, names: Collection[str]) -> dict[int, str]:
        """Return the inputs of all operators of these kinds, which nothing else reads; by index."""
        inputs = {op.inputs[0]: self.name(op) for op in self.operators if self.name(op) in names}
        return {index: name for index, name in inputs.items() if self.readers(index) == 1}

    def constant(self, index: int) -> Array | None:
        """Return a float32 constant; None for other tensors and for -1."""
        if index < 0:
            return None
        tensor = self.tensors[index]
        data = self.model.buffers[tensor.buffer].data
        if data is None or tensor.type != FLOAT32:
            return None
        shape = () if tensor.shape is None else tensor.shape
        return np.frombuffer(bytes(data), np.float32).reshape(shape)

    def kernel_and_bias(self, layer: Any) -> tuple[Array | None, Array | None]:
        """Return the float32 kernel and bias of a layer; None for a computed kernel and no bias.

        A QuarlError for a computed bias, which would be lost.
        """
        _, kernel_index, bias_index = [*layer.inputs, -1][:3]
        kernel, bias = self.constant(kernel_index), self.constant(bias_index)
        if bias is None and bias_index >= 0:
            name = self.tensors[bias_index].name.decode()
            raise QuarlError(
                "Layers are rewritten where their bias is a float32 constant; convert it so, or "
                f"name other schemes. Received: bias={name!r}"
            )
        return kernel, bias

    def set_constant(self, index: int, values: Array) -> None:
        """Give a tensor constant values, of its shape and type."""
        tensor = self.tensors[index]
        if tensor.buffer == 0:  # That of computed tensors.
            tensor.buffer = len(self.model.buffers)
            self.model.buffers.append(schema.BufferT())
        data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        self.model.buffers[tensor.buffer].data = data

    def set_grid(self, index: int, scales: Any, zero: int) -> None:
        """Set the scale of a tensor, or one for each output channel, and the code of 0."""
        scale = np.atleast_1d(scales).astype(np.float32)
        zero_point = np.full(scale.shape, zero, np.int64)
        grid = schema.QuantizationParametersT(scale=scale, zeroPoint=zero_point)
        self.tensors[index].quantization = grid

    def add(
        self,
        like: int,
        suffix: bytes,
        dtype: Any = np.float32,
        shape: Sequence[int] | None = None,
        values: Any = None,
    ) -> int:
        """Add a tensor of the name and, without shape or values, the shape of another.

        Values are constant, and their shape counts.
        """
        template, kind = self.tensors[like], _TYPES[np.dtype(dtype)]
        tensor = schema.TensorT(name=template.name + suffix, type=kind, hasRank=template.hasRank)
        tensor.shape, tensor.shapeSignature = template.shape, template.shapeSignature
        shape = shape if values is None else np.shape(values)
        if shape is not None:
            tensor.shape, tensor.shapeSignature = np.array(shape, np.int32), None
        self.tensors.append(tensor)
        if values is not None:
            self.set_constant(len(self.tensors) - 1, np.asarray(values, dtype))
        return len(self.tensors) - 1

    def add_integers(
        self,
        like: int,
        dtype: Any,
        scales: Any,
        zero: int = 0,
        values: Any = None,
        shape: Sequence[int] | None = None,
    ) -> int:
        """Add an integer tensor with scales; name, shape and values as in `add`."""
        index = self.add(like, b"_int", dtype, shape, values)
        self.set_grid(index, scales, zero)
        return index

    def add_codes(self, like: int, grid: Grid) -> int:
        """Add an int8 tensor on a grid, of the shape of another."""
        zero = -128 - round(float(grid.low / grid.step))
        return self.add_integers(like, np.int8, grid.step, zero)

    def operator(
        self,
        name: str,
        inputs: list[int],
        outputs: list[int],
        options: Any = None,
        version: int | None = None,
    ) -> Any:
        """Make an operator, with options of the schema; the version is by default that of int8."""
        kind = "NONE" if options is None else type(options).__name__.removesuffix("T")
        return schema.OperatorT(
            opcodeIndex=self._code(name, version or _VERSIONS.get(name, 1)),
            inputs=inputs,
            outputs=outputs,
            builtinOptionsType=getattr(schema.BuiltinOptions, kind),
            builtinOptions=options,
        )

    def _code(self, name: str, version: int) -> int:
        codes, kind = self.model.operatorCodes, getattr(schema.BuiltinOperator, name)
        for number, code in enumerate(codes):
            if (code.builtinCode, code.version) == (kind, version):
                return number
        codes.append(schema.OperatorCodeT(min(kind, 127), version=version, builtinCode=kind))
        return len(codes) - 1

    def pack(self) -> bytes:
        """Return the flatbuffer, without unused operators and tensors.

        Tensors are renumbered, in this graph and in the flatbuffer alike.
        """
        used_tensors, used_operators = {*self.outputs}, []
        for operator in reversed(self.operators):
            if used_tensors & {*operator.outputs}:
                used_operators.append(operator)
                used_tensors |= {*operator.inputs, *operator.outputs}
        numbers = _new_numbers({*used_tensors, *self.inputs} - {-1})
        for operator in used_operators:
            operator.inputs = [numbers.get(i, -1) for i in operator.inputs]
            operator.outputs = [numbers[i] for i in operator.outputs]
        self.operators[:] = used_operators[::-1]
        self.tensors[:] = [self.tensors[i] for i in numbers]
        for ends in (self.inputs, self.outputs):
            ends[:] = [numbers[i] for i in ends]
        for signature in self.model.signatureDefs or []:
            for entry in (*signature.inputs, *signature.outputs):
                entry.tensorIndex = numbers[entry.tensorIndex]
        owners = [*self.tensors, *(self.model.metadata or [])]
        # Buffer 0 is empty by convention.
        numbers = _new_numbers({0, *(owner.buffer for owner in owners)})
        for owner in owners:
            owner.buffer = numbers[owner.buffer]
        self.model.buffers = [self.model.buffers[i] for i in numbers]
        numbers = _new_numbers({operator.opcodeIndex for operator in used_operators})
        for operator in used_operators:
            operator.opcodeIndex = numbers[operator.opcodeIndex]
        self.model.operatorCodes = [self.model.operatorCodes[i] for i in numbers]
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(self.model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())


def in_float32(content: bytes) -> bytes:
    """Return a flatbuffer whose float16 constants are float32; one without any stays as it is."""
    graph = Graph(content)
    wideners = [
        operator
        for operator in graph.operators
        if graph.name(operator) == "DEQUANTIZE"
        and graph.tensors[operator.inputs[0]].type == FLOAT16
    ]
    for operator in wideners:
        half_tensor, index = graph.tensors[operator.inputs[0]], operator.outputs[0]
        values = np.frombuffer(bytes(graph.model.buffers[half_tensor.buffer].data), np.float16)
        graph.tensors[index].buffer = 0
        graph.set_constant(index, values.astype(np.float32))
        graph.operators.remove(operator)
    return graph.pack() if wideners else content


def in_float16(content: bytes) -> bytes:
    """Return a flatbuffer whose kernels and biases are float16, widened as they are loaded.

    A QuarlError where one would overflow.
    """
    graph, wideners, widened = Graph(content), list[Any](), dict[Any, int]()
    for layer in [op for op in graph.operators if graph.name(op) in WEIGHTED]:
        for position, index in enumerate(layer.inputs):
            if position == 0 or (values := graph.constant(index)) is None:
                continue
            if (largest := np.abs(values).max()) > np.finfo(np.float16).max:
                raise QuarlError(
                    "fp16 holds numbers up to 65504; choose another scheme. "
                    f"Received: {graph.tensors[index].name.decode()} up to {largest}"
                )
            # Layers may share a kernel.
            layer.inputs[position] = widened.setdefault((values.shape, values.tobytes()), index)
            if layer.inputs[position] == index:
                half = graph.add(index, b"_half", np.float16, values=values)
                graph.tensors[index].buffer = 0
                wideners.append(graph.operator("DEQUANTIZE", [half], [index], version=_OF_HALVES))
    graph.operators[:0] = wideners
    return graph.pack()


def with_scaled_head(content: bytes, factor: Array, offset: Array) -> bytes:
    """Return a flatbuffer whose output is multiplied by a factor, then added to an offset."""
    graph = Graph(content)
    (output,) = graph.outputs
    head, product = graph.add(output, b"_unscaled"), graph.add(output, b"_product")
    graph.producer(output).outputs = [head]
    graph.operators += [
        graph.operator("MUL", [head, graph.add(output, b"_mul", values=factor)], [product]),
        graph.operator("ADD", [product, graph.add(output, b"_add", values=offset)], [output]),
    ]
    return graph.pack()


def _new_numbers(old_numbers: Iterable[int]) -> dict[int, int]:
    """Return a new number for each old one: consecutive, in their order."""
    return {old: new for new, old in enumerate(sorted(old_numbers))}
