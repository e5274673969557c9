"""Run the missing experiments of a study: processes of `quarl`, here or on a Ray cluster.

A job is one run in all its schemes, which resumes where it stopped. A quantised run starts after
its plain reference. The output is in the run's folder: `run.log`, or `failure.log` if it failed.
"""

import ctypes
import errno
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import BusyError, QuarlError
from quarl_tf.foundation.files import is_locked, unwritable, write_bytes
from quarl_tf.foundation.provenance import available_cores, import_path
from quarl_tf.spec import REFERENCE
from quarl_tf.store.state import State, exported_run, require_origin
from quarl_tf.store.workspace import Workspace
from quarl_tf.study import Status, failure_path, plan
from quarl_tf.study.claims import Claims
from quarl_tf.study.file import Study

#: Environment variables from which libraries read their number of threads.
_THREADS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)
_POLL_SECONDS = 0.2
_SHARD_POLL_SECONDS = 2.0  #: A shard reads the files of all waiting jobs.
_NODE_POLL_SECONDS = 2.0

#: The command `quarl`; -P ignores a package of this name in the current folder.
_QUARL = ("-P", "-m", "quarl_tf.cli")
_PR_SET_PDEATHSIG = 1


class Job(NamedTuple):
    """A run with missing experiments.

    Attributes:
        command: Command line without the interpreter.
        log: File of its output.
        reference_id: The plain run, or the one to start from, that has to end first; None where its
            fp32 is evaluated.
        folders: Folders it reads and writes, below the root; its own first.
    """

    run_id: str
    command: tuple[str, ...]
    log: Path
    reference_id: str | None
    folders: tuple[Path, ...] = ()


def run(
    workspace: Workspace,
    study: Study,
    engine: "LocalEngine | RayEngine",
    say: Callable[[str], None],
    update: Update,
    shard: tuple[int, int] | None = None,
) -> list[Status]:
    """Run the missing and failed experiments of a study; return the new status of all.

    An engine has `slots`, the largest number of jobs at once, and `start`, `ended` and `stop`.
    `say` gets a line for every job that ends, `update` the number of evaluated experiments. With
    a `shard`, (i, n), this is one of n workers that share the workspace: each starts with its part
    of the runs, continues with unclaimed ones, and waits until all are done.

    A QuarlError where the workspace is not writable.
    """
    claims = Claims()
    try:
        pool = _Pool(workspace, study, engine, say, claims, shard)
        while pool.waiting or pool.running:
            pool.start()
            pool.collect()
            update(pool.done.total(), pool.total, ", ".join(sorted(pool.running)))
            time.sleep(_POLL_SECONDS if shard is None else _SHARD_POLL_SECONDS)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOMEM):
            raise QuarlError(
                f"No more processes can be started; run fewer at a time. Received: {error}"
            ) from error
        if error.filename is None:  # Not of a file, as a closed pipe.
            raise
        raise unwritable(workspace.root, error) from error
    finally:
        engine.stop()
        claims.release_all()
    return plan(workspace, study)


