"""Studies: their files, what exists of them, running what does not, and the report."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quarl_tf import study
from quarl_tf.cli import verbs
from quarl_tf.evaluation import memory
from quarl_tf.evaluation.compare import Interval
from quarl_tf.export import convert
from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.files import locked, write_csv, write_text
from quarl_tf.report import figures as plots
from quarl_tf.report.results import load_run
from quarl_tf.spec import Quantization, Scheme
from quarl_tf.store import records
from quarl_tf.store.workspace import Workspace, evaluation_path
from quarl_tf.study import State, Study, figures, runner, worker
from quarl_tf.study import results as study_results
from quarl_tf.study.figures import overview_figures
from quarl_tf.study.results import Loader, cell_results
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


def test_options_that_differ_between_trainings_are_told_with_their_bits(tmp_path: Path) -> None:
    (cell,) = study.read(write(tmp_path, BASE + "bits: [4, 3, 2]\n")).cells
    options = study_results._options(cell)
    assert options["per_channel"] == "False at 4 bits, True at 3/2 bits"
    assert options["rule"] == "nearest"
    assert study_results._options(replace(cell, quantizations=())) == {}


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
        "protocol": {"action": "by another rule"},
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
    run = study.read(write(tmp_path, BASE)).cells[0].run(0, Quantization(bits=4, delay=5))
    paths = {
        study.failure_path(Workspace(tmp_path), run, scheme)
        for scheme in (None, Scheme.parse("fp32"), Scheme.parse("qat_w4a4"))
    }
    assert len(paths) == 3


# The report.


def test_the_report_names_what_is_missing_and_averages_nothing_else(
    finished: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _ = finished
    wanted, workspace = study.read(path), Workspace(root)
    lost = evaluation_path(workspace.artifact(wanted.cells[0].run(1, None).run_id, "int8"))
    saved = lost.read_bytes()
    lost.unlink()
    try:
        assert verbs.main(["study", "report", str(path), "--root", str(root)]) == 0
    finally:
        lost.write_bytes(saved)
    folder = workspace.report_dir("tiny")
    assert str(folder / "index.html") in capsys.readouterr().out.replace("\n", "")
    text = (folder / "report.md").read_text()
    assert "4 of 9 experiments have no result" in text
    assert f"int8 of {lost.parent.name} was not evaluated" in text
    assert "fp32 of " in text
    assert "failed: Training diverged" in text
    assert f"quarl study run {path} --root {root}" in text
    results = json.loads((folder / "results.json").read_text())
    pooled = {(row["precision"], row["run_id"]): row for row in results["pooled"][:3]}
    assert pooled["8*", None]["return_mean"] is None
    assert pooled["8*", None]["status"] == "missing: seed 1"
    assert pooled["2", None]["return_mean"] is not None
    assert len(results["missing"]) == 4
    assert len(results["runs"]) == 9
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png") == 3
    assert sorted(p.name for p in (folder / "figures").iterdir()) == [
        "1_learning_curves.png",
        "action_variance_ppo_CartPole-v1.png",
        "reward_against_precision.png",
    ]
    assert text.index("action_variance_ppo") < text.index("## ppo on CartPole-v1")


def test_a_damaged_evaluation_takes_no_other_along(
    finished: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _ = finished
    wanted, workspace = study.read(path), Workspace(root)
    damaged = evaluation_path(workspace.artifact(wanted.cells[0].run(1, None).run_id, "int8"))
    saved = damaged.read_text()
    damaged.write_text(saved[: len(saved) // 2])
    try:
        assert verbs.main(["study", "report", str(path), "--root", str(root)]) == 0
    finally:
        damaged.write_text(saved)
    results = json.loads((workspace.report_dir("tiny") / "results.json").read_text())
    statuses = {row["precision"]: row["status"] for row in results["pooled"][:3]}
    assert statuses == {"Fp": "ok", "8*": "missing: seed 1", "2": "ok"}
    capsys.readouterr()


def test_a_longer_evaluation_changes_no_number_of_the_report(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    path, root, _ = finished
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)

    def rows() -> list[tuple[float, str]]:
        assert verbs.main(["study", "report", str(path), "--root", str(tmp_path)]) == 0
        results = json.loads((Workspace(tmp_path).report_dir("tiny") / "results.json").read_text())
        return [(row["return_mean"], row["status"]) for row in results["runs"]]

    before = rows()
    run = study.read(path).cells[0].run(0, None)
    artifact = Workspace(tmp_path).artifact(run.run_id, "fp32")
    assert verbs.main(["evaluate", str(artifact), "--episodes", "5"]) == 0
    assert len(records.Evaluation.load(evaluation_path(artifact)).seeds) == 5
    assert rows() == before
    text = (Workspace(tmp_path).report_dir("tiny") / "report.md").read_text()
    assert "2 episodes per flatbuffer" in text


def test_a_cell_tells_how_it_was_played_and_quantised(
    finished: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _ = finished
    assert verbs.main(["study", "report", str(path), "--root", str(root)]) == 0
    capsys.readouterr()
    folder = Workspace(root).report_dir("tiny")
    found = json.loads((folder / "results.json").read_text())
    assert found["missing"]  # of the cell that diverged; it was played by no rules
    overview = (folder / "report.md").read_text().split("|", 200)
    assert overview[0].startswith("# A tiny study\n")
    assert overview[2].strip() == "random"
    for text in ((folder / "report.md").read_text(), (folder / "index.html").read_text()):
        assert text.count("greedy: the best value") == 1
        assert "Rules of an episode: those of" not in text
        assert "Only 2 episodes" in text
        assert "edge_bits=8; rule=nearest; ranges=moving_average" in text
        for term in ("8*", "8, 7, …", "qat_wNaN"):
            assert term in text
        for term in ("ptq_wN", "qat_int8", "normalised error"):
            assert f"{term}</dt>" not in text
            assert f"**{term}" not in text


def without_variances(path: Path) -> None:
    """Make a curve that of an older training, which did not record them."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    write_csv(path, [{k: v for k, v in row.items() if k[:6] != "action"} for row in rows])


