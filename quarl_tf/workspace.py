"""The folders of a project: where runs, flatbuffers and reports lie, and what is there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quarl_tf import checkpoints
from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.files import read_json, sha256, unwritable, write_bytes
from quarl_tf.presets import Preset
from quarl_tf.records import Sidecar, TrainingRecord
from quarl_tf.spec import REFERENCE, Run


@dataclass(frozen=True)
class Workspace:
    """The folder that holds `runs/`, `tflite_models/` and `reports/`."""

    root: Path

    def run_dir(self, run_id: str) -> Path:
        """Return the folder of one training.

        Raises:
            UsageError: The run id is no name of a folder.
        """
        return self.root / "runs" / _checked_run_id(run_id)

    def artifact_dir(self, run_id: str) -> Path:
        """Return the folder of one training's flatbuffers.

        Raises:
            UsageError: The run id is no name of a folder.
        """
        return self.root / "tflite_models" / _checked_run_id(run_id)

    def artifact(self, run_id: str, scheme: str) -> Path:
        """Return the path of one flatbuffer; its sidecar and evaluations lie beside it."""
        return self.artifact_dir(run_id) / f"{scheme}.tflite"

    def report_dir(self, name: str) -> Path:
        """Return the folder of one report."""
        return self.root / "reports" / name


def _checked_run_id(run_id: str) -> str:
    if run_id in ("", ".", "..") or "/" in run_id or os.sep in run_id:
        name = Path(run_id).name
        hint = f"give {name}" if name not in ("", "..") else "`quarl list` names the runs"
        raise UsageError(
            f"A run id is the name of a run, not a path and without a slash; {hint}. "
            f"Received: run={run_id!r}"
        )
    return run_id


def sidecar_path(artifact: Path) -> Path:
    """Return where the sidecar of a flatbuffer lies."""
    return artifact.with_suffix(".json")


def evaluation_path(artifact: Path, *, sample: bool = False) -> Path:
    """Return where the evaluation of a flatbuffer lies, the one by sampled actions apart."""
    return artifact.with_suffix(".sampled.eval.json" if sample else ".eval.json")


def reference_path(artifact: Path, sidecar: Sidecar) -> Path:
    """Return the fp32 flatbuffer that one is compared with.

    It lies beside it, but for a quantisation-aware training: there it is the plain training's.
    """
    run = Run.from_dict(sidecar.run)
    folder = artifact.parent
    if run.quantization is not None:
        # Of "." and ".." the parent is not the folder that they lie in.
        folder = Path(os.path.abspath(folder)).parent / run.plain.run_id
    return folder / f"{REFERENCE}.tflite"


def checked_report_name(name: object) -> str:
    """Return the name of a report, which is that of its folder.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(
            "The name of a report is a folder's: letters, digits, '.', '_' and '-', beginning with "
            f"a letter or digit. Received: name={name!r}"
        )
    return name


def report_name(name: str, *, sample: bool = False) -> str:
    """Return what a report named after its runs is called, the one on sampled actions apart."""
    return f"{name}-sampled" if sample else name


def write_artifact(path: Path, content: bytes, sidecar: Sidecar) -> None:
    """Write a flatbuffer and its sidecar.

    The old sidecar goes first and the new one comes last: between the two nothing claims that the
    flatbuffer is whole.
    """
    try:
        sidecar_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    write_bytes(path, content)
    sidecar.save(sidecar_path(path))


def finished_training(workspace: Workspace, run: Run, preset: Preset) -> TrainingRecord | None:
    """Return the record of a finished training, or None if it is not finished.

    Checkpoints that it has left, as one does that was killed as it ended, are deleted.

    Raises:
        QuarlError: As `TrainingRecord.finished`.
    """
    folder = workspace.run_dir(run.run_id)
    record = TrainingRecord.finished(folder, run, preset)
    if record is not None:
        checkpoints.delete(folder)
    return record


