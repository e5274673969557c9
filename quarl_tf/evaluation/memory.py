"""Measure the memory of a flatbuffer: its weights, its file, the runtime's arena and a process.

`python -m quarl_tf.evaluation.memory FILE` prints by how many bytes it grows when it runs FILE.
"""

import gc
import math
import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

from ai_edge_litert.interpreter import Interpreter

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.provenance import import_path
from quarl_tf.runtime import flatbuffer

_ALIGNMENT = 64  #: Of tensors in the arena, in bytes.


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
    graph = flatbuffer.parsed(source)[0]
    end = len(graph.operators) - 1
    # Inputs are written before the first operator; inputs and outputs are read after the last one.
    starts, last_uses = dict.fromkeys(graph.inputs, 0), dict[int, int]()
    for number, operator in enumerate(graph.operators):
        starts.update({i: number for i in operator.outputs if i not in starts})
        last_uses.update(dict.fromkeys(operator.inputs, number))
    last_uses.update(dict.fromkeys((*graph.inputs, *graph.outputs), end))
    tensors = []
    for i, first in starts.items():
        tensor, last = graph.tensors[i], last_uses.get(i, end)  # An unused one is never freed.
        if tensor.data is None:
            size = flatbuffer.byte_size(tensor.dtype, math.prod(tensor.shape))
            # Those that are there all the time come first, in order.
            rank = (-math.inf, 0) if (first, last) == (0, end) else (-size, first)
            tensors.append((rank, size, first, last))
    placed: list[tuple[int, int, int, int]] = []
    for _, size, first, last in sorted(tensors, key=itemgetter(0)):
        gaps, end = [], 0  # Between tensors that are alive at the same time, and behind them.
        for start, length, begin, finish in sorted(placed):
            if begin <= last and first <= finish:
                if end + size <= start:
                    gaps.append((start - end, end))
                end = max(end, -(-(start + length) // _ALIGNMENT) * _ALIGNMENT)
        placed.append((min(gaps)[1] if gaps else end, size, first, last))
    return max((start + size for start, size, *_ in placed), default=0)


def process_bytes(path: Path) -> int:
    """Return by how much a new Python process grows when it loads and runs a flatbuffer."""
    # -P ignores packages of this name in the current folder.
    command = [sys.executable, "-P", "-m", "quarl_tf.evaluation.memory", str(path)]
    env = {**os.environ, "PYTHONPATH": import_path()}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if process.returncode:
        output = process.stderr.strip().splitlines()
        raise QuarlError(
            f"LiteRT cannot run the flatbuffer ({output[-1] if output else 'no output'}); "
            f"export it again. Received: path={str(path)!r}, exit code {process.returncode}"
        )
    return int(process.stdout)


def _resident() -> int:
    gc.collect()
    # The current size: the maximum would include temporary memory.
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    before = _resident()
    interpreter = Interpreter(model_path=sys.argv[1], num_threads=1)
    interpreter.allocate_tensors()
    interpreter.invoke()
    print(_resident() - before)
