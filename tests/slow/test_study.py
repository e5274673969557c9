"""Running studies: order, failures, kills, shards, progress, and the report."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from samples import STUDY, Capsys, Patch, printed, python, refusal, refused, silent, write_study

from quarl_tf.cli import verbs
from quarl_tf.foundation.errors import BusyError
from quarl_tf.foundation.files import locked
from quarl_tf.store.workspace import Workspace, evaluation_path
from quarl_tf.study import State, Status, Study, engine, failure_path, plan, read

#: Trainings of a second.
SOUND_STUDY = """
name: tiny
title: A tiny study
seeds: [0, 1]
bits: [2]
episodes: 2
overrides: &tiny
  {steps: 600, network: [8], num_envs: 4, train_frequency: 64, minibatch_size: 64, epochs: 1,
   evaluation_every: 300, evaluation_episodes: 4, checkpoint_every: 200}
cells:
  - {algo: ppo, env: CartPole-v1}
"""
#: Its second cell diverges, so that its quantised run is not started.
TINY_STUDY = f"""{SOUND_STUDY}
  - {{algo: ppo, env: CartPole-v1, seeds: [0], overrides: {{<<: *tiny, learning_rate: 1e30}}}}
"""
Finished = tuple[Path, Path, str]


@pytest.fixture(autouse=True)
def prompt(monkeypatch: Patch) -> None:
    """Look more often whether jobs have ended."""
    for name in ("_POLL_SECONDS", "_SHARD_POLL_SECONDS"):
        monkeypatch.setattr(engine, name, 0.01)


def states(root: Path, study: Study) -> list[str]:
    return [str(status.state) for status in plan(Workspace(root), study)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Run the tiny study, kill it, run it to its end; return file, root and output."""
    root = tmp_path_factory.mktemp("study")
    path = write_study(root, TINY_STUDY)
    assert states(root, read(path)) == ["missing"] * 9
    words = ["-m", "quarl_tf.cli", "study", "run", str(path), "--root", str(root), "--jobs", "2"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(root.glob("runs/*/checkpoints/*.npz")) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert children
    deadline = time.monotonic() + 5  # A job takes longer.
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, children)), "workers outlive their parent"
    completed = python(*words, code=1)
    return path, root, completed.stdout + completed.stderr


def _alive(pid: str) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    return False


def test_a_killed_study_goes_on_without_what_fails(finished: Finished, capsys: Capsys) -> None:
    path, root, output = finished
    statuses = plan(Workspace(root), read(path))
    expected = [*[State.EVALUATED] * 6, *[State.FAILED] * 2, State.MISSING]
    assert [status.state for status in statuses] == expected
    assert "Training diverged" in statuses[6].reason
    assert statuses[6].failure is not None
    last = output.splitlines()[-1]
    assert last.startswith("quarl: 3 of 9 experiments are not evaluated; read why by `quarl study ")
    logs = [path.parent.name for path in root.glob("runs/*/run.log")]
    assert sorted(logs) == sorted({status.run.run_id for status in statuses[:6]})
    output = printed(capsys, "study", "status", str(path), "--root", str(root))
    assert "1 missing, 6 evaluated, 2 failed" in output
    assert output.count("failure.log") == 1
    output = printed(capsys, "study", "plan", str(path), "--root", str(root))
    assert re.search(r"q2d300\S* \W+ qat_w2a2 \W+ evaluated", output)


def test_a_second_run_tries_what_failed_again(finished: Finished, tmp_path: Path) -> None:
    path, root, _ = finished
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    study = read(path)
    failed_id = study.cells[1].references[0].run_id
    recorder = _Recorder(1, failed_id)
    engine.run(Workspace(tmp_path), study, recorder, silent, silent)
    assert recorder.started == [failed_id]
    artifact = Workspace(tmp_path).artifact(study.cells[0].references[1].run_id, "int8")
    assert states(tmp_path, study)[3] == "evaluated"
    for file, state in ((evaluation_path(artifact), "exported"), (artifact, "trained")):
        file.unlink()
        assert states(tmp_path, study)[3] == state


