"""Studies: their files, what exists of them, running what does not, and the report."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quarl_tf import study
from quarl_tf.cli import verbs
from quarl_tf.export import convert
from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.files import locked, write_text
from quarl_tf.spec import Quantization, Scheme
from quarl_tf.store import records
from quarl_tf.store.workspace import Workspace, evaluation_path
from quarl_tf.study import State, Study, runner, worker
from quarl_tf.study.worker import Task

#: A training of a second.
TINY = """
overrides: &tiny
  {steps: 600, network: [8], num_envs: 4, train_frequency: 64, minibatch_size: 64, epochs: 1,
   evaluation_every: 300, evaluation_episodes: 4, checkpoint_every: 200}
"""
TINY_STUDY = f"""
name: tiny
title: A tiny study
seeds: [0, 1]
bits: [2]
episodes: 2
{TINY}
cells:
  - {{algo: ppo, env: CartPole-v1}}
  # Diverges, and what would be compared with it is not begun.
  - {{algo: ppo, env: CartPole-v1, seeds: [0], overrides: {{<<: *tiny, learning_rate: 1e30}}}}
"""
BASE = "name: s\nseeds: [0]\ncells: [{algo: ppo, env: CartPole-v1}]\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def states(root: Path, wanted: Study) -> list[str]:
    return [str(one.state) for one in study.plan(Workspace(root), wanted)]


# Files.


def test_a_file_names_every_experiment(tmp_path: Path) -> None:
    text = BASE + "bits: [8, 3]\ndelays: [0.5, 10]\nquantization: {edge_bits: 4}\n"
    found = study.read(write(tmp_path, text + "schemes: [int8]\n"))
    (cell,) = found.cells
    assert cell.schemes == ("fp32", "int8")
    assert [(q.bits, q.delay) for q in cell.quantizations] == [
        *((8, 50_000), (3, 50_000)),
        *((8, 10), (3, 10)),
    ]
    assert {q.edge_bits for q in cell.quantizations} == {4}
    assert [one.scheme.name for one in found.experiments()] == [
        *("fp32", "int8", "qat_w8a8", "qat_w3a3", "qat_w8a8", "qat_w3a3")
    ]
    assert found.episodes == 100


def test_labels_are_those_of_the_papers_figure(tmp_path: Path) -> None:
    (cell,) = study.read(write(tmp_path, BASE + "bits: [8, 2]\n")).cells
    assert [(one.label, one.scheme.name) for one in cell.precisions()] == [
        *(("Fp", "fp32"), ("8*", "int8")),
        *(("8", "qat_int8"), ("8", "qat_w8a8"), ("2", "qat_w2a2")),
    ]


def test_labels_of_weights_alone_name_their_bits(tmp_path: Path) -> None:
    text = BASE + "schemes: [ptq_w4, ptq_paper_w4, fp16]\n"
    (cell,) = study.read(write(tmp_path, text)).cells
    assert [one.label for one in cell.precisions()] == ["Fp", "w4", "ptq_paper_w4", "fp16"]


def test_several_delays_are_told_apart(tmp_path: Path) -> None:
    (cell,) = study.read(write(tmp_path, BASE + "bits: [2]\ndelays: [0.5, 10]\n")).cells
    assert [one.label for one in cell.precisions()] == ["Fp", "8*", "2 from 50,000", "2 from 10"]


def test_a_share_of_the_training_is_its_number_of_steps(tmp_path: Path) -> None:
    # 0.57 times 100000 is 56999.999999999993.
    (cell,) = study.read(write(tmp_path, BASE + "bits: [2]\ndelays: [0.57, 0.5]\n")).cells
    assert [one.delay for one in cell.quantizations] == [57_000, 50_000]


def test_cells_that_differ_in_quantization_share_their_plain_trainings(tmp_path: Path) -> None:
    text = """
name: s
seeds: [0, 1]
bits: [4]
delays: [60000]
quantization: {ranges: extremes}
cells:
  - {algo: ppo, env: CartPole-v1}
  - {algo: ppo, env: CartPole-v1, quantization: {ranges: percentile, per_channel: true}}
  # Has no use for delays and quantization; its training ends before the delay.
  - {algo: ppo, env: CartPole-v1, bits: [], overrides: {steps: 50000}}
