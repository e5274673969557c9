"""Replay flatbuffers on an emulated Arm board and compare their actions with this processor's.

Of each task, algorithm and network of `tflite_models/` the first run that keeps fp32 and int8. Both
meet 1 000 states that the fp32 policy met in play, each tenth one, through `quarl_tf.Policy`: here
on LiteRT, there on tflite-runtime, on Debian's Python for aarch64 and an emulated Cortex-A53. What
differs by the kernels rather than by the processor is seen in a third replay, here without XNNPACK.

    apt-get install debootstrap qemu-user-static
    python benchmarks/arm.py --json benchmarks/arm.json

The first time as root, to make Debian's root file system in `.arm/` (270 MB); it is kept. Rows of
runs that are not measured again stay in the file.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf import Policy, environments
from quarl_tf.environments.acting import ticks
from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import read_json, write_json
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.runtime import flatbuffer

ROOT = Path(__file__).parents[1]
SCHEMES = ("fp32", "int8")
STATES, EVERY = 1000, 10
#: This processor, this one without XNNPACK's kernels, and the board.
HERE, BOARD = ("xnnpack", "built_in"), "arm"

_PROCESSOR, _RELEASE, _PYTHON = "cortex-a53", "bookworm", "3.11"
_EMULATOR = "qemu-aarch64-static"
#: tflite-runtime was built for NumPy 1.
_WHEELS = ("tflite-runtime==2.14.0", "numpy==1.26.4")
#: Wheels are for a C library as old as the one they name, or newer; bookworm's is 2.36.
_PLATFORMS = ("manylinux_2_34_aarch64", "manylinux2014_aarch64")

#: For each job a flatbuffer, a file of states and a file for the results.
_WORKER = """
import functools, json, platform, sys
from importlib import metadata
import numpy as np
from quarl_tf.runtime import policy as room
from quarl_tf.runtime.policy import Policy
if sys.argv[2:] == ["built_in"]:
    from ai_edge_litert.interpreter import OpResolverType
    kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    room.Interpreter = functools.partial(room.Interpreter, experimental_op_resolver_type=kernels)
for flatbuffer, states, results in json.loads(sys.argv[1]):
    policy = Policy.load(flatbuffer)
    observations = np.load(states)
    actions = [policy.act(observation) for observation in observations]
    heads = [policy.head(observation) for observation in observations]
    np.savez(results, actions=np.array(actions), heads=np.array(heads))
    print(flatbuffer, file=sys.stderr, flush=True)
packages = ("ai-edge-litert", "tflite-runtime", "numpy")
versions = {d.name: d.version for d in metadata.distributions() if d.name in packages}
print(json.dumps({"machine": platform.machine(), "python": platform.python_version(), **versions}))
"""


def file_system(folder: Path) -> Path:
    """Return the folder of Debian's `root` and the wheels' `site`, made where it is not there.

    Raises:
        SystemExit: A Debian package is missing, or the user is not root, in one line.
    """
    target = folder / "-".join((_RELEASE, *_WHEELS))
    packages = {_EMULATOR: "qemu-user-static"}
    if not target.exists():
        packages["debootstrap"] = "debootstrap"
    if missing := [package for name, package in packages.items() if not shutil.which(name)]:
        raise SystemExit(f"Run `apt-get install {' '.join(missing)}` as root, and this again.")
    if target.exists():
        return target
    if os.geteuid() != 0:
        raise SystemExit(f"The first time debootstrap makes {folder}; run this as root.")
    folder.mkdir(exist_ok=True)
    # Made aside and renamed, so that it is whole wherever it is there.
    with tempfile.TemporaryDirectory(dir=folder) as name:
        temporary = Path(name) / "made"
        (temporary / "root").mkdir(parents=True)
        bootstrap = ["debootstrap", "--download-only", "--arch=arm64", "--variant=minbase"]
        _run([*bootstrap, "--include=python3", _RELEASE, f"{name}/packages"])
        for package in sorted(Path(name).glob("packages/var/cache/apt/archives/*.deb")):
            _run(["dpkg", "-x", str(package), f"{temporary}/root"])
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        pip += ["--only-binary=:all:", f"--python-version={_PYTHON}", f"--target={temporary}/site"]
        _run([*pip, *(f"--platform={platform}" for platform in _PLATFORMS), *_WHEELS])
        temporary.rename(target)
    return target


def _run(command: Sequence[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines() or [""]
        raise SystemExit(f"{command[0]} failed: {lines[-1]} Received: {' '.join(command)}")


def chosen(models: Path) -> list[Path]:
    """Return the first run's folder of each task, algorithm and network that keeps both files."""
    folders: dict[str, Path] = {}
    for path in sorted(models.glob("*/*/*/int8.tflite")):
        if path.with_name("fp32.tflite").exists():
            sidecar = json.loads(path.with_suffix(".json").read_text())
            name = f"{path.parent.parent}: {sidecar['preset']['network']}"
            folders.setdefault(name, path.parent)
    return list(folders.values())


def states(policy: Policy) -> NDArray[Any]:
    """Return observations [STATES, ...] that a policy meets, by seeds of this benchmark's own."""
    return np.array(list(islice(_observations(policy), 0, STATES * EVERY, EVERY)))


