"""Measure DQN on Pong with QuaRL's Policies A, B and C in float32 and in bfloat16 (their Table 5).

Each repetition is a process of its own, so that the largest memory is one training's; precisions
take turns. It acts and learns by the preset, with a small replay and in short bursts of as many
gradient steps to environment steps, and is timed once all is compiled.

    python benchmarks/mixed_precision.py --json benchmarks/mixed_precision.json

docs/results/half-the-bits.md shows what it wrote, QuaRL's minutes beside.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ours
from training_throughput import in_fresh_process, machine

from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import write_json

PRECISIONS = ("float32", "bfloat16")

POLICIES = ("policy_a", "policy_b", "policy_c")

#: The preset's 4 environment steps for each gradient step, in the shortest bursts of 8 games.
_OVERRIDES = {
    "num_envs": 8,
    "train_frequency": 8,
    "gradient_steps": 2,
    "learning_starts": 64,
    "buffer_size": 2000,
}
_WARM_UP, _LEAST_BURSTS = 96, 2

_RATES = ("gradient_steps", "environment_steps")


def measure(policy: str, precision: str, seconds: float) -> dict[str, float]:
    """Return gradient steps a second of learning, environment steps a second, and peak MiB."""
    workload = ours.Workload(
        algo="dqn",
        env_id="PongNoFrameskip-v4",
        warm_up=_WARM_UP,
        steps=0,
        peers=(),
        overrides={**_OVERRIDES, "network": policy, "precision": precision},
    )
    with ours.started(workload, 0) as training:
        durations = ours.time_calls(training.agent, "learn")
        first_step, start = training.step, time.perf_counter()
        while len(durations) < _LEAST_BURSTS or time.perf_counter() - start < seconds:
            training.burst()
        steps, duration = training.step - first_step, time.perf_counter() - start
    return {
        "gradient_steps": _OVERRIDES["gradient_steps"] * len(durations) / sum(durations),
        "environment_steps": steps / duration,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


Repetitions = Sequence[Mapping[str, Mapping[str, float]]]


def summary(repetitions: Repetitions) -> dict[str, Any]:
    """Return medians for each precision, and the ratio of both: median, least and largest."""
    result: dict[str, Any] = {
        precision: {
            name: statistics.median(pair[precision][name] for pair in repetitions)
            for name in (*_RATES, "peak_mib")
        }
        for precision in PRECISIONS
    }
    for name in _RATES:
        ratios = sorted(pair["bfloat16"][name] / pair["float32"][name] for pair in repetitions)
        result[f"{name}_ratio"] = [statistics.median(ratios), ratios[0], ratios[-1]]
    return result


def main() -> None:
    """Print medians and ratios; with `--json`, write every repetition, and on what machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="at least, of a repetition")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = {**machine(), "seconds": args.seconds}
    repetitions: dict[str, list[Any]] = {policy: [] for policy in args.policies}
    for policy in args.policies:
        for _ in range(args.repetitions):
            pair = {
                precision: in_fresh_process(measure, policy, precision, args.seconds)
                for precision in PRECISIONS
            }
            repetitions[policy].append(pair)
            print(policy, json.dumps(pair), file=sys.stderr)
    summaries = {policy: summary(pairs) for policy, pairs in repetitions.items()}
    print(json.dumps(summaries, indent=1))
    if args.json:
        facts |= {"versions": provenance.package_versions(), "commit": provenance.source_commit()}
        write_json(args.json, {**facts, "policies": summaries, "repetitions": repetitions})


if __name__ == "__main__":
    main()