"""
    found = study.read(write(tmp_path, text))
    assert [cell.title for cell in found.cells] == [
        "ppo on CartPole-v1 (ranges=extremes)",
        "ppo on CartPole-v1 (ranges=percentile, per_channel=True)",
        "ppo on CartPole-v1 (steps=50000)",
    ]
    names = [one.scheme.name for one in found.experiments()]
    # Two seeds of two plain trainings, and of two quantisation-aware ones.
    assert [names.count(name) for name in ("fp32", "int8", "qat_w4a4")] == [4, 4, 4]
    assert len({(one.run.run_id, one.scheme.name) for one in found.experiments()}) == 12


def test_a_cell_goes_before_the_study_and_old_ids_are_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
name: s
seeds: [0, 1, 2]
bits: [4]
cells:
  - {algo: dqn, env: LunarLander-v2, seeds: [7], bits: []}
  - {algo: dqn, env: CartPole-v1}
  - {algo: dqn, env: CartPole-v1, overrides: {discount: 0.9}}
"""
    first, second, third = study.read(write(tmp_path, text)).cells
    assert (first.env_id, first.seeds, first.quantizations) == ("LunarLander-v3", (7,), ())
    assert verbs.main(["study", "plan", str(tmp_path / "study.yaml")]) == 0
    assert capsys.readouterr().err.count("LunarLander-v2 is LunarLander-v3 today") == 1
    assert second.seeds == (0, 1, 2)
    assert (second.title, third.title) == (
        "dqn on CartPole-v1",
        "dqn on CartPole-v1 (discount=0.9)",
    )


