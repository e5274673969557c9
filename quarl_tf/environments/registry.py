"""Find environments by id; packages that register some are imported only for an unknown id."""

import hashlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as Registration

from quarl_tf.foundation.errors import QuarlError, UsageError, one_line, unknown
from quarl_tf.foundation.files import sha256

#: Versions that Gymnasium removed, and their successors with the same task.
_RENAMED = {
    f"{task}-v2": f"{task}-v3"
    for task in ("BipedalWalker", "BipedalWalkerHardcore", "LunarLander", "LunarLanderContinuous")
}

#: Packages that register environments when imported, and the pattern of their ids.
_REGISTERING_PACKAGES = {
    "ale_py": re.compile(r"NoFrameskip-v\d+$|^ALE/"),
    "pybullet_envs_gymnasium": re.compile(r"BulletEnv-v\d+$"),
    "quarl_tf": re.compile(r"^AirNav-v\d+$"),
}

#: The end of the ids of games that are played by the papers' protocol (`environments.atari`).
GAME = "NoFrameskip-v4"

#: Parts of a registration that change an environment.
_SETTINGS = ("entry_point", "kwargs", "max_episode_steps", "additional_wrappers")

#: Ids of Gymnasium's own registrations: a user's of the same class may have other settings.
_OF_GYMNASIUM = frozenset(gym.registry)

#: Names on PyPI that differ from the module's.
_PIP_NAMES = {"ale_py": "ale-py", "cv2": "opencv-python-headless"}


def canonical_id(env_id: str) -> str:
    """Return the current id of an environment that may be given by an older version."""
    return _RENAMED.get(env_id, env_id)


def find(env_id: str) -> Registration:
    """Look an environment up, also in packages that register some."""
    if env_id not in gym.registry:
        for module, pattern in _REGISTERING_PACKAGES.items():
            try:
                import_module(module)
            except ImportError as error:  # Missing, or broken.
                if pattern.search(env_id):
                    raise _not_installed(env_id, error) from error
    if env_id not in gym.registry:
        # Without the hundreds of variants of Atari games that `environments.atari` refuses.
        env_ids = [
            name
            for name, entry in gym.registry.items()
            if name.endswith(GAME) or not str(entry.entry_point).startswith("ale_py.")
        ]
        hint = "One of your own needs --import MODULE, which registers it (in Python, import it)."
        raise unknown("environment", env_id, env_ids, hint)
    return gym.registry[env_id]


def is_versioned(env_id: str) -> bool:
    """Tell whether records have the version of an environment's code and registration."""
    package = _module(env_id).split(".")[0]
    if package == "gymnasium":
        return env_id in _OF_GYMNASIUM
    pattern = _REGISTERING_PACKAGES.get(package)
    return pattern is not None and pattern.search(env_id) is not None


def _module(env_id: str) -> str:
    entry_point: Any = find(env_id).entry_point
    if isinstance(entry_point, str):
        return entry_point.split(":")[0]
    while isinstance(entry_point, partial):
        entry_point = entry_point.func
    return getattr(entry_point, "__module__", "builtins")


def source_sha256(env_id: str) -> str | None:
    """Return the hash of the code that defines an environment, unless `is_versioned`.

    It is that of the registration and of the module, or of all modules of its package, at the first
    call; a module that runs as a script counts as if it was imported.
    """
    if is_versioned(env_id):
        return None
    with making(env_id):
        code = _code_sha256(_module(env_id))
        settings = [getattr(find(env_id), name) for name in _SETTINGS]
        text = f"{_described(settings)} {code}".replace("__main__", _imported_name("__main__"))
    return None if code is None else hashlib.sha256(text.encode()).hexdigest()


def is_identified(env_id: str) -> bool:
    """Tell whether records identify an environment's code, as far as it is imported."""
    try:
        return is_versioned(env_id) or source_sha256(env_id) is not None
    except QuarlError:
        return True


def _described(value: Any) -> str:
    """Describe a value alike in every process; of objects that may be anything, tell the type."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(map(_described, value.items())))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, partial):
        return _described([value.func, value.args, value.keywords])
    if hasattr(value, "tolist"):  # Of NumPy.
        return _described([str(value.dtype), value.tolist()])
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    is_plain = isinstance(value, str | bytes | int | float | None)
    return repr(value) if is_plain else type(value).__qualname__


def _imported_name(name: str) -> str:
    """Return the name by which a module is imported, also of a script."""
    module = import_module(name)
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if name != "__main__" or file is None:
        return name
    return Path(file).stem if spec is None else str(spec.name)


@cache  # Taken once: a file may be edited while its code is in use.
def _code_sha256(name: str) -> str | None:
    if (file := getattr(import_module(name), "__file__", None)) is None:
        return None
    path = Path(file).resolve()
    folder, paths = path.parent, {path}
    # Of the package that the module is in, however deep.
    levels = _imported_name(name).count(".") + (path.name == "__init__.py")
    if levels and (folder / "__init__.py").exists():
        folder = path.parents[levels - 1]
        paths |= {found for found in folder.rglob("*.py") if found.is_file()}
    parts = {path.relative_to(folder).parts: path for path in paths}
    shown = {key: path for key, path in parts.items() if not any(p.startswith(".") for p in key)}
    hashes = (f"{'/'.join(key)} {sha256(path)}" for key, path in sorted(shown.items()))
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@contextmanager
def making(env_id: str) -> Iterator[None]:
    """Turn every failure to make an environment into a UsageError of one line."""
    try:
        with warnings.catch_warnings():
            # Old versions such as CartPole-v0 are tasks of their own.
            warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
            yield
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise _not_installed(env_id, error) from error
    except QuarlError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{env_id} cannot be made or drawn ({type(error).__name__}: "
            f"{one_line(error).rstrip('.')}); gymnasium.make alone would show where. "
            f"Received: environment={env_id!r}"
        ) from error


def import_environments(modules: Sequence[str]) -> None:
    """Import a user's modules that register environments, installed or in the current folder.

    A UsageError names the one that cannot be imported.
    """
    folder = str(Path.cwd())
    if modules and folder not in sys.path:
        sys.path.append(folder)
    for module in modules:
        try:
            import_module(module)
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"The module cannot be imported ({type(error).__name__}: "
                f"{one_line(error).rstrip('.')}); fix it, or name one as an import statement "
                f"would, installed or in the current folder. Received: --import {module!r}"
            ) from error


def _not_installed(env_id: str, error: Exception) -> UsageError:
    cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    name = str(getattr(cause, "name", None) or "")
    entry_point = str(gym.registry[env_id].entry_point) if env_id in gym.registry else ""
    flaw = one_line(error).rstrip(".")
    if name and re.match(rf"{re.escape(name)}[.:]", entry_point):
        flaw = f"{env_id} was registered with an entry point that cannot be imported, {entry_point}"
    elif name:
        package = name.split(".", maxsplit=1)[0]
        package = _PIP_NAMES.get(package, package)
        flaw = f"{env_id} needs a package that is not installed: pip install {package}"
    return UsageError(f"{flaw}. Received: environment={env_id!r}")
