"""Catch what native libraries print past Python: notices that no user could act on."""

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def caught() -> Iterator[Callable[[], str]]:
    """Divert standard error while the block runs; yield what returns it so far, on one line."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            return " ".join(file.read().decode(errors="replace").split())

        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def silenced() -> Iterator[None]:
    """Drop what native libraries print, on standard output as well, while the block runs."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    with caught(), open(os.devnull, "wb") as sink:
        kept = os.dup(1)
        os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            # C holds lines back where standard output is no terminal; they would come out later.
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)