def test_cells_of_the_same_settings_are_told_apart_by_their_extent(tmp_path: Path) -> None:
    text = """
name: s
seeds: [0, 1]
bits: [4, 2]
cells:
  - {algo: ppo, env: CartPole-v1, delays: [20000, 0.5]}
  - {algo: ppo, env: CartPole-v1, delays: [30000]}
  - {algo: ppo, env: CartPole-v1, seeds: [2], delays: [30000], quantization: {edge_bits: 4}}
  - {algo: a2c, env: CartPole-v1, bits: []}
  - {algo: a2c, env: CartPole-v1, seeds: [0]}
"""
    assert [cell.title for cell in study.read(write(tmp_path, text)).cells] == [
        "ppo on CartPole-v1 (delays=20000/50000)",
        "ppo on CartPole-v1 (delays=30000)",
        "ppo on CartPole-v1 (edge_bits=4)",
        "a2c on CartPole-v1 (seeds=0/1)",
        "a2c on CartPole-v1 (bits=4/2, delays=150000, seeds=0)",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cells: [", "line 1"),
        ("- a", "a study must map names"),
        (BASE + "seeds: [1]", "line 4: 'seeds' comes twice"),
        (BASE + "episods: 3", "did you mean episodes"),
        (BASE.replace("name: s", "name: a/b"), "name='a/b'"),
        (BASE.replace("name: s\n", ""), "needs name"),
        (BASE.replace("seeds: [0]\n", ""), "needs seeds"),
        (BASE.replace("[0]", "[]"), "seeds must be a list of one or more"),
        (BASE.replace("[0]", "[true]"), "seeds must be a list of whole numbers"),
        (BASE.replace("[0]", "[-1]"), "seeds must be 0 or more"),
        (BASE.replace("[0]", "[0, 0]"), "comes twice"),
        (BASE.replace("ppo", "ppx"), "cell 1: Unknown algorithm: did you mean ppo"),
        (BASE.replace("CartPole-v1", "CartPol-v1"), "did you mean CartPole-v1"),
        (BASE.replace("env:", "envs:"), "did you mean env"),
        (BASE + "overrides: {step: 3}", "did you mean steps"),
        (BASE + "schemes: [int9]", "did you mean int8"),
        (BASE + "schemes: [qat_int8]", "leave it out of schemes"),
        (BASE + "bits: [9]", "bits=9"),
        (BASE + "bits: [0.5]", "bits must be a list of whole numbers"),
        (BASE + "bits: [4]\ndelays: [1.5]", "share of the training between 0 and 1. Rec"),
        (BASE + "bits: [4]\ndelays: [.inf]", "delay=inf"),
        (BASE + "bits: [4]\ndelays: [.nan]", "delay=nan"),
        (BASE + "bits: [4]\ndelays: [0.000001]", "delay=1e-06, steps=100000"),
        (BASE + "bits: [4]\noverrides: {layer_norm: true}", "has no rule for layer_norm"),
        (BASE + "bits: [4]\ndelays: [1000000]", "delay=1000000, steps=100000"),
        (BASE + "delays: [5]", "are for trainings at `bits`"),
        (
            BASE.replace("v1}", "v1, delays: [5], bits: []}") + "bits: [4]",
            "cell 1: Delays and quantization are for trainings at `bits`",
        ),
        (BASE + "bits: [4, 4]", "comes twice"),
        (
            BASE.replace("v1}", "v1}, {algo: ppo, env: CartPole-v1}") + "bits: [4]",
            "comes twice; keep one of the cells, bits or delays",
        ),
        (BASE + "bits: [4]\nquantization: {edge_bit: 4}", "did you mean edge_bits"),
        (BASE + "bits: [4]\nquantization: {delay: 4}", "`delays` the delays"),
        (BASE + "episodes: 0", "episodes=0"),
        (BASE + "title: [a]", "title must be the report's heading. Received: title=['a']"),
        (BASE.replace("v1}", "v1, remark: [a]}"), "remark=['a']"),
        (BASE + "memory: 1", "memory must be false or true. Received: memory=1"),
        (BASE + "x: frames", "x must be steps or episodes. Received: x='frames'"),
        (BASE + "import: [no_such_module]", "no_such_module"),
        (BASE + "presets: none.yaml", "none.yaml"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        study.read(write(tmp_path, text))
    message = str(caught.value)
    assert words in message
    assert "study.yaml" in message
    assert "\n" not in message


def test_a_missing_file_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("plan", "run", "status", "report"):
        assert verbs.main(["study", action, str(tmp_path / "none.yaml")]) == 2
        assert "none.yaml" in capsys.readouterr().err


# Running: one study, killed, run to its end, run again.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Run the tiny study, kill it, run it to its end; return file, root and what was printed."""
    root = tmp_path_factory.mktemp("study")
    path = write(root, TINY_STUDY)
    assert states(root, study.read(path)) == ["missing"] * 9
    command = [sys.executable, "-m", "quarl_tf.cli", "study", "run", str(path)]
    command += ["--root", str(root), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(root.glob("runs/*/checkpoints/*.npz")) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert children
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, children)), "workers outlive their parent"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return path, root, done.stdout + done.stderr


def _children(pid: int) -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _stat(int(p.name))[1] == str(pid)]


def _stat(pid: int) -> list[str]:
    """Return state and parent of a process, and more; X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", ""]


def _alive(pid: int) -> bool:
    return _stat(pid)[0] not in "XZ"


def test_a_killed_study_goes_on_and_a_failing_cell_leaves_the_others_alone(
    finished: tuple[Path, Path, str],
) -> None:
    path, root, printed = finished
    plan = study.plan(Workspace(root), study.read(path))
    assert [one.state for one in plan] == [
        *[State.EVALUATED] * 6,
        *[State.FAILED] * 2,
        State.MISSING,
    ]
    failed = plan[6]
    assert "Training diverged" in failed.reason
    assert failed.failure is not None
    assert "Traceback" in failed.failure.read_text()
    last = printed.splitlines()[-1]
    assert last.startswith("quarl: 2 of 9 experiments failed, and 1 more cannot do without them;")
    assert f"read why in {failed.failure}" in last


def test_a_second_run_tries_again_what_failed_and_nothing_else(
    finished: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _ = finished
    before = {p: p.stat().st_mtime_ns for p in root.glob("tflite_models/*/*")}
    # One at a time: two would train the twin that waits while its plain training fails.
    assert verbs.main(["study", "run", str(path), "--root", str(root), "--jobs", "1"]) == 1
    shown = capsys.readouterr().out
    assert len(re.findall("^failed ", shown, re.MULTILINE)) == 1
    assert "9 experiments: 1 missing, 6 evaluated, 2 failed" in shown
    assert {p: p.stat().st_mtime_ns for p in root.glob("tflite_models/*/*")} == before


def test_a_finished_study_starts_nothing(
    finished: tuple[Path, Path, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, root, _ = finished
    whole = write(root / "runs", TINY_STUDY[: TINY_STUDY.index("  # Diverges")])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert verbs.main(["study", "run", str(whole), "--root", str(root)]) == 0
    assert "6 experiments: 6 evaluated" in capsys.readouterr().out


def test_results_stand_without_the_run_folders_as_in_a_fresh_clone(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    whole = TINY_STUDY[: TINY_STUDY.index("  # Diverges")]
    assert states(tmp_path, study.read(write(tmp_path, whole))) == ["evaluated"] * 6
    longer = whole.replace("episodes: 2", "episodes: 3")
    assert set(states(tmp_path, study.read(write(tmp_path, longer)))) == {"missing"}
    for path in tmp_path.glob("tflite_models/*/fp32.json"):
        sidecar = records.Sidecar.load(path)
        replace(sidecar, preset={**sidecar.preset, "discount": 0.5}).save(path)
    found = states(tmp_path, study.read(write(tmp_path, whole)))
    assert found == ["missing"] * 2 + ["evaluated"] * 4


def test_results_in_a_fresh_clone_go_by_the_rules_of_all_others(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    whole = study.read(write(tmp_path, TINY_STUDY[: TINY_STUDY.index("  # Diverges")]))
    workspace, cell = Workspace(tmp_path), whole.cells[0]
    plain, aware = cell.run(0, None), cell.run(0, cell.quantizations[0])

    # fp32 of both seeds, int8 of both, qat_w2a2 of both.
    write_text(study.failure_path(workspace, plain, None), "it has no preset\n")
    workspace.artifact(plain.run_id, "int8").unlink()
    workspace.artifact(plain.run_id, "fp32").unlink()
    assert states(tmp_path, whole) == ["evaluated"] * 6

    path = evaluation_path(workspace.artifact(aware.run_id, "qat_w2a2"))
    saved = path.read_text()
    of_another = {
        "reference_sha256": "0" * 64,
        "seeds": [1, 2],
        "protocol": records.Protocol(0, "greedy"),
    }
    for name, value in of_another.items():
        replace(records.Evaluation.load(path), **{name: value}).save(path)
        assert states(tmp_path, whole) == [*["evaluated"] * 4, "missing", "evaluated"]
        path.write_text(saved)
    workspace.artifact(aware.run_id, "qat_w2a2").write_bytes(b"changed")
    assert states(tmp_path, whole)[4] == "missing"


def test_a_job_has_all_schemes_of_its_run(tmp_path: Path) -> None:
    wanted = study.read(write(tmp_path, BASE + "bits: [2]\n"))
    found = [
        study.Status(one, State.EXPORTED if one.scheme.name == "int8" else State.EVALUATED)
        for one in wanted.experiments()
    ]
    (job,) = runner._missing_jobs(found, lambda _: None)
    assert [scheme.name for scheme in job.schemes] == ["fp32", "int8"]
    assert job.trained


def test_what_is_not_evaluated_though_nothing_failed_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Workspace, wanted: Study, *__: object) -> list[study.Status]:
        first, second = wanted.experiments()
        return [study.Status(first, State.EVALUATED), study.Status(second, State.EXPORTED)]

    monkeypatch.setattr(runner, "run", run)
    path = write(tmp_path, BASE)
    assert verbs.main(["study", "run", str(path), "--root", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quarl: 1 of 2 experiments are not evaluated, though none failed")
    assert f"quarl study plan {path}" in line


def test_status_and_plan_show_states_and_failures(
    finished: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _ = finished
    assert verbs.main(["study", "status", str(path), "--root", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "1 missing, 6 evaluated, 2 failed" in shown
    assert shown.count("failure.txt") == 1
    for arguments in (["plan", str(path)], ["run", str(path), "--dry-run"]):
        assert verbs.main(["study", *arguments, "--root", str(root)]) == 0
        assert re.search(r"q2d300 \W+ qat_w2a2 \W+ evaluated", capsys.readouterr().out)


def test_states_follow_from_the_files_alone(finished: tuple[Path, Path, str]) -> None:
    path, root, _ = finished
    wanted, workspace = study.read(path), Workspace(root)
    run_id = wanted.cells[0].run(1, None).run_id
    artifact = workspace.artifact(run_id, "int8")
    index = 3
    evaluation, flatbuffer = evaluation_path(artifact), artifact.read_bytes()
    saved = evaluation.read_bytes()
    evaluation.unlink()
    assert states(root, wanted)[index] == "exported"
    artifact.unlink()
    assert states(root, wanted)[index] == "trained"
    artifact.write_bytes(flatbuffer)
    evaluation.write_bytes(saved)
    assert states(root, wanted)[index] == "evaluated"
    more = write(root / "runs", TINY_STUDY.replace("episodes: 2", "episodes: 3"))
    assert states(root, study.read(more))[:6] == ["exported"] * 6


def test_two_at_once_are_refused(
    finished: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _ = finished
    with locked(root / "runs" / ".study-tiny", "held by the test"):
        assert verbs.main(["study", "run", str(path), "--root", str(root)]) == 1
    assert "Another process is running this study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "words"),
    [("kill -9 $$", "was killed by signal 9"), ("exit 0", "ended with exit code 0")],
)
def test_a_process_that_ends_without_a_word_is_a_failure(
    end: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\necho out of memory\n{end}\n")
    worker.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(worker))
    path = write(tmp_path, BASE.replace("[0]", "[0, 1]"))
    assert verbs.main(["study", "run", str(path), "--root", str(tmp_path)]) == 1
    assert states(tmp_path, study.read(path)) == ["failed"] * 4
    files = list(tmp_path.glob("runs/*/failure.txt"))
    assert len(files) == 2
    for file in files:
        assert words in file.read_text().splitlines()[0]
        assert "out of memory" in file.read_text()


def test_workers_run_the_code_of_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "quarl_tf" / "__init__.py"
    other.parent.mkdir()
    other.write_text("raise SystemExit('another version')\n")
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, BASE + "overrides: {steps: 2048, learning_rate: 1e30}\n")
    assert verbs.main(["study", "run", str(path), "--root", str(tmp_path)]) == 1
    (file,) = tmp_path.glob("runs/*/failure.txt")
    assert "Training diverged" in file.read_text().splitlines()[0]


def test_trainings_at_other_bits_go_on_from_the_first(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    path, root, _ = finished
    trained = study.read(path).cells[0].run(0, Quantization.from_mapping({"bits": 2, "delay": 300}))
    firsts = []
    trunk = tmp_path / "trunk.npz"
    for bits in (8, 2):
        run = replace(trained, quantization=Quantization.from_mapping({"bits": bits, "delay": 300}))
        task = Task(
            root=str(tmp_path),
            run=run.to_dict(),
            schemes=[],
            episodes=2,
            failures={"": str(tmp_path / "failure.txt")},
            presets=None,
            modules=[],
            trunk=str(trunk),
            cpus=[],
        )
        steps: list[int] = []
        assert worker.work(task, lambda step, *_, steps=steps: steps.append(step))
        firsts.append(steps[0])
    assert firsts[0] < 100
    assert firsts[1] > 200
    again, before = (Workspace(one).run_dir(trained.run_id) for one in (tmp_path, root))
    assert (again / "network.npz").read_bytes() == (before / "network.npz").read_bytes()
    assert not list((root / "runs" / ".study-tiny").iterdir())


def test_a_scheme_that_fails_leaves_the_others_alone(
    finished: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, root, _ = finished
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    wanted, workspace = study.read(path), Workspace(tmp_path)
    run = wanted.cells[0].run(0, None)
    exported = convert.export

    def fail_int8(workspace: Workspace, run_id: str, schemes: list[Scheme], *rest: Any) -> Any:
        if schemes[0].name == "int8":
            raise ValueError("No room\nleft.")
        return exported(workspace, run_id, schemes, *rest)

    monkeypatch.setattr(convert, "export", fail_int8)
    schemes = ("int8", "fp32")
    for name in schemes:
        workspace.artifact(run.run_id, name).unlink()
    task = Task(
        root=str(tmp_path),
        run=run.to_dict(),
        schemes=list(schemes),
        episodes=2,
        failures={
            name: str(study.failure_path(workspace, run, None if not name else Scheme.parse(name)))
            for name in ("", *schemes)
        },
        presets=None,
        modules=[],
        trunk=None,
        cpus=[],
    )
    assert not worker.work(task, lambda *_: None)
    found = {
        one.experiment.scheme.name: (one.state, one.reason)
        for one in study.plan(workspace, wanted)
        if one.experiment.run == run
    }
    assert found["fp32"][0] == State.EVALUATED
    assert found["int8"] == (State.FAILED, "ValueError: No room left.")
    text = Path(task.failures["int8"]).read_text()
    assert "Traceback" in text
    assert "fail_int8" in text
    assert not Path(task.failures["fp32"]).exists()


def test_jobs_that_differ_in_bits_alone_share_a_trunk_until_the_last_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "worker"
    stand_in.write_text("#!/bin/sh\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(stand_in))
    given: list[str | None] = []
    monkeypatch.setattr(runner, "Task", lambda **task: given.append(task["trunk"]) or Task(**task))
    text = f"""
name: s
seeds: [0]
bits: [8, 4]
{TINY}
cells:
  - {{algo: ppo, env: CartPole-v1}}
  - {{algo: ppo, env: CartPole-v1, bits: [2], delays: [200]}}
"""
    wanted = study.read(write(tmp_path, text))
    pool = runner._Pool(Workspace(tmp_path), wanted, 3, lambda _: None, lambda *_: None)
    eight, four, two = (job for job in pool._waiting if job.run.quantization is not None)
    for job in (eight, four, two):
        pool._waiting.remove(job)
        pool._start(job)
    trunk = tmp_path / "runs" / ".study-s" / Path(given[0] or "").name
    assert given == [str(trunk), str(trunk), None]
    trunk.parent.mkdir(parents=True)
    trunk.touch()
    for one, left in zip(list(pool._workers), (True, False, False), strict=True):
        one.process.wait()
        pool._workers.remove(one)
        pool._end(one)
        assert trunk.exists() == left


def test_a_worker_has_the_threads_of_its_cores_but_acts_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker"
    worker.write_text('#!/bin/sh\necho "OpenMP $OMP_NUM_THREADS, OpenBLAS $OPENBLAS_NUM_THREADS"\n')
    worker.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(worker))
    monkeypatch.setattr(runner, "_cores", lambda: [0, 1, 2])
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    path = write(tmp_path, BASE)
    assert verbs.main(["study", "run", str(path), "--root", str(tmp_path), "--jobs", "1"]) == 1
    (file,) = tmp_path.glob("runs/*/failure.txt")
    assert "OpenMP 3, OpenBLAS 1" in file.read_text()


def test_jobs_must_be_one_or_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, BASE)
    assert verbs.main(["study", "run", str(path), "--jobs", "0"]) == 2
    assert "--jobs 0" in capsys.readouterr().err


def test_a_failure_has_a_file_of_its_own(tmp_path: Path) -> None:
    run = (
        study.read(write(tmp_path, BASE))
        .cells[0]
        .run(0, Quantization.from_mapping({"bits": 4, "delay": 5}))
    )
    paths = {
        study.failure_path(Workspace(tmp_path), run, scheme)
        for scheme in (None, Scheme.parse("fp32"), Scheme.parse("qat_w4a4"))
    }
    assert len(paths) == 3


# The report.


def test_the_report_names_what_is_missing_and_averages_nothing_else(
    finished: tuple[Path, Path, str],
) -> None:
    path, root, _ = finished
    wanted, workspace = study.read(path), Workspace(root)
    damaged = evaluation_path(workspace.artifact(wanted.cells[0].run(1, None).run_id, "int8"))
    saved = damaged.read_bytes()
    damaged.write_bytes(saved[: len(saved) // 2])
    contents = []
    try:
        for _ in range(2):
            assert verbs.main(["study", "report", str(path), "--root", str(root)]) == 0
            folder = workspace.report_dir("tiny")
            contents.append({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    finally:
        damaged.write_bytes(saved)
    assert contents[0] == contents[1]
    results = json.loads(contents[0]["results.json"])
    rows = {row["scheme"]: row for row in results["pooled"][:3]}
    assert rows["int8"]["return_mean"] is None
    assert rows["qat_w2a2"]["return_mean"] is not None
    # The damaged one, and all of the cell that diverged.
    assert len(results["missing"]) == 4
    assert len(results["runs"]) == 9
    text = contents[0]["report.md"].decode()
    assert all(f"{one['scheme']} of {one['run_id']} " in text for one in results["missing"])
    assert f"quarl study run {path} --root {root}" in text
    assert contents[0].keys() >= {
        *("return_against_bits.png", "1_learning_curves.png"),
        "action_variance_ppo_CartPole-v1.png",
    }


def test_jobs_do_not_share_cores() -> None:
    cores = runner.available_cores()
    for size in range(1, cores + 1):
        shares = [runner._share(slot, size) for slot in range(size)]
        assert sorted(core for share in shares for core in share) == sorted(os.sched_getaffinity(0))
        assert all(shares)
    assert runner._share(0, cores + 1) == []
    assert set(runner._thread_limits(10 * cores).values()) == {"1"}


# Figures.


def test_the_pipeline_script_is_the_verb() -> None:
    script = Path(__file__).parents[2] / "pipelines" / "study.py"
    command = [sys.executable, str(script), "run", "-h"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "quarl study run" in done.stdout


@pytest.mark.parametrize(
    "path",
    # Presets of a study's own lie beside it.
    [
        path
        for path in sorted((Path(__file__).parents[2] / "studies").glob("*.yaml"))
        if not path.stem.endswith("-presets")
    ],
    ids=lambda path: path.stem,
)
def test_shipped_studies_are_sound(path: Path) -> None:
    assert study.read(path).name == path.stem