def test_results_stand_without_run_folders_as_in_clones(finished: Finished, tmp_path: Path) -> None:
    _, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    study = read(write_study(tmp_path, SOUND_STUDY))
    workspace, cell = Workspace(tmp_path), study.cells[0]
    workspace.artifact(cell.references[0].run_id, "fp32").unlink()  # Results count without files.
    workspace.artifact(cell.references[1].run_id, "int8").unlink()
    assert states(tmp_path, study) == ["evaluated"] * 6
    text = SOUND_STUDY.replace("episodes: 2", "episodes: 3") + "schemes: [fp32, int8, ptq_w4]\n"
    longer = read(write_study(tmp_path, text))
    # Missing schemes are made of fp32, which seed 0 lacks.
    expected = [*["exported"] * 4, "missing", "trained", *["exported"] * 2]
    assert states(tmp_path, longer) == expected
    engine.run(workspace, longer, engine.LocalEngine(1), silent, silent)
    assert states(tmp_path, longer)[1::2] == ["evaluated"] * 4
    assert states(tmp_path, longer)[::2] == ["failed", "evaluated", "failed", "evaluated"]
    assert "--schemes fp32 --root DIR" in plan(workspace, longer)[0].reason


#: Used as Python: copies the results of a run instead of doing it, and notes start and end.
_COPYING = """#!/bin/sh
folder=$(dirname $(readlink /proc/$$/fd/1)); run=$(basename $folder)
echo $run >> {root}/begun
sleep 2
for part in runs/$run tflite_models/CartPole-v1/ppo/${{run#ppo-CartPole-v1-}}; do
  mkdir -p {root}/$part && cp {done}/$part/*.* {root}/$part/
done
echo $run >> {root}/ended
"""
_WORKER = """
import sys
from quarl_tf.cli import verbs
from quarl_tf.study import claims, engine
claims.SILENCE, engine._SHARD_POLL_SECONDS, engine.sys.executable = 15.0, 0.2, sys.argv.pop(1)
sys.exit(verbs.main(sys.argv[1:]))
"""


def test_workers_share_a_folder_and_replace_killed_ones(finished: Finished, tmp_path: Path) -> None:
    path, python = write_study(tmp_path, SOUND_STUDY), tmp_path / "python"
    python.write_text(_COPYING.format(root=tmp_path, done=finished[1]))
    python.chmod(0o755)
    words = ["study", "run", str(path), "--root", str(tmp_path), "--jobs", "1", "--shard"]
    command = [sys.executable, "-c", _WORKER, str(python), *words]
    # One that is told to end, as by a scheduler, gives up its claim; one that is killed cannot.
    for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        (tmp_path / "begun").write_text("")
        first = subprocess.Popen([*command, "1/4"], stdout=subprocess.DEVNULL)
        while not (begun := (tmp_path / "begun").read_text().split()):
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(number)
        assert first.wait() in (130, -signal.SIGKILL)
        assert len(list(tmp_path.glob("runs/*/claim.*"))) == left
    workers = [subprocess.Popen([*command, f"{i}/4"], stdout=subprocess.PIPE) for i in (2, 3, 4)]
    outputs = [worker.communicate()[0].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], outputs
    jobs = {run.run_id for run, _ in read(path).experiments()}
    assert sorted((tmp_path / "ended").read_text().split()) == sorted(jobs)
    assert sorted((tmp_path / "begun").read_text().split()) == sorted([*jobs, *begun])
    assert sorted(re.findall(r"^done +(\S+)", "".join(outputs), re.MULTILINE)) == sorted(jobs)
    assert states(tmp_path, read(path)) == ["evaluated"] * 6
    assert not list(tmp_path.glob("runs/*/claim.*"))


def test_a_failure_is_taken_from_another_worker_and_tried_again_by_its_own(tmp_path: Path) -> None:
    study = read(write_study(tmp_path, STUDY + "bits: [4]\n"))
    runs = [run for run, _ in study.experiments()[::2]]
    failure = failure_path(Workspace(tmp_path), runs[0])
    failure.parent.mkdir(parents=True)
    failure.write_text("")
    recorders = _Recorder(1), _Recorder(1)
    for i, recorder in zip((2, 1), recorders, strict=True):
        engine.run(Workspace(tmp_path), study, recorder, print, print, (i, 2))
    assert [recorder.started for recorder in recorders] == [[], [run.run_id for run in runs]]


