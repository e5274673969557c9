"""Imports point down, change nothing, and load no more than they need."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import ROOT, python

import quarl_tf

PACKAGE = Path(quarl_tf.__file__).parent

#: From the lowest: a room may import from itself and from those before it.
TABLE = (ROOT / "docs/design/rooms.md").read_text()
ROOMS = re.findall(r"^\| `(\w+)` \|", TABLE, re.MULTILINE)
TENSORFLOW = {"tensorflow", "keras", "tf_keras", "tf_agents", "tensorflow_probability"}
#: What boards lack besides.
USUAL = {"flatbuffers", "gymnasium", "jinja2", "pandas", "rich", "scipy", "yaml"}


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down() -> None:
    rooms = set()
    for path in {*PACKAGE.rglob("*.py")} - {PACKAGE / "__init__.py"}:
        room, names = path.relative_to(PACKAGE).with_suffix("").parts[0], set(imports(path))
        rooms.add(room)
        allowed = {*ROOMS[: ROOMS.index(room) + 1], "__version__"}
        assert {m.split(".")[1] for m in names if m.startswith("quarl_tf.")} <= allowed, path
        if room in ("evaluation", "report", "study"):
            assert not {m.split(".")[0] for m in names} & TENSORFLOW, path
            assert not any(m.startswith("quarl_tf.foundation.keras") for m in names), path
    assert rooms == set(ROOMS)


def printed_by(code: str) -> str:
    """Return what code prints in a new process."""
    return python("-c", code, cwd=PACKAGE.parent).stdout


@pytest.mark.parametrize(
    ("names", "unneeded"),
    [
        ("evaluation.play evaluation.memory evaluation.bench evaluation.video", TENSORFLOW),
        ("report study study.engine cli", TENSORFLOW),
        ("runtime.policy", TENSORFLOW | USUAL),
    ],
)
def test_imports_load_no_more_than_they_need(names: str, unneeded: set[str]) -> None:
    statements = "".join(f"import quarl_tf.{name}\n" for name in names.split())
    code = f"import sys\n{statements}print(*{{n.split('.')[0] for n in sys.modules}})"
    assert not set(printed_by(code).split()) & unneeded


@pytest.mark.parametrize(
    ("module", "extra"), [("rich", "evaluate"), ("pandas", "report"), ("tensorflow", "train")]
)
def test_the_command_names_the_extra_that_is_not_installed(module: str, extra: str) -> None:
    task = ["train", "CartPole-v1"] if extra == "train" else ["report", "dqn-CartPole-v1-s0"]
    words = [*task, "--root", "/proc/nowhere" if extra == "train" else str(PACKAGE.parent)]
    code = f"import sys; sys.modules[{module!r}] = None; import quarl_tf.cli as c; c.main({words})"
    process = python("-c", code)
    assert f"pip install '.[{extra}]'" in process.stderr
    assert process.stderr.count("\n") == 1


def test_importing_the_package_sets_nothing() -> None:
    code = "import os; old = dict(os.environ); import quarl_tf; print(dict(os.environ) == old)"
    assert printed_by(code) == "True\n"


def test_keras_3_is_refused_in_one_line() -> None:
    keras = 'types.SimpleNamespace(__version__="3.9.1")'
    code = f'import sys, types; sys.modules["keras"] = {keras}; import quarl_tf.foundation.keras'
    *_, error = python("-c", code, code=1).stderr.splitlines()
    assert re.fullmatch(r"quarl_tf\S+Error: .+ Received: keras=3\.9\.1", error)


def test_loading_tensorflow_makes_all_settings_even_after_numpy() -> None:
    code = """
import os
os.environ.pop("OPENBLAS_NUM_THREADS", None)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
import ctypes, numpy, sys
from quarl_tf.foundation.keras import tf
library = ctypes.CDLL(numpy.linalg._umath_linalg.__file__)
threads = getattr(library, "scipy_openblas_get_num_threads64_", lambda: 1)
print(threads(), os.environ["CUDA_VISIBLE_DEVICES"], tf.config.list_physical_devices("GPU"))
import quarl_tf.export.convert, quarl_tf.training.loop
print("tensorflow_model_optimization" in sys.modules)
"""
    assert printed_by(code).splitlines()[-2:] == ["1 -1 []", "False"]
