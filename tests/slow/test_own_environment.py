"""Environments and presets of users: the example of the README, and errors."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml
from samples import ROOT, Capsys, Patch, python, refusal, refused, register, write_presets

from quarl_tf import presets
from quarl_tf.cli import verbs
from quarl_tf.pipeline import train
from quarl_tf.presets import tables
from quarl_tf.spec import Run
from quarl_tf.store.workspace import Workspace

RUN_ID = "ppo-Docking-v0-s0"
INT8 = str(Workspace(Path()).artifact(RUN_ID, "int8"))
DOCKING = ["--algo", "ppo", "--env", "Docking-v0", "--presets", "examples/docking.yaml"]
IMPORT = ["--import", "examples.docking"]
TRAIN = ["train", "--algo", "ppo", "--env", "CartPole-v1", "--dry-run"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Follow the docs, but briefly, in a folder with nothing but its example; return the folder."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "examples", folder / "examples")
    values = (folder / "examples/docking.yaml").read_text()
    assert "60000" in values
    (folder / "examples/docking.yaml").write_text(values.replace("60000", "8192"))
    # As for the script `quarl`, Python does not import from the current folder.
    words = [*DOCKING, *IMPORT, "--schemes", "fp32,int8", "--episodes", "50"]
    python("-P", "-m", "quarl_tf.cli", "run", *words, cwd=folder)
    return folder


@pytest.fixture
def here(finished: Path, monkeypatch: Patch) -> Iterator[Path]:
    """Work in the finished folder, and forget afterwards what was imported from it."""
    monkeypatch.chdir(finished)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    yield finished
    for name in [name for name in sys.modules if name.split(".")[0] == "examples"]:
        del sys.modules[name]
    gym.registry.pop("Docking-v0", None)


def test_a_stage_imports_the_module_and_what_is_finished_needs_none(here: Path) -> None:
    assert verbs.main(["export", RUN_ID, "--schemes", "ptq_w8", *IMPORT]) == 0
    assert Workspace(here).artifact(RUN_ID, "ptq_w8").exists()
    assert verbs.main(["evaluate", INT8, "--episodes", "50"]) == 0


def test_a_finished_training_leaves_its_environment_to_the_stages_behind_it(here: Path) -> None:
    file, modules = "examples/docking.yaml", ("examples.docking",)
    train(Run("ppo", "Docking-v0", seed=0, modules=modules, presets=file), root=here)
    assert "Docking-v0" in gym.registry


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", *DOCKING],
        ["export", RUN_ID, "--schemes", "fp16"],
        ["evaluate", INT8, "--episodes", "51"],
    ],
)
def test_a_forgotten_import_is_told(here: Path, capsys: Capsys, arguments: Sequence[str]) -> None:
    line = refusal(capsys, *arguments)
    assert "needs --import MODULE" in line
    assert "Received: environment='Docking-v0'" in line


def test_a_run_keeps_its_presets(here: Path, tmp_path: Path, capsys: Capsys) -> None:
    preset = tables.read(here / "examples/docking.yaml", ["ppo"])["ppo"]["Docking-v0"]
    file = write_presets(tmp_path / "own.yaml", "ppo", "Docking-v0", preset | {"epochs": 3})
    task = ["train", "--algo", "ppo", "--env", "Docking-v0", *IMPORT]
    assert "Received: epochs=3 for 10" in refusal(capsys, *task, "--presets", str(file), code=1)
    # The preset is looked for in the file.
    assert "given with --presets" in refusal(capsys, *task)


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


@pytest.mark.parametrize(
    ("entry_point", "options", "words"),
    [
        ("examples.dokcing:Docking", {}, "cannot be imported, examples.dokcing:"),
        ("examples.docking:Docking", {"thrust": 1}, "(TypeError: "),
    ],
)
@pytest.mark.usefixtures("here")
def test_an_environment_that_cannot_be_made_is_no_traceback(
    entry_point: str, options: dict[str, Any], words: str, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    register(monkeypatch, "Mistaken-v0", entry_point, kwargs=options)
    preset = yaml.safe_load(Path("examples/docking.yaml").read_text())["ppo"]["Docking-v0"]
    file = write_presets(Path("mistaken.yaml"), "ppo", "Mistaken-v0", preset)
    task = ["--algo", "ppo", "--env", "Mistaken-v0", "--presets", str(file)]
    line = refusal(capsys, "train", *task, "--root", "elsewhere")
    assert words in line
    assert "pip install" not in line


def shipped(**changes: Any) -> dict[str, Any]:
    return asdict(presets.load("ppo", "CartPole-v1")) | changes


def own(folder: Path, **changes: Any) -> Path:
    return write_presets(folder / "own.yaml", "ppo", "CartPole-v1", shipped(**changes))


def test_own_presets_go_before_the_package_s_and_overrides_before_both(tmp_path: Path) -> None:
    missing = refused(presets.load, "ppo", "CartPole-v1", file=tmp_path / "own.yaml")
    assert "(No such file or directory); name a YAML file. Received: path='/" in missing
    wrong = refused(presets.load, "ppo", "CartPole-v1", file=own(tmp_path, num_envs=7))
    assert "Received: train_frequency=256, num_envs=7" in wrong
    path = own(tmp_path, epochs=3, clip=0.3)
    assert asdict(presets.load("ppo", "CartPole-v1", file=path)) == shipped(epochs=3, clip=0.3)
    overridden = presets.load("ppo", "CartPole-v1", {"clip": 0.1}, path)
    assert asdict(overridden) == shipped(epochs=3, clip=0.1)
    other = presets.load("a2c", "CartPole-v1", file=path)
    assert other == presets.load("a2c", "CartPole-v1")


def test_entries_may_share_values_and_numbers_have_exponents(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("ppo:\n  A-v0: &a {steps: 1, clip: 2e-1}\n  B-v0:\n    <<: *a\n    steps: 2\n")
    assert tables.read(path, ["ppo"])["ppo"]["B-v0"] == {"steps": 2, "clip": 0.2}
    for text in ("1e-3", "1E-3", "1.0e-3", "1.e-3", "+.1e-2"):
        assert tables.parse(f"rate: {text}") == {"rate": 0.001}
    # Written otherwise, the same run.
    for text in ("1e6", "1.0e+6"):
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
