"""Catch what C++ libraries print on standard error past Python: notices no user could act on."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def caught() -> Iterator[Callable[[], str]]:
    """Divert standard error while the block runs.

    Yields:
        A function that returns what was printed so far, on one line.
    """
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
