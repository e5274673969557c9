"""Measure how fast trainings run, beside Stable-Baselines3 (`sb3`) and SBX (`sbx`).

Prints environment steps per second of whole trainings (environment, acting, replay and learning),
the ratio to each peer, what the environment does alone with random actions, what the arithmetic
would allow alone (the networks' multiplications at the speed of large products), what share ours is
of both in turns, and where our time goes. Every measurement has a process of its own; in each
repetition ours and the peers take turns, so that a drift of the machine meets all alike.

All train with the same hyper-parameters: our preset with the overrides of `workloads.yaml`, which
`peers.py` translates; there stands what still differs. The clock starts after a warm-up, when
learning is under way and everything is compiled, and counts whole rounds of acting and learning;
greedy evaluations and checkpoints do not fall into it. Peers get what is fastest for them: numbers
of threads, processes for Atari and rhythms of learning are tried first. Our convolutions compute in
bfloat16 unless `--precision float32` is given, the peers' in float32.

    make peers
    python benchmarks/training_throughput.py --json benchmarks/training_throughput.json

writes all figures, and the tables beside them as `.md`. A workload that is measured again is
replaced whole; what the file has of others stays in it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import ours
from ours import PARTS, Workload

from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import read_json, write_json, write_text

#: Made by `make peers`.
PEERS_VENV = Path(__file__).parents[1] / ".venv-peers"

PEERS = ("sb3", "sbx")

#: Part of a measurement's steps that each of a peer's settings is tried with.
_TRIAL = 0.25
#: Mean number of running processes up to which a machine is at rest.
_QUIET = 0.5


def peer(
    name: str, workload: Workload, seed: int, steps: int, setting: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a peer's environment steps per second, and its versions."""
    preset = {**asdict(workload.preset()), **setting["rhythm"]}
    request = {"library": name, "seed": seed, "steps": steps, "preset": preset}
    return ask({**asdict(workload), **setting, **request})


def ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of `peers.py`, run in the peers' environment."""
    text = json.dumps(request)
    command = [str(PEERS_VENV / "bin/python"), str(Path(__file__).with_name("peers.py")), text]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{request['library']} failed.\n{process.stderr}Received: {text}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def settings(name: str, workload: Workload) -> list[dict[str, Any]]:
    """List the settings to try a peer with."""
    # SBX computes in JAX, which takes all cores by itself.
    threads = sorted({1, os.cpu_count() or 1}) if name == "sb3" else [1]
    rhythms = [{}, workload.zoo] if workload.zoo else [{}]
    processes = (False, True) if workload.on_atari else (False,)
    return [
        {"rhythm": rhythm, "threads": count, "processes": in_processes}
        for rhythm, count, in_processes in product(rhythms, threads, processes)
        if not (in_processes and rhythm.get("num_envs") == 1)
    ]


def by_speed(name: str, workload: Workload, steps: int) -> list[dict[str, Any]]:
    """Return a peer's settings, the fastest first, with their speeds if there is a choice."""
    candidates = settings(name, workload)
    for setting in candidates if len(candidates) > 1 else ():
        setting |= {"steps_per_second": peer(name, workload, 0, steps, setting)["steps_per_second"]}
        _say(f"  {name} tried: {setting}")
    return sorted(candidates, key=lambda setting: -setting.get("steps_per_second", 0.0))


