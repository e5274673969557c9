"""Atomic files: each is written under a temporary name, then renamed; one that exists is whole."""

import contextlib
import csv
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quarl_tf.foundation.errors import BusyError, QuarlError


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which is renamed to it if the block succeeds.

    A QuarlError where the folder is not writable; then no file remains.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            sync(temporary)
            temporary.chmod(0o644)  # mkstemp creates private files.
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def require_writable(path: Path) -> None:
    """Create a file's folder; a QuarlError where the file cannot be written."""
    if path.is_dir():
        raise QuarlError(f"Name a file; this is a folder. Received: path={str(path)!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> QuarlError:
    """Return the error for a file or folder that cannot be written."""
    return QuarlError(
        f"Cannot write {path}: {error.strerror or error}; make the folder writable, free some "
        f"space, or work in another folder. Received: path={str(path)!r}"
    )


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; a ValueError for NaN and infinities."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with a header atomically."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, buffer.getvalue())


def read_bytes(path: Path) -> bytes:
    """Read a file, or raise a QuarlError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise QuarlError(
            f"{path} cannot be read ({error.strerror or error}). Received: path={str(path)!r}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a QuarlError if the file is missing or damaged."""
    content = read_bytes(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise QuarlError(
            f"{path} cannot be read as JSON ({error}); delete it and run again what made it. "
            f"Received: path={str(path)!r}"
        ) from error
    if not isinstance(value, dict):
        raise QuarlError(f"{path} holds no JSON object. Received: {type(value).__name__}")
    return value


def sha256(path: Path) -> str:
    """Return the hash of a file's content; a QuarlError if it cannot be read."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


@contextlib.contextmanager
def locked(folder: Path, refusal: str) -> Iterator[None]:
    """Create and lock a folder while the block runs; a BusyError(`refusal`) if it is locked.

    The lock ends with the process at the latest.
    """
    import fcntl  # Of POSIX systems; acting needs none.

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(refusal) from error
        except OSError:
            pass  # Some file systems, such as NFS, cannot lock folders: work unlocked.
        yield
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Tell whether a process works in a folder that it has `locked`; creates the folder."""
    try:
        with locked(folder, ""):
            return False
    except BusyError:
        return True


def digest(values: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that identify JSON-ready values."""
    canonical = json.dumps(dict(values), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]
