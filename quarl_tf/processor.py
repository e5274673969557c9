"""Know what the processor computes with: a training's bytes depend on it, and all speeds do."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

#: Extensions by which libraries choose their kernels, best first: of x86, then of Arm.
_EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512bw", "avx2", "bf16", "asimd")

#: Those without arithmetic in bfloat16. With AVX2 alone TensorFlow 2.21 takes several times as
#: long for a convolution's gradient as in float32.
_WITHOUT_BFLOAT16 = ("avx512bw", "avx2", "asimd")


@cache
def description() -> str:
    """Return the processor's name and the best extension it has, as "AMD EPYC with avx2"."""
    try:
        return describe(Path("/proc/cpuinfo").read_text())
    except OSError:
        return describe("")


def describe(information: str) -> str:
    """Return the name and the best extension of the processor that /proc/cpuinfo describes."""
    fields = [line.partition(":") for line in information.splitlines()]
    names = [value.strip() for name, _, value in fields if name.strip() == "model name"]
    words = set(information.split())
    best = next((f" with {one}" for one in _EXTENSIONS if one in words), "")
    return next(iter(names), platform.machine()) + best


def lacks_bfloat16(described: str) -> bool:
    """Tell whether a processor, as described, is known to have no arithmetic in bfloat16."""
    return described.endswith(tuple(f" with {one}" for one in _WITHOUT_BFLOAT16))
