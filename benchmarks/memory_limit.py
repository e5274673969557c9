"""Measure one inference of QuaRL's Policy III (4096-512-1024 units) where memory is limited.

QuaRL reports 208 ms in fp32 and 11 ms in int8 on a board of 1 GB, 18.85 times as fast, and does not
say how many numbers the policy observes. Both readings of its sources are measured, with random
weights: a short vector, and the flat vector of 39 427 numbers of Air Learning's baselines. Each
file runs in a process of its own, in a control group that has so much memory and swaps beyond it.

    sudo python benchmarks/memory_limit.py --json benchmarks/memory_limit.json \
        --figure docs/assets/memory_limit.png

As root on Linux; elsewhere only what no limit holds back is measured. The swap file takes 2 GB.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from matplotlib.figure import Figure
from training_throughput import machine

from quarl_tf.export import integer
from quarl_tf.foundation.files import read_json, write_bytes, write_json
from quarl_tf.report.figures.style import grid, png, scheme_colour, styled
from quarl_tf.runtime.flatbuffer import IDENTIFIER
from quarl_tf.spec import Scheme
from quarl_tf.spec.architectures import architecture

INPUTS = (32, 39_427)
ACTIONS = 25
LIMITS_MIB: tuple[int | None, ...] = (None, 1024, 768, 640, 512, 256, 192, 128, 32)

_MIB, _SWAP_MIB = 2**20, 2048
_GROUPS = Path("/sys/fs/cgroup")
_SECONDS = 5
_LONGEST = 300

#: Small, for what it imports is held to the limit, too.
_WORKER = """
import json, resource, statistics, sys, time
import numpy as np
from ai_edge_litert.interpreter import Interpreter
interpreter = Interpreter(model_path=sys.argv[1], num_threads=1)
interpreter.allocate_tensors()
(source,) = interpreter.get_input_details()
interpreter.set_tensor(source["index"], np.ones(source["shape"], source["dtype"]))
interpreter.invoke()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
durations, end = [], time.monotonic() + float(sys.argv[2])
while len(durations) < 3 or (len(durations) < 1000 and time.monotonic() < end):
    start = time.perf_counter()
    interpreter.invoke()
    durations.append(1000 * (time.perf_counter() - start))
faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
print(json.dumps({
    "median_ms": statistics.median(durations),
    "least_ms": min(durations),
    "calls": len(durations),
    "faults_a_call": faults / len(durations),
}))
"""


def float_policy(sizes: Sequence[int]) -> bytes:
    """Return a float32 flatbuffer of a multilayer perceptron with ReLU and random weights."""
    random, functions = np.random.default_rng(0), schema.ActivationFunctionType
    graph = schema.SubGraphT(tensors=[], operators=[])
    kind = schema.BuiltinOperator.FULLY_CONNECTED
    codes = [schema.OperatorCodeT(kind, version=1, builtinCode=kind)]
    buffers = [schema.BufferT()]
    model = schema.ModelT(3, operatorCodes=codes, subgraphs=[graph], buffers=buffers)

    def tensor(name: str, shape: Sequence[int], values: Any = None) -> int:
        if values is not None:
            data = values.astype(np.float32, copy=False).ravel().view(np.uint8)
            buffers.append(schema.BufferT(data=data))
        number = 0 if values is None else len(buffers) - 1
        float32 = schema.TensorType.FLOAT32
        graph.tensors.append(schema.TensorT(shape=[*shape], type=float32, buffer=number, name=name))
        return len(graph.tensors) - 1

    last = tensor("observation", (1, sizes[0]))
    graph.inputs = [last]
    for i, (n, m) in enumerate(pairwise(sizes)):
        kernel = random.standard_normal((m, n), np.float32) * np.float32(n**-0.5)
        constants = tensor(f"kernel_{i}", (m, n), kernel), tensor(f"b_{i}", (m,), np.zeros(m))
        inputs, last = [last, *constants], tensor(f"layer_{i}", (1, m))
        activation = functions.NONE if i == len(sizes) - 2 else functions.RELU
        operator = schema.OperatorT(
            inputs=inputs,
            outputs=[last],
            builtinOptionsType=schema.BuiltinOptions.FullyConnectedOptions,
            builtinOptions=schema.FullyConnectedOptionsT(fusedActivationFunction=activation),
        )
        graph.operators.append(operator)
    graph.outputs = [last]
    builder = flatbuffers.Builder(sum(4 * n * m for n, m in pairwise(sizes)) + 2**20)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def make(folder: Path) -> dict[tuple[int, str], Path]:
    """Write the files of both readings and both formats."""
    paths = {}
    for inputs in INPUTS:
        content = float_policy((inputs, *architecture("policy_iii").hidden_layers, ACTIONS))
        observations = np.random.default_rng(1).standard_normal((8, inputs), np.float32)
        int8 = integer.quantized(content, observations, Scheme.parse("int8").recipe)
        for scheme, file in (("fp32", content), ("int8", int8)):
            paths[inputs, scheme] = folder / f"{inputs}_{scheme}.tflite"
            paths[inputs, scheme].write_bytes(file)
    return paths


@contextmanager
def swap(folder: Path) -> Iterator[None]:
    """Swap to a file of this folder while the block runs."""
    path = folder / "swap"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _SWAP_MIB * _MIB)
    path.chmod(0o600)
    subprocess.run(["mkswap", path], check=True, capture_output=True)
    subprocess.run(["swapon", path], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["swapoff", path], check=True)


@contextmanager
def group(limit_mib: int | None) -> Iterator[Path | None]:
    """Make a control group of so much memory, in version 1 or 2; none where there is no limit."""
    if limit_mib is None:
        yield None
        return
    version_1 = (_GROUPS / "memory").is_dir()
    folder = (_GROUPS / "memory" if version_1 else _GROUPS) / f"quarl-{os.getpid()}"
    folder.mkdir()
    try:
        limit = "memory.limit_in_bytes" if version_1 else "memory.max"
        (folder / limit).write_text(str(limit_mib * _MIB))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def measure(path: Path, limit_mib: int | None) -> dict[str, Any]:
    """Return what the worker found of a file, or why it found nothing."""
    with group(limit_mib) as members:

        def join() -> None:
            if members is not None:
                members.write_text(str(os.getpid()))

        command = [sys.executable, "-I", "-c", _WORKER, str(path), str(_SECONDS)]
        try:
            process = subprocess.run(
                command,
                preexec_fn=join,
                capture_output=True,
                text=True,
                check=False,
                timeout=_LONGEST,
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"not done in {_LONGEST} s"}
    if process.returncode == -signal.SIGKILL:
        return {"failure": "killed: the limit is below what Python and the interpreter need"}
    if process.returncode:
        return {"failure": f"exit code {process.returncode}"}
    result: dict[str, Any] = json.loads(process.stdout)
    return result


@styled
def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw an inference's time against the limit; without a limit, at the right end."""
    labels = "Policy III, one thread", "memory of the process, MiB", "ms an inference"
    figure, panels = grid(len(INPUTS), 2, 3.2, labels, sharey=True)
    ticks = sorted(limit for limit in LIMITS_MIB if limit is not None)
    for inputs, axes in zip(INPUTS, panels, strict=True):
        for scheme in ("fp32", "int8"):
            line = {
                r["limit_mib"]: r for r in rows if (r["inputs"], r["scheme"]) == (inputs, scheme)
            }
            points = sorted(
                (len(ticks) if limit is None else ticks.index(limit), r["median_ms"])
                for limit, r in line.items()
                if "median_ms" in r
            )
            label = f"{scheme}, {line[None]['file_bytes'] / 1e6:,.0f} MB"
            axes.plot(*zip(*points, strict=True), "o-", color=scheme_colour(scheme), label=label)
        axes.set_xticks(range(len(ticks) + 1), [*map(str, ticks), "none"])
        axes.set_yscale("log")
        axes.set_title(f"{inputs:,} inputs")
        axes.legend(frameon=False)
    return figure


def _can_limit(stack: ExitStack, folder: Path) -> bool:
    """Swap to this folder for as long as the stack lives; tell why where that or limits fail."""
    try:
        stack.enter_context(swap(folder))
        with group(LIMITS_MIB[-1]):
            return True
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Limits are left out: control groups and swap need root on Linux ({error}).")
        return False


def main() -> None:
    """Measure, print and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--folder", type=Path, help="where 3 GB are free (default: for the moment)")
    args = parser.parse_args()
    rows, facts = [], machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        limits = LIMITS_MIB if _can_limit(stack, folder) else (None,)
        for limit, ((inputs, scheme), path) in product(limits, make(folder).items()):
            size = path.stat().st_size
            row = {"inputs": inputs, "scheme": scheme, "file_bytes": size, "limit_mib": limit}
            rows.append(row | measure(path, limit))
            print(rows[-1], flush=True)
    write_json(args.json, {"machine": facts, "rows": rows})
    if args.figure is not None:
        write_bytes(args.figure, png(draw(read_json(args.json)["rows"])))


if __name__ == "__main__":
    main()
