"""Measure how long a task takes to solve, beside Stable-Baselines3 (`sb3`) and SBX (`sbx`).

A task is solved by a mean return of its goal over 20 greedy episodes on selection seeds. The clock
is that of the user: from the start of the command to the end of the look that found the goal, with
imports, compilation and the looks themselves. What was found plays 100 episodes of other seeds
afterwards. Ours trains by its preset with the overrides of `solving.yaml`, the peers by the zoo's
entry there with PyTorch's usual number of threads. Every training is a process of its own, and the
libraries take turns.

    make peers
    python benchmarks/time_to_solve.py --json benchmarks/time_to_solve.json

writes all figures, and the table beside them as `.md`. A training that is in the file already is
not made again. `--at-most 3` ends a peer's training, unsolved, at the first look after three times
the seconds of ours of the same seed, which is measured first.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pandas
import yaml
from training_throughput import PEERS, PEERS_VENV, ask, machine, summary

from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import read_json, write_json, write_text

LIBRARIES = ("ours", *PEERS)  # Ours first: a peer's limit is told from it.

#: Episodes of a look, and of the confirmation.
_LOOK, _CONFIRMED = 20, 100


def tasks() -> dict[str, dict[str, Any]]:
    """Read `solving.yaml`, by name."""
    path = Path(__file__).with_name("solving.yaml")
    entries: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())
    return entries


def libraries(task: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the libraries that a task has a recipe for."""
    return LIBRARIES if "zoo" in task else ("ours",)


def ours(task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train by our preset and the task's overrides until it is solved.

    Returns:
        `seconds` and `steps` to the goal, both None if it was not reached, and the mean return
        `confirmed` on other seeds.
    """
    overrides = {
        **task.get("overrides", {}),
        "evaluation_every": task["every"],
        "evaluation_episodes": _LOOK,
        "until": task["goal"],
    }
    options = ["--algo", task["algo"], "--env", task["env_id"], "--seed", str(seed)]
    for name, value in overrides.items():
        options += ["-p", f"{name}={value}"]
    with tempfile.TemporaryDirectory() as root:
        start = time.perf_counter()
        _quarl("train", *options, "--root", root)
        seconds = time.perf_counter() - start
        (run,) = Path(root, "runs").iterdir()
        _quarl("export", run.name, "--schemes", "fp32", "--root", root)
        (file,) = Path(root, "tflite_models").rglob("fp32.tflite")
        _quarl("evaluate", str(file), "--episodes", str(_CONFIRMED))
        returns = read_json(file.with_suffix(".eval.json"))["returns"]
        curve = pandas.read_csv(run / "progress.csv")
    solved = curve.loc[curve["greedy_return"] >= task["goal"], "step"]
    return {
        "seconds": seconds if len(solved) else None,
        "steps": int(solved.min()) if len(solved) else None,
        "confirmed": mean(returns),
        "versions": provenance.package_versions(),
    }


def _quarl(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("quarl")), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed.\n{process.stderr}")


def seconds_limit(
    rows: Sequence[Mapping[str, Any]], name: str, seed: int, times_ours: float | None
) -> float | None:
    """Return so many times the seconds of ours of the same seed; None where there is no limit."""
    key = name, seed, "ours"
    seconds = [row["seconds"] for row in rows if (row["task"], row["seed"], row["library"]) == key]
    return times_ours * seconds[0] if times_ours is not None and any(seconds) else None


def peer(
    library: str, task: Mapping[str, Any], seed: int, limit: float | None = None
) -> dict[str, Any]:
    """Train by a peer until the task is solved, or to a limit of seconds; returns as `ours`."""
    answer = ask(
        {
            "library": library,
            "seed": seed,
            "look": _LOOK,
            "confirmed": _CONFIRMED,
            "limit": limit,
            "started": time.time(),
            **{name: task[name] for name in ("algo", "env_id", "goal", "every", "zoo")},
        }
    )
    return {"limit": limit, **answer}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return seconds to the goal by task and library, and the ratios to ours of the same seed.

    Below are the libraries that have not been run on a task.
    """
    lines = [
        "Seconds from the start of the command to the goal: median [range] over trainings",
        "",
        "| task | goal | library | solved | seconds | thousand steps | confirmed | over ours |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    our_rows = {(row["task"], row["seed"]): row for row in results if row["library"] == "ours"}
    missing = []
    pairs = [(name, task, library) for name, task in tasks().items() for library in libraries(task)]
    for name, task, library in pairs:
        rows = [row for row in results if (row["task"], row["library"]) == (name, library)]
        if not rows:
            missing.append(f"{library} on {name}")
            continue
        solved = [row for row in rows if row["seconds"] is not None]
        of_seed = [(row, our_rows.get((name, row["seed"]), {})) for row in solved]
        ratios = [row["seconds"] / our["seconds"] for row, our in of_seed if our.get("seconds")]
        cells = [
            _cell([row["seconds"] for row in solved], "{:,.1f}"),
            _cell([row["steps"] / 1000 for row in solved], "{:,.0f}"),
            _cell([row["confirmed"] for row in solved], "{:,.1f}"),
            "" if library == "ours" else _cell(ratios, "{:.2f}"),
        ]
        count = f"{len(solved)} of {len(rows)}"
        if limits := [row["limit"] for row in rows if row.get("out_of_time")]:
            count += f" within {max(limits):,.0f} s"
        lines.append(f"| {name} | {task['goal']} | {library} | {count} | {' | '.join(cells)} |")
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float], form: str) -> str:
    return summary(values, form) if values else "none"


def main() -> None:
    """Measure what is asked for, and print the table; with `--json`, write all figures as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    all_tasks = tasks()
    parser.add_argument("--tasks", nargs="+", choices=[*all_tasks], default=[*all_tasks])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=[*LIBRARIES])
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each library")
    parser.add_argument(
        "--at-most", type=float, metavar="TIMES", help="end a peer's training after TIMES ours"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if set(args.libraries) & set(PEERS) and not (PEERS_VENV / "installed").exists():
        parser.error("the peers are not installed; install them by `make peers`")
    rows = read_json(args.json)["rows"] if args.json is not None and args.json.exists() else []
    measured = {(row["task"], row["seed"], row["library"]) for row in rows}
    for name, seed, library in product(args.tasks, range(args.seeds), LIBRARIES):
        task = all_tasks[name]
        asked = library in args.libraries and library in libraries(task)
        if not asked or (name, seed, library) in measured:
            continue
        row = {"task": name, "seed": seed, "library": library}
        row |= {"commit": provenance.source_commit(), **machine()}
        if library == "ours":
            result = ours(task, seed)
        else:
            result = peer(library, task, seed, seconds_limit(rows, name, seed, args.at_most))
        rows.append(row | result)
        print(f"{name}, seed {seed}, {library}: {result['seconds']} s", file=sys.stderr, flush=True)
        if args.json is not None:
            write_json(args.json, {"rows": rows})
            write_text(args.json.with_suffix(".md"), table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
