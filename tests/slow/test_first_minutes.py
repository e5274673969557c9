"""The commands and the code of the README, and the scripts of the stages."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from samples import ROOT, Patch, python

import quarl_tf
from quarl_tf.cli import main
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace, evaluation_path

TEXT = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("examples", "studies"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def test_commands_run_and_a_flatbuffer_docks(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    commands = re.findall(r"^quarl .+$", TEXT, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        assert main(shlex.split(command, comments=True)[1:]) == 0, command
    int8 = Workspace(folder / "mine").artifact("ppo-Docking-v0-s0", "int8")
    paths = int8, int8.with_name("random.tflite")
    trained, random = (Evaluation.load(evaluation_path(path)).returns for path in paths)
    assert len(trained) == len(random) == 100
    assert np.mean(trained) > 80
    assert np.mean(random) < 10


def test_python_runs(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(folder)
    stages, board = re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL)
    exec(stages, {})
    for path in (folder / "mine/tflite_models/CartPole-v1/ppo/s0").glob("int8.*"):
        shutil.copy(path, folder)
    namespace = {"observation": np.zeros(4, np.float32)}
    exec(board, namespace)
    assert namespace["action"] in (0, 1)


def test_each_script_does_its_stage(folder: Path) -> None:
    mine = folder / "mine"  # Where most is finished.
    mine.mkdir(exist_ok=True)

    def script(name: str, *words: str, code: int = 0) -> str:
        return python(str(ROOT / name), *words, cwd=mine, code=code).stdout

    run_id = "ppo-CartPole-v1-s0"
    artifact = Workspace(mine).artifact(run_id, "int8")
    for path in artifact.parent.glob("int8.*"):
        path.unlink()
    assert run_id in script("pipelines/train.py", "ppo", "CartPole-v1", "0")
    paths = script("pipelines/export.py", run_id, "fp32", "int8").split()
    assert artifact.exists()
    output = script("pipelines/evaluate.py", *paths, "--episodes", "5")
    assert output.count("mean return") == 2
    assert evaluation_path(artifact).exists()
    page = script("pipelines/report.py", run_id).strip()
    assert "int8" in (mine / page).with_name("report.md").read_text()
    results = json.loads((mine / page).with_name("results.json").read_text())
    assert results["command"] == f"quarl report {run_id}"
    assert page in script("pipelines/run.py", "ppo", "CartPole-v1", "0")
    assert "action: " in script("examples/api.py", ".")
    script("pipelines/study.py", "none.yaml", code=2)


def test_public_names_are_there() -> None:
    assert all(callable(getattr(quarl_tf, name)) for name in quarl_tf.__all__)
    with pytest.raises(AttributeError, match="quantise"):
        _ = quarl_tf.quantise