class _Pool:
    """The unfinished jobs of a study: those that wait, and those that run here."""

    def __init__(
        self,
        workspace: Workspace,
        study: Study,
        engine: "LocalEngine | RayEngine",
        say: Callable[[str], None],
        claims: Claims,
        shard: tuple[int, int] | None,
    ) -> None:
        """Read the progress; a shard starts with its part, and retries no failures but its own."""
        self._workspace, self._study, self._engine, self._say = workspace, study, engine, say
        runs = {run.run_id: run for run, _ in study.experiments()}
        number, workers = shard or (1, 1)
        turn = {run_id: (i - number + 1) % workers for i, run_id in enumerate(runs)}
        if any(run.origin for run in runs.values()):
            # Another network to start from is refused before a failure is forgotten.
            _jobs(workspace, study, plan(workspace, study))
        for run_id, run in runs.items():
            if turn[run_id] == 0:
                failure_path(workspace, run).unlink(missing_ok=True)
        statuses = plan(workspace, study)
        self._claims, self._sharing = claims, shard is not None
        #: Numbers of evaluated experiments by run.
        self.done = Counter(s.run.run_id for s in statuses if s.state == State.EVALUATED)
        self.total = len(statuses)
        self.running: set[str] = set()
        self.waiting = sorted(_jobs(workspace, study, statuses), key=lambda job: turn[job.run_id])

    def start(self) -> None:
        """Start jobs that are ready and unclaimed while the engine has room."""
        self._claims.renew()
        unfinished = {job.run_id for job in self.waiting} | self.running
        for job in [job for job in self.waiting if job.reference_id not in unfinished]:
            if len(self.running) >= self._engine.slots:
                break
            if self._admit(job):
                self.waiting.remove(job)
                self.running.add(job.run_id)
                self._engine.start(job)

    def _admit(self, job: Job) -> bool:
        """Tell whether to start a job; claim it where workers share, settle one that has ended."""
        folder = job.log.parent
        self._claims.renew()
        if is_locked(folder) or (self._sharing and not self._claims.take(folder)):
            return False
        statuses = plan(self._workspace, self._study, job.run_id)
        failed = any(status.failure is not None for status in statuses)
        if not failed and (origin := statuses[0].run.origin) is not None:
            try:
                require_origin(self._workspace, origin)
            except QuarlError as error:  # It was trained since the study began.
                failed = True
                job.log.write_text(f"quarl: {error}\n")
                self._say(_ending(job, 1))
        to_do = not failed and any(status.state != State.EVALUATED for status in statuses)
        if not to_do:
            if self._sharing:
                self._claims.release(folder)
            self.waiting.remove(job)
            self._settle(job, statuses, failed=failed)
        return to_do

    def collect(self) -> None:
        for job, code in self._engine.ended():
            self.running.remove(job.run_id)
            if code == BusyError.exit_code:  # Another process works on it.
                self.waiting.append(job)
            else:
                self._say(_ending(job, code))
                self._settle(job, plan(self._workspace, self._study, job.run_id), failed=code != 0)
            if self._sharing:  # Last, so that other workers see how it ended.
                self._claims.release(job.log.parent)

    def _settle(self, job: Job, statuses: Sequence[Status], *, failed: bool) -> None:
        """Count the evaluated experiments of a job; drop the jobs whose reference is missing."""
        evaluated = [s.scheme.name for s in statuses if s.state == State.EVALUATED]
        self.done[job.run_id] = len(evaluated)
        known = REFERENCE in evaluated or exported_run(self._workspace, job.run_id) is not None
        if not failed or known:
            return
        for dependent in [other for other in self.waiting if other.reference_id == job.run_id]:
            self.waiting.remove(dependent)
            self._say(f"waiting   {dependent.run_id}  (its reference failed)")


def commands(workspace: Workspace, study: Study) -> list[str]:
    """Return the command lines of all runs with missing experiments, as a study starts them."""
    jobs = _jobs(workspace, study, plan(workspace, study))
    return [f"quarl {shlex.join(job.command[len(_QUARL) :])}" for job in jobs]


