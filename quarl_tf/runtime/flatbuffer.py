"""Read the types, operators and weights of a TFLite flatbuffer from the file itself.

The schema's reader is plain Python: a wrong offset in a damaged file raises an exception, it never
crashes. A `source` is a file or its content; a QuarlError is raised where it is missing, empty,
damaged or no TFLite flatbuffer.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.files import read_bytes

IDENTIFIER = b"TFL3"

#: Operators whose second input is their kernel.
WEIGHTED = {"FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"}

#: Types of the constants of a float flatbuffer; integers are shapes and axes.
FLOAT_TYPES = {"float32", "float16", "int32", "int64", "bool"}

_DECODABLE = {"float32", "float16", "int8", "int4"}  #: Types of weights that can be decoded.
_BITS = {"bfloat16": 16, "int4": 4, "uint4": 4, "int2": 2}  #: Of types that NumPy does not have.

#: What reading a damaged file raises: a read beyond the end, a negative offset, a missing table, an
#: unknown type or operator.
_DAMAGED = (struct.error, AttributeError, LookupError, OverflowError, TypeError, ValueError)


@contextmanager
def understood() -> Iterator[None]:
    """Turn the errors of an unsupported graph into a QuarlError."""
    try:
        yield
    except QuarlError:
        raise
    except (*_DAMAGED, RuntimeError) as error:
        raise QuarlError(
            "A flatbuffer of this graph, which `quarl inspect` shows, cannot be run or quantised "
            f"so; convert it otherwise. Received: {type(error).__name__}: {one_line(error)}"
        ) from error


def _schema() -> Any:
    # Acting does not need it, and only one of the two LiteRT packages has it.
    from ai_edge_litert import schema_py_generated

    return schema_py_generated


@cache
def _names(enumeration: str) -> dict[int, str]:
    members = vars(getattr(_schema(), enumeration))
    return {code: name for name, code in members.items() if not name.startswith("_")}


class Tensor(NamedTuple):
    """One tensor; `scales` are empty where it is not quantised."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: NDArray[np.float32]
    zero_points: NDArray[np.int64]
    axis: int
    data: NDArray[np.uint8] | None  #: Raw bytes of a constant; None for a computed tensor.


@dataclass(frozen=True, eq=False)
class FlatbufferAudit:
    """The main graph's inputs and outputs, and the contents of all graphs.

    Tensors are counted by dtype, constants by their elements, scales by the kernel. Operators are
    in order with the dtype each computes: "FULLY_CONNECTED int8", or "FULLY_CONNECTED float32×int8"
    for float activations with int8 weights.
    """

    tensor_dtypes: dict[str, int]
    weight_dtypes: dict[str, int]
    kernel_scales: list[int]
    operators: list[str]
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Operator(NamedTuple):
    name: str
    inputs: list[int]
    outputs: list[int]


class Graph(NamedTuple):
    """The tensors and operators of one graph, and the indices of its inputs and outputs."""

    tensors: list[Tensor]
    operators: list[_Operator]
    inputs: list[int]
    outputs: list[int]


def read(path: Path) -> bytes:
    """Read a flatbuffer's bytes; a QuarlError where the file is not one."""
    content = read_bytes(path)
    _check_identifier(content, str(path))
    return content


def _check_identifier(content: bytes | bytearray, name: str) -> None:
    if content[4:8] != IDENTIFIER:
        raise QuarlError(
            f"{name} is not a TFLite flatbuffer; name a .tflite file. Received: "
            f"{len(content)} bytes, identifier={bytes(content[4:8])!r}, expected {IDENTIFIER!r}"
        )


def audit(source: Path | bytes) -> FlatbufferAudit:
    """List the types, operators and interface of a flatbuffer."""
    graphs = parsed(source)
    tensors = [tensor for graph in graphs for tensor in graph.tensors]
    weight_dtypes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.data is not None:
            weight_dtypes[tensor.dtype] += math.prod(tensor.shape)
    return FlatbufferAudit(
        tensor_dtypes=dict(Counter(tensor.dtype for tensor in tensors)),
        weight_dtypes=dict(weight_dtypes),
        kernel_scales=[
            graph.tensors[dequantized(graph).get(i, i)].scales.size
            for graph in graphs
            for op in graph.operators
            if op.name in WEIGHTED
            for i in op.inputs[1:2]
        ],
        operators=[_describe(op, graph) for graph in graphs for op in graph.operators],
        inputs=[graphs[0].tensors[i] for i in graphs[0].inputs],
        outputs=[graphs[0].tensors[i] for i in graphs[0].outputs],
    )


def weights(source: Path | bytes) -> dict[str, NDArray[np.float32]]:
    """Return the constants of rank 2 or more, dequantised, by name, in the order of their use.

    Schemes may name the same layer differently, but their order is the same.
    """
    arrays = {}
    for graph in parsed(source):
        origins = dequantized(graph)
        used = (i for op in graph.operators if op.name != "DEQUANTIZE" for i in op.inputs)
        for index in dict.fromkeys(origins.get(i, i) for i in used):
            tensor = graph.tensors[index]
            if tensor.data is not None and len(tensor.shape) > 1 and tensor.dtype in _DECODABLE:
                # Names are optional, and may be those of others.
                key = tensor.name or f"tensor {index}"
                key = f"{key} {index}" if key in arrays else key
                arrays[key] = decode(tensor, tensor.data)
    return arrays


def dequantized(graph: Graph) -> dict[int, int]:
    """Return what each result of a DEQUANTIZE is made of, both by number of tensor.

    fp16 files dequantise all weights first, in any order: the use of the results counts.
    """
    return {op.outputs[0]: op.inputs[0] for op in graph.operators if op.name == "DEQUANTIZE"}


