"""Files, random streams, software and processor; imports point down and load what they need."""

import ast
import errno
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from samples import ROOT, Patch, python, refused

import quarl_tf
from quarl_tf.foundation import files, keras, provenance
from quarl_tf.foundation.seeding import environment_seed, evaluation_seeds, generator
from quarl_tf.store.records import TrainingRecord

SEEDS = st.integers(0, 2**32 - 1)
PURPOSES = ["training", "selection", "calibration", "evaluation", "exploration", "replay"]
_AMD = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx avx2 {}\n"
_ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm{}\nCPU part\t: 0xd03\n"
PACKAGE = Path(quarl_tf.__file__).parent

#: From the lowest: a room may import from itself and from those before it.
ROOMS = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/design/rooms.md").read_text(), re.MULTILINE)
TENSORFLOW = {"tensorflow", "keras", "tf_keras", "tf_agents", "tensorflow_probability"}
BOARDS_LACK = TENSORFLOW | {"flatbuffers", "gymnasium", "jinja2", "pandas", "rich", "scipy", "yaml"}


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with files.atomic_path(path) as temporary:
        temporary.write_bytes(b"content")
        assert not path.exists()
        assert temporary.parent == path.parent  # A rename is atomic within one file system only.
    assert (path.read_bytes(), list(path.parent.iterdir())) == (b"content", [path])
    assert path.stat().st_mode & 0o7777 == 0o644


def test_what_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(failure: type[BaseException]) -> None:
        with files.atomic_path(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise failure

    for failure in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(failure):
            fail(failure)
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            files.write_json(path, {"x": value})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    message = refused(files.write_bytes, path, b"new")
    assert f"Cannot write {path}: No space left on device" in message
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_what_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    for folder in ("/dev/null", "/dev/null/deeper", "/proc", "/proc/quarl"):
        assert f"path='{folder}/x'" in refused(files.write_bytes, Path(folder) / "x", b"new")
    assert f"path='{tmp_path}'" in refused(files.sha256, tmp_path)
    path = tmp_path / "nothing.json"
    for function in (files.sha256, files.read_json, TrainingRecord.load):
        assert f"No such file or directory). Received: path='{path}'" in refused(function, path)


@given(SEEDS, st.integers(0, 10**9))
def test_purposes_seeds_and_indices_have_streams_of_their_own(seed: int, step: int) -> None:
    names: list[tuple[Any, ...]] = [*((seed, purpose) for purpose in PURPOSES)]
    names += [(seed + 1, "training"), *((seed, "training", index) for index in (1, 2, 1000))]
    first, again = ([generator(*name).bytes(16) for name in names] for _ in range(2))
    assert (first, len(set(first))) == (again, len(names))
    # Those of evaluations are not below 2**30.
    assert all(0 <= environment_seed(seed, purpose, step) < 2**30 for purpose in PURPOSES)


@given(SEEDS, st.integers(0, 300), st.integers(0, 200))
@example(0, 100_000, 0)  # 100 000 draws from 2**30 hold five pairs on average.
@example(0, 1000, 99_000)
def test_evaluation_seeds_are_distinct_and_extended(seed: int, episodes: int, more: int) -> None:
    seeds = evaluation_seeds(seed, episodes)
    assert len(seeds) == len(set(seeds)) == episodes
    # Gymnasium and JSON need Python's integers.
    assert all(type(s) is int and 2**30 <= s < 2**31 for s in seeds)
    assert evaluation_seeds(seed, episodes + more)[:episodes] == seeds


@pytest.mark.parametrize("installed", ["quarl_tf", ".venv/quarl_tf"])
def test_commit_is_of_this_project(installed: str, tmp_path: Path, monkeypatch: Patch) -> None:
    package = tmp_path / installed
    package.mkdir(parents=True)
    (package / "software.py").write_text("code")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "-f", installed], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "foundation/provenance.py"))
    assert (provenance.source_commit.__wrapped__() is None) == (installed != "quarl_tf")


@pytest.mark.parametrize(
    ("information", "described"),
    [
        (_AMD.format(""), "AMD EPYC with avx2"),
        (_AMD.format("avx512f avx512bw avx512_bf16"), "AMD EPYC with avx512_bf16"),
        (_AMD.format("amx_bf16 avx512_bf16"), "AMD EPYC with amx_bf16"),
        (_ARM.format(""), f"{platform.machine()} 0xd03 with asimd"),
        ("", platform.machine()),
    ],
)
def test_processors_are_known(information: str, described: str, monkeypatch: Patch) -> None:
    assert provenance.describe_processor(information) == described
    monkeypatch.delattr(provenance.os, "sched_getaffinity", raising=False)  # As on macOS.
    assert provenance.available_cores() == [*range(os.cpu_count() or 1)]


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


@pytest.mark.parametrize(
    ("names", "unneeded"),
    [
        ("evaluation.play evaluation.memory evaluation.bench evaluation.video", TENSORFLOW),
        ("report study study.engine cli", TENSORFLOW),
        ("runtime.policy", BOARDS_LACK),
    ],
)
def test_imports_load_no_more_than_they_need(names: str, unneeded: set[str]) -> None:
    statements = "".join(f"import quarl_tf.{name}\n" for name in names.split())
    code = f"import sys\n{statements}print(*{{n.split('.')[0] for n in sys.modules}})"
    assert not set(python("-c", code, cwd=PACKAGE.parent).stdout.split()) & unneeded


@pytest.mark.parametrize("module", ["rich", "pandas", "tensorflow"])
def test_the_command_names_the_extra_that_is_not_installed(module: str) -> None:
    extra = {"rich": "evaluate", "pandas": "report", "tensorflow": "train"}[module]
    task = ["train", "CartPole-v1"] if extra == "train" else ["report", "dqn-CartPole-v1-s0"]
    words = [*task, "--root", "/proc/nowhere" if extra == "train" else str(PACKAGE.parent)]
    code = f"import sys; sys.modules[{module!r}] = None; import quarl_tf.cli as c; c.main({words})"
    process = python("-c", code)
    assert f"pip install '.[{extra}]'" in process.stderr
    assert process.stderr.count("\n") == 1


def test_keras_3_is_refused_in_one_line() -> None:
    keras = 'types.SimpleNamespace(__version__="3.9.1")'
    code = f'import sys, types; sys.modules["keras"] = {keras}; import quarl_tf.foundation.keras'
    *_, error = python("-c", code, code=1).stderr.splitlines()
    assert re.fullmatch(r"quarl_tf\S+Error: .+ Received: keras=3\.9\.1", error)


def test_a_fork_of_what_has_loaded_tensorflow_is_refused(monkeypatch: Patch) -> None:
    keras.require_unforked()
    monkeypatch.setattr(keras.os, "getpid", lambda: -1)
    assert "get_context('spawn')" in refused(keras.require_unforked)


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
    assert python("-c", code, cwd=PACKAGE.parent).stdout.splitlines()[-2:] == ["1 -1 []", "False"]
