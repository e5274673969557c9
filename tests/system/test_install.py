"""The wheel installs into an empty environment and acts there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from samples import ROOT

_ACT = """
import sys
import numpy as np
from quarl_tf.runtime import POLICIES
from quarl_tf.runtime.policy import Policy

for path in sorted(POLICIES.rglob("*.tflite")):
    policy = Policy.load(path)
    print(path, policy.act(np.zeros(policy.sidecar.observation_shape, np.float32)))
assert not {"gymnasium", "rich", "scipy", "tensorflow", "yaml"} & set(sys.modules)
"""


def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    completed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert completed.returncode == code, completed.stderr
    return completed


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel; return the folder of programs."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "quarl_tf", folder / "quarl_tf")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder / "dist", folder)
    run(sys.executable, "-m", "venv", folder / "environment")
    run(folder / "environment/bin/pip", "install", *(folder / "dist").glob("*.whl"))
    return folder / "environment/bin"


def test_the_wheel_holds_small_policies(environment: Path) -> None:
    (wheel,) = environment.parents[1].glob("dist/*.whl")
    entries = zipfile.ZipFile(wheel).infolist()
    policies = [entry for entry in entries if "/policies/" in entry.filename]
    assert sum(entry.filename.endswith(".tflite") for entry in policies) == 3
    assert sum(entry.file_size for entry in policies) <= 300_000


def test_policies_act_by_the_base_alone(environment: Path) -> None:
    # From a folder without the package's sources.
    completed = run("env", "-C", environment, environment / "python", "-c", _ACT)
    assert len(completed.stdout.splitlines()) == 3


def test_the_command_names_the_extra_that_it_needs(environment: Path) -> None:
    completed = run(environment / "quarl", "list", code=1)
    assert "[evaluate]" in completed.stderr
    assert completed.stderr.count("\n") == 1
