"""Claims on runs, by which workers divide a study whose only link is a file system.

A claim is a file that is made exclusively, which every file system can do, where locks may be
missing or local. Its owner touches it. One that nobody has touched for `SILENCE` is of a worker
that is gone; the claim of the next number takes its place, which again only one can make.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from quarl_tf.foundation.files import unwritable

#: Seconds; a network file system may show the times of files a minute late.
SILENCE = 180.0


class Claims:
    """The claims of one worker on the folders of runs."""

    def __init__(self) -> None:
        self._mine: dict[Path, Path] = {}
        #: When others' claims were touched, and when that was first seen by our clock.
        self._seen: dict[Path, tuple[int, float]] = {}

    def take(self, folder: Path) -> bool:
        """Claim a run; tell whether it is ours. A QuarlError where the folder is not writable."""
        last = max(_claims(folder), default=-1)
        if last >= 0 and not self._silent(folder / f"claim.{last}"):
            return False
        path = folder / f"claim.{last + 1}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise unwritable(path, error) from error
        self._mine[folder] = path
        return True

    def _silent(self, path: Path) -> bool:
        try:
            touched = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if self._seen.get(path, (None,))[0] != touched:
            self._seen[path] = touched, time.monotonic()
        return time.monotonic() - self._seen[path][1] > SILENCE

    def renew(self) -> None:
        """Touch all claims; those of a run folder that was deleted are gone."""
        for path in self._mine.values():
            with suppress(FileNotFoundError):
                os.utime(path)

    def release(self, folder: Path) -> None:
        """Give a run back; what is done of it says so itself."""
        mine = self._mine.pop(folder)
        for number in _claims(folder):
            # A later one is of who took it for abandoned.
            if number <= _number(mine):
                (folder / f"claim.{number}").unlink(missing_ok=True)

    def release_all(self) -> None:
        """Give everything back."""
        for folder in list(self._mine):
            self.release(folder)


def _claims(folder: Path) -> list[int]:
    return [_number(path) for path in folder.glob("claim.*")]


def _number(claim: Path) -> int:
    return int(claim.suffix[1:])