def test_commands_do_plain_runs_first(finished: Finished, tmp_path: Path, capsys: Capsys) -> None:
    path, root, _ = finished
    words, new_root = ["study", "plan", str(path), "--commands", "--root"], root / "new"
    commands = printed(capsys, *words, str(new_root)).splitlines()
    assert ["--bits" in line for line in commands] == [False, False, False, True, True, True]
    assert commands[0].startswith("quarl run --algo ppo --env CartPole-v1 --seed 0 -p ")
    end = f"--schemes fp32,int8 --no-report --root {new_root.resolve()} --episodes 2"
    assert commands[0].endswith(end)
    assert all(verbs.main([*shlex.split(line)[1:], "--dry-run"]) == 0 for line in commands[:3])
    capsys.readouterr()
    # The run that diverged, and the one that waits for it.
    assert len(printed(capsys, *words, str(root)).splitlines()) == 2
    sampled = write_study(tmp_path, STUDY + "sample: true\n")
    (command,) = engine.commands(Workspace(tmp_path), read(sampled))
    assert "--sample" in shlex.split(command)


class _Recorder:
    """An engine that does nothing: jobs end in the order they were started."""

    def __init__(self, room: int, failing: str = "", code: Any = None) -> None:
        self.started: list[str] = []
        self.slots, self._running = room, list[engine.Job]()
        self._code = code or (lambda job: int(job.run_id == failing))

    def start(self, job: engine.Job) -> None:
        self.started.append(job.run_id)
        self._running.append(job)
        job.log.write_text("")

    def ended(self) -> list[tuple[engine.Job, int]]:
        ended, self._running = self._running[:1], self._running[1:]
        return [(job, self._code(job)) for job in ended]

    def stop(self) -> None:
        assert not self._running


def test_quantised_runs_wait_for_their_reference(tmp_path: Path) -> None:
    study = read(write_study(tmp_path, STUDY.replace("[0]", "[0, 1]") + "bits: [4, 2]\n"))
    (cell,) = study.cells
    ids = {column.label: [run.run_id for run in column.runs] for column in cell.columns}
    plain_ids, ids_at_4, ids_at_2 = (ids[label] for label in ("fp32", "qat_w4a4", "qat_w2a2"))
    together, failing = _Recorder(2), _Recorder(1, plain_ids[0])
    engine.run(Workspace(tmp_path), study, together, silent, silent)
    assert together.started == [*plain_ids, *ids_at_4, *ids_at_2]
    engine.run(Workspace(tmp_path), study, failing, silent, silent)
    assert failing.started == [*plain_ids, ids_at_4[1], ids_at_2[1]]
    (log,) = tmp_path.glob("runs/*/failure.log")
    assert log.parent.name == plain_ids[0]


def test_a_failed_scheme_stops_no_run_with_a_reference(tmp_path: Path, monkeypatch: Patch) -> None:
    study = read(write_study(tmp_path, STUDY + "bits: [4]\n"))
    plain_id, aware_id = dict.fromkeys(run.run_id for run, _ in study.experiments())
    failing = _Recorder(1, plain_id)

    def fp32_is_evaluated(*arguments: Any) -> list[Status]:
        done = {(run_id, "fp32") for run_id in failing.started}
        return [
            replace(s, state=State.EVALUATED) if (s.run.run_id, s.scheme.name) in done else s
            for s in plan(*arguments)
        ]

    monkeypatch.setattr(engine, "plan", fp32_is_evaluated)
    engine.run(Workspace(tmp_path), study, failing, silent, silent)
    assert failing.started == [plain_id, aware_id]


def test_a_training_waits_for_the_network_it_starts_from_and_takes_no_other(tmp_path: Path) -> None:
    cell = "{algo: ppo, env: CartPole-v1, overrides: {steps: 4000}}"
    start = "from: {sha256: [abc], overrides: {steps: 4000}}}"
    text = STUDY.replace("[0]", "[3]").replace("v1}]", f"v1, {start}, {cell}]")
    study = read(write_study(tmp_path, text))
    assert len({cell.distinction for cell in study.cells}) == 2
    later, origin = {run.run_id: run for run, _ in study.experiments()}.values()
    recorder, workspace = _Recorder(2), Workspace(tmp_path)
    engine.run(workspace, study, recorder, silent, silent)
    assert recorder.started == [origin.run_id, later.run_id]

    def train(_: engine.Job) -> int:
        samples.write_training(workspace, origin, {}, np.zeros((2, 4)))
        return 0

    recorder = _Recorder(2, code=train)
    engine.run(workspace, study, recorder, silent, silent)
    assert recorder.started == [origin.run_id]
    assert "another network" in failure_path(workspace, later).read_text()
    # Once more, it is refused before a failure is forgotten.
    assert "expected abc" in refused(engine.run, workspace, study, recorder, silent, silent)
    assert failure_path(workspace, later).exists()


