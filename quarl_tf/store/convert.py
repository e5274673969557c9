"""Bring the files of an earlier version along: `python -m quarl_tf.store.convert DIR`.

DIR holds `runs/` and `tflite_models/`. Records get today's form, and the folders of flatbuffers
their places by environment and algorithm. What is converted already is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quarl_tf.environments import rules
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import read_json, write_json
from quarl_tf.spec import Quantization, Run
from quarl_tf.store.records import PROTOCOL_VERSION
from quarl_tf.store.workspace import Workspace

_Values = dict[str, Any]


def convert(root: Path) -> int:
    """Convert all records below a folder; return how many were.

    Raises:
        QuarlError: A file cannot be read or written.
    """
    paths = sorted([*root.glob("runs/*/training.json"), *root.glob("tflite_models/**/*.json")])
    former = {path: read_json(path) for path in paths}
    today = {path: record(values) for path, values in former.items()}
    # Evaluations keep a run's id without the run.
    ids = {former[p]["run_id"]: v["run_id"] for p, v in today.items() if v and "run" in v}
    count = 0
    for path, found in today.items():
        if found is None:
            continue
        if "run" not in found:
            found["run_id"] = ids.get(found["run_id"], found["run_id"])
        if found != former[path]:
            write_json(path, found)
            count += 1
    _move(Workspace(root))
    return count


def record(values: _Values) -> _Values | None:
    """Return a record of any version in today's form; None if it is none."""
    kind = next((name for name in _FORMERLY if name in values), None)
    if kind is None:
        return None
    found = dict(_FORMERLY[kind](values))
    if "run" in found:
        found["run"] = _run(found["run"])
        found["run_id"] = Run.from_dict(found["run"]).run_id
    return found


def _training(values: _Values) -> _Values:
    if "commits" in values:
        return values
    return _without(values, "commit", "processor") | {
        "commits": _several(values["commit"]),
        "sources": [],
        "processors": _several(values.get("processor")),
    }


def _sidecar(values: _Values) -> _Values:
    if "trained_commits" in values:
        return values
    return _without(values, "trained_commit", "trained_on") | {
        "action_std": values.get("action_std"),
        "trained_commits": _several(values.get("trained_commit")),
        "trained_on": _several(values.get("trained_on")),
        "sources": "",
    }


def _evaluation(values: _Values) -> _Values:
    if "sources" in values:
        return values
    words = values["protocol"]["action"].split()[0].rstrip(":")
    actions = "random" if values["scheme"] == "random" else words
    return values | {
        "protocol": {
            "version": PROTOCOL_VERSION,
            "actions": actions,
            "game": rules(values["env_id"]),
        },
        "starts": None,
        "processor": values.get("processor", ""),
        "sources": "",
    }


def _run(values: Mapping[str, Any]) -> _Values:
    """Return what was trained in today's form; a quantisation was all its options by name."""
    how = values.get("quantization")
    if how is None or "recipe" in how:
        return dict(values)
    return {**values, "quantization": Quantization.from_mapping(how).to_dict()}


#: A field that only this kind of record has had from the first.
_FORMERLY: dict[str, Callable[[_Values], _Values]] = {
    "selection_return": _training,
    "weight_dtypes": _sidecar,
    "protocol": _evaluation,
}


def _without(values: _Values, *names: str) -> _Values:
    return {name: value for name, value in values.items() if name not in names}


def _several(text: str | None) -> list[str]:
    return text.split("; ") if text else []


def _move(workspace: Workspace) -> None:
    """Put folders of flatbuffers where their run's id says."""
    for sidecar in sorted((workspace.root / "tflite_models").glob("*/*.json")):
        folder = sidecar.parent
        if not folder.exists() or "weight_dtypes" not in (values := read_json(sidecar)):
            continue
        target = workspace.artifact_dir(values["run_id"])
        if target.exists():
            raise QuarlError(
                f"{target} is there already; move one of the two away. Received: {folder}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)


def main(words: Sequence[str]) -> int:
    """Convert the folder that is named."""
    if len(words) != 1 or not Path(words[0]).is_dir():
        print("Name the folder that holds runs/ and tflite_models/.", file=sys.stderr)
        return 2
    try:
        print(f"{convert(Path(words[0]))} records converted")
    except QuarlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
