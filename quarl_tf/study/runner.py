"""Run what a study lacks, in a pool of local processes.

A job is one run that lacks something, in a process of its own: one that crashes or is killed takes
no other along. Jobs share the cores without sharing a core, and what says how many
threads to use is set before NumPy or TensorFlow is loaded. Plain trainings come first, for the
quantisation-aware ones of the same cell and seed are compared with their fp32. Those that differ in
bits alone share their trunk (`trunks`), unless they start together.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from quarl_tf.foundation.display import Update
from quarl_tf.foundation.files import locked, write_text
from quarl_tf.foundation.provenance import import_path
from quarl_tf.spec import REFERENCE, Run, Scheme
from quarl_tf.store.workspace import Workspace
from quarl_tf.study import Experiment, State, Status, Study, failure_path, plan, preset_of, statuses
from quarl_tf.study.trunks import trunk_path
from quarl_tf.study.worker import PROGRESS, Task

#: What libraries read their number of threads from when they are loaded; not OpenBLAS, by which
#: policies act: one thread is fastest there, as the package says for all its processes.
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
_SECONDS_BETWEEN = 0.1
_LINES_OF_A_CRASH = 40


@dataclass(frozen=True)
class _Job:
    """One run that lacks something.

    Attributes:
        schemes: All that the study needs: should the training be made anew, none is whole any more,
            and one that is whole costs nothing.
        after: The plain run whose fp32 has to be evaluated before these; None if it is.
        trained: Whether only export and evaluation are left.
        trunk: File of what it may share with jobs at other bits.
    """

    run: Run
    schemes: tuple[Scheme, ...]
    after: str | None
    trained: bool
    trunk: Path | None


@dataclass
class _Worker:
    """A process at work.

    Attributes:
        training_only: Whether it was told to stop after the training, for others to come first.
        note: How far it said it is.
        said: The last lines of anything else it said.
    """

    job: _Job
    training_only: bool
    slot: int
    process: subprocess.Popen[str]
    started: float = field(default_factory=time.monotonic)
    note: str = ""
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_OF_A_CRASH))

    def __post_init__(self) -> None:
        """Listen from now on."""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        if self.process.stdout is not None:
            with self.process.stdout as lines:
                for line in lines:
                    if line.startswith(PROGRESS):
                        self.note = line.removeprefix(PROGRESS).strip()
                    else:
                        self.said.append(line.rstrip())

    def close(self) -> None:
        """Hear the last words and let go of the process, which has ended."""
        self._listener.join(timeout=1)
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(_cores())


def run(
    workspace: Workspace, study: Study, jobs: int, say: Callable[[str], None], update: Update
) -> list[Status]:
    """Do what is missing of a study; what failed before is tried again.

    Args:
        workspace: Where everything is and goes.
        study: The study.
        jobs: Processes at a time.
        say: Given a line for every job that ends.
        update: Told how many experiments are done.

    Returns:
        How far every experiment is now.

    Raises:
        QuarlError: Another process is running this study, or the workspace cannot be written.
    """
    folder = _own_folder(workspace, study)
    busy = (
        "Another process is running this study; wait for it, or follow it with `quarl study "
        f"status`. Received: study={study.name!r}"
    )
    with locked(folder, busy):
        for one in study.experiments():
            for scheme in (None, one.scheme):
                failure_path(workspace, one.run, scheme).unlink(missing_ok=True)
        _Pool(workspace, study, jobs, say, update).run()
        for left in folder.iterdir():  # Trunks of other code, and what a kill left of one.
            left.unlink(missing_ok=True)
    return plan(workspace, study)


def _own_folder(workspace: Workspace, study: Study) -> Path:
    """Return the folder of the lock and of trunks: beside the runs, which nobody publishes."""
    return workspace.run_dir(f".study-{study.name}")


class _Pool:
    """The jobs that wait and the workers at work."""

    def __init__(
        self,
        workspace: Workspace,
        study: Study,
        jobs: int,
        say: Callable[[str], None],
        update: Update,
    ) -> None:
        self._workspace, self._study = workspace, study
        self._say, self._update = say, update
        found = plan(workspace, study)
        self._total = len(found)
        #: Run id and scheme of what is done.
        self._evaluated = {_key(one) for one in found if one.state == State.EVALUATED}
        self._waiting = _missing_jobs(found, self._trunk)
        # However few are left: networks for images learn other bytes on another number of threads.
        self._slots = jobs
        #: Plain runs whose fp32 was evaluated by this pool.
        self._referenced: set[str] = set()
        self._workers: list[_Worker] = []

    def run(self) -> None:
        """Work until nothing is left that can be done."""
        try:
            while self._start_what_can() or self._workers:
                time.sleep(_SECONDS_BETWEEN)
                for worker in [w for w in self._workers if w.process.poll() is not None]:
                    self._workers.remove(worker)
                    self._end(worker)
                self._tell()
        finally:
            for worker in self._workers:
                # With the processes of its environments.
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
            for worker in self._workers:
                worker.process.wait()
                worker.close()

    def _trunk(self, run: Run) -> Path | None:
        folder = _own_folder(self._workspace, self._study)
        return trunk_path(folder, run, preset_of(self._study, run))

    def _wants_trunk(self, other: _Job) -> bool:
        """Tell whether a job that waits or is at work has the trunk of another."""
        waiting = [job for job in self._waiting if not job.trained]
        jobs = [*waiting, *(worker.job for worker in self._workers)]
        return any(job.trunk == other.trunk for job in jobs)

    def _start_what_can(self) -> bool:
        """Start jobs while there are free slots; return whether one was started."""
        started = False
        while len(self._workers) < self._slots:
            job = self._next()
            if job is None:
                break
            self._waiting.remove(job)
            self._start(job)
            started = True
        return started

    def _next(self) -> _Job | None:
        """Return the first job that can be done, or be trained while it waits for another."""
        free = [job for job in self._waiting if job.after is None]
        coming = {w.job.run.run_id for w in self._workers} | {j.run.run_id for j in self._waiting}
        early = [job for job in self._waiting if not job.trained and job.after in coming]
        return next(iter([*free, *early]), None)

    def _start(self, job: _Job) -> None:
        slot = min(set(range(self._slots)) - {worker.slot for worker in self._workers})
        schemes = () if job.after else job.schemes
        shares = job.trunk is not None and (job.trunk.exists() or self._wants_trunk(job))
        task = Task(
            root=str(self._workspace.root),
            run=job.run.to_dict(),
            schemes=[scheme.name for scheme in schemes],
            episodes=self._study.episodes,
            failures={
                name: str(failure_path(self._workspace, job.run, scheme))
                for name, scheme in [("", None), *((s.name, s) for s in schemes)]
            },
            presets=None if self._study.presets is None else str(self._study.presets),
            modules=list(self._study.modules),
            trunk=str(job.trunk) if shares else None,
            cpus=_share(slot, self._slots),
        )
        process = subprocess.Popen(
            # -P: not by whatever package of this name lies in the current folder.
            [sys.executable, "-P", "-m", "quarl_tf.study.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **_thread_limits(self._slots), "PYTHONPATH": import_path()},
            # A group of its own: Ctrl-C is for the parent, which then ends the whole group.
            start_new_session=True,
        )
        worker = _Worker(job, bool(job.after), slot, process)
        self._workers.append(worker)
        if process.stdin is not None:
            # One that has died already is found by its end.
            with suppress(BrokenPipeError):
                process.stdin.write(task.to_json() + "\n")
                process.stdin.flush()

    def _end(self, worker: _Worker) -> None:
        """Say how a job ended, put back what is left of it, let go on what waited for it."""
        worker.close()
        job, run_id = worker.job, worker.job.run.run_id
        if job.trunk is not None and not self._wants_trunk(job):
            job.trunk.unlink(missing_ok=True)
        found = self._statuses(job)
        left = _unfinished(found)
        untrained = any(one.state == State.MISSING for one in found)
        if left and (untrained or not worker.training_only):
            self._write_down_a_crash(worker, None if untrained else left[0])
            found = self._statuses(job)
            left = _unfinished(found)
        evaluated = {_key(one) for one in found if one.state == State.EVALUATED}
        fresh = [scheme for _, scheme in sorted(evaluated - self._evaluated)]
        self._evaluated = (self._evaluated - set(map(_key, found))) | evaluated
        if (run_id, REFERENCE) in evaluated:
            self._referenced.add(run_id)
            self._waiting = [self._released(one) for one in self._waiting]
        if left:
            rest = replace(job, schemes=tuple(left), trained=True)
            self._waiting.insert(0, self._released(rest))
        seconds = f"{time.monotonic() - worker.started:.0f} s"
        for reason in dict.fromkeys(one.reason for one in found if one.state == State.FAILED):
            self._say(f"failed    {run_id}  ({seconds}; {reason})")
        if fresh:
            self._say(f"evaluated {run_id}  ({seconds}; {', '.join(fresh)})")
        elif worker.training_only and left:
            self._say(f"trained   {run_id}  ({seconds})")

    def _released(self, job: _Job) -> _Job:
        return replace(job, after=None) if job.after in self._referenced else job

    def _statuses(self, job: _Job) -> list[Status]:
        experiments = [Experiment(job.run, scheme) for scheme in job.schemes]
        return statuses(self._workspace, self._study, experiments)

    def _write_down_a_crash(self, worker: _Worker, scheme: Scheme | None) -> None:
        """Write down why a worker ended without a word."""
        code = worker.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = "\n".join([f"The process {how} before it was done.", "", *worker.said, ""])
        path = failure_path(self._workspace, worker.job.run, scheme)
        write_text(path, text)

    def _tell(self) -> None:
        running = ", ".join(f"{w.job.run.run_id} {w.note}".strip() for w in self._workers)
        self._update(len(self._evaluated), self._total, running)


def _missing_jobs(found: Sequence[Status], trunk: Callable[[Run], Path | None]) -> list[_Job]:
    """Return a job for every run that lacks something, plain ones first."""
    by_run: dict[str, list[Status]] = {}
    for one in found:
        by_run.setdefault(one.experiment.run.run_id, []).append(one)
    evaluated = {_key(one) for one in found if one.state == State.EVALUATED}
    jobs = []
    for of_run in by_run.values():
        lacking = {one.state for one in of_run} - {State.EVALUATED}
        if not lacking:
            continue
        run = of_run[0].experiment.run
        has_reference = (run.plain.run_id, REFERENCE) in evaluated
        jobs.append(
            _Job(
                run=run,
                schemes=tuple(one.experiment.scheme for one in of_run),
                after=None if run.quantization is None or has_reference else run.plain.run_id,
                trained=lacking <= {State.TRAINED, State.EXPORTED},
                trunk=trunk(run),
            )
        )
    return sorted(jobs, key=lambda job: job.run.quantization is not None)


def _key(status: Status) -> tuple[str, str]:
    return status.experiment.run.run_id, status.experiment.scheme.name


def _unfinished(found: Sequence[Status]) -> list[Scheme]:
    ended = (State.EVALUATED, State.FAILED)
    return [one.experiment.scheme for one in found if one.state not in ended]


def _cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _share(slot: int, size: int) -> list[int]:
    """Return the cores of one of so many workers; none where there are too few."""
    cores = _cores()
    if size > len(cores):
        return []
    return cores[slot * len(cores) // size : (slot + 1) * len(cores) // size]


def _thread_limits(size: int) -> dict[str, str]:
    """Return the environment in which libraries use no more threads than a worker's cores."""
    threads = str(max(1, len(_cores()) // size))
    return dict.fromkeys(_THREADS, threads)
