"""The commands and the code of the README, the scripts of the stages, and what users bring."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from samples import ROOT, Capsys, Patch, python, refusal, refused, register, write_presets

from quarl_tf import Run, presets, train
from quarl_tf.cli import verbs
from quarl_tf.presets import tables
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace, evaluation_path

TEXT = (ROOT / "README.md").read_text()
RUN_ID, MINE = "ppo-Docking-v0-s0", ["--root", "mine"]
INT8 = str(Workspace(Path("mine")).artifact(RUN_ID, "int8"))
DOCKING = ["--algo", "ppo", "--env", "Docking-v0", "--presets", "examples/docking.yaml", *MINE]
IMPORT = ["--import", "examples.docking"]
TRAIN = ["train", "--algo", "ppo", "--env", "CartPole-v1", "--dry-run"]
SHIPPED = asdict(presets.load("ppo", "CartPole-v1"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Follow the README in a folder with its examples and studies; return the folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("examples", "studies"):
        shutil.copytree(ROOT / name, folder / name)
    commands = re.findall(r"^quarl .+$", TEXT, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        # As for the script `quarl`, Python does not import from the current folder.
        python("-P", "-m", "quarl_tf.cli", *shlex.split(command, comments=True)[1:], cwd=folder)
    return folder


def test_a_flatbuffer_docks(folder: Path) -> None:
    paths = folder / INT8, (folder / INT8).with_name("random.tflite")
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
    mine, run_id = folder / "mine", "ppo-CartPole-v1-s0"  # Where most is finished.

    def script(name: str, *words: str, code: int = 0) -> str:
        return python(str(ROOT / name), *words, cwd=mine, code=code).stdout

    assert run_id in script("pipelines/train.py", "ppo", "CartPole-v1", "0")
    paths = script("pipelines/export.py", run_id, "fp32", "int8").split()
    assert script("pipelines/evaluate.py", *paths, "--episodes", "5").count("mean return") == 2
    page = script("pipelines/report.py", run_id).strip()
    assert (mine / page).exists()
    assert page in script("pipelines/run.py", "ppo", "CartPole-v1", "0")
    assert "action: " in script("examples/api.py", ".")
    script("pipelines/study.py", "none.yaml", code=2)


@pytest.fixture
def here(folder: Path, monkeypatch: Patch) -> Iterator[Path]:
    """Work in the folder, and forget afterwards what was imported from it."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "examples"]:
        del sys.modules[name]
    gym.registry.pop("Docking-v0", None)


def test_a_stage_imports_the_module_and_what_is_finished_needs_none(here: Path) -> None:
    assert verbs.main(["export", RUN_ID, "--schemes", "ptq_w9", *IMPORT, *MINE]) == 0
    assert Workspace(here / "mine").artifact(RUN_ID, "ptq_w9").exists()
    assert verbs.main(["evaluate", INT8, "--episodes", "50"]) == 0


def test_a_finished_training_leaves_its_environment_to_the_stages_behind_it(here: Path) -> None:
    file, modules = "examples/docking.yaml", ("examples.docking",)
    train(Run("ppo", "Docking-v0", seed=0, modules=modules, presets=file), root=here / "mine")
    assert "Docking-v0" in gym.registry


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", *DOCKING],
        ["export", RUN_ID, "--schemes", "ptq_w10", *MINE],
        ["evaluate", INT8, "--episodes", "101"],
    ],
)
def test_a_forgotten_import_is_told(here: Path, capsys: Capsys, arguments: Sequence[str]) -> None:
    line = refusal(capsys, *arguments)
    assert "needs --import MODULE" in line
    assert "Received: environment='Docking-v0'" in line


def test_a_run_keeps_its_presets(here: Path, tmp_path: Path, capsys: Capsys) -> None:
    preset = tables.read(here / "examples/docking.yaml", ["ppo"])["ppo"]["Docking-v0"]
    file = write_presets(tmp_path / "own.yaml", "ppo", "Docking-v0", preset | {"epochs": 3})
    task = ["train", "--algo", "ppo", "--env", "Docking-v0", *IMPORT, *MINE]
    assert "Received: epochs=3 for 10" in refusal(capsys, *task, "--presets", str(file), code=1)
    assert "given with --presets" in refusal(capsys, *task)  # The preset is looked for in the file.