def training_record(workspace: Workspace, run_id: str) -> TrainingRecord:
    """Return the record of a training that is finished.

    Raises:
        QuarlError: The run does not exist or is not finished.
    """
    folder = workspace.run_dir(run_id)
    if not (folder / "training.json").exists():
        state = "is not finished" if folder.exists() else "does not exist"
        command = "quarl train --algo … --env … --seed …"
        if not folder.exists() and (exported := exported_run(workspace, run_id)):
            state = "is not here, only what was exported of it"
            command = f"{exported.command('train')} --root DIR"
        raise QuarlError(
            f"The run {state}; train it first ({command}). "
            f"Received: run={run_id!r} in {workspace.root.resolve()}"
        )
    return TrainingRecord.load(folder / "training.json")


def not_exported(workspace: Workspace, run_id: str, schemes: Sequence[str]) -> list[str]:
    """Return the schemes whose flatbuffer is missing, damaged or of an earlier network.

    Raises:
        QuarlError: As `training_record`.
    """
    network = training_record(workspace, run_id).network_sha256

    def current(scheme: str) -> bool:
        path = workspace.artifact(run_id, scheme)
        try:
            sidecar = Sidecar.load(sidecar_path(path))
            found = (sidecar.scheme, sidecar.sha256, sidecar.network_sha256)
            return found == (scheme, sha256(path), network)
        except QuarlError:
            return False

    return [scheme for scheme in schemes if not current(scheme)]


def export_command(workspace: Workspace, run_id: str, options: str = "") -> str:
    """Return the command line that exports a run from where we are."""
    root = workspace.root
    here = root.resolve() == Path.cwd()
    return f"quarl export {run_id}{options}" + ("" if here else f" --root {shlex.quote(str(root))}")


def exported_run(workspace: Workspace, run_id: str) -> Run | None:
    """Return the run that the flatbuffers under a run's id are of; None if there are none."""
    for path in sorted(workspace.artifact_dir(run_id).glob("*.tflite")):
        with contextlib.suppress(QuarlError):
            return Run.from_dict(Sidecar.load(sidecar_path(path)).run)
    return None


def reported_runs(workspace: Workspace) -> set[str]:
    """Return the ids of all runs whose results are in a report."""
    found: set[str] = set()
    for path in workspace.report_dir("x").parent.glob("*/results.json"):
        # Whatever else has that name is none of ours.
        with contextlib.suppress(QuarlError, AttributeError, KeyError, TypeError):
            rows = read_json(path)["runs"]
            found |= {row["run_id"] for row in rows if row["status"] == "ok"}
    return found


def is_trained(workspace: Workspace, run_id: str) -> bool:
    """Tell whether a training is finished, or its flatbuffers came without it, as in a clone."""
    folder = workspace.run_dir(run_id)
    if (folder / "run.json").exists():
        return (folder / "training.json").exists()
    return any(workspace.artifact_dir(run_id).glob("*.tflite"))


def require_untaken(workspace: Workspace, run_id: str) -> None:
    """Refuse to begin a training whose flatbuffers would take the place of another one's.

    Raises:
        QuarlError: There are flatbuffers under the run's id and no training, as in a clone of
            published results.
    """
    folder = workspace.artifact_dir(run_id)
    begun = (workspace.run_dir(run_id) / "run.json").exists()
    if not begun and any(folder.glob("*.tflite")):
        raise QuarlError(
            f"{folder} has what an earlier training was exported to, which is not here; work "
            f"elsewhere (--root DIR) or delete that folder. Received: run={run_id!r}"
        )


def copy_curve(workspace: Workspace, run_id: str) -> None:
    """Bring the run's learning curve to its flatbuffers, where the report looks for it."""
    name = "progress.csv"
    try:
        curve = (workspace.run_dir(run_id) / name).read_bytes()
    except FileNotFoundError:
        return  # The report says that there is none.
    copy = workspace.artifact_dir(run_id) / name
    if not copy.exists() or copy.read_bytes() != curve:
        write_bytes(copy, curve)