def _observations(policy: Policy) -> Iterator[Any]:
    with closing(environments.make(policy.sidecar.env_id)) as env:
        for number in count():
            seed = environment_seed(int(policy.sidecar.run["seed"]), "another board", number)
            for tick in ticks(env, policy.act, env.reset(seed=seed)[0]):
                yield tick.observations
                if tick.done:
                    break


def replay(side: str, board: Path, jobs: Sequence[Sequence[Path]]) -> dict[str, str]:
    """Have a side's Python do the jobs; return its machine and versions."""
    command, path = [sys.executable], f"{ROOT}"
    if side == BOARD:
        command = [_EMULATOR, "-L", f"{board}/root", "-cpu", _PROCESSOR]
        command.append(f"{board}/root/usr/bin/python{_PYTHON}")
        path = f"{board}/site:{ROOT}"
    process = subprocess.run(
        [*command, "-c", _WORKER, json.dumps(jobs, default=str), side],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    versions: dict[str, str] = json.loads(process.stdout)
    return versions


def step(content: bytes) -> float | None:
    """Return how far apart neighbouring codes of the head are; None where it is computed in float.

    The head of a float output is the tensor that its last operator dequantises.
    """
    graph = flatbuffer.parsed(content)[0]
    (head,) = graph.outputs
    for operator in graph.operators:
        if head in operator.outputs and operator.name == "DEQUANTIZE":
            (head,) = operator.inputs
    scales = graph.tensors[head].scales
    return float(scales[0]) if scales.size else None


Replayed, Row = Mapping[str, NDArray[Any]], dict[str, Any]


def comparison(here: Replayed, board: Replayed, unit: float | None) -> dict[str, Any]:
    """Return how many actions [n, ...] are equal, and the largest difference of heads [n, k].

    `lead` is the most by which the head here prefers its action to another one that was taken on
    the board. Both are in steps of the head's codes, where these are `unit` apart.
    """
    actions, board_actions = here["actions"], board["actions"]
    equal = (actions == board_actions).reshape(len(actions), -1).all(axis=1)
    differences = {"difference": float(np.abs(here["heads"] - board["heads"]).max())}
    if actions.ndim == 1:
        rows = np.arange(len(actions))
        leads = here["heads"][rows, actions] - here["heads"][rows, board_actions]
        differences["lead"] = float(leads.max())
    if unit is not None:
        differences = {name: round(value / unit) for name, value in differences.items()}
    return {"equal_actions": int(equal.sum()), **differences}


def measured(folders: Sequence[Path], board: Path, work: Path) -> dict[str, Any]:
    """Return the versions on each side, and a row for each file of these runs."""
    state_files = {}
    for number, folder in enumerate(folders):
        path = work / f"{number}.npy"
        np.save(path, states(Policy.load(folder / "fp32.tflite")))
        state_files |= {folder / f"{scheme}.tflite": path for scheme in SCHEMES}
    sides: dict[str, Any] = {}
    for side in (*HERE, BOARD):
        (work / side).mkdir()
        jobs = [
            (path, state_file, work / side / f"{number}.npz")
            for number, (path, state_file) in enumerate(state_files.items())
        ]
        sides[side] = replay(side, board, jobs)
    rows = []
    for number, path in enumerate(state_files):
        sidecar, unit = Policy.load(path).sidecar, step(path.read_bytes())
        row = {"env_id": sidecar.env_id, "algo": sidecar.run["algo"], "run_id": sidecar.run_id}
        row |= {"network": sidecar.preset["network"], "scheme": sidecar.scheme}
        row |= {"sha256": sidecar.sha256, "states": STATES, "step": unit}
        board_replay = np.load(work / BOARD / f"{number}.npz")
        for side in HERE:
            side_replay = np.load(work / side / f"{number}.npz")
            row[side] = comparison(side_replay, board_replay, unit)
        rows.append(row)
    emulator = subprocess.run([_EMULATOR, "--version"], capture_output=True, text=True, check=True)
    sides[BOARD] |= {"processor": _PROCESSOR, "emulator": emulator.stdout.splitlines()[0]}
    sides["xnnpack"]["processor"] = provenance.processor()
    return {**sides, "rows": rows}


def merged(old_rows: Sequence[Row], new_rows: Sequence[Row]) -> list[Row]:
    """Return all rows by run and scheme, new ones in place of old ones."""
    rows = {(row["run_id"], row["scheme"]): row for row in (*old_rows, *new_rows)}
    return sorted(rows.values(), key=lambda row: (row["env_id"], row["run_id"], row["scheme"]))


def main() -> None:
    """Print a line for each file; with `--json`, write all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", help="runs (default: of tflite_models/)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    board = file_system(ROOT / ".arm")
    folders = args.folders or chosen(ROOT / "tflite_models")
    with tempfile.TemporaryDirectory() as work:
        results = measured(folders, board, Path(work))
    for row in results["rows"]:
        print(json.dumps(row))
    if args.json:
        old_rows = read_json(args.json)["rows"] if args.json.exists() else []
        rows = merged(old_rows, results["rows"])
        write_json(args.json, {"commit": provenance.source_commit(), **results, "rows": rows})


if __name__ == "__main__":
    main()
