"""The schemes: how the numbers of a flatbuffer are represented; the name says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quarl_tf.foundation.errors import unknown
from quarl_tf.spec.recipe import INT4_BITS, QAT_BITS, Quantization

#: The scheme that all others are compared with; every plain training has it.
REFERENCE = "fp32"


#: What evaluations of the random policy are called, which stand beside those of schemes.
BASELINE = "random"


#: Widths of weights alone on a grid; at 32 bits it is finer than float32 at the ends of its range.
PTQ_BITS = range(2, 33)


_NATIVE_SCHEMES = {
    "fp32": 32,
    "fp16": 16,
    "dynamic_int8": 8,
    "int8": 8,
    "qat_int8": 8,
    "qat_int4": 4,
}


#: What `quarl run` exports when nothing else is asked for.
DEFAULT_SCHEMES = (
    *("fp32", "fp16", "dynamic_int8", "int8"),
    *(f"ptq_w{bits}" for bits in range(8, 1, -1)),
)


@dataclass(frozen=True)
class Scheme:
    """How a policy's numbers are represented; decode the name with `Scheme.parse`.

    | name           | weights       | activations | kernels                                  |
    |----------------|---------------|-------------|------------------------------------------|
    | `fp32`         | float32       | float32     | native                                   |
    | `fp16`         | float16       | float32     | native storage, float arithmetic         |
    | `dynamic_int8` | int8          | float32     | native, activations quantised per call   |
    | `int8`         | int8          | int8        | native, calibrated on rollouts           |
    | `ptq_wN`       | N-bit grid    | float32     | simulated: float values on the N-bit grid |
    | `ptq_paper_wN` | as published  | float32     | simulated: floored, one code too many    |
    | `qat_int8`     | int8          | int8        | native, of a training at 8 bits          |
    | `qat_int4`     | int4          | N-bit grid  | native storage, of a training at N <= 4  |
    | `qat_wNaN`     | N-bit grid    | N-bit grid  | simulated, of a training at N bits       |

    Attributes:
        name: The name, which says all the rest.
        weight_bits: Width of a weight.
        native: Whether the flatbuffer stores weights in those bits.
        mode: Rule of the affine quantiser (`quantization.affine`), for `ptq_…` schemes.
        aware: Whether it is of a quantisation-aware training.
    """

    name: str
    weight_bits: int
    native: bool
    mode: Literal["code", "paper"] | None = None
    aware: bool = False

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """Decode a scheme's name.

        Raises:
            UsageError: No scheme has that name; the closest are named.
        """
        if name in _NATIVE_SCHEMES:
            aware = name.startswith("qat_")
            return cls(name, _NATIVE_SCHEMES[name], native=True, aware=aware)
        match = re.fullmatch(r"qat_w([1-9])a\1", name)
        if match and int(match[1]) in QAT_BITS:
            return cls(name, int(match[1]), native=False, aware=True)
        match = re.fullmatch(r"ptq_(paper_)?w([1-9][0-9]*)", name)
        if match and int(match[2]) in PTQ_BITS:
            mode: Literal["code", "paper"] = "paper" if match[1] else "code"
            return cls(name, int(match[2]), native=False, mode=mode)
        raise unknown("scheme", name, {*DEFAULT_SCHEMES, *_NATIVE_SCHEMES, *_QAT_SCHEMES})


_QAT_SCHEMES = tuple(f"qat_w{bits}a{bits}" for bits in QAT_BITS)


def default_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of what is exported of a training when nothing else is asked for."""
    if quantization is None:
        return DEFAULT_SCHEMES
    simulated = f"qat_w{quantization.bits}a{quantization.bits}"
    eight = quantization.bits == 8 and quantization.edge_bits == 8
    # The converter takes no fully-connected kernels with several grids.
    native = eight and quantization.rule == "nearest" and not quantization.per_channel
    return ("qat_int8", simulated) if native else (simulated,)


def possible_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of what can be exported of a training; for a plain one, the usual ones."""
    usual = default_schemes(quantization)
    if quantization is None or quantization.bits > INT4_BITS:
        return usual
    # The papers' grids are not symmetric.
    return ("qat_int4", *usual) if quantization.rule == "nearest" else usual
