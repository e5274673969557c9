"""Measure what quantisation-aware training costs: gradient steps with it, over those without.

For each case the two take turns to learn from the same steps of the environment, before the delay
(ranges are watched) and after it (numbers are quantised). Prints the median ratio and its range
over repetitions beside the most that it should be (about 15 minutes, both cores at rest).

    python benchmarks/qat_overhead.py --json benchmarks/qat_overhead.json
"""

import argparse
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from training_throughput import machine

from quarl_tf import agents, environments, presets
from quarl_tf.environments.acting import ticks
from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import write_json
from quarl_tf.quantization import qat, watching

#: Algorithm, environment, and the largest ratio: 1.6 for small layers, 1.4 for Nature's network.
CASES = (
    ("ppo", "CartPole-v1", 1.6),
    ("a2c", "CartPole-v1", 1.6),
    ("dqn", "CartPole-v1", 1.6),
    ("ddpg", "HalfCheetahBulletEnv-v0", 1.6),
    ("ppo", "PongNoFrameskip-v4", 1.4),
    ("a2c", "PongNoFrameskip-v4", 1.4),
    ("dqn", "PongNoFrameskip-v4", 1.4),
)

#: What a measurement takes at least: rounds of small networks take 2 ms.
_SECONDS = 1.0


def build(algo: str, env_id: str, bits: int | None) -> tuple[Any, Callable[[], float]]:
    """Build an agent that has seen enough to learn from; plain where `bits` is None."""
    overrides = {"learning_starts": 1000, "buffer_size": 5000} if algo in ("dqn", "ddpg") else {}
    preset = presets.load(algo, env_id, overrides)
    values = {"bits": bits, "delay": 1}
    quantization = None if bits is None else presets.quantization(algo, values)
    spec = environments.env_spec(env_id)
    agent = agents.build(algo, spec, preset, 0, watching(quantization))
    follows = quantization is not None and quantization.schedule.ranges == "following"
    envs = environments.make_vector(env_id, preset.num_envs, training=True)
    count = max(preset.train_frequency, overrides.get("learning_starts", 0)) // preset.num_envs + 1
    stream = ticks(envs, lambda observations: agent.act(observations, 0.5), envs.reset(seed=0)[0])
    history = list(islice(stream, count))
    rollout = history[: preset.train_frequency // preset.num_envs]

    def learn() -> float:
        for tick in rollout:
            agent.act(tick.observations, 0.5)
            agent.observe(tick)
        start = time.perf_counter()
        agent.learn(history[-1].following)
        if follows and qat.quantized_layers(agent.network):
            qat.freeze(agent.network)
            agent.refresh()
        return time.perf_counter() - start

    for tick in history[len(rollout) :]:
        if algo in ("dqn", "ddpg"):
            agent.observe(tick)
    learn()
    return agent, learn


def seconds(learn: Callable[[], float]) -> float:
    """Return the median time of a round of learning."""
    times: list[float] = []
    while sum(times) < _SECONDS:
        times.append(learn())
    return median(times)


def ratios(algo: str, env_id: str, repetitions: int) -> dict[str, list[float]]:
    """Return the ratios of every repetition, before and after the delay."""
    _, learn_plain = build(algo, env_id, None)
    agent, learn = build(algo, env_id, 8)
    phases: dict[str, list[float]] = {"before": [], "after": []}
    for phase, values in phases.items():
        if phase == "after":
            agent.change_network(qat.quantized)
            qat.freeze(agent.network, agent.targets)
            agent.refresh()
            learn()
        for _ in range(repetitions):
            plain_seconds = seconds(learn_plain)
            values.append(seconds(learn) / plain_seconds)
    return phases


def main() -> None:
    """Print the table; with `--json`, write every repetition."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print("| training | before the delay | after it | at most |")
    print("|---|--:|--:|--:|")
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": provenance.package_versions(),
        "commit": provenance.source_commit(),
        "cases": {},
    }
    for algo, env_id, most in CASES:
        phases = ratios(algo, env_id, args.repetitions)
        results["cases"][f"{algo} {env_id}"] = {
            **phases,
            "most": most,
            "precision": presets.load(algo, env_id).precision,
        }
        cells = [f"{median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in phases.values()]
        print(f"| {algo} {env_id} | {' | '.join(cells)} | {most} |", flush=True)
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