def test_a_curve_has_the_variances_that_were_recorded(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    path, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    workspace, run_id = Workspace(tmp_path), study.read(path).cells[0].run(0, None).run_id
    new = load_run(workspace, run_id, ["fp32"], 2.0).curve
    without_variances(workspace.artifact_dir(run_id) / "progress.csv")
    old = load_run(workspace, run_id, ["fp32"], 2.0).curve
    assert new is not None
    assert old is not None
    known = np.isfinite(new.greedy_return)
    assert known.sum() == 2
    assert np.isfinite(new.action_variance).tolist() == known.tolist()
    # Of two actions' probabilities: 0 for equal ones, 1/4 for a certain choice.
    assert ((new.action_variance[known] >= 0) & (new.action_variance[known] <= 0.25)).all()
    assert np.isnan(old.action_variance).all()
    assert old.greedy_return[known].tolist() == new.greedy_return[known].tolist()


def test_variances_are_drawn_only_if_every_training_recorded_them(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    path, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    workspace, run_id = Workspace(tmp_path), study.read(path).cells[0].run(1, None).run_id
    without_variances(workspace.artifact_dir(run_id) / "progress.csv")
    assert verbs.main(["study", "report", str(path), "--root", str(tmp_path)]) == 0
    folder = workspace.report_dir("tiny")
    assert (folder / "figures" / "1_learning_curves.png").exists()
    assert "action_variance" not in (folder / "report.md").read_text()
    assert "Action variance" not in (folder / "index.html").read_text()


def test_memory_is_shown_where_it_is_asked_for_of_what_is_there(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    text = TINY_STUDY[: TINY_STUDY.index("  # Diverges")] + "memory: true\n"
    path, workspace = write(tmp_path, text), Workspace(tmp_path)
    plain = [study.read(path).cells[0].run(seed, None).run_id for seed in (0, 1)]
    sizes = [workspace.artifact(run_id, "fp32").stat().st_size for run_id in plain]
    # As if it was too large to be kept.
    workspace.artifact(plain[1], "int8").unlink()
    assert verbs.main(["study", "report", str(path), "--root", str(tmp_path)]) == 0
    folder = workspace.report_dir("tiny")
    fp32, int8 = json.loads((folder / "results.json").read_text())["memory"]
    # 4 inputs, 8 hidden units and 2 outputs are 58 floats; the normaliser adds some.
    assert fp32["bytes"]["weights"] >= 4 * 58
    assert fp32["bytes"]["file"] == sum(sizes) / 2
    assert (int8["scheme"], int8["status"]) == ("int8", "missing: seed 1")
    assert int8["bytes"] is None
    for shown in ((folder / "report.md").read_text(), (folder / "index.html").read_text()):
        assert "change to fp32" in shown
        assert "qat_w2a2" in shown


def test_changes_of_memory_are_those_to_fp32(
    finished: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    path = write(tmp_path, TINY_STUDY[: TINY_STUDY.index("  # Diverges")] + "memory: true\n")

    def measure(path: Path) -> memory.Memory:
        size = 50 if path.stem == "int8" else 200 if "-s0" in path.parent.name else 100
        return memory.Memory(weights=size, file=2 * size, arena=50, process=3 * size)

    monkeypatch.setattr(memory, "measure", measure)
    assert verbs.main(["study", "report", str(path), "--root", str(tmp_path)]) == 0
    results = json.loads((Workspace(tmp_path).report_dir("tiny") / "results.json").read_text())
    fp32, int8 = results["memory"]
    # Means of 200 and 100, and of 50 and 50.
    assert fp32["bytes"] == {"weights": 150, "file": 300, "arena": 50, "process": 450}
    assert int8["bytes"] == {"weights": 50, "file": 100, "arena": 50, "process": 150}
    assert fp32["change_percent"] is None
    changes = {"weights": -200 / 3, "file": -200 / 3, "arena": 0, "process": -200 / 3}
    assert int8["change_percent"] == pytest.approx(changes)


def test_a_cells_remark_is_in_the_report(tmp_path: Path) -> None:
    text = """
name: s
seeds: [0]
cells:
  - {algo: dqn, env: CartPole-v1, remark: "Published: 1 < 2."}
  - {algo: dqn, env: Acrobot-v1}
"""
    assert verbs.main(["study", "report", str(write(tmp_path, text)), "--root", str(tmp_path)]) == 0
    report = tmp_path / "reports" / "s"
    assert (report / "report.md").read_text().count("Published: 1 < 2.") == 1
    assert (report / "index.html").read_text().count("Published: 1 &lt; 2.") == 1


def test_a_study_by_episodes_draws_what_was_counted(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, root, _ = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    path = write(tmp_path, TINY_STUDY[: TINY_STUDY.index("  # Diverges")] + "x: episodes\n")
    workspace = Workspace(tmp_path)
    command = ["study", "report", str(path), "--root", str(tmp_path)]
    assert verbs.main(command) == 0
    text = (workspace.report_dir("tiny") / "report.md").read_text()
    assert "Return in training against training episodes" in text
    for curve in workspace.artifact_dir("x").parent.glob("*/progress.csv"):
        rows = list(csv.DictReader(curve.read_text().splitlines()))
        run_id = curve.parent.name
        write_csv(curve, [{k: v for k, v in r.items() if k != "episodes"} for r in rows])
        if "-q" not in run_id:
            old = load_run(workspace, run_id, ["fp32"], 2.0).curve
            assert old is not None
            assert old.episodes is None
    assert verbs.main(command) == 0
    assert "against training" not in (workspace.report_dir("tiny") / "report.md").read_text()


def test_the_same_files_give_the_same_report(finished: tuple[Path, Path, str]) -> None:
    path, root, _ = finished
    contents = []
    for _ in range(2):
        assert verbs.main(["study", "report", str(path), "--root", str(root)]) == 0
        folder = Workspace(root).report_dir("tiny")
        contents.append({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    assert contents[0] == contents[1]


def test_a_study_of_which_nothing_exists_has_a_report(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "bits: [2]\n")
    assert verbs.main(["study", "report", str(path), "--root", str(tmp_path)]) == 0
    text = (tmp_path / "reports" / "s" / "report.md").read_text()
    assert "3 of 3 experiments have no result" in text
    terms = re.findall(r"^- \*\*(.+)\*\*:", text, re.MULTILINE)
    assert {"Fp", "8*", "8, 7, …"} <= set(terms)
    assert "w8, w7, …" not in terms
    assert "qat_w2a2 of ppo-CartPole-v1-s0-q2d50000 was not trained" in text


def test_jobs_do_not_share_cores() -> None:
    cores = runner.available_cores()
    for size in range(1, cores + 1):
        shares = [runner._share(slot, size) for slot in range(size)]
        assert sorted(core for share in shares for core in share) == sorted(os.sched_getaffinity(0))
        assert all(shares)
    assert runner._share(0, cores + 1) == []
    assert set(runner._thread_limits(10 * cores).values()) == {"1"}


# Figures.


def loaded(cells: Iterable[study.Cell]) -> dict[str, Any]:
    """Return a stand-in for every training of some cells, with a curve named after it."""
    steps = np.array([10.0, 20.0])
    return {
        run_id: SimpleNamespace(curve=plots.Curve(run_id, steps, steps, steps, steps))
        for cell in cells
        for quantization in (None, *cell.quantizations)
        for run_id in (cell.run(seed, quantization).run_id for seed in cell.seeds)
    }


def labels(root: Path, text: str) -> list[str]:
    cells = study.read(write(root, text)).cells
    return [one.label for one in figures._precision_curves(cells, loaded(cells))]


def test_precisions_of_all_cells_are_told_apart_by_name(tmp_path: Path) -> None:
    text = """
name: s
seeds: [0, 1]
bits: [8, 2]
cells:
  - {algo: ppo, env: CartPole-v1, overrides: {evaluation_every: 1000}}
  - {algo: ppo, env: CartPole-v1, bits: [], overrides: {evaluation_every: 1000, layer_norm: true}}
"""
    assert labels(tmp_path, text) == ["fp32", "layer norm", "QAT 8 bits", "QAT 2 bits"]
    text += "  - {algo: ppo, env: CartPole-v1, bits: [], overrides: {discount: 0.9}}\n"
    assert labels(tmp_path, text) == [
        "fp32 (evaluation_every=1000)",
        "layer norm (evaluation_every=1000)",
        "fp32 (discount=0.9)",
        *("QAT 8 bits", "QAT 2 bits"),
    ]


def test_shared_plain_trainings_are_one_line_and_delays_are_told_apart(tmp_path: Path) -> None:
    text = """
name: s
seeds: [0]
bits: [4]
cells:
  - {algo: ppo, env: CartPole-v1, delays: [0.5, 10]}
  - {algo: ppo, env: CartPole-v1, quantization: {ranges: extremes}}
"""
    assert labels(tmp_path, text) == [
        "fp32",
        *("QAT 4 bits from 50,000", "QAT 4 bits from 10"),
        "QAT 4 bits from 50,000 (ranges=extremes)",
    ]


def test_a_precision_without_one_of_its_trainings_has_no_curves(tmp_path: Path) -> None:
    cells = study.read(write(tmp_path, BASE.replace("[0]", "[0, 1]") + "bits: [4]\n")).cells
    runs = loaded(cells)
    del runs[cells[0].run(1, cells[0].quantizations[0]).run_id]
    plain, aware = figures._precision_curves(cells, runs)
    assert [curve.label for curve in plain.curves] == ["ppo-CartPole-v1-s0", "ppo-CartPole-v1-s1"]
    assert (plain.quantised, aware.quantised, aware.curves) == (False, True, [])


def drawn(root: Path, text: str) -> list[str]:
    """Return the files of the figures of more than one cell, if every training were there."""
    wanted = study.read(write(root, text))
    loader = Loader(Workspace(root), wanted, 2.0)
    cells = [cell_results(cell, wanted, loader) for cell in wanted.cells]
    return [name for name, _ in overview_figures(wanted, cells, loaded(wanted.cells))]


def test_variances_are_drawn_for_two_lines_to_ten(tmp_path: Path) -> None:
    nine = ", ".join(f"{step}" for step in range(10, 19))
    usual, ours = "reward_against_precision.png", "action_variance_ppo_CartPole-v1.png"
    assert drawn(tmp_path, BASE) == [usual]
    assert drawn(tmp_path, BASE + "bits: [4]\n") == [usual, ours]
    assert drawn(tmp_path, BASE + f"bits: [4]\ndelays: [{nine}]\n") == [usual, ours]
    assert drawn(tmp_path, BASE + f"bits: [4]\ndelays: [{nine}, 99]\n") == [usual]


def test_settings_of_one_task_share_a_figure(tmp_path: Path) -> None:
    text = """
name: s
seeds: [0]
bits: [4, 2]
cells:
  - {algo: ppo, env: CartPole-v1}
  - {algo: ppo, env: CartPole-v1, quantization: {ranges: extremes}}
"""
    several, alone = "reward_by_setting.png", "reward_against_precision.png"
    assert drawn(tmp_path, text)[0] == alone
    text += "  - {algo: ppo, env: CartPole-v1, bits: [2], quantization: {edge_bits: 2}}\n"
    assert drawn(tmp_path, text)[0] == several
    assert alone not in drawn(tmp_path, text)
    text += "  - {algo: dqn, env: CartPole-v1}\n"
    assert drawn(tmp_path, text)[:2] == [several, alone]
    assert drawn(tmp_path, f"x: episodes\n{text}")[0] == alone
    # Two things at once: what made the difference?
    text += "  - {algo: ppo, env: CartPole-v1, overrides: {discount: 0.9}}\n"
    assert several not in drawn(tmp_path, text)


def test_a_line_is_broken_where_a_training_is_missing() -> None:
    points = [
        plots.PrecisionPoint(str(bits), Scheme.parse(f"qat_w{bits}a{bits}"), 5, returns, runs)
        for bits, returns, runs in (
            (4, Interval(3.0, 2.0, 4.0), (2.5, 3.5)),
            (3, None, (9.0,)),
            (2, Interval(1.0, 0.0, 2.0), (0.5, 1.5)),
        )
    ]
    panel = plots.PrecisionPanel("cell", points, None)
    (axes,) = plots.reward_against_precision([panel], "study").figure.axes
    sweep = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    assert np.isnan(sweep.get_ydata()).tolist() == [False, True, False]
    assert [text.get_text() for text in axes.texts] == ["missing"]


def test_delays_are_told_apart_in_the_legend() -> None:
    def panel(title: str, *delays: int) -> plots.PrecisionPanel:
        scheme, returns = Scheme.parse("qat_w2a2"), Interval(3.0, 2.0, 4.0)
        points = [plots.PrecisionPoint("2", scheme, one, returns, (3.0,)) for one in delays]
        return plots.PrecisionPanel(title, points, None)

    def legend(*panels: plots.PrecisionPanel) -> list[str]:
        figure = plots.reward_against_precision(panels, "study").figure
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        return [text for text in texts if text.startswith("trained")]

    assert legend(panel("a", 5), panel("b", 7)) == ["trained at those bits"]
    assert legend(panel("a", 5, 1000), panel("b", 7)) == [
        "trained from 5 or 7",
        "trained from 1,000",
    ]


@pytest.mark.parametrize("delay", [None, 20])
def test_the_delay_is_a_line_in_the_learning_curve(delay: int | None) -> None:
    steps = np.array([10.0, 20.0, 30.0])
    curve = plots.Curve("run", steps, steps, steps, steps, delay)
    one, several = (
        plots.learning_curve([curve], "run"),
        plots.learning_curves({"4 bits": [curve]}, "cell"),
    )
    for plot in (one, several):
        drawn = [
            line for line in plot.figure.axes[0].lines if list(line.get_xdata()) == [delay, delay]
        ]
        assert len(drawn) == (delay is not None)
        assert ("quantisation delay" in plot.caption) == (delay is not None)


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