def byte_size(dtype: str, elements: int) -> int:
    """Return the bytes of a number of elements; those smaller than a byte are packed."""
    try:
        bits = _BITS.get(dtype) or 8 * np.dtype(dtype).itemsize
    except TypeError as error:
        raise QuarlError(
            "The memory of a flatbuffer is that of its numbers; measure one without tensors of "
            f"other types. Received: dtype={dtype!r}"
        ) from error
    return math.ceil(elements * bits / 8)


def parsed(source: Path | bytes | bytearray) -> list[Graph]:
    """Return the graphs of a flatbuffer, the main one first; a QuarlError where it is damaged."""
    name = str(source) if isinstance(source, Path) else "The content"
    content = read_bytes(source) if isinstance(source, Path) else source
    _check_identifier(content, name)
    try:
        model = _schema().Model.GetRootAs(content, 0)
        buffers = [_bytes(buffer, content) for buffer in _items(model, "Buffers")]
        graphs = [_graph(model, graph, buffers) for graph in _items(model, "Subgraphs")]
        if not graphs:
            raise ValueError("no graph")
    except _DAMAGED as error:
        raise QuarlError(
            f"{name} is truncated or damaged ({type(error).__name__}: {error}); export it again. "
            f"Received: {len(content)} bytes"
        ) from error
    return graphs


def _bytes(buffer: Any, content: bytes | bytearray) -> NDArray[np.uint8] | None:
    if start := buffer.Offset():
        # Some writers put large buffers behind the tables.
        if start + buffer.Size() > len(content):
            raise IndexError("a buffer ends behind the file")
        return np.frombuffer(content, np.uint8, buffer.Size(), start)
    return buffer.DataAsNumpy() if buffer.DataLength() else None


def _items(owner: Any, name: str) -> list[Any]:
    return [getattr(owner, name)(i) for i in range(getattr(owner, f"{name}Length")())]


def _graph(model: Any, subgraph: Any, buffers: list[NDArray[np.uint8] | None]) -> Graph:
    tensors = [_tensor(tensor, buffers) for tensor in _items(subgraph, "Tensors")]
    operators = [_operator(model, operator) for operator in _items(subgraph, "Operators")]
    inputs, outputs = _items(subgraph, "Inputs"), _items(subgraph, "Outputs")
    indices = [i for op in operators for i in (*op.inputs, *op.outputs)]
    if not all(0 <= i < len(tensors) for i in (*inputs, *outputs, *indices)):
        raise IndexError("a tensor that is not there is used")
    return Graph(tensors, operators, inputs, outputs)


def _tensor(tensor: Any, buffers: list[NDArray[np.uint8] | None]) -> Tensor:
    shape = tuple(_items(tensor, "Shape"))
    scales, zero_points, axis = np.empty(0, np.float32), np.empty(0, np.int64), 0
    quantization = tensor.Quantization()
    if quantization is not None and quantization.ScaleLength():
        scales = quantization.ScaleAsNumpy()
        zero_points = quantization.ZeroPointAsNumpy()
        # One scale for the whole tensor, or one for each slice along the axis.
        axis = quantization.QuantizedDimension() if scales.size > 1 else 0
        if zero_points.size != scales.size or (scales.size > 1 and scales.size != shape[axis]):
            raise ValueError(f"{scales.size} scales for a tensor of shape {shape}")
    # Buffer 0 is empty by convention: computed tensors have it.
    data = buffers[tensor.Buffer()]
    dtype = _names("TensorType")[tensor.Type()].lower()
    if data is not None and dtype in _DECODABLE:
        expected = byte_size(dtype, math.prod(shape))
        if data.size != expected:
            raise ValueError(f"{data.size} bytes where {expected} belong")
    return Tensor((tensor.Name() or b"").decode(), shape, dtype, scales, zero_points, axis, data)


def _operator(model: Any, operator: Any) -> _Operator:
    code = model.OperatorCodes(operator.OpcodeIndex())
    # Old files have only the 8-bit field; new ones repeat small numbers in it.
    name = _names("BuiltinOperator")[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]
    if name == "CUSTOM":
        name = (code.CustomCode() or b"").decode()
    # -1 is an omitted optional input.
    inputs = [i for i in _items(operator, "Inputs") if i != -1]
    return _Operator(name, inputs, _items(operator, "Outputs"))


def _describe(operator: _Operator, graph: Graph) -> str:
    kernel = operator.inputs[1:2] if operator.name in WEIGHTED else []
    dtypes = dict.fromkeys(graph.tensors[i].dtype for i in (*operator.outputs[:1], *kernel))
    types = "\N{MULTIPLICATION SIGN}".join(dtypes)
    return f"{operator.name} {types}".rstrip()


def decode(tensor: Tensor, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of a constant, dequantised."""
    if tensor.dtype == "int4":  # Two to a byte, the first in the lower half.
        pairs = np.stack([data << 4, data], axis=1).view(np.int8) >> 4
        numbers = pairs.reshape(-1)[: math.prod(tensor.shape)]
    else:
        numbers = data.view(tensor.dtype)
    values = numbers.reshape(tensor.shape).astype(np.float32)
    if not tensor.scales.size:
        return values
    shape = [1] * len(tensor.shape)
    shape[tensor.axis] = -1
    zero_points = tensor.zero_points.astype(np.float32).reshape(shape)
    # A damaged scale may overflow; no warning is needed for that.
    with np.errstate(over="ignore", invalid="ignore"):
        return (values - zero_points) * tensor.scales.reshape(shape)
