"""Time flatbuffers in turns, so that whatever else the machine does meets all of them alike."""

import os
import time
import timeit
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from quarl_tf.evaluation import memory
from quarl_tf.foundation import provenance
from quarl_tf.foundation.display import Update
from quarl_tf.runtime.policy import Policy, percentiles, time_calls

_TURNS = 5

#: What a machine at rest stays below: others' load of a core, and the spread of a fixed loop.
_REST_LOAD, _REST_SPREAD = 0.25, 1.1
_LOOP = "sum(range(20_000))"


def bench(artifacts: Sequence[Path], calls: int, update: Update) -> dict[str, Any]:
    """Time so many `Policy.act` calls of each flatbuffer, by one thread and by all.

    Returned, ready for JSON, are the "artifacts", each with its "latency_us" by threads, "load_ms"
    with its bytes in the page cache and "bytes" as `memory.measure` has them; and how quiet the
    machine was: the "load_average" of a core in the minute before, the "spread" of a fixed loop's
    durations (95th percentile over median), and "at_rest". Observations are random numbers. A
    QuarlError says that a file is missing, damaged or not what its sidecar says.
    """
    sidecars = {path: Policy.load(path).sidecar for path in artifacts}
    cores, random = len(os.sched_getaffinity(0)), np.random.default_rng(0)
    load_average = os.getloadavg()[0] / cores
    loops, loads, timed = [], defaultdict(list), defaultdict(list)
    turns = list(product(range(_TURNS), sidecars, sorted({1, cores})))
    for done, (_, path, threads) in enumerate(turns):
        update(done, len(turns))
        loops += timeit.repeat(_LOOP, number=1, repeat=50)
        start = time.perf_counter()
        policy = Policy.load(path, threads)
        loads[path].append(1000 * (time.perf_counter() - start))
        shape, dtype = (100, *policy.sidecar.observation_shape), policy.sidecar.observation_dtype
        seen = list(random.integers(0, 256, shape).astype(dtype))
        timed[path, threads].append(time_calls(policy, seen, -(-calls // _TURNS)))
    spread = percentiles(loops)["p95"] / median(loops)
    return {
        "artifacts": [
            {
                "artifact": str(path),
                "run_id": sidecar.run_id,
                "scheme": sidecar.scheme,
                "sha256": sidecar.sha256,
                "load_ms": median(loads[path]),
                "latency_us": {
                    str(threads): percentiles(np.concatenate(timed[path, threads]))
                    for threads in sorted({1, cores})
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
