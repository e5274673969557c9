"""Tell from the files of a workspace what is done and what belongs together."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import read_json, sha256, write_bytes
from quarl_tf.presets import Preset
from quarl_tf.spec import Run
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, delete_checkpoints, sidecar_path


def finished_training(workspace: Workspace, run: Run, preset: Preset) -> TrainingRecord | None:
    """Return the record of a finished training, or None if it is not finished.

    Checkpoints that it has left, as one does that was killed as it ended, are deleted.

    Raises:
        QuarlError: As `TrainingRecord.finished`.
    """
    folder = workspace.run_dir(run.run_id)
    record = TrainingRecord.finished(folder, run, preset)
    if record is not None:
        delete_checkpoints(folder)
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


def refuse_overwrite(workspace: Workspace, run_id: str) -> None:
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
