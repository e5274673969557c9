"""Find environments by id; packages that register some are imported only for an unknown one."""

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as Registered

from quarl_tf.foundation.errors import QuarlError, UsageError, one_line, unknown

#: Versions that Gymnasium took out, and those that took their place without a change of the task.
_RENAMED = {
    "BipedalWalker-v2": "BipedalWalker-v3",
    "BipedalWalkerHardcore-v2": "BipedalWalkerHardcore-v3",
    "LunarLander-v2": "LunarLander-v3",
    "LunarLanderContinuous-v2": "LunarLanderContinuous-v3",
}

#: Packages that register environments when imported, and what their ids look like.
_REGISTERING = {
    "ale_py": re.compile(r"NoFrameskip-v\d+$|^ALE/"),
    "pybullet_envs_gymnasium": re.compile(r"BulletEnv-v\d+$"),
}

#: What to install where pip's name is not the module's.
_PIP_NAMES = {"ale_py": "ale-py", "cv2": "opencv-python-headless"}


def canonical_id(env_id: str) -> str:
    """Return today's id of an environment, for which an older version may be given."""
    return _RENAMED.get(env_id, env_id)


def find(env_id: str) -> Registered:
    """Look an environment up, in packages that register some too."""
    if env_id not in gym.registry:
        for module, ids in _REGISTERING.items():
            try:
                import_module(module)
            except ModuleNotFoundError as error:
                if ids.search(env_id):
                    raise _not_installed(env_id, error) from error
    if env_id not in gym.registry:
        hint = "One of your own needs --import MODULE, the module that registers it."
        raise unknown("environment", env_id, filter(_is_offered, gym.registry), hint)
    return gym.registry[env_id]


@contextmanager
def making(env_id: str) -> Iterator[None]:
    """Turn what keeps an environment from being made into one line, a UsageError."""
    try:
        with warnings.catch_warnings():
            # CartPole-v0, say, is a task of its own, asked for by its full name.
            warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
            yield
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise _not_installed(env_id, error) from error
    except QuarlError:
        raise
    except Exception as error:
        raise UsageError(
            f"{env_id} cannot be made ({type(error).__name__}: {one_line(error).rstrip('.')}); "
            f"gymnasium.make alone would show where. Received: environment={env_id!r}"
        ) from error


def import_environments(modules: Sequence[str]) -> None:
    """Import modules, installed or in the current folder, that register a user's environments.

    A UsageError says which of them, or of what they import, is not there or cannot be imported.
    """
    here = str(Path.cwd())
    if modules and here not in sys.path:
        sys.path.append(here)
    for module in modules:
        try:
            import_module(module)
        except Exception as error:
            raise UsageError(
                f"The module cannot be imported ({type(error).__name__}: "
                f"{one_line(error).rstrip('.')}); name it as an import statement would, installed "
                f"or in the current folder. Received: --import {module!r}"
            ) from error


def _is_offered(env_id: str) -> bool:
    """Leave out the hundreds of variants of Atari games that `environments.atari` refuses."""
    is_game = str(gym.registry[env_id].entry_point).startswith("ale_py.")
    return env_id.endswith("NoFrameskip-v4") or not is_game


def _not_installed(env_id: str, error: Exception) -> UsageError:
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    name = str(getattr(missing, "name", None) or "")
    entry_point = str(gym.registry[env_id].entry_point) if env_id in gym.registry else ""
    flaw = one_line(error).rstrip(".")
    if name and re.match(rf"{re.escape(name)}[.:]", entry_point):
        flaw = f"{env_id} was registered with an entry point that cannot be imported, {entry_point}"
    elif name:
        package = name.split(".", maxsplit=1)[0]
        package = _PIP_NAMES.get(package, package)
        flaw = f"{env_id} needs a package that is not installed: pip install {package}"
    return UsageError(f"{flaw}. Received: environment={env_id!r}")
