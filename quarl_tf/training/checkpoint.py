"""Checkpoints of a training: one `.npz` each, whole or absent, the newest two kept.

A zip archive carries a checksum of every member, by which a damaged file is found.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.files import atomic_path

_KEPT = 2
_STATE = "state.json"

#: What reading a damaged archive ends in; RuntimeError where it suddenly seems to be encrypted.
_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile)


def save(folder: Path, step: int, arrays: Mapping[str, npt.NDArray[Any]], state: Any) -> Path:
    """Write the checkpoint of a step, then delete all but it and the one before."""
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    path = folder / f"{step:012d}.npz"
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, **{_STATE: text})  # type: ignore[arg-type]
    checkpoints = _newest_first(folder)
    place = checkpoints.index(path)
    # A training goes on from the newest good one: those of later steps are damaged.
    for superseded in checkpoints[:place] + checkpoints[place + _KEPT :]:
        superseded.unlink(missing_ok=True)
    return path


def load_newest(folder: Path) -> tuple[dict[str, npt.NDArray[Any]], Any] | None:
    """Return arrays and state of the newest checkpoint that is not damaged, or None."""
    return next(filter(None, map(load, _newest_first(folder))), None)


def load(path: Path) -> tuple[dict[str, npt.NDArray[Any]], Any] | None:
    """Return arrays and state of a checkpoint, or None if it is damaged or not there."""
    try:
        with zipfile.ZipFile(path) as archive:
            # NumPy reads as far as an array's header says; the checksum is at the very end.
            if archive.testzip() is not None:
                return None
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return arrays, json.loads(arrays.pop(_STATE).tobytes())
    except _DAMAGE:
        return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"), reverse=True)
