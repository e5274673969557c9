"""Time flatbuffers in turns, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf.evaluation import memory
from quarl_tf.evaluation.memory import Memory
from quarl_tf.foundation import provenance
from quarl_tf.foundation.display import Update
from quarl_tf.runtime.policy import Policy, percentiles, time_calls
from quarl_tf.store.records import Sidecar

_TURNS = 5
_OBSERVATIONS = 100

#: What a machine at rest stays below: others' load per core, and the calibration loop's spread.
_REST_LOAD, _REST_SPREAD = 0.25, 1.1

_LOOPS, _LOOP_ADDITIONS = 100, 20_000


@dataclass(frozen=True)
class Timing:
    """What one flatbuffer takes.

    Attributes:
        load_ms: Median milliseconds to read, check and prepare it, its bytes in the page cache.
        latency_us: Of one `Policy.act` call by threads: "median", "p95", "p99" in microseconds.
    """

    artifact: str
    run_id: str
    scheme: str
    sha256: str
    load_ms: float
    latency_us: dict[int, dict[str, float]]
    memory: Memory


@dataclass(frozen=True)
class Bench:
    """Timings of several flatbuffers, and how quiet the machine was.

    Attributes:
        load_average: Of the minute before, over the cores that may be used.
        spread: 95th percentile of a fixed loop's durations over their median.
    """

    timings: list[Timing]
    calls: int
    load_average: float
    spread: float
    processor: str
    versions: dict[str, str]

    @property
    def at_rest(self) -> bool:
        """Whether nothing else is likely to have taken part of the processor."""
        return self.load_average <= _REST_LOAD and self.spread <= _REST_SPREAD

    def to_dict(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return {"at_rest": self.at_rest, **asdict(self)}


def bench(artifacts: Sequence[Path], calls: int, update: Update) -> Bench:
    """Time so many calls of each flatbuffer, by one thread and by all, on random observations.

    Raises:
        UsageError: No call is asked for.
        QuarlError: A file is missing, damaged or not what its sidecar says.
    """
    sidecars = {path: Policy.load(path).sidecar for path in artifacts}
    observations = {path: _observations(sidecar) for path, sidecar in sidecars.items()}
    cores = len(os.sched_getaffinity(0))
    load_average = os.getloadavg()[0] / cores
    loops: list[float] = []
    loads: dict[Path, list[float]] = defaultdict(list)
    durations: dict[tuple[Path, int], list[NDArray[np.float64]]] = defaultdict(list)
    for turn in range(_TURNS):
        update(turn, _TURNS)
        loops += _calibrate()
        for path in sidecars:
            for threads in sorted({1, cores}):
                start = time.perf_counter()
                policy = Policy.load(path, threads)
                loads[path].append(1000 * (time.perf_counter() - start))
                timed = time_calls(policy, observations[path], -(-calls // _TURNS))
                durations[path, threads].append(timed)
    timings = [
        Timing(
            str(path),
            sidecar.run_id,
            sidecar.scheme,
            sidecar.sha256,
            statistics.median(loads[path]),
            {
                threads: percentiles(np.concatenate(timed))
                for (timed_path, threads), timed in durations.items()
                if timed_path == path
            },
            memory.measure(path),
        )
        for path, sidecar in sidecars.items()
    ]
    median, p95, _ = percentiles(loops).values()
    made_by = provenance.processor(), provenance.package_versions()
    return Bench(timings, calls, load_average, p95 / median, *made_by)


def _observations(sidecar: Sidecar) -> list[NDArray[Any]]:
    random, shape = np.random.default_rng(0), (_OBSERVATIONS, *sidecar.observation_shape)
    if sidecar.observation_dtype == "uint8":
        return list(random.integers(0, 256, shape, np.uint8))
    return list(random.standard_normal(shape, np.float32))


def _calibrate() -> list[float]:
    """Return the seconds of a fixed loop, again and again."""
    seconds = []
    for _ in range(_LOOPS):
        start = time.perf_counter()
        sum(range(_LOOP_ADDITIONS))
        seconds.append(time.perf_counter() - start)
    return seconds
