"""Write an int8 policy as C99 that computes the same bits as LiteRT's reference kernels.

These lack ELU, which is the table of the default ones. The float parts of the flatbuffer, the
normaliser and the scaling of actions, are float in C, or integers of Q16.16, multiples of 1/65536.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from quarl_tf.export.graph import NONE, RELU, VALID, Graph
from quarl_tf.export.integer import FINER
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import write_text
from quarl_tf.quantization.grid import Array
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.store.records import Sidecar

_Shape = tuple[int, ...]

_TYPES = {"float32": "float"} | {t: f"{t}_t" for t in ("int8", "uint8", "int32", "int64")}

#: All codes, in the order of unsigned bytes.
_CODES = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)

#: 1 in Q16.16, and the integer at which an observation is clipped.
_ONE, _FARTHEST = 65536, 2**30 - 1
_ENDS = 400  #: Steps from 0 beyond which both codes of a number are saturated.
_LAYER_BYTES = 64  #: Of a `struct layer` on processors of 32 bits.

#: Elementwise operators on floats; another operand is a constant.
_ELEMENTWISE = {
    "ADD float32": "{0} + {1}",
    "SUB float32": "{0} - {1}",
    "MUL float32": "{0} * {1}",
    "MINIMUM float32": "{0} < {1} ? {0} : {1}",
    "MAXIMUM float32": "{0} > {1} ? {0} : {1}",
    "TANH float32": "tanhf({0})",
}


def size(artifact: Path) -> tuple[int, int, int]:
    """Return the size of the C source: see `_Writer.size`; raises as `write`."""
    return _make_writer(artifact, fixed=False)[0].size()


def write(artifact: Path, *, fixed: bool = False) -> str:
    """Write a flatbuffer as .h and .c beside it, and return a line on its size.

    `fixed` replaces the floats of observations, heads and actions by integers of Q16.16. A
    UsageError where an operator is not supported, or one of the files is not ours; a QuarlError
    where the flatbuffer is damaged.
    """
    writer, sidecar = _make_writer(artifact, fixed=fixed)
    (source,), (head,) = writer.audit.inputs, writer.audit.outputs
    constants, buffer_bytes, products = writer.size()
    summary = (
        f"flash: {constants:,} bytes of constants, and the code; RAM: {buffer_bytes:,} bytes of "
        f"buffers; {products:,} multiply-accumulates an action"
    )
    buffers = "\n".join(f"static {t} {n}[{count}];" for n, (t, count) in writer.buffers.items())
    body = "\n".join(writer.body)
    names = vars(sidecar) | writer.scales | {"summary": summary, "body": body}
    names["declarations"] = "\n\n".join([*_used_kernels(body), *writer.constants, buffers])
    names["include"] = "<math.h>" if "tanhf(" in body else "<stdint.h>"
    tag = sidecar.sha256[:8] + "_fixed" * fixed
    names.update(algo=sidecar.run["algo"], stem=artifact.stem, tag=tag)
    note = "-std=c99 or -ffp-contract=off keep the same floats, except on x87."
    caution = " NaN counts as one\n * end of its number's range, so check sensors before."
    if fixed:
        note, caution = "int32_t numbers are Q16.16: 65536 is 1.", ""
    names.update(type=writer.observation_type, number=writer.number, numbers=note, caution=caution)
    names.update(observation_size=math.prod(source.shape), head_size=math.prod(head.shape))
    discrete = sidecar.num_actions is not None
    names["act"] = _template("discrete.c" if discrete else "continuous.c").substitute(names).strip()
    names["prototype"] = names["act"].partition("\n")[0]
    files = {artifact.with_suffix(suffix): f"policy{suffix}" for suffix in (".h", ".c")}
    for path in files:
        if path.exists() and "Written by quarl_tf" not in path.read_text(errors="replace")[:200]:
            raise UsageError(
                f"{path} was not written by this program; move it away. "
                f"Received: path={str(path)!r}"
            )
    for path, template in files.items():
        write_text(path, _template(template).substitute(names))
    return summary


def _make_writer(artifact: Path, *, fixed: bool) -> tuple[_Writer, Sidecar]:
    sidecar, audit = Policy.load(artifact).sidecar, flatbuffer.audit(artifact)
    (source,), (head,) = audit.inputs, audit.outputs
    if (source.dtype, head.dtype) != (sidecar.observation_dtype, "float32"):
        raise _refusal(f"input={source.dtype}, output={head.dtype}")
    if isinstance(sidecar.num_actions, list):
        raise _refusal(f"several actions at once, num_actions={sidecar.num_actions}")
    try:
        writer = _Writer(flatbuffer.read(artifact), audit, fixed=fixed)
    except QuarlError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Flatbuffers of others may have anything.
        raise _refusal(f"{type(error).__name__}: {error}") from error
    if not writer.products:
        raise _refusal("no layer in int8")
    if sidecar.num_actions is not None:
        writer.buffers["kept_values"] = writer.number, math.prod(head.shape)
    else:
        for name in ("action_low", "action_high"):
            bounds = np.array(getattr(sidecar, name), np.float32)
            if fixed:
                low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
                bounds = np.rint(bounds * np.float64(_ONE)).clip(low, high).astype(np.int32)
            writer.constant(bounds, name)
    return writer, sidecar


def _template(name: str) -> Template:
    return Template((Path(__file__).parent / "c" / name).read_text())


def _used_kernels(body: str) -> list[str]:
    """Return the blocks of kernels.c that the body needs; compilers warn of unused functions."""
    templates = map(Template, _template("kernels.c").template.strip().split("\n\n"))
    types = ("int8_t", "uint8_t")  # A block without a type is the same for both.
    blocks = dict.fromkeys(block.substitute(type=t) for block in templates for t in types)
    names, used = re.compile(r"^static \w+ (\w+\()", re.MULTILINE), list[str]()
    for block in reversed(blocks):  # What a function calls stands before it.
        if all(name in "\n".join([body, *used]) for name in names.findall(block)):
            used.append(block)
    return used[::-1]


def _refusal(received: str) -> UsageError:
    return UsageError(
        "C is written from a chain of dense layers and unpadded convolutions with ReLU, tanh, "
        "ELU or SiLU, in int8 from the first layer on (int8, int8_tensor, qat_int8 and, without "
        f"--no-float, int8_head32); name or adopt one. Received: {received}"
    )


class _Writer:
    """Writes a chain of operators.

    The current numbers are integers in an array, or floats: an expression of `i` and statements
    that are not written yet, so that elementwise operators become one loop.
    """

    def __init__(self, content: bytes, audit: flatbuffer.FlatbufferAudit, *, fixed: bool) -> None:
        self.audit, self._fixed = audit, fixed
        self.constants, self.body, self.scales = list[str](), list[str](), dict[str, str]()
        self.constant_bytes = self.products = 0
        self.buffers: dict[str, tuple[str, int]] = {}
        self._graph, self._tensors = Graph(content), flatbuffer.parsed(content)[0].tensors
        self._tensor, self._type = self._graph.inputs[0], _TYPES[audit.inputs[0].dtype]
        self._array, self._load, self._steps = "observation", "observation[i]", list[str]()
        self.number = "int32_t" if fixed else "float"
        self.observation_type = self.number if self._type == "float" else self._type
        #: In fixed point a number is the clipped integer of `_load` times a factor plus an offset.
        self._factor, self._offset = np.float64(1 / _ONE), np.float64(0)
        self._low, self._high = np.float64(-_FARTHEST), np.float64(_FARTHEST)
        #: The code of 0 in the array, and whether the layer clips there.
        self._zero, self._relu = 0, False
        #: The largest integer of a head, in size, and how many of them are a code.
        self._largest, self._finer = 128, 1
        self._layers = {id(operator): name for name, operator in self._graph.layers().items()}
        writers = _FIXED_OPERATORS if fixed else _OPERATORS
        operators, kinds = list(self._graph.operators), list(audit.operators)
        suffix = " in fixed point" * fixed
        chains = (_REFINED, self._refine), (_SILU, self._silu), (_TWO_STAGES, self._two_stages)
        known = {*writers, *(kind for chain, _ in chains for kind in chain)}
        if not any(kind.endswith(" int8") for kind in kinds):  # A float file.
            known -= {"FULLY_CONNECTED float32"}
        # Before the chain is followed, which such an operator may break.
        if others := [kind for kind in dict.fromkeys(kinds) if kind not in known]:
            raise _refusal(", ".join(others) + suffix)
        while operators:
            for chain, write in chains:
                if kinds[: len(chain)] == chain:
                    write(operators[: len(chain)])
                    del operators[: len(chain)], kinds[: len(chain)]
            operator, kind = operators.pop(0), kinds.pop(0)
            if kind not in writers or (kind == "FULLY_CONNECTED float32" and not self.products):
                raise _refusal(kind + suffix)
            activation = self._graph.activation(operator)
            self._relu = activation == RELU and id(operator) in self._layers
            sources = [i for i in operator.inputs if i >= 0 and self._tensors[i].data is None]
            if sources != [self._tensor]:
                raise _refusal(f"a branch, {kind} of others than the tensor before it")
            if not (self._relu or activation == NONE):
                raise _refusal(f"{kind}, fused activation {activation}")
            writers[kind](self, operator, kind)
            self._tensor = operator.outputs[0]
        if fixed:
            self._fixed_head()
        else:
            self._flush("head")

    def size(self) -> tuple[int, int, int]:
        """Return bytes of constants, bytes of buffers, and multiply-accumulates of an action."""
        buffers = sum((1 if kind == "int8_t" else 4) * n for kind, n in self.buffers.values())
        return self.constant_bytes, buffers, self.products

    def constant(self, values: Array, name: str = "") -> str:
        """Declare an array of constants; return its name."""
        name, kind = name or f"constant_{len(self.constants)}", _TYPES[str(values.dtype)]
        # A float32 is written as the shortest text of the same number.
        texts = [f"{x!s}{'f' * (kind == 'float')}" for x in values.ravel()]
        lines = ",\n    ".join(", ".join(texts[i : i + 16]) for i in range(0, len(texts), 16))
        self.constants.append(f"static const {kind} {name}[{len(texts)}] = {{\n    {lines}\n}};")
        self.constant_bytes += values.nbytes
        return name

    def _elementwise(self, operator: Any, kind: str) -> None:
        shape = self._tensors[self._tensor].shape
        operands = [
            "x" if v is None else f"{self.constant(np.broadcast_to(v, shape))}[i]"
            for v in map(self._values, operator.inputs)
        ]
        self._steps.append(f"x = {_ELEMENTWISE[kind].format(*operands)};")

    def _quantize(self, operator: Any, kind: str) -> None:
        scale, zero = self._grid(operator.outputs[0])
        self.scales.setdefault("first", f"scale {scale!s}, zero point {zero}")
        if self._type == "float":
            self._encode(operator.outputs[0])
        # Bytes on the same grid are read directly.
        elif self._type != "uint8_t" or self._grid(self._tensor) != (scale, zero + 128):
            raise _refusal(f"{kind} of codes by another scale")

    def _refine(self, operators: list[Any]) -> None:
        """Quantise the numbers and, behind them, their residuals times a power of two."""
        source = self._tensor
        codes, rounded, residual, scaled, features, target = (op.outputs[0] for op in operators)
        chain = [[source], [codes], [source, rounded], [residual], [rounded, scaled], [features]]
        inputs = [list(operator.inputs) for operator in operators]
        factor, grid = self._values(inputs[3].pop()), self._grid(codes)
        is_power = np.size(factor) == 1 and np.frexp(factor)[0] == 0.5
        is_double = self._tensors[features].shape[-1] == 2 * self._count(source)
        if inputs != chain or self._grid(target) != grid or not (is_power and is_double):
            raise _refusal("QUANTIZE int8 of what QUANTIZE int8 leaves, in another order")
        text = f"scale {grid[0]!s}, zero point {grid[1]}, and the rest times {factor!s}"
        self.scales["first"] = text
        self._encode(target, factor.item())
        self._tensor = target

    def _encode(self, tensor: int, factor: float = 1) -> None:
        """Write the codes of a tensor, with a factor those of the residuals behind them."""
        (scale, zero), target = self._grid(tensor), self._buffer("int8_t", self._count(tensor))
        size = self._count(self._tensor)
        number = [f"float x = {self._load};", *self._steps]
        code = residual_code = f"quantize(x, {scale!s}f, {zero})"
        residual = f"(x - {scale!s}f * (float)({target}[i] - {zero})) * {factor}f"
        if self._fixed:
            bits = math.frexp(factor)[1] - 1
            low, high, *line = self._fixed_input(float(scale))
            number = [f"int32_t x = within({self._load}, {low}[i], {high}[i]);"]
            code, residual = (_on_line("x", line, f" - {n}" * bool(n)) for n in (0, bits))
            residual += f" - {2**bits} * ({target}[i] - {zero})"
            code, residual_code = (f"(int8_t)within({x} + {zero}, -128, 127)" for x in (code, "x"))
        residuals = [f"x = {residual};", f"{target}[{size} + i] = {residual_code};"]
        self._loop(*number, f"{target}[i] = {code};", *(residuals if factor != 1 else []))
        self._array, self._type, self._zero, self._steps = target, "int8_t", zero, []

    def _dequantize(self, *_: Any) -> None:
        scale, zero = self._grid(self._tensor)
        self.scales["last"] = f"scale {scale!s}, zero point {zero}"
        self._load = f"{scale!s}f * (float)({self._array}[i] - {self._zero})"
        self._type, self._steps = "float", []
        if self._fixed:
            self._load, self._factor = f"{self._array}[i]", np.float64(scale)
            self._offset = -self._factor * zero
            self._low, self._high = np.float64(-_FARTHEST), np.float64(_FARTHEST)

    def _two_stages(self, operators: list[Any]) -> None:
        """Compute the codes of both stages of a head, from the same sums."""
        source, sources = self._tensor, [[*op.inputs] for op in operators]
        coarse, stacked, flat, joined, fine, *floats, _ = (op.outputs[0] for op in operators)
        del sources[1][1:], sources[2][1:]  # Shapes.
        (*_, kernel, bias), (*_, extended, _) = sources[0], sources[4]
        chain = [[source, kernel, bias], [coarse], [stacked], [source, flat]]
        chain += [[joined, extended, bias], [coarse], [fine], floats]
        weights, values = (self._values(i).astype(np.int64) for i in (kernel, extended))
        size, inputs = weights.shape
        copies = values[:, inputs:].reshape(size, -1, size).diagonal(axis1=0, axis2=2)
        limit = int((255 * np.abs(values).sum(axis=1) + np.abs(self._values(bias))).max())
        (scale, zero), step = self._grid(coarse), self._grid(fine)[0]
        is_same = (
            sources == chain
            and [self._grid(i) for i in (source, joined)] == [(scale, zero)] * 2
            and self._grid(fine) == (scale / FINER, 0)
            and {*map(self._graph.activation, operators)} == {NONE}
            and np.array_equal(values, np.hstack([weights, *map(np.diag, copies)]))
            and not self._tensors[extended].zero_points.any()
            and self._count(coarse) == size
        )
        if not is_same or limit > np.iinfo(np.int32).max:
            raise _refusal("BROADCAST_TO int8 in another order")
        name = self._declare_layer(operators[0], "FULLY_CONNECTED int8")
        ratios = np.broadcast_to(self._tensors[extended].scales.astype(np.float64), size)
        multipliers, shifts = _multipliers(ratios * scale / step, limit)
        arrays = -copies.sum(axis=0).astype(np.int32), multipliers, shifts
        source_array, self._array = self._array, self._buffer("int8_t", 2 * size)
        arguments = [source_array, self._array, f"&{name}_layer", *map(self.constant, arrays)]
        self.body.append(f"    two_stages_{self._type}({', '.join(arguments)});")
        self.scales["last"] = (
            f"scale {scale!s}, zero point {zero}, and the rest {FINER} times as fine"
        )
        self._load, self._type = f"{scale!s}f * (float)({self._array}[i] - {zero})", "float"
        self._steps = [f"x = x + {step!s}f * (float){self._array}[{size} + i];"]
        if self._fixed:
            self._load = f"{FINER} * {self._array}[i] + {self._array}[{size} + i]"
            self._factor, self._offset = np.float64(step), -np.float64(scale) * zero
            self._largest, self._finer = 129 * FINER, FINER
        self._tensor = operators[-1].outputs[0]

    def _function(self, operator: Any, kind: str) -> None:
        self._look_up(self._table(operator, kind), operator.outputs[0])

    def _silu(self, operators: list[Any]) -> None:
        """Compute x sigmoid(x), with the sigmoid rounded to its codes."""
        gate, product = operators
        if {*product.inputs} != {self._tensor, gate.outputs[0]}:
            raise _refusal("MUL int8 of others than x and sigmoid(x)")
        (scale, zero), (step, gate_zero) = map(self._grid, (self._tensor, gate.outputs[0]))
        target_step, target_zero = self._grid(product.outputs[0])
        products = (_CODES - zero) * (self._table(gate, _SILU[0]) - gate_zero)
        codes = np.rint(products * (scale * step / target_step)) + target_zero
        self._look_up(codes.clip(-128, 127), product.outputs[0])
        self._tensor = product.outputs[0]

    def _table(self, operator: Any, kind: str) -> Array:
        """Return a function's code for each code; in float32, as the runtime's table."""
        (scale, zero), (step, target_zero) = map(self._grid, (self._tensor, operator.outputs[0]))
        values = _TABLES[kind]((scale * (_CODES - np.float32(zero))).astype(np.float64))
        steps = (values.astype(np.float32) * (np.float32(1) / step)).astype(np.float64)
        codes: Array = np.trunc(steps + np.copysign(0.5, steps)) + target_zero
        return codes.clip(-128, 127)

    def _look_up(self, codes: Array, output: int) -> None:
        table = self.constant(codes.astype(np.int8))
        target = self._buffer("int8_t", self._count(self._tensor))
        self._loop(f"{target}[i] = {table}[(uint8_t){self._array}[i]];")
        self._array, self._zero = target, self._grid(output)[1]

    def _integer_layer(self, operator: Any, kind: str) -> None:
        name, target = self._declare_layer(operator, kind), operator.outputs[0]
        source_array, self._array = self._array, self._buffer("int8_t", self._count(target))
        self.body.append(f"    layer_{self._type}({source_array}, {self._array}, &{name}_layer);")
        self._type, self._zero = "int8_t", self._grid(target)[1]

    def _declare_layer(self, operator: Any, kind: str) -> str:
        """Declare a layer's constants; return its name."""
        name = self._layers[id(operator)]
        tensors = (*operator.inputs[:2], operator.outputs[0])
        source, weights, target = (self._tensors[i] for i in tensors)
        kernel, bias = map(self._values, [*operator.inputs, -1][1:3])
        matrix, zero = kernel.reshape(len(kernel), -1).astype(np.int64), int(target.zero_points[0])
        # The bias contains the input's zero point.
        full_bias = (0 if bias is None else bias) - self._zero * matrix.sum(axis=1)
        limit = int((np.abs(full_bias) + 255 * np.abs(matrix).sum(axis=1)).max())
        if weights.zero_points.any() or limit > np.iinfo(np.int32).max:
            raise _refusal(f"{kind} with a zero point of weights, or sums to {limit}")
        scales = [tensor.scales.astype(np.float64) for tensor in (source, weights, target)]
        ratios = scales[0] * scales[1] / scales[2]
        rounds_twice = kind == "CONV_2D int8"
        multipliers, shifts = _multipliers(ratios, 0 if rounds_twice else limit)
        window = _window(operator.builtinOptions, source.shape, kernel.shape, target.shape)
        fields = [
            self.constant(kernel, f"{name}_kernel"),
            self.constant(full_bias.astype(np.int32), f"{name}_bias"),
            self.constant(multipliers, f"{name}_multiplier"),
            self.constant(shifts, f"{name}_shift"),
            *map(str, (*window, len(kernel), int(len(ratios) > 1), int(rounds_twice))),
            *map(str, (zero, zero if self._relu else -128)),
        ]
        self.constants.append(f"static const struct layer {name}_layer = {{{', '.join(fields)}}};")
        self.constant_bytes += _LAYER_BYTES
        self.products += math.prod(target.shape) * matrix.shape[1]
        return name

    def _float_layer(self, operator: Any, kind: str) -> None:
        name = self._layers[id(operator)]
        source = self._array = self._buffer("float", self._count(self._tensor))
        self._flush(source)
        target = self._array = self._buffer("float", self._count(operator.outputs[0]))
        kernel, bias = map(self._values, [*operator.inputs, -1][1:3])
        if self._count(self._tensor) != kernel.shape[1]:
            raise _refusal(f"{kind} of several vectors")
        self.scales["last"] = "none"
        bias = np.zeros(len(kernel), np.float32) if bias is None else bias
        arrays = [self.constant(kernel, f"{name}_kernel"), self.constant(bias, f"{name}_bias")]
        lowest = "0.0f" if self._relu else f"{np.finfo(np.float32).min!s}f"
        arguments = [source, target, *arrays, *map(str, kernel.shape[::-1]), lowest]
        self.body.append(f"    float_layer({', '.join(arguments)});")
        self.products += kernel.size
        self._load, self._steps = f"{target}[i]", []

    def _affine(self, operator: Any, kind: str) -> None:
        first, second = map(self._values, operator.inputs)
        clip: Any = {"MINIMUM float32": np.minimum, "MAXIMUM float32": np.maximum}.get(kind)
        if first is not None or (self.products and clip):
            raise _refusal(f"{kind} in another place, in fixed point")
        end = np.clip((second - self._offset) / self._factor, -_FARTHEST, _FARTHEST)
        if clip:
            self._low, self._high = clip(self._low, end), clip(self._high, end)
        elif kind == "MUL float32":
            if (second <= 0).any():  # The ends of a clip would change places.
                raise _refusal("a factor of 0 or less, in fixed point")
            self._factor, self._offset = self._factor * second, self._offset * second
        else:
            self._offset = self._offset + (second if kind == "ADD float32" else -second)

    def _fixed_input(self, scale: float) -> list[str]:
        """Declare the bounds of each integer, and the line from integers to codes."""
        factor, offset = self._broadcast(self._factor / scale, self._offset / scale)
        mean, reach = -offset / factor, _ENDS / factor
        is_representable = (factor > 0) & (factor <= 1) & (np.abs(mean) < _FARTHEST)
        if not is_representable.all():
            what = "number between two layers" if self.products else "feature"
            raise _refusal(f"{what} {is_representable.argmin()}, which Q16.16 does not hold")
        ends = (np.clip(end, mean - reach, mean + reach) for end in (self._low, self._high))
        bounds = [np.rint(x).astype(np.int32) for x in self._broadcast(*ends)]
        return [*map(self.constant, bounds), *self._line(factor, offset)]

    def _fixed_head(self) -> None:
        factor, offset = self._broadcast(self._factor * _ONE, self._offset * _ONE)
        largest = (factor * self._largest + np.abs(offset)).max()
        if (factor * self._finer < 1).any() or largest > np.iinfo(np.int32).max:
            raise _refusal("a head that Q16.16 does not hold")
        self._loop(f"head[i] = {_on_line(self._load, self._line(factor, offset))};")

    def _broadcast(self, *values: Array | np.float64) -> list[Array]:
        """Return a value for each number of the current tensor, whose shape they may have."""
        size, shape = self._count(self._tensor), self._tensors[self._tensor].shape
        return [np.ravel(x if np.size(x) == size else np.broadcast_to(x, shape)) for x in values]

    def _line(self, factor: Array, offset: Array) -> list[str]:
        """Declare factors and offsets for `line` in C."""
        multipliers, shifts = _multipliers(factor, 0)
        offsets = offset * 2.0**shifts
        if np.abs(offsets).max() > 2**62:
            raise _refusal("a number that Q16.16 does not hold")
        offsets = np.rint(offsets).astype(np.int64)
        return [self.constant(values) for values in (multipliers, shifts, offsets)]

    def _flush(self, target: str) -> None:
        """Compute each float `x`, and write it into an array."""
        self._loop(f"float x = {self._load};", *self._steps, f"{target}[i] = x;")

    def _loop(self, *statements: str) -> None:
        lines = [f"    for (int32_t i = 0; i < {self._count(self._tensor)}; i++) {{", *statements]
        self.body += ["\n        ".join(lines), "    }"]

    def _buffer(self, kind: str, size: int) -> str:
        """Return the one of two buffers without the current numbers, after enlarging it to fit."""
        names = [f"{'values' if kind == 'float' else 'codes'}_{i}" for i in (0, 1)]
        name = names[self._array == names[0]]
        self.buffers[name] = kind, max(size, self.buffers.get(name, ("", 0))[1])
        return name

    def _count(self, tensor: int) -> int:
        return math.prod(self._tensors[tensor].shape)

    def _grid(self, tensor: int) -> tuple[np.float32, int]:
        return self._tensors[tensor].scales[0], int(self._tensors[tensor].zero_points[0])

    def _values(self, tensor: int) -> Any:
        """Return a constant; None for a computed or an omitted tensor."""
        constant = self._tensors[tensor]
        if tensor < 0 or constant.data is None:
            return None
        return constant.data.view(constant.dtype).reshape(constant.shape)