def measure(workload: Workload, peers: Sequence[str], repeats: int, scale: float) -> dict[str, Any]:
    """Return all figures of a workload but the machine's."""
    commit = provenance.source_commit()  # Before it is measured, which takes long.
    steps = math.ceil(workload.steps * scale)
    peers_settings = {name: by_speed(name, workload, math.ceil(steps * _TRIAL)) for name in peers}
    versions = {"ours": provenance.package_versions()}
    speeds: dict[str, list[float]] = {name: [] for name in ("alone", "ours", *peers)}
    for seed in range(repeats):
        speeds["alone"].append(in_fresh_process(ours.alone, workload))
        speeds["ours"].append(in_fresh_process(ours.speed, workload, seed, steps))
        for name in peers:
            answer = peer(name, workload, seed, steps, peers_settings[name][0])
            speeds[name].append(answer["steps_per_second"])
            versions[name] = answer["versions"]
        _say("  " + ", ".join(f"{name} {values[-1]:,.0f}" for name, values in speeds.items()))
    return {
        **asdict(workload),
        "commit": commit,
        "steps": steps,
        "preset": asdict(workload.preset()),
        "peers": list(peers),
        "peers_settings": peers_settings,
        "steps_per_second": speeds,
        "shares": in_fresh_process(ours.shares, workload, steps),
        "multiplications": in_fresh_process(ours.multiplications, workload),
        "versions": versions,
    }


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function where nothing else has run before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def tables(workloads: Mapping[str, Mapping[str, Any]]) -> str:
    """Return two tables: speeds with their ratios, and where our time goes."""
    lines = [
        "Environment steps/s and ratios of each repetition: median [range]",
        "",
        "| workload | ours | peer | peer's | ours / peer's | share of the floor "
        "| environment alone | arithmetic alone |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for name, figures in workloads.items():
        speeds = figures["steps_per_second"]
        our_cells = f"| {name} | {_speed(speeds['ours'])} |"
        floor_cells = f"| {100 * _share(figures):.0f} % | {_speed(speeds['alone'])} "
        floor_cells += f"| {_limit(figures):,.0f} |"
        for peer_name in figures["peers"]:
            pairs = zip(speeds["ours"], speeds[peer_name], strict=True)
            ratio = summary([mine / theirs for mine, theirs in pairs], "{:.2f}")
            peer_cells = f"{peer_name} | {_speed(speeds[peer_name])} | {ratio}"
            lines.append(f"{our_cells} {peer_cells} {floor_cells}")
        if not figures["peers"]:
            lines.append(f"{our_cells} | | {floor_cells}")
    parts = [*PARTS, "rest"]
    lines += ["", "Where our time goes, %", "", f"| workload | {' | '.join(parts)} |"]
    lines.append("|---|" + "--:|" * len(parts))
    for name, figures in workloads.items():
        cells = (f"{figures['shares'][part]:.0f}" for part in parts)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _limit(figures: Mapping[str, Any]) -> float:
    """Return the steps per second that the arithmetic alone would allow."""
    rates = figures["machine"]["multiplications_per_second"]
    return float(rates[figures["preset"]["precision"]] / figures["multiplications"])


def _share(figures: Mapping[str, Any]) -> float:
    """Return our speed as a share of what the environment and then the arithmetic would allow."""
    speeds = {name: median(values) for name, values in figures["steps_per_second"].items()}
    return speeds["ours"] * (1 / speeds["alone"] + 1 / _limit(figures))


def _speed(values: Sequence[float]) -> str:
    return summary(values, "{:,.0f}")


def summary(values: Sequence[float], form: str) -> str:
    """Return the median and the range of values, each in a format."""
    middle, low, high = map(form.format, (median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"


def machine() -> dict[str, Any]:
    """Describe the machine, and what else it is doing."""
    return {
        "processor": provenance.processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure what is asked for, and print the tables; with `--json`, write all figures as well."""
    workloads = ours.workloads()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--workloads", nargs="+", choices=[*workloads], default=[*workloads])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS])
    parser.add_argument("--repetitions", type=int, help="5, and 3 on Atari, unless given")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the steps to measure")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="of our convolutions")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.repetitions is not None and args.repetitions < 1:
        parser.error(f"one repetition at least. Received: --repetitions {args.repetitions}")
    if not 0 < args.scale <= 1:
        parser.error(f"the scale is above 0 and at most 1. Received: --scale {args.scale}")
    peers = args.peers if (PEERS_VENV / "installed").exists() else []
    if len(peers) < len(args.peers):
        _say(
            "The peers are not installed, so ours is measured alone; install them by `make peers`."
        )
    results: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        results = read_json(args.json)
    facts = machine()
    if facts["load_before"] > _QUIET:
        _say(f"Something else is running and slows all. Received: load={facts['load_before']:.1f}")
    facts["multiplications_per_second"] = in_fresh_process(ours.multiplications_per_second)
    for name in args.workloads:
        workload = workloads[name]
        if workload.on_atari and args.precision:
            overrides = {**workload.overrides, "precision": args.precision}
            workload = replace(workload, overrides=overrides)
        _say(name)
        workload_peers = [peer_name for peer_name in peers if peer_name in workload.peers]
        repetitions = args.repetitions or (3 if workload.on_atari else 5)
        figures = measure(workload, workload_peers, repetitions, args.scale)
        results[name] = {"machine": facts, **figures}
        results = {name: results[name] for name in workloads if name in results}
        if args.json is not None:
            write_json(args.json, results)
            write_text(args.json.with_suffix(".md"), tables(results) + "\n")
    print(tables({name: results[name] for name in args.workloads}))


if __name__ == "__main__":
    main()