def test_a_run_that_another_process_took_first_is_waited_for(tmp_path: Path) -> None:
    study = read(write_study(tmp_path, STUDY))
    (run_id,) = dict.fromkeys(run.run_id for run, _ in study.experiments())
    codes, elsewhere = [BusyError.exit_code, 0], ExitStack()

    def code(job: engine.Job) -> int:
        if len(codes) > 1:
            elsewhere.enter_context(locked(job.log.parent, "held by the test"))
        return codes.pop(0)

    recorder, said, started = _Recorder(1, code=code), list[str](), list[int]()

    def update(*_: object) -> None:
        started.append(len(recorder.started))
        if len(started) == 3:
            elsewhere.close()

    engine.run(Workspace(tmp_path), study, recorder, said.append, update)
    assert started[:3] == [1] * 3
    assert (recorder.started, said) == ([run_id] * 2, [f"done      {run_id}"])


def test_a_job_on_a_node_of_its_own_works_on_its_own_files(tmp_path: Path) -> None:
    own = f"{tmp_path}/own.yaml"
    words = ("-c", "import sys; print(*sys.argv[1:])", str(tmp_path), own)
    job = engine.Job("run", words, tmp_path / "runs/run/run.log", None, (Path("runs/run"),))
    files: dict[Path, bytes] = {}
    call = {"fetch": lambda _: {}, "keep": files.update}
    assert engine._run_apart(job, 1, tmp_path, lambda name, value: call[name](value)) == 0
    root, file = files[Path("runs/run/run.log")].decode().split()
    assert root != str(tmp_path)
    assert file == own


def test_a_killed_process_is_a_failure_with_its_signal(tmp_path: Path, monkeypatch: Patch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(engine.sys, "executable", str(python))
    path = write_study(tmp_path, STUDY)
    assert verbs.main(["study", "run", str(path), "--root", str(tmp_path)]) == 1
    statuses = plan(Workspace(tmp_path), read(path))
    assert {status.reason for status in statuses} == {"killed by signal 9"}
    assert "out of memory" in failure_path(Workspace(tmp_path), statuses[0].run).read_text()


def test_jobs_share_the_cores_and_run_this_code(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(engine.sys, "executable", "/bin/sh")
    script = "echo $OMP_NUM_THREADS; echo $PYTHONPATH; taskset -cp $$"
    jobs = 2 if len(engine.available_cores()) > 1 else 1
    local = engine.LocalEngine(jobs)
    for number in range(jobs):
        local.start(engine.Job(f"{number}", ("-c", script), tmp_path / f"{number}" / "log", None))
    ended: list[tuple[engine.Job, int]] = []
    while len(ended) < jobs:
        ended += local.ended()
    assert [code for _, code in ended] == [0] * jobs
    logs = [(tmp_path / f"{number}" / "log").read_text().splitlines() for number in range(jobs)]
    threads, paths, cores = (set(lines) for lines in zip(*logs, strict=True))
    assert threads == {str(len(engine.available_cores()) // jobs)}
    assert {path.split(os.pathsep)[0] for path in paths} == {str(Path(engine.__file__).parents[2])}
    assert len({line.split(": ")[1] for line in cores}) == jobs


def test_the_report_names_what_is_missing(finished: Finished, capsys: Capsys) -> None:
    path, root, _ = finished
    printed(capsys, "study", "report", str(path), "--root", str(root))
    folder = Workspace(root).report_dir("tiny")
    results = json.loads((folder / "results.json").read_text())
    assert (len(results["runs"]), len(results["missing"])) == (9, 3)  # Of the cell that diverged.
    text = (folder / "report.md").read_text()
    assert all(f"{row['scheme']} of {row['run_id']} " in text for row in results["missing"])
    assert f"quarl study run {path} --root {root}" in text
    assert (folder / "figures/action_variance_ppo_CartPole-v1.png").exists()


def test_a_cluster_needs_ray(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write_study(tmp_path, STUDY)
    words = ["study", "run", str(path), "--root", str(tmp_path), "--engine", "ray"]
    assert "pip install '.[cluster]'" in refusal(capsys, *words, code=1)
