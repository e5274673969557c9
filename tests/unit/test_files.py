"""Files are written atomically."""

import csv
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import Patch, refused

from quarl_tf.foundation.files import (
    atomic_path,
    read_json,
    sha256,
    write_bytes,
    write_csv,
    write_json,
)
from quarl_tf.store.records import TrainingRecord


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Return a file that no failure may change, alone in its folder."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    yield path
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"content")
        assert not path.exists()
        assert temporary.parent == path.parent  # A rename is atomic within one file system only.
    assert path.read_bytes() == b"content"
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_failing_block_leaves_the_old_file(path: Path, failure: type[BaseException]) -> None:
    def write() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise failure

    with pytest.raises(failure):
        write()


def test_full_disk_leaves_the_old_file_and_is_one_line(path: Path, monkeypatch: Patch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    message = refused(write_bytes, path, b"new")
    assert f"Cannot write {path}: No space left on device" in message


def test_temporary_files_of_killed_processes_are_removed_in_time(tmp_path: Path) -> None:
    path = tmp_path / "file[1].json"
    long_ago = time.time() - 2 * 3600
    old, young = (tmp_path / f".file[1].json.{end}.tmp" for end in ("abcd_123", "efgh_456"))
    foreign = [tmp_path / name for name in (".file1.json.abcd_123.tmp", ".file[1].abcd_123.tmp")]
    for file in (old, young, *foreign):
        file.write_bytes(b"half")
        if file != young:
            os.utime(file, (long_ago, long_ago))
    write_bytes(path, b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([path, young, *foreign])


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/deeper", "/proc", "/proc/quarl"])
def test_folders_that_are_not_writable_are_refused(folder: str) -> None:
    assert f"path='{folder}/x'" in refused(write_bytes, Path(folder) / "x", b"new")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_outside_json_are_not_written(path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": value})


def test_csv_is_read_back_by_the_csv_module(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [{"step": 1, "loss": None, "note": 'a "b", c'}, {"step": 2, "loss": 0.1, "note": "é\n"}]
    for table in (rows, []):
        write_csv(path, table)
        with path.open(newline="") as file:
            read_rows = list(csv.DictReader(file))
        text_rows = [{k: "" if v is None else str(v) for k, v in row.items()} for row in table]
        assert read_rows == text_rows


def test_folders_and_missing_files_are_named(tmp_path: Path) -> None:
    assert f"path='{tmp_path}'" in refused(sha256, tmp_path)
    path = tmp_path / "nothing.json"
    message = f"No such file or directory); name a file that was made. Received: path='{path}'"
    for function in (sha256, read_json, TrainingRecord.load):
        assert message in refused(function, path)
