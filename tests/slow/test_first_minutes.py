"""What the README says to type works as it stands."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from samples import Patch

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
    found = {"observation": np.zeros(4, np.float32)}
    exec(board, found)
    assert found["action"] in (0, 1)