@pytest.mark.parametrize(
    ("module", "content", "words"),
    [
        *((module, "", f"No module named '{module}'") for module in ("folly", "faulty.envs")),
        *((module, "", "import statement") for module in ("./faulty.py", "faulty/envs.py", "")),
        ("faulty", "import no_such_physics.engine\n", "No module named 'no_such_physics'"),
        ("faulty", "def broken(:\n", "(SyntaxError: invalid syntax (faulty.py, line 1))"),
        ("faulty", "import sys\nsys.exit('no licence')\n", "(SystemExit: no licence)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_no_traceback(
    module: str, content: str, words: str, capsys: Capsys, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    Path("faulty.py").write_text(content)
    line = refusal(capsys, *TRAIN, "--import", module)
    assert words in line
    assert line.endswith(f"Received: --import {module!r}\n")


@pytest.mark.usefixtures("here")
def test_what_cannot_be_made_is_no_traceback(capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    file = write_presets(Path("mistaken.yaml"), "ppo", "Mistaken-v0", SHIPPED)
    task = ["--algo", "ppo", "--env", "Mistaken-v0", "--presets", str(file)]
    for entry_point, options, words in (
        ("examples.dokcing:Docking", {}, "cannot be imported, examples.dokcing:"),
        ("examples.docking:Docking", {"thrust": 1}, "(TypeError: "),
    ):
        register(monkeypatch, "Mistaken-v0", entry_point, kwargs=options)
        line = refusal(capsys, "train", *task, "--root", "elsewhere")
        assert words in line
        assert "pip install" not in line


def test_own_presets_go_before_the_package_s_and_overrides_before_both(tmp_path: Path) -> None:
    def own(**changes: Any) -> Path:
        return write_presets(tmp_path / "own.yaml", "ppo", "CartPole-v1", SHIPPED | changes)

    missing = refused(presets.load, "ppo", "CartPole-v1", file=tmp_path / "own.yaml")
    assert "(No such file or directory); name a YAML file. Received: path='/" in missing
    wrong = refused(presets.load, "ppo", "CartPole-v1", file=own(num_envs=7))
    assert "Received: train_frequency=256, num_envs=7" in wrong
    path = own(epochs=3, clip=0.3)
    for overrides, clip in (({}, 0.3), ({"clip": 0.1}, 0.1)):
        preset = presets.load("ppo", "CartPole-v1", overrides, path)
        assert asdict(preset) == SHIPPED | {"epochs": 3, "clip": clip}
    assert presets.load("a2c", "CartPole-v1", file=path) == presets.load("a2c", "CartPole-v1")


def test_entries_may_share_values_and_numbers_have_exponents(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("ppo:\n  A-v0: &a {steps: 1, clip: 2e-1}\n  B-v0:\n    <<: *a\n    steps: 2\n")
    assert tables.read(path, ["ppo"])["ppo"]["B-v0"] == {"steps": 2, "clip": 0.2}
    for text in ("1e-3", "1E-3", "1.0e-3", "1.e-3", "+.1e-2"):
        assert tables.parse(f"rate: {text}") == {"rate": 0.001}
    for text in ("1e6", "1.0e+6"):  # Written otherwise, the same run.
        assert (tables.parse(text), type(tables.parse(text))) == (1_000_000, int)
    assert [tables.parse(text) for text in ("1.0", "2.5e0")] == [1.0, 2.5]
    assert type(tables.parse("1.0")) is float


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "map algorithms to values. Received: None"),
        ("pop: {}", "Unknown algorithm at the top of {path}: did you mean ppo?"),
        ("ppo: {CartPole-v1: {on: 3}}", "Received: {True: 3}"),
        ("dqn: {quantization: {ranges: extremes}}", "Received: dqn.quantization in {path}"),
        ("ppo: {CartPole-v1: {}}", "lacks checkpoint_every, clip"),
        ("ppo: !!python/object:os.system {}", "(line 1: could not"),
        ("ppo: \0", "(unacceptable character"),
    ],
)
def test_files_of_other_forms(content: str, words: str, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(content)
    line = refusal(capsys, *TRAIN, "--presets", str(path))
    assert words.replace("{path}", str(path)) in line
    assert "Received: " in line
