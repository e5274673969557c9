"""Paths of runs, flatbuffers and reports."""

import os
import re
import shlex
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.files import atomic_path, locked, read_json, sync
from quarl_tf.spec import GREEDY, REFERENCE, Chance, Run
from quarl_tf.store.records import Sidecar

# An adopted policy may be named like a seed, which follows the environment's version.
_RUN_ID = re.compile(r"(\w[^-/]*)-(\w[^/]*?-v\d+|\w[^/]*)-(s\d+[^/]*)")


@dataclass(frozen=True)
class Workspace:
    """The folder that holds `runs/`, `tflite_models/` and `reports/`."""

    root: Path

    def run_dir(self, run_id: str) -> Path:
        """Return the folder of one training; a UsageError for what is no run id, as a path."""
        _require_run_id(run_id)
        return self.root / "runs" / run_id

    def artifact_dir(self, run_id: str) -> Path:
        """Return the folder of a run's flatbuffers: environment / algorithm / seed and settings."""
        algo, env, folder = _require_run_id(run_id).groups()
        return self.shelf / env / algo / folder

    @property
    def shelf(self) -> Path:
        """The folder of all flatbuffers."""
        return self.root / "tflite_models"

    def run_ids(self) -> list[str]:
        """Return the ids of all runs that have a folder."""
        ids = {path.name for path in self.root.glob("runs/[!.]*/")}
        for *_, env, algo, folder in (path.parts for path in self.shelf.glob("*/*/*/")):
            ids.add(f"{algo}-{env}-{folder}")
        return sorted(filter(_RUN_ID.fullmatch, ids))

    def artifact(self, run_id: str, scheme: str) -> Path:
        """Return the path of a flatbuffer; its sidecar and evaluations are beside it."""
        return self.artifact_dir(run_id) / f"{scheme}.tflite"

    def report_dir(self, name: str) -> Path:
        """Return the folder of one report."""
        return self.root / "reports" / name

    def working_on(self, run_id: str) -> AbstractContextManager[None]:
        """Lock a run while a block runs; a BusyError where another process works on it."""
        refusal = f"Another process works on this run; wait for it. Received: run={run_id!r}"
        return locked(self.run_dir(run_id), refusal)

    def command(self, line: str) -> str:
        """Return a command line with this workspace's --root, unless it is the current folder."""
        at_root = self.root.resolve() == Path.cwd()
        return line if at_root else f"{line} --root {shlex.quote(str(self.root))}"


def _require_run_id(run_id: str) -> re.Match[str]:
    if (match := _RUN_ID.fullmatch(run_id)) is None:
        raise UsageError(
            "A run id is an algorithm, an environment and a seed, as in dqn-CartPole-v1-s0; "
            f"`quarl list` names the runs. Received: run={run_id!r}"
        )
    return match


def checkpoint_dir(run_folder: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run_folder / "checkpoints"


def delete_checkpoints(run_folder: Path) -> None:
    """Delete the checkpoints of a run; with a replay they take hundreds of megabytes."""
    shutil.rmtree(checkpoint_dir(run_folder), ignore_errors=True)


def sidecar_path(artifact: Path) -> Path:
    """Return the path of a flatbuffer's sidecar."""
    return artifact.with_suffix(".json")


def has_sidecar(artifact: Path) -> bool:
    """Tell whether a sidecar is beside a flatbuffer, and not a description for its adoption."""
    path = sidecar_path(artifact)
    return path.exists() and "run_id" in read_json(path)


def evaluation_path(artifact: Path, chance: Chance = GREEDY) -> Path:
    """Return the path of a flatbuffer's evaluation, one for each `Chance`."""
    return artifact.with_suffix(f".{chance.name}.eval.json" if chance.name else ".eval.json")


def is_evaluated(artifact: Path) -> bool:
    """Tell whether a flatbuffer has an evaluation, of any `Chance`."""
    return any(artifact.parent.glob(f"{artifact.stem}.*eval.json"))


def blame_path(artifact: Path) -> Path:
    """Return the path of a policy's table of int8 errors by layer, beside its flatbuffers."""
    return artifact.with_name("int8.blame.csv")


def reference_path(artifact: Path, sidecar: Sidecar) -> Path:
    """Return the fp32 flatbuffer that one is compared with.

    It is in the same folder or, of a quantisation-aware training, in that of its plain one.
    """
    run = Run.from_dict(sidecar.run)
    reference = artifact.with_name(f"{REFERENCE}.tflite")
    if run.quantization is None or has_sidecar(reference) or is_evaluated(reference):
        return reference
    # `parent` alone is wrong for "." and "..".
    return Path(os.path.abspath(artifact.parent)).parent / run.plain.folder / reference.name


def checked_report_name(name: object) -> str:
    """Return the name of a report; a UsageError where a folder cannot have it."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(
            "The name of a report is a folder's: letters, digits, '_', '.' and '-', the last "
            f"two not at its beginning. Received: name={name!r}"
        )
    return name


def report_name(name: str, chance: Chance) -> str:
    """Return the default name of a report, one for each `Chance`."""
    return f"{name}-{chance.name}" if chance.name else name


def write_artifact(path: Path, content: bytes, sidecar: Sidecar) -> None:
    """Write a flatbuffer and its sidecar.

    The old sidecar is deleted between, so that no sidecar describes another flatbuffer. Where there
    is no room for the new files, the old ones stay.
    """
    old_sidecar = sidecar_path(path)
    with atomic_path(old_sidecar) as new_sidecar, atomic_path(path) as temporary:
        sidecar.save(new_sidecar)
        temporary.write_bytes(content)
        sync(temporary)
        old_sidecar.unlink(missing_ok=True)
