"""Time the actions of a policy."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf.runtime.policy import Policy

_WARM_UP_CALLS = 100


def percentiles(durations: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Return the "median", "p95" and "p99" of durations [n]."""
    values = np.percentile(durations, [50, 95, 99]).tolist()
    return dict(zip(("median", "p95", "p99"), values, strict=True))


def time_calls(
    policy: Policy,
    observations: Sequence[NDArray[Any]],
    calls: int = 2000,
    random: np.random.Generator | None = None,
) -> NDArray[np.float64]:
    """Return the microseconds of single calls [calls] of `act`, or of `sample` with a generator.

    Calls take the observations in turn, after a warm-up, and count no ties.
    """
    act: Callable[[NDArray[Any]], Any] = policy.act
    if random is not None:
        act = partial(policy.sample, random=random)
    clock, ties = time.perf_counter_ns, policy.ties
    durations = []
    for observation in islice(cycle(observations), _WARM_UP_CALLS + calls):
        start = clock()
        act(observation)
        durations.append(clock() - start)
    policy.ties = ties
    return np.array(durations[_WARM_UP_CALLS:]) / 1000