#: The operators that `preparation.refined` inserts before the first layer.
_REFINED = [
    *("QUANTIZE int8", "DEQUANTIZE float32", "SUB float32", "MUL float32"),
    *("CONCATENATION float32", "QUANTIZE int8"),
]

#: The operators of a head in two stages.
_TWO_STAGES = [
    *("FULLY_CONNECTED int8", "BROADCAST_TO int8", "RESHAPE int8", "CONCATENATION int8"),
    *("FULLY_CONNECTED int8", "DEQUANTIZE float32", "DEQUANTIZE float32", "ADD float32"),
]

#: Functions of one number that are a table of all codes.
_TABLES: dict[str, Callable[[Array], Array]] = {
    "TANH int8": np.tanh,
    "ELU int8": lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x),
    "LOGISTIC int8": lambda x: (1 + np.tanh(x / 2)) / 2,
}

_SILU = ["LOGISTIC int8", "MUL int8"]

_Write = Callable[[_Writer, Any, str], None]

_OPERATORS: Mapping[str, _Write] = {
    **dict.fromkeys(_ELEMENTWISE, _Writer._elementwise),
    **dict.fromkeys(("FULLY_CONNECTED int8", "CONV_2D int8"), _Writer._integer_layer),
    **dict.fromkeys(_TABLES, _Writer._function),
    "FULLY_CONNECTED float32": _Writer._float_layer,
    "QUANTIZE int8": _Writer._quantize,
    "DEQUANTIZE float32": _Writer._dequantize,
    **dict.fromkeys(("RESHAPE int8", "RESHAPE float32"), lambda *_: None),
}

