"""Paths of runs, flatbuffers and reports."""

import errno
from dataclasses import replace
from pathlib import Path

from samples import SIDECAR, Patch, refused

from quarl_tf.store import workspace as paths
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import Workspace, sidecar_path


def test_runs_are_listed_by_their_ids(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    named = "adopted-CartPole-v1-s0-s3"  # An adopted policy may have the name of a seed.
    place = tmp_path / "tflite_models/CartPole-v1/adopted/s0-s3"
    assert workspace.artifact_dir(named) == place
    aware = "dqn-CartPole-v1-s0-1c09e6d5-q4d50-0a1b2c3d"
    ids = ["a2c-a_b-v0-s1", named, aware, "ppo-Foo-s3-v1-s12"]
    # Folders of other names were moved away by hand.
    others = [tmp_path / "runs/old", tmp_path / "tflite_models/CartPole-v1/dqn/backup"]
    for folder in (*map(workspace.artifact_dir, ids), *others):
        folder.mkdir(parents=True)
    assert workspace.run_ids() == ids
    for run_id in ("", "..", "runs/dqn-A-v1-s0", "dqn-A-v1-s0/", "dqn-..-s0"):  # No paths.
        for place in (workspace.run_dir, workspace.artifact_dir):
            message = refused(place, run_id, code=2)
            assert message.endswith(f"Received: run={run_id!r}")


def test_no_sidecar_describes_another_flatbuffer(tmp_path: Path, monkeypatch: Patch) -> None:
    path, blocked = tmp_path / "int8.tflite", tmp_path / "blocked.tflite"
    blocked.mkdir()  # A folder cannot be replaced by a file.
    sidecar_path(blocked).write_text("{}")
    assert "Cannot write" in refused(paths.write_artifact, blocked, b"new", SIDECAR)
    assert list(tmp_path.iterdir()) == [blocked]
    paths.write_artifact(path, b"old", SIDECAR)
    write = Path.write_bytes

    def full(file: Path, content: bytes) -> int:
        if content == b"new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    other = replace(SIDECAR, scheme="int8")
    assert "No space left" in refused(paths.write_artifact, path, b"new", other)
    assert path.read_bytes() == b"old"
    assert Sidecar.load(sidecar_path(path)) == SIDECAR
    assert len(list(tmp_path.iterdir())) == 3
