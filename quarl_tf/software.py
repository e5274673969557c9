"""The software that makes a result: its commit, and the packages that shape it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from quarl_tf import processor
from quarl_tf.files import sha256
from quarl_tf.spec import digest

_RECORDED_PACKAGES = (
    "quarl-tf",
    "tensorflow",
    "tf-keras",
    "tf-agents",
    "tensorflow-model-optimization",
    "ai-edge-litert",
    "gymnasium",
    "ale-py",
    "opencv-python-headless",
    "Box2D",
    "pybullet",
    "pybullet_envs_gymnasium",
    "numpy",
)

#: What stands between several commits or processors, and for one that is not known.
SEVERAL = "; "
UNKNOWN_COMMIT, UNKNOWN_PROCESSOR = "unknown", "an unknown processor"


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that shape a result, those that are installed."""
    versions = {}
    for name in _RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache
def source_digest() -> str:
    """Return what tells this code, and the packages and processor under it, from any other."""
    package = Path(__file__).parent
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml"))
    found = {str(path.relative_to(package)): sha256(path) for path in files}
    return digest({**found, **package_versions(), "processor": processor.description()})


def import_path() -> str:
    """Return the PYTHONPATH of processes that shall find this package first of all."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parents[1]), *([given] if given else [])])


@cache
def source_commit() -> str | None:
    """Return the commit this code runs from, with `-dirty` for local changes; None if unknown."""
    package = Path(__file__).resolve().parent
    # Installed into an environment within another project, git would name that one's.
    if _git(package, "rev-parse", "--show-toplevel") != str(package.parent):
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git answers in a folder; None without git, or outside of its projects."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
