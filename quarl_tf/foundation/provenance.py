"""Know what makes a result: the commit, the packages and the processor.

A training's bytes depend on the processor's instructions, and all speeds do.
"""

import contextlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from quarl_tf.foundation.files import digest, sha256

#: Extensions by which libraries choose their kernels, best first: of x86, then of Arm.
_EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512bw", "avx2", "bf16", "asimd")


@cache
def processor() -> str:
    """Return the processor's name and the best extension it has, as "AMD EPYC with avx2"."""
    try:
        return describe_processor(Path("/proc/cpuinfo").read_text())
    except OSError:
        return describe_processor("")


def describe_processor(information: str) -> str:
    """Return the name and the best extension of the processor that /proc/cpuinfo describes."""
    fields = [line.partition(":") for line in information.splitlines()]
    names = [value.strip() for name, _, value in fields if name.strip() == "model name"]
    words = set(information.split())
    best = next((f" with {one}" for one in _EXTENSIONS if one in words), "")
    return next(iter(names), platform.machine()) + best


_RECORDED_PACKAGES = (
    *("quarl-tf", "tensorflow", "tf-keras", "tf-agents", "tensorflow-model-optimization"),
    *("ai-edge-litert", "gymnasium", "ale-py", "opencv-python-headless", "Box2D", "pybullet"),
    *("pybullet_envs_gymnasium", "numpy"),
)


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that shape a result, those that are installed."""
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
    """Return the PYTHONPATH of processes that shall find this package first of all."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parents[2]), *([given] if given else [])])


@cache
def source_commit() -> str | None:
    """Return the commit this code runs from, `-dirty` if it was changed since; None if unknown."""
    package = Path(__file__).resolve().parents[1]
    # Installed into an environment within another project, git would name that one's.
    if _git(package, "rev-parse", "--show-toplevel") != str(package.parent):
        return None
    commit = _git(package, "rev-parse", "--short=12", "HEAD")
    changed = _git(package, "status", "--short", ".")
    return f"{commit}-dirty" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git answers in a folder; None without git, or outside of its projects."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
