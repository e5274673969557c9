"""Catch the output of native libraries, which bypasses Python."""

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

#: One thread at a time: a second one would take the first one's file for standard error.
_LOCK = threading.RLock()


@contextmanager
def caught() -> Iterator[Callable[[], str]]:
    """Catch standard error in the block; yield a function that returns it on one line."""
    if getattr(sys, "stderr", None) is None:  # A daemon may have closed it.
        yield str
        return
    sys.stderr.flush()
    with _LOCK, _memory_file() as file:
        stderr_handle = os.dup(2)
        os.dup2(file.fileno(), 2)

        def output() -> str:
            file.seek(0)
            return " ".join(file.read().decode(errors="replace").split())

        try:
            yield output
        finally:
            sys.stderr.flush()
            os.dup2(stderr_handle, 2)
            os.close(stderr_handle)


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # No folder may be writable.
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()


@contextmanager
def silenced() -> Iterator[None]:
    """Drop all native output in the block, on standard output as well."""
    if getattr(sys, "stdout", None) is None:
        with caught():
            yield
        return
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    with caught(), open(os.devnull, "wb") as sink:
        stdout_handle = os.dup(1)
        os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            # C buffers lines if standard output is no terminal.
            flush(None)
            os.dup2(stdout_handle, 1)
            os.close(stdout_handle)
