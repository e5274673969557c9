"""Catch the output of native libraries, which bypasses Python."""

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO

#: One thread at a time: a second one would take the first one's file for standard error.
_LOCK = threading.RLock()


@contextmanager
def caught() -> Iterator[Callable[[], str]]:
    """Catch standard error in the block; yield a function that returns it on one line."""
    if getattr(sys, "stderr", None) is None:  # A daemon may have closed it.
        yield str
        return
    with _LOCK, _memory_file() as file, _redirected(2, file, sys.stderr.flush):

        def output() -> str:
            file.seek(0)
            return " ".join(file.read().decode(errors="replace").split())

        yield output


@contextmanager
def _redirected(handle: int, file: IO[bytes], flush: Callable[[], object]) -> Iterator[None]:
    """Write to a file what goes to a handle of the process; flush at both ends of the block."""
    flush()
    copy = os.dup(handle)
    try:
        os.dup2(file.fileno(), handle)
        yield
    finally:
        flush()
        os.dup2(copy, handle)
        os.close(copy)


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
    sys.stdout.flush()
    # C buffers lines if standard output is no terminal.
    flush = partial(ctypes.CDLL(None).fflush, None)
    with caught(), open(os.devnull, "wb") as sink, _redirected(1, sink, flush):
        yield
