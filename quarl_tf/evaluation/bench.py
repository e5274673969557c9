"""Time flatbuffers in turns, so that other load on the machine affects all of them equally."""

import os
import shutil
import subprocess
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf.evaluation import memory
from quarl_tf.evaluation.play import percentiles, time_calls
from quarl_tf.export import c_source
from quarl_tf.foundation import provenance
from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import UsageError
from quarl_tf.runtime.policy import Policy
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path

_TURNS = 5
#: Limits of a machine at rest: load of a core by others, and spread of a fixed loop.
_REST_LOAD, _REST_SPREAD = 0.25, 1.1
_LOOP = "sum(range(20_000))"
_TIMER = Path(c_source.__file__).with_name("c") / "timer.c"


def bench(artifacts: Sequence[Path], calls: int, update: Update) -> dict[str, Any]:
    """Time `Policy.act` of each flatbuffer with one thread and with all, and its C code.

    The JSON-ready result has the "artifacts", each with "latency_us" by threads and, if it has C
    code that `cc` compiles, of "C" (`policy_head`), "load_ms" from the page cache and "bytes" by
    `memory.measure`; and the state of the machine: "load_average" of a core in the minute before,
    "spread" of a fixed loop's durations (95th percentile over median) and "at_rest". Observations
    are random. A QuarlError for a file that is missing, damaged or differs from its sidecar.
    """
    sidecars = {path: Policy.load(path).sidecar for path in artifacts}
    cores = len(provenance.available_cores())
    load_average = os.getloadavg()[0] / cores
    loops, loads, times = [], defaultdict(list), defaultdict[Path, dict[str, Any]](dict)
    with tempfile.TemporaryDirectory() as folder:
        programs = {path: _program(path, sidecar, folder) for path, sidecar in sidecars.items()}
        turns = list(product(range(_TURNS), sidecars, sorted({1, cores})))
        for done, (_, path, threads) in enumerate(turns):
            update(done, len(turns))
            loops += timeit.repeat(_LOOP, number=1, repeat=50)
            start = time.perf_counter()
            policy = Policy.load(path, threads)
            loads[path].append(1000 * (time.perf_counter() - start))
            for name, latencies in _turn(policy, threads, programs[path], -(-calls // _TURNS)):
                times[path].setdefault(name, []).append(latencies)
    spread = percentiles(loops)["p95"] / median(loops)
    return {
        "artifacts": [
            {
                "artifact": str(path),
                **{key: getattr(sidecar, key) for key in ("run_id", "scheme", "native", "sha256")},
                "load_ms": median(loads[path]),
                "latency_us": {
                    name: percentiles(np.concatenate(turns)) for name, turns in times[path].items()
                },
                "bytes": memory.measure(path),
            }
            for path, sidecar in sidecars.items()
        ],
        "calls": calls,
        "load_average": load_average,
        "spread": spread,
        "at_rest": load_average <= _REST_LOAD and spread <= _REST_SPREAD,
        "processor": provenance.processor(),
        "versions": provenance.package_versions(),
    }


def _turn(
    policy: Policy, threads: int, program: Path | None, calls: int
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield the microseconds of calls by name: the number of threads and, after one, "C"."""
    shape, dtype = policy.sidecar.observation_shape, policy.sidecar.observation_dtype
    random, size = np.random.default_rng(0), (100, *shape)
    # Floats of unit size, as larger ones may overflow.
    values = random.integers(0, 256, size) if dtype == "uint8" else random.standard_normal(size)
    observations = values.astype(dtype)
    yield f"{threads}", time_calls(policy.act, list(observations), calls)
    if threads == 1 and program is not None:
        stdin = observations[np.arange(calls) % len(observations)].tobytes()
        process = subprocess.run([program], input=stdin, stdout=subprocess.PIPE, check=True)
        yield "C", np.array(process.stdout.split(), np.float64) / 1000


def _program(artifact: Path, sidecar: Sidecar, parent: str) -> Path | None:
    """Compile the timer of a flatbuffer's C code; None if that is impossible."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    for path in (artifact, sidecar_path(artifact)):
        shutil.copy(path, folder)
    copy, program = folder / artifact.name, folder / "program"
    try:
        c_source.write(copy)
    except UsageError:
        return None
    c_type = "uint8_t" if sidecar.observation_dtype == "uint8" else "float"
    command: list[str | Path] = ["cc", "-O2", f"-DTYPE={c_type}"]
    command += ["-include", copy.with_suffix(".h"), _TIMER, copy.with_suffix(".c")]
    command += ["-lm", "-o", program]
    try:
        subprocess.run(command, capture_output=True, check=True)
        subprocess.run([program], input=b"", capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # No compiler, or a folder without programs.
        return None
    return program
