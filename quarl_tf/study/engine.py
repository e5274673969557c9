"""Run what a study lacks: a pool of `quarl run`, on this machine or on a Ray cluster.

The unit is one run in all its schemes, a process of its own that goes on where it was. A quantised
run starts once its plain reference is done. What a run says lies in its folder, as `run.log`, and
as `failure.log` if it failed.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import locked
from quarl_tf.foundation.provenance import import_path
from quarl_tf.spec import REFERENCE
from quarl_tf.store.state import State
from quarl_tf.store.workspace import Workspace
from quarl_tf.study.file import Study
from quarl_tf.study.status import Status, failure_path, plan

#: What libraries read their number of threads from when they are loaded.
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
_SECONDS_BETWEEN = 0.2
_PR_SET_PDEATHSIG = 1

#: How often Ray starts a task again whose node or worker was lost.
_RETRIES = 20


@dataclass(frozen=True)
class Job:
    """A run that lacks something.

    Attributes:
        command: What does it, without the interpreter.
        log: Where it says what it does.
        after: The plain run that comes first; None if its fp32 is evaluated.
    """

    run_id: str
    command: tuple[str, ...]
    log: Path
    after: str | None


class Engine(Protocol):
    """What runs jobs: this machine or a cluster."""

    def has_room(self) -> bool:
        """Tell whether another job may be started."""

    def start(self, job: Job) -> None:
        """Start a job."""

    def ended(self) -> list[tuple[Job, int]]:
        """Return the jobs that have ended since the last call, with their exit codes."""

    def stop(self) -> None:
        """End all that is running."""


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def run(
    workspace: Workspace, study: Study, engine: Engine, say: Callable[[str], None], update: Update
) -> list[Status]:
    """Do what is missing of a study, what failed before as well; return how far all is now.

    `say` is given a line for every job that ends, `update` how many experiments are done.

    Raises:
        QuarlError: Another process is running this study, or the workspace cannot be written.
    """
    busy = (
        "Another process is running this study; wait for it, or follow it with `quarl study "
        f"status`. Received: study={study.name!r}"
    )
    with locked(workspace.run_dir(f".study-{study.name}"), busy):
        for one in study.experiments():
            failure_path(workspace, one.run).unlink(missing_ok=True)
        found = plan(workspace, study)
        done = sum(one.state == State.EVALUATED for one in found)
        schemes = Counter(one.run.run_id for one in found)
        waiting, running = _jobs(workspace, study, found), set[str]()
        try:
            while waiting or running:
                names = {job.run_id for job in waiting} | running
                for job in [job for job in waiting if job.after not in names]:
                    if not engine.has_room():
                        break
                    waiting.remove(job)
                    running.add(job.run_id)
                    engine.start(job)
                for job, code in engine.ended():
                    running.remove(job.run_id)
                    done += 0 if code else schemes[job.run_id]
                    say(_ending(job, code))
                    for other in [one for one in waiting if code and one.after == job.run_id]:
                        waiting.remove(other)
                        say(f"waiting   {other.run_id}  (its reference failed)")
                update(done, len(found), ", ".join(sorted(running)))
                time.sleep(_SECONDS_BETWEEN)
        finally:
            engine.stop()
    return plan(workspace, study)


def _jobs(workspace: Workspace, study: Study, found: Sequence[Status]) -> list[Job]:
    """Return a job for every run that lacks something, plain ones first."""
    lacking = {one.run.run_id for one in found if one.state != State.EVALUATED}
    compared_with = {
        one.run.run_id
        for one in found
        if one.scheme.name == REFERENCE and one.state == State.EVALUATED
    }
    jobs = []
    for run in {one.run.run_id: one.run for one in found if one.run.run_id in lacking}.values():
        schemes = [one.scheme.name for one in found if one.run.run_id == run.run_id]
        words = [*shlex.split(run.command("run"))[1:], "--schemes", ",".join(schemes)]
        words += ["--episodes", f"{study.episodes + study.skip_episodes}", "--no-report"]
        # -P: not by whatever package of this name lies in the current folder.
        command = ("-P", "-m", "quarl_tf.cli", *words, "--root", f"{workspace.root.resolve()}")
        first = run.quantization is None or run.plain.run_id in compared_with
        log = failure_path(workspace, run).with_name("run.log")
        jobs.append(Job(run.run_id, command, log, None if first else run.plain.run_id))
    return sorted(jobs, key=lambda job: job.after is not None)


def _ending(job: Job, code: int) -> str:
    """Keep the log of a job that failed as such; return a line on how it ended."""
    if code == 0:
        return f"done      {job.run_id}"
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as log:
        log.write("" if code > 0 else f"quarl: {how}\n")
    failure = job.log.with_name("failure.log")
    job.log.replace(failure)
    return f"failed    {job.run_id}  ({how}; {failure})"


class LocalEngine:
    """Processes on this machine, each with its share of the cores."""

    def __init__(self, jobs: int) -> None:
        """Keep how many may run at a time."""
        self._jobs = jobs
        self._running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}

    def has_room(self) -> bool:
        """Tell whether a slot is free."""
        return len(self._running) < self._jobs

    def start(self, job: Job) -> None:
        """Start a job in the first free slot, on the cores of that slot."""
        slot = min(set(range(self._jobs)) - set(self._running))
        cores = available_cores()
        mine = cores[slot * len(cores) // self._jobs : (slot + 1) * len(cores) // self._jobs]
        if self._jobs > len(cores):
            mine = []
        threads = max(1, len(cores) // self._jobs)
        self._running[slot] = job, start_process(job, threads, mine)

    def ended(self) -> list[tuple[Job, int]]:
        """Return the jobs that have ended, with their exit codes."""
        codes = {slot: process.poll() for slot, (_, process) in self._running.items()}
        return [(self._running.pop(slot)[0], n) for slot, n in codes.items() if n is not None]

    def stop(self) -> None:
        """Kill what is running; it goes on from its checkpoints."""
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()


def start_process(job: Job, threads: int, cores: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a job's process, which ends with this one, on some cores or on all."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    limits = dict.fromkeys(_THREADS, str(threads))
    library = ctypes.CDLL(None)

    def prepare() -> None:
        # Killed with its parent, however that ends: another one will go on with the run.
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, cores)

    with job.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **limits, "PYTHONPATH": import_path()},
            # A group of its own: Ctrl-C is for the parent, which then ends the whole group.
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509
        )


class RayEngine:
    """Tasks on a Ray cluster, whose nodes share the workspace's folder under one path.

    A task whose node or worker is lost starts again elsewhere, and goes on from its checkpoints.
    """

    def __init__(self, address: str | None, cores: int) -> None:
        """Connect, or without an address start a cluster of this machine.

        Raises:
            QuarlError: Ray is not installed, or there is no cluster.
        """
        try:
            import ray
        except ImportError as error:
            raise QuarlError(
                "A study on a cluster needs Ray; install it on every node with "
                f"`pip install 'quarl-tf[cluster]'`. Received: {error}"
            ) from error
        self._ray, self._running = ray, dict[Any, Job]()
        environment = {"env_vars": {"PYTHONPATH": import_path()}}
        try:
            ray.init(address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise QuarlError(
                "There is no Ray cluster at this address; start one with `ray start --head`. "
                f"Received: address={address!r} ({error})"
            ) from error

        def work(job: Job) -> int:
            return start_process(job, cores).wait()

        self._task = ray.remote(num_cpus=cores, max_retries=_RETRIES)(work)

    def has_room(self) -> bool:
        """Tell that Ray has: it keeps what waits for cores."""
        return True

    def start(self, job: Job) -> None:
        """Hand a job to the cluster."""
        self._running[self._task.remote(job)] = job

    def ended(self) -> list[tuple[Job, int]]:
        """Return the jobs that have ended, with their exit codes."""
        if not self._running:
            return []
        waiting = list(self._running)
        ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        return [(self._running.pop(one), self._code(one)) for one in ready]

    def _code(self, task: Any) -> int:
        """Return the exit code of a task that has ended; 1 where the cluster gave it up."""
        try:
            return int(self._ray.get(task))
        except self._ray.exceptions.RayError:
            return 1

    def stop(self) -> None:
        """Cancel what is running, and leave the cluster."""
        for one in self._running:
            self._ray.cancel(one, force=True)
        self._ray.shutdown()
