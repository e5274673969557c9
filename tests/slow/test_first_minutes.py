"""The commands and the code of the README, and the scripts of the stages."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from samples import Patch, run_python

import quarl_tf
from quarl_tf.cli import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("examples", "studies"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def test_commands_run(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    commands = re.findall(r"^quarl .+$", TEXT, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        assert main(shlex.split(command, comments=True)[1:]) == 0, command


def test_python_runs(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(folder)
    stages, board = re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL)
    exec(stages, {})
    for path in (folder / "mine/tflite_models/CartPole-v1/ppo/s0").glob("int8.*"):
        shutil.copy(path, folder)
    namespace = {"observation": np.zeros(4, np.float32)}
    exec(board, namespace)
    assert namespace["action"] in (0, 1)


def test_each_script_does_its_stage(tmp_path: Path) -> None:
    def script(name: str, *words: str, code: int = 0) -> str:
        return run_python(str(ROOT / name), *words, folder=tmp_path, code=code)

    run_id = "ppo-CartPole-v1-s0"
    assert run_id in script("pipelines/train.py", "ppo", "CartPole-v1", "0")
    paths = script("pipelines/export.py", run_id, "fp32", "int8").split()
    output = script("pipelines/evaluate.py", *paths, "--episodes", "5")
    assert output.count("mean return") == 2
    page = script("pipelines/report.py", run_id).strip()
    assert "int8" in (tmp_path / page).with_name("report.md").read_text()
    results = json.loads((tmp_path / page).with_name("results.json").read_text())
    assert results["command"] == f"quarl report {run_id}"
    assert page in script("pipelines/run.py", "ppo", "CartPole-v1", "0")
    assert "action: " in script("examples/api.py", ".")
    script("pipelines/study.py", "none.yaml", code=2)


def test_public_names_are_there() -> None:
    assert all(callable(getattr(quarl_tf, name)) for name in quarl_tf.__all__)
    with pytest.raises(AttributeError, match="quantise"):
        _ = quarl_tf.quantise