def _jobs(workspace: Workspace, study: Study, statuses: Sequence[Status]) -> list[Job]:
    """Return a job for every run with missing experiments, first those that wait for no other."""
    statuses_by_run: dict[str, list[Status]] = {}
    for status in statuses:
        statuses_by_run.setdefault(status.run.run_id, []).append(status)
    evaluated = {(s.run.run_id, s.scheme.name) for s in statuses if s.state == State.EVALUATED}
    jobs: list[Job] = []
    for run_id, of_run in statuses_by_run.items():
        if all(status.state == State.EVALUATED for status in of_run):
            continue
        run = of_run[0].run
        if run.origin is not None:
            require_origin(workspace, run.origin)
        schemes = ",".join(status.scheme.name for status in of_run)
        words = [*shlex.split(run.command("run"))[1:], "--schemes", schemes, "--no-report"]
        words += ["--root", str(workspace.root.resolve()), *study.chance.option.split()]
        words += ["--episodes", f"{study.episodes + study.skip_episodes}"]
        paths = [workspace.run_dir(run_id), workspace.artifact_dir(run_id)]
        needed_id = None if run.needed is None else run.needed.run_id
        if needed_id is not None:
            paths.append(workspace.artifact_dir(needed_id))
            if run.origin is not None:
                paths.append(workspace.run_dir(needed_id))
        waits = needed_id in statuses_by_run and (needed_id, REFERENCE) not in evaluated
        log = workspace.run_dir(run_id) / "run.log"
        folders = tuple(path.relative_to(workspace.root) for path in paths)
        jobs.append(Job(run_id, (*_QUARL, *words), log, needed_id if waits else None, folders))
    return sorted(jobs, key=lambda job: job.reference_id is not None)


def _ending(job: Job, code: int) -> str:
    """Return a line on how a job ended; the log of a failed one becomes its `failure.log`."""
    if code == 0:
        return f"done      {job.run_id}"
    cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    with job.log.open("a") as log:
        log.write("" if code > 0 else f"quarl: {cause}\n")
    failure = job.log.replace(job.log.with_name("failure.log"))
    return f"failed    {job.run_id}  ({cause}; {failure})"


