"""Know what the processor computes with: a training's bytes depend on it, and all speeds do."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

#: Extensions by which libraries choose their kernels, best first: of x86, then of Arm.
_EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512bw", "avx2", "bf16", "asimd")

#: On these a convolution's gradient took 9 times as long in bfloat16 as in float32 (AVX2,
#: TensorFlow 2.21, whose convolutions in bfloat16 are then not oneDNN's).
_SLOW_IN_BFLOAT16 = ("avx512bw", "avx2", "asimd")


@cache
def description() -> str:
    """Return the processor's name and the best extension it has, as "AMD EPYC with avx2"."""
    return describe(_information())


@cache
def slow_in_bfloat16() -> bool:
    """Tell whether it is known to have no arithmetic in bfloat16."""
    return best_extension(_information()) in _SLOW_IN_BFLOAT16


def describe(information: str) -> str:
    """Return the name and the best extension of the processor in the words of /proc/cpuinfo."""
    fields = [line.partition(":") for line in information.splitlines()]
    names = [value.strip() for name, _, value in fields if name.strip() == "model name"]
    extension = best_extension(information)
    return " with ".join([next(iter(names), platform.machine()), *([extension] * bool(extension))])


def best_extension(information: str) -> str:
    """Return the best extension that /proc/cpuinfo names; nothing if it names none."""
    words = set(information.split())
    return next((one for one in _EXTENSIONS if one in words), "")


def _information() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
