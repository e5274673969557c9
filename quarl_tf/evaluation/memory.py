"""Measure the memory of a flatbuffer: its weights, its file, the runtime's arena and a process.

`python -m quarl_tf.evaluation.memory FILE` prints by how many bytes it grows when it runs FILE.
"""

import gc
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ai_edge_litert.interpreter import Interpreter

from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.provenance import import_path
from quarl_tf.runtime import flatbuffer

_ALIGNMENT = 64  #: Of tensors in the arena, in bytes.


class Activation(NamedTuple):
    """The bytes of a computed tensor, and the operators that compute it and use it last.

    Inputs are written before the first operator; inputs and outputs are read after the last one.
    """

    size: int
    first: int
    last: int


def measure(path: Path) -> dict[str, int]:
    """Return the bytes of a flatbuffer's "weights", of its "file", its "arena" and a "process"."""
    content = flatbuffer.read(path)
    weights = flatbuffer.audit(content).weight_dtypes
    return {
        "weights": sum(flatbuffer.byte_size(dtype, n) for dtype, n in weights.items()),
        "file": len(content),
        "arena": arena_bytes(content),
        "process": process_bytes(path),
    }


def arena_bytes(source: Path | bytes) -> int:
    """Return the bytes of the runtime's arena, which holds computed tensors.

    This follows LiteRT's planner for the main graph: a tensor takes memory from the operator that
    computes it to the last that uses it; the largest are placed first, each in the smallest gap
    that fits. The real arena may be smaller, where an operator overwrites its input, or larger by
    the scratch memory of operators; that of delegates such as XNNPACK is in `process_bytes`.
    """
    tensors = activations(source)
    end = max((tensor.last for tensor in tensors), default=0)

    def order(tensor: Activation) -> tuple[bool, int, int]:
        if tensor.first == 0 and tensor.last == end:
            return False, 0, 0
        return True, -tensor.size, tensor.first

    placements: list[tuple[int, Activation]] = []
    for tensor in sorted(tensors, key=order):
        overlapping = [
            (start, other.size)
            for start, other in placements
            if other.first <= tensor.last and tensor.first <= other.last
        ]
        placements.append((_place(tensor.size, overlapping), tensor))
    return max((start + tensor.size for start, tensor in placements), default=0)


def activations(source: Path | bytes) -> list[Activation]:
    """Return the computed tensors of the main graph, inputs first."""
    graph = flatbuffer.parsed(source)[0]
    end = len(graph.operators) - 1
    starts = dict.fromkeys(graph.inputs, 0)
    last_uses = {}
    for number, operator in enumerate(graph.operators):
        starts.update({i: number for i in operator.outputs if i not in starts})
        last_uses.update(dict.fromkeys(operator.inputs, number))
    last_uses.update(dict.fromkeys((*graph.inputs, *graph.outputs), end))
    return [
        # An unused tensor is never freed.
        Activation(flatbuffer.byte_size(t.dtype, math.prod(t.shape)), start, last_uses.get(i, end))
        for i, start in starts.items()
        if (t := graph.tensors[i]).data is None
    ]


def _place(size: int, overlapping: Sequence[tuple[int, int]]) -> int:
    """Return the offset of a tensor, given starts and sizes of those alive at the same time."""
    gaps, end = [], 0
    for start, length in sorted(overlapping):
        if end + size <= start:
            gaps.append((start - end, end))
        end = max(end, -(-(start + length) // _ALIGNMENT) * _ALIGNMENT)
    return min(gaps)[1] if gaps else end


def process_bytes(path: Path) -> int:
    """Return by how much a new Python process grows when it loads and runs a flatbuffer."""
    # -P ignores packages of this name in the current folder.
    command = [sys.executable, "-P", "-m", "quarl_tf.evaluation.memory", str(path)]
    env = {**os.environ, "PYTHONPATH": import_path()}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if process.returncode:
        output = (process.stdout.strip() or process.stderr.strip()).splitlines()
        raise QuarlError(
            f"LiteRT cannot run the flatbuffer ({output[-1] if output else 'no output'}); "
            f"export it again. Received: path={str(path)!r}, exit code {process.returncode}"
        )
    return int(process.stdout)


def _resident() -> int:
    gc.collect()
    # The current size: the maximum would include temporary memory.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(path: str) -> int:
    """Print by how many bytes this process grows when it runs a flatbuffer."""
    before = _resident()
    try:
        interpreter = Interpreter(model_path=path, num_threads=1)
        interpreter.allocate_tensors()
        interpreter.invoke()
    except (ValueError, RuntimeError) as error:
        print(one_line(error))
        return 1
    print(_resident() - before)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
