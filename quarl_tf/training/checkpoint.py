"""Checkpoints of a training: atomic `.npz` files, of which the newest two are kept.

Checksums of the zip archive reveal damaged files. To continue on another machine, a checkpoint can
be saved without its large parts.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import atomic_path, sha256
from quarl_tf.presets import OffPolicyPreset, Preset
from quarl_tf.spec import Origin, Run
from quarl_tf.store.state import require_same_settings
from quarl_tf.store.workspace import checkpoint_dir

#: Largest size in bytes of a checkpoint that is saved to continue elsewhere.
LIMIT = 20_000_000
#: Checkpoints in a folder.
_COUNT = 2
_STATE = "state.json"
#: Arrays and state.
Content = tuple[dict[str, npt.NDArray[Any]], Any]

#: Errors on reading a damaged archive; RuntimeError where it seems to be encrypted.
_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def save(folder: Path, step: int, arrays: Mapping[str, npt.NDArray[Any]], state: Any) -> Path:
    """Write the checkpoint of a step, then delete all others but the one before."""
    path = folder / f"{step:012d}.npz"
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, **{_STATE: _json_bytes(state)})  # type: ignore[arg-type]
    checkpoints = _newest_first(folder)
    position = checkpoints.index(path)
    # Training resumed from the newest good one: those of later steps are damaged.
    for superseded in checkpoints[:position] + checkpoints[position + _COUNT :]:
        superseded.unlink(missing_ok=True)
    return path


def _json_bytes(state: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def save_to_go_on(run_folder: Path, file: Path) -> Run:
    """Save a run's newest checkpoint to a file to continue from; return the run that continues.

    The replay, copies of the network and the best network are left out. A QuarlError where there is
    no checkpoint, or where it is too large.
    """
    folder = checkpoint_dir(run_folder)
    content = load_newest(folder)
    if content is None:
        raise QuarlError(
            "There is no checkpoint: the run is not here (--root), has not reached its first "
            "(checkpoint_every of its preset), or is finished, and --from takes its id. "
            f"Received: folder={str(folder)!r}"
        )
    arrays, state = content
    lacking = {name for name in arrays if name.startswith(("replay/", "best/"))}
    lacking |= set(state.get("copies", ()))  # Earlier versions lack this.
    arrays = {name: array for name, array in arrays.items() if name not in lacking}
    state |= {"best": [float("-inf"), state["step"]], "lacking": sorted(lacking)}
    with atomic_path(file) as temporary:
        with temporary.open("wb") as target:
            np.savez_compressed(target, **arrays, **{_STATE: _json_bytes(state)})  # type: ignore[arg-type]
        if (size := temporary.stat().st_size) > LIMIT:
            raise QuarlError(
                f"The checkpoint is larger than {LIMIT:,} bytes; copy the run folder instead. "
                f"Received: bytes={size:,}"
            )
    run = Run.from_dict(state["run"])
    return replace(run, origin=Origin(run, sha256(file), state["step"], str(file)))


def load_to_go_on(file: Path) -> Content:
    """Return the content of a checkpoint saved to continue from; else a QuarlError."""
    content = load(file)
    if content is None or "lacking" not in content[1]:
        raise QuarlError(
            "This is no whole file of `quarl checkpoint save`; name one, or save it again. "
            f"Received: path={str(file)!r}{'' if file.exists() else ', which does not exist'}"
        )
    return content


def going_on(file: Path, run: Run, preset: Preset) -> Run:
    """Return the run that continues a saved one; a QuarlError if settings differ."""
    _, state = load_to_go_on(file)
    require_same_settings(file, state, run, preset, "give the same ones")
    saved_run = Run.from_dict(state["run"])
    if run.seed != saved_run.seed:
        raise UsageError(
            f"A saved training continues with its own seed; give --seed {saved_run.seed}. "
            f"Received: seed={run.seed}"
        )
    steps_left = preset.steps - state["step"]
    if isinstance(preset, OffPolicyPreset) and steps_left <= preset.learning_starts:
        raise UsageError(
            "A saved training fills its replay anew and would end before it learns again; save an "
            f"earlier checkpoint. Received: {steps_left} steps left, of which learning_starts="
            f"{preset.learning_starts} fill the replay"
        )
    return replace(run, origin=Origin(saved_run, sha256(file), state["step"], str(file)))


def load_newest(folder: Path) -> Content | None:
    """Return the content of the newest undamaged checkpoint, or None.

    A QuarlError if one cannot be opened: passed over, it would be deleted by the next `save`.
    """
    paths = _newest_first(folder)
    for path in paths:
        try:
            path.open("rb").close()
        except OSError as error:
            raise QuarlError(
                f"A checkpoint cannot be opened ({error.strerror or error}); repeat the command, "
                f"or delete the file to resume from an earlier one. Received: path={str(path)!r}"
            ) from error
    return next(filter(None, map(load, paths)), None)


def load(path: Path) -> Content | None:
    """Return the content of a checkpoint, or None if it is damaged or missing."""
    try:
        with zipfile.ZipFile(path) as archive:
            # NumPy may stop reading before the checksum at the end of a member.
            if archive.testzip() is not None:
                return None
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return arrays, json.loads(arrays.pop(_STATE).tobytes())
    except _DAMAGE:
        return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"), reverse=True)
