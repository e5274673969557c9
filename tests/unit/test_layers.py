"""Imports point down, and a board needs few packages."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import python

import quarl_tf

PACKAGE = Path(quarl_tf.__file__).parent

#: From the lowest: a room may import from itself and from those before it.
ROOMS = [
    *("foundation", "spec", "presets", "environments", "networks", "store", "agents"),
    *("quantization", "runtime", "training", "export", "evaluation", "report", "pipeline"),
    *("study", "cli"),
]


TENSORFLOW = {"tensorflow", "keras", "tf_keras", "tf_agents", "tensorflow_probability"}


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files() -> dict[str, list[Path]]:
    """Return the files of each room."""
    by_room: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        by_room.setdefault(path.relative_to(PACKAGE).with_suffix("").parts[0], []).append(path)
    return by_room


@pytest.mark.parametrize("name", ROOMS)
def test_imports_point_down(name: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(name) + 1], "__version__"}
    assert files().keys() == {*ROOMS, "__init__"}
    for path in files()[name]:
        names = set(imports(path))
        assert {m.split(".")[1] for m in names if m.startswith("quarl_tf.")} <= allowed, path
        if name in ("evaluation", "report", "study"):
            assert not {m.split(".")[0] for m in names} & TENSORFLOW, path
            assert not any(m.startswith("quarl_tf.foundation.keras") for m in names), path


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a new process."""
    process = python(f"import sys\n{statement}\nprint(*{{n.split('.')[0] for n in sys.modules}})")
    assert process.returncode == 0, process.stderr
    return set(process.stdout.split())


def test_evaluation_and_reports_load_no_tensorflow() -> None:
    rooms = ["evaluation.play", "evaluation.memory", "evaluation.bench", "evaluation.video"]
    rooms += ["report", "study", "study.engine", "cli"]
    loaded = loaded_by("; ".join(f"import quarl_tf.{name}" for name in rooms))
    assert not loaded & TENSORFLOW


def test_boards_load_numpy_and_litert_alone() -> None:
    unneeded = {"flatbuffers", "gymnasium", "jinja2", "pandas", "rich", "scipy", "yaml"}
    assert not loaded_by("import quarl_tf.runtime.policy") & (TENSORFLOW | unneeded)


@pytest.mark.parametrize(
    ("module", "extra"), [("rich", "evaluate"), ("jinja2", "report"), ("tensorflow", "train")]
)
def test_the_command_names_the_extra_that_is_not_installed(module: str, extra: str) -> None:
    task = ["train", "CartPole-v1"] if extra == "train" else ["report", "dqn-CartPole-v1-s0"]
    words = [*task, "--root", "/proc/nowhere" if extra == "train" else str(PACKAGE.parent)]
    code = f"import sys; sys.modules[{module!r}] = None; import quarl_tf.cli as c; c.main({words})"
    process = python(code)
    assert f"pip install '.[{extra}]'" in process.stderr
    assert process.stderr.count("\n") == 1


def test_plain_trainings_load_no_toolkit() -> None:
    assert "tensorflow_model_optimization" not in loaded_by("import quarl_tf.training.loop")