class LocalEngine:
    """Processes on this machine, at most `slots` at once, each with its share of the cores."""

    def __init__(self, jobs: int) -> None:
        self.slots = jobs
        self._running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}

    def start(self, job: Job) -> None:
        """Start a job in the first free slot, on that slot's cores."""
        slot = min(set(range(self.slots)) - set(self._running))
        cores = available_cores()
        share = slice(slot * len(cores) // self.slots, (slot + 1) * len(cores) // self.slots)
        slot_cores = cores[share] if self.slots <= len(cores) else []
        threads = max(1, len(cores) // self.slots)
        self._running[slot] = job, start_process(job, threads, slot_cores)

    def ended(self) -> list[tuple[Job, int]]:
        """Return the jobs that have ended, with their exit codes."""
        slots = [slot for slot, (_, process) in self._running.items() if process.poll() is not None]
        ended = [self._running.pop(slot) for slot in slots]
        return [(job, process.returncode) for job, process in ended]

    def stop(self) -> None:
        """Kill the running jobs; they resume from their checkpoints."""
        for _, process in self._running.values():
            _kill(process)
        self._running.clear()


def start_process(job: Job, threads: int, cores: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a job's process on the given cores, or on all; it ends with this process."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    limits = dict.fromkeys(_THREADS, str(threads))
    library = ctypes.CDLL(None)

    def prepare() -> None:
        # Killed with its parent, so that no two processes work on one run.
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, cores)

    with job.log.open("ab") as log:  # A process that came first may write to it.
        return subprocess.Popen(
            [sys.executable, *job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **limits, "PYTHONPATH": import_path()},
            # In its own group, as Ctrl-C is for the parent, which then kills the group.
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _changes(root: Path, folders: Sequence[Path], mtimes: dict[Path, int]) -> dict[Path, bytes]:
    """Return the changed files, oldest first, so that records come after their files."""
    contents = {}
    with suppress(FileNotFoundError):  # A file that is being replaced is read the next time.
        paths = (path for folder in folders for path in (root / folder).glob("[!.]*"))
        files = [(path.stat().st_mtime_ns, path) for path in paths if path.is_file()]
        for mtime, path in sorted(files):
            if mtimes.get(path) != mtime:
                contents[path.relative_to(root)], mtimes[path] = path.read_bytes(), mtime
    return contents


class _Files:
    """The files of a workspace, for nodes with separate folders; a Ray actor beside it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def fetch(self, folders: Sequence[Path]) -> dict[Path, bytes]:
        return _changes(self._root, folders, {})

    def keep(self, files: Mapping[Path, bytes]) -> None:
        for path, content in files.items():
            write_bytes(self._root / path, content)


def _run_apart(job: Job, cores: int, shared: Path, call: Callable[..., Any]) -> int:
    """Do a job in a folder of this node; send files to the `_Files` of `shared` by `call`."""
    with tempfile.TemporaryDirectory(prefix="quarl-") as name:
        root, mtimes = Path(name), dict[Path, int]()
        for path, content in call("fetch", job.folders).items():
            write_bytes(root / path, content)
        _changes(root, job.folders, mtimes)
        log = root / job.folders[0] / job.log.name

        command = tuple(str(root) if Path(word) == shared else word for word in job.command)
        process = start_process(job._replace(command=command, log=log), cores)
        try:
            code: int | None = None
            while code is None:
                time.sleep(_NODE_POLL_SECONDS)
                code = process.poll()
                call("keep", _changes(root, job.folders, mtimes))
        finally:
            _kill(process)
        return code


class RayEngine:
    """Tasks on a Ray cluster; a lost one is restarted on another node.

    Nodes share the workspace's folder under one path, and a task resumes from its checkpoints. Or
    nodes have separate folders (`gather_in` is the workspace's root), and a task resumes after the
    last stage whose files were sent back.
    """

    def __init__(self, address: str | None, cores: int, gather_in: Path | None = None) -> None:
        """Connect, or start a cluster on this machine without an address; else a QuarlError.

        A ModuleNotFoundError without the extra `cluster`.
        """
        import ray

        self._ray, self._running = ray, dict[Any, Job]()
        self.slots = sys.maxsize  # Ray queues the tasks.
        try:
            ray.init(
                address or os.environ.get("RAY_ADDRESS", "local"),
                runtime_env={"env_vars": {"PYTHONPATH": import_path()}},
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise QuarlError(
                "There is no Ray cluster at this address; start one with `ray start --head`. "
                f"Received: address={address!r} ({error})"
            ) from error

        #: Of the largest node; a run of more waits for another node.
        self.most_cores = max(int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"])
        files: Any = None
        if gather_in is not None:
            # On this node, where the workspace is.
            this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            files = ray.remote(num_cpus=0, scheduling_strategy=this_node)(_Files).remote(gather_in)

        folder = Path.cwd()

        def work(job: Job) -> int:
            # Where paths are relative to; a worker starts where its node was started.
            with suppress(OSError):
                os.chdir(folder)
            if gather_in is None:
                if not job.log.parent.is_dir():
                    raise FileNotFoundError(f"this node lacks {job.log.parent}; add --gather")
                return start_process(job, cores).wait()

            def call(method: str, argument: Any) -> Any:
                return ray.get(getattr(files, method).remote(argument))

            return _run_apart(job, cores, gather_in, call)

        self._task = ray.remote(num_cpus=cores, max_retries=20)(work)  # If a worker is lost.

    def start(self, job: Job) -> None:
        """Hand a job to the cluster."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self._running[self._task.remote(job)] = job

    def ended(self) -> list[tuple[Job, int]]:
        """Return the jobs that have ended, with their exit codes."""
        if not self._running:
            return []
        tasks = list(self._running)
        ended, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)
        return [(job := self._running.pop(task), self._code(job, task)) for task in ended]

    def _code(self, job: Job, task: Any) -> int:
        """Return the exit code of a task that has ended; 1, and why in its log, without one."""
        try:
            return int(self._ray.get(task))
        except self._ray.exceptions.RayError as error:
            with job.log.open("a") as log:
                log.write(f"{error}\n")
            return 1

    def stop(self) -> None:
        """Cancel the running tasks, and disconnect."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()
