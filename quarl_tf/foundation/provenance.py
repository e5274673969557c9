"""Identify what produced a result: the commit, the packages, the processor and its cores.

The bytes of a training depend on the processor's instructions, as all speeds do.
"""

import contextlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from quarl_tf.foundation.files import digest, sha256

#: Extensions that libraries choose kernels by, best first: of x86, then of Arm.
_EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512bw", "avx2", "bf16", "asimd")


@cache
def processor() -> str:
    """Return the processor's name and its best extension, such as "AMD EPYC with avx2"."""
    path = Path("/proc/cpuinfo")
    return describe_processor(path.read_text() if path.exists() else "")


def describe_processor(information: str) -> str:
    """Return the same from the content of /proc/cpuinfo."""
    fields = (line.partition(":") for line in information.splitlines())
    first = {name.strip(): value.strip() for name, _, value in reversed(list(fields))}
    # Arm has numbers instead.
    numbers = [first[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in first]
    name = first.get("model name") or " ".join([platform.machine(), *numbers])
    words = set(information.split())
    suffix = next((f" with {extension}" for extension in _EXTENSIONS if extension in words), "")
    return name + suffix


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Of Linux.
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


_RECORDED_PACKAGES = (
    *("quarl-tf", "tensorflow", "tf-keras", "tf-agents", "tensorflow-model-optimization"),
    *("tensorflow-probability", "mujoco"),
    *("ai-edge-litert", "gymnasium", "ale-py", "opencv-python-headless", "Box2D", "pybullet"),
    *("pybullet_envs_gymnasium", "numpy"),
)


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect results."""
    versions = {}
    for name in _RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache
def sources() -> str:
    """Return a digest of this package's sources."""
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml"))
    return digest({str(path.relative_to(package)): sha256(path) for path in files})


def import_path() -> str:
    """Return a PYTHONPATH on which this package comes first."""
    paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, paths))


@cache
def source_commit() -> str | None:
    """Return the commit of this code, with `-dirty` if it has changes; None if unknown."""
    package = Path(__file__).resolve().parents[1]
    # An environment inside another project would give that project's commit.
    if _git(package, "rev-parse", "--show-toplevel") != str(package.parent):
        return None
    commit = _git(package, "rev-parse", "--short=12", "HEAD")
    changed = _git(package, "status", "--short", ".")
    return f"{commit}-dirty" if commit and changed else commit


def _git(folder: Path, *args: str) -> str | None:
    """Return the output of git in a folder; None without git or a repository."""
    try:
        git = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()
