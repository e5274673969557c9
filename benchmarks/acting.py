"""Measure what acting from a flatbuffer costs over the bare interpreter, and a whole evaluation.

Prints, for every native flatbuffer of a run, the median and range over repetitions of: one bare
`invoke`, one `Policy.act`, the difference, and 100 episodes in the environment. The two calls
alternate within every repetition, so that a drift of the machine meets both alike.

    python benchmarks/acting.py tflite_models/CartPole-v1/dqn/s0
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from training_throughput import machine

from quarl_tf.evaluation.play import evaluate
from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import read_json, write_json
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme
from quarl_tf.store.workspace import evaluation_path

_CALLS = 20_000


def microseconds(call: Callable[[], Any]) -> float:
    """Return the mean time of one call."""
    start = time.perf_counter_ns()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter_ns() - start) / _CALLS / 1000


def measure(path: Path, repetitions: int) -> dict[str, list[float]]:
    """Return every repetition's figures: microseconds, and seconds for the evaluation."""
    policy = Policy.load(path)
    bare = Interpreter(model_content=path.read_bytes(), num_threads=1)
    bare.allocate_tensors()
    observation = np.full(policy.sidecar.observation_shape, 0.01, policy.sidecar.observation_dtype)
    seeds = read_json(evaluation_path(path))["seeds"]
    found: dict[str, list[float]] = {"invoke µs": [], "act µs": [], "over µs": [], "100 ep s": []}
    for _ in range(repetitions):
        invoke = microseconds(bare.invoke)
        act = microseconds(lambda: policy.act(observation))
        start = time.perf_counter()
        evaluation = evaluate(path, seeds)
        seconds = time.perf_counter() - start
        for name, value in zip(found, (invoke, act, act - invoke, seconds), strict=True):
            found[name].append(value)
        steps = sum(evaluation.lengths)
    found["steps"] = [float(steps)]
    return found


def main() -> None:
    """Print the table; with `--json`, write every repetition, and what it was measured on."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path, help="a run's folder of flatbuffers, evaluated")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    made_by = {
        "machine": machine(),
        "versions": provenance.package_versions(),
        "commit": provenance.source_commit(),
    }
    table: dict[str, dict[str, list[float]]] = {}
    for path in sorted(args.folder.glob("*.tflite")):
        if Scheme.parse(path.stem).native:
            table[path.stem] = measure(path, args.repetitions)
            texts = [
                f"{name} {np.median(v):.2f} [{min(v):.2f}, {max(v):.2f}]"
                for name, v in table[path.stem].items()
            ]
            print(f"{path.stem:13}", "  ".join(texts))
    if not table:
        parser.error(f"there are no native flatbuffers in {args.folder}")
    if args.json is not None:
        write_json(args.json, {**made_by, "schemes": table})


if __name__ == "__main__":
    main()
