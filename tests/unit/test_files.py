"""Files are written atomically."""

import errno
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from samples import Patch, refused

from quarl_tf.foundation import files
from quarl_tf.store.records import TrainingRecord


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with files.atomic_path(path) as temporary:
        temporary.write_bytes(b"content")
        assert not path.exists()
        assert temporary.parent == path.parent  # A rename is atomic within one file system only.
    assert path.read_bytes() == b"content"
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_what_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(failure: type[BaseException]) -> None:
        with files.atomic_path(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise failure

    for failure in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(failure):
            fail(failure)
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            files.write_json(path, {"x": value})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    message = refused(files.write_bytes, path, b"new")
    assert f"Cannot write {path}: No space left on device" in message
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    for folder in ("/dev/null", "/dev/null/deeper", "/proc", "/proc/quarl"):
        assert f"path='{folder}/x'" in refused(files.write_bytes, Path(folder) / "x", b"new")
    assert f"path='{tmp_path}'" in refused(files.sha256, tmp_path)
    path = tmp_path / "nothing.json"
    message = f"No such file or directory). Received: path='{path}'"
    for function in (files.sha256, files.read_json, TrainingRecord.load):
        assert message in refused(function, path)