#: Operators of the export without floats.
_FIXED_OPERATORS: Mapping[str, _Write] = {
    kind: _Writer._affine if kind in _ELEMENTWISE else write
    for kind, write in _OPERATORS.items()
    if kind not in ("TANH float32", "FULLY_CONNECTED float32")
}


def _on_line(x: str, line: list[str], shifted: str = "") -> str:
    multiplier, shift, offset = line
    return f"line({x}, {multiplier}[i], {shift}[i]{shifted}, {offset}[i])"


def _window(options: Any, image: _Shape, kernel: _Shape, output: _Shape) -> _Shape:
    """Return a window and its moves as the fields in C; a dense layer has one for each vector."""
    if len(kernel) == 2:
        return kernel[1], 1, kernel[1], kernel[1], 0, math.prod(image) // kernel[1], 1
    (images, _, width, channels), (_, height, columns, depth) = image, kernel
    dilations = options.dilationHFactor, options.dilationWFactor
    if (options.padding, *dilations, depth, images) != (VALID, 1, 1, channels, 1):
        raise _refusal("CONV_2D int8 with padding, dilation, groups or several images")
    row, right = width * channels, options.strideW * channels
    return row, height, columns * depth, options.strideH * row, right, *output[1:3]


def _multipliers(scales: Array, limit: int) -> tuple[Array, Array]:
    multipliers, shifts = np.array([_multiplier(scale, limit) for scale in scales.tolist()]).T
    return multipliers.astype(np.int32), shifts.astype(np.int8)


def _multiplier(scale: float, limit: int) -> tuple[int, int]:
    """Return the 31 bits and the shift of a scale, as in LiteRT's kernels.

    With a limit, sums up to it are rounded as in double precision, but for a rare half.
    """
    fraction, exponent = math.frexp(scale)
    middle, shift = min(math.floor(fraction * 2**31 + 0.5), 2**31 - 1), 31 - exponent
    if exponent < -31:
        return 0, 62
    if not limit:
        return middle, shift
    # Roundings differ only near halves between codes: the best of three multipliers there is taken.
    halves = np.arange(-256, 256)[:, None] + 0.5
    sums = np.clip(np.floor(halves / scale) + np.arange(-1, 3), -limit, limit)
    sizes, codes = np.abs(sums).astype(np.int64), np.floor(np.abs(sums * scale) + 0.5)

    def differences(multiplier: int) -> int:
        return int(((sizes * multiplier + (1 << shift >> 1)) >> shift != codes).sum())

    return min((middle, middle + 1, middle - 1), key=differences), shift
