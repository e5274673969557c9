"""Measure the memory of a flatbuffer: its weights, its file, the runtime's arena and a process.

`python -m quarl_tf.evaluation.memory FILE` prints by how many bytes it grows when it runs FILE.
"""

import gc
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from ai_edge_litert.interpreter import Interpreter, OpResolverType

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.provenance import import_path
from quarl_tf.runtime import flatbuffer


def measure(path: Path) -> dict[str, int]:
    """Return the bytes of a flatbuffer's "weights", of its "file", its "arena" and a "process"."""
    content = flatbuffer.read(path)
    weights = flatbuffer.audit(content).weight_dtypes
    process = process_bytes(path)  # First: it refuses what LiteRT cannot run.
    return {
        "weights": sum(flatbuffer.byte_size(dtype, n) for dtype, n in weights.items()),
        "file": len(content),
        "arena": arena_bytes(content),
        "process": process,
    }


def arena_bytes(content: bytes) -> int:
    """Return the bytes of the runtime's arenas, which hold computed tensors.

    They are those of the reference kernels: others may need more scratch memory, and that of
    delegates such as XNNPACK is in `process_bytes`.
    """
    graph, resolver = flatbuffer.parsed(content)[0], OpResolverType.BUILTIN_REF
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    sources, arenas = flatbuffer.dequantized(graph), defaultdict[bool, list[int]](list)
    for i in {*graph.inputs, *(i for operator in graph.operators for i in operator.outputs)}:
        # Dequantised constants stay, in an arena of their own.
        is_constant = i in sources and graph.tensors[sources[i]].data is not None
        view = interpreter.tensor(i)()
        start = view.__array_interface__["data"][0]
        arenas[is_constant] += start, start + view.nbytes
    return sum(max(ends) - min(ends) for ends in arenas.values())


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
