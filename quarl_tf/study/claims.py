"""Claims on runs, by which workers that share only a file system divide a study.

A claim is a file made exclusively, which works on every file system, unlike locks. Its owner
touches it. One untouched for `SILENCE` is abandoned, and the claim with the next number replaces
it, which again only one worker can make.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from quarl_tf.foundation.files import unwritable

#: Seconds; on network file systems the times of files may be a minute late.
SILENCE = 180.0


class Claims:
    """The claims of one worker on the folders of runs."""

    def __init__(self) -> None:
        self._claims: dict[Path, Path] = {}
        #: Of others' claims: time of the last touch, and when our clock first saw it.
        self._sightings: dict[Path, tuple[int, float]] = {}

    def take(self, folder: Path) -> bool:
        """Claim a run, and tell whether it is ours; a QuarlError where that cannot be written."""
        newest_claim = max(folder.glob("claim.*"), key=_number, default=None)
        if newest_claim is not None and not self._silent(newest_claim):
            return False
        path = folder / f"claim.{0 if newest_claim is None else _number(newest_claim) + 1}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise unwritable(path, error) from error
        self._claims[folder] = path
        return True

    def _silent(self, path: Path) -> bool:
        try:
            touched = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if self._sightings.get(path, (None,))[0] != touched:
            self._sightings[path] = touched, time.monotonic()
        return time.monotonic() - self._sightings[path][1] > SILENCE

    def renew(self) -> None:
        """Touch all claims, except those in deleted folders."""
        for path in self._claims.values():
            with suppress(FileNotFoundError):
                os.utime(path)

    def release(self, folder: Path) -> None:
        """Give up the claim on a run."""
        number = _number(self._claims.pop(folder))
        for claim in folder.glob("claim.*"):
            # A later claim belongs to a worker that took ours for abandoned.
            if _number(claim) <= number:
                claim.unlink(missing_ok=True)

    def release_all(self) -> None:
        """Give up all claims."""
        for folder in list(self._claims):
            self.release(folder)


def _number(claim: Path) -> int:
    return int(claim.suffix[1:])
