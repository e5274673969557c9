"""One job of a study in a process of its own: train, export and evaluate one run.

The task comes as a line of JSON on standard input. What fails is written down and the rest goes on.
Standard input stays open as long as the parent lives: when it ends, however it ended, so does this
process. Nothing is lost, for every file is whole or not there, and training resumes exactly.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from quarl_tf import environments, presets
from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import write_text
from quarl_tf.spec import Run, Scheme
from quarl_tf.store.state import copy_curve, finished_training, not_exported
from quarl_tf.store.workspace import Workspace

#: What a line on standard output begins with that tells how far the job is.
PROGRESS = "progress: "

_SECONDS_BETWEEN = 0.5


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker is to do, as plain values.

    Attributes:
        run: See `Run.to_dict`.
        schemes: To be exported and evaluated; none where the training is all there is to do yet.
        failures: Scheme, or "" for the training, to the file that says why it failed.
        presets: A file of the user's presets.
        modules: Modules that register environments.
        trunk: File of what trainings at other bits share until the delay (`trunks`), if any do.
        cpus: Cores to stay on; none for all.
    """

    root: str
    run: dict[str, Any]
    schemes: list[str]
    episodes: int
    failures: dict[str, str]
    presets: str | None
    modules: list[str]
    trunk: str | None
    cpus: list[int]

    def to_json(self) -> str:
        """Return the task as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Take `to_json` back."""
        return cls(**json.loads(text))


def work(task: Task, update: Update) -> bool:
    """Do a task; return whether all of its steps were done."""
    workspace, run = Workspace(Path(task.root)), Run.from_dict(task.run)
    environments.import_environments(task.modules)
    if not _attempt(Path(task.failures[""]), lambda: _train(workspace, run, task, update)):
        return False
    done = True
    for scheme in task.schemes:
        _tell(f"evaluating {scheme}")
        finish = partial(_export_and_evaluate, workspace, run.run_id, scheme, task.episodes)
        done &= _attempt(Path(task.failures[scheme]), finish)
    return done


def _train(workspace: Workspace, run: Run, task: Task, update: Update) -> None:
    own = None if task.presets is None else Path(task.presets)
    preset = presets.load(run.algo, run.env_id, run.overrides, own)
    if finished_training(workspace, run, preset) is None:
        from quarl_tf.training.loop import train

        trunk = None if task.trunk is None else Path(task.trunk)
        train(workspace, run, update, preset, trunk)


def _export_and_evaluate(workspace: Workspace, run_id: str, scheme: str, episodes: int) -> None:
    from quarl_tf.evaluation.play import evaluate_and_save

    if not_exported(workspace, run_id, [scheme]):
        from quarl_tf.export.convert import export

        export(workspace, run_id, [Scheme.parse(scheme)], lambda *_: None)
    copy_curve(workspace, run_id)
    evaluate_and_save(workspace.artifact(run_id, scheme), episodes)


def _attempt(failure: Path, step: Callable[[], None]) -> bool:
    """Do a step; write down why it failed, if it does."""
    try:
        step()
    except Exception as error:
        name = "" if isinstance(error, QuarlError) else f"{type(error).__name__}: "
        line = " ".join(f"{name}{error}".split())
        write_text(failure, f"{line}\n\n{traceback.format_exc()}")
        return False
    return True


def _tell(how_far: str) -> None:
    print(f"{PROGRESS}{how_far}", flush=True)


class _Teller:
    """Tell on standard output how far the training is, not too often."""

    def __init__(self) -> None:
        self._last = -_SECONDS_BETWEEN

    def __call__(self, done: int, total: int, note: str = "") -> None:
        del note
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN:
            self._last = now
            _tell(f"{min(100, 100 * done // total)} %")


def _end_with_parent() -> None:
    """Wait for the end of standard input, which is the parent's, and end with it."""
    # Not by `sys.stdin`: a lock of its buffer, held here, would hinder an orderly end.
    while os.read(0, 1024):
        pass
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # With the processes of its environments.
    os._exit(1)


def main() -> int:
    """Do the task on standard input; the exit code tells whether all of it was done."""
    received = b""
    while not received.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            return 1
        received += more
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = Task.from_json(received.decode())
    if task.cpus:
        os.sched_setaffinity(0, task.cpus)
    return 0 if work(task, _Teller()) else 1


if __name__ == "__main__":
    sys.exit(main())
