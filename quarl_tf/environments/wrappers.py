"""Wrappers of environments that keep state over resets, and of a user's own."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Tuple
from numpy.typing import NDArray

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError, one_line

#: Entry points of environments whose seeded reset is known to keep state.
KEEPS_STATE = ("gymnasium.envs.box2d.bipedal_walker:", "pybullet_envs_gymnasium.")

#: Bullet's functions of a step, which its client would wrap anew at every call.
_STEP_FUNCTIONS = (
    "getContactPoints",
    "getJointState",
    "getLinkState",
    "setJointMotorControl2",
    "stepSimulation",
)


class RebuildOnReset(gym.Wrapper[Any, Any, Any, Any]):
    """Creates an environment again, in 2 to 4 ms, at every seeded reset, which would keep state.

    Bullet's locomotion environments restore a saved state but keep solver caches and contacts, and
    BipedalWalker builds its terrain in a used world: the same seed and actions give other results
    after other episodes. Evaluation on paired seeds and exact resume need episodes that depend on
    their seed.
    """

    def __init__(self, create: Callable[[], gym.Env[Any, Any]]) -> None:
        # Bullet prints its build time when loaded, and a line at every connection.
        with native_output.silenced():
            super().__init__(create())
        self._create = create
        # Kept, as they may have been seeded.
        self.observation_space = self.env.observation_space
        self.action_space = self.env.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Start an episode, with a seed in a new environment."""
        if seed is None:
            return self.env.reset(options=options)
        with native_output.silenced():
            self.env.close()
            self.env = self._create()
            start = self.env.reset(seed=seed, options=options)
        if (client := getattr(self.env.unwrapped, "_p", None)) is not None:
            vars(client).update({name: getattr(client, name) for name in _STEP_FUNCTIONS})
        return start


class _Checked:
    """Raises a QuarlError for exceptions, and for observations that do not fit their space.

    It is inside `spaces.plain`, which turns all that it gets into numbers that fit.
    """

    env: Any
    observation_space: gym.Space[Any]
    spec: Any
    unwrapped: Any

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, or several."""
        with self._naming_errors("reset"):
            observation, info = self.env.reset(seed=seed, options=options)
        return self._fitting(self.observation_space, observation, "reset"), _mapping(info)

    def close(self, **options: Any) -> None:
        """Close the environment."""
        with self._naming_errors("close"):
            self.env.close(**options)

    @contextmanager
    def _naming_errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            frames = extract_tb(error.__traceback__)
            module = sys.modules.get(type(self.unwrapped).__module__)
            source = getattr(module, "__file__", None)
            frame = next((f for f in frames[::-1] if f.filename == source), frames[-1])
            raise self._error(
                f"raised {type(error).__name__} in {method} ({frame.filename}:{frame.lineno})",
                one_line(error),
            ) from error

    def _fitting(self, space: gym.Space[Any], observation: Any, method: str) -> Any:
        """Return an observation in the types of its space, or of the parts of a Dict or Tuple."""
        flaw = f"in {method} returned an observation"
        if isinstance(space, Dict | Tuple):
            is_tuple = isinstance(space, Tuple)
            spaces: Any = dict(enumerate(space.spaces)) if is_tuple else space.spaces
            try:
                parts, count = {key: observation[key] for key in spaces}, len(observation)
            except (IndexError, KeyError, TypeError) as error:
                raise self._error(f"{flaw} without parts of its space", one_line(error)) from error
            if is_tuple and count > len(spaces):
                raise self._error(f"{flaw} of more parts than its space", f"{count} parts")
            fitting = {key: self._fitting(spaces[key], part, method) for key, part in parts.items()}
            return tuple(fitting.values()) if is_tuple else fitting
        values = self._typed(space, observation, flaw)
        if not isinstance(space, Box) and not space.contains(values):
            raise self._error(f"{flaw} beyond its space, {space}", f"observation={values}"[:200])
        return values

    def _typed(self, space: gym.Space[Any], observation: Any, flaw: str) -> NDArray[Any]:
        """Return an array in the type of its space, equal to the observation."""
        try:
            source = np.asarray(observation)
            with np.errstate(all="ignore"):  # What is beyond the type is not finite in it.
                values: NDArray[Any] = source.astype(space.dtype, copy=False)
        except (OverflowError, TypeError, ValueError) as error:
            raise self._error(f"{flaw} that is no array of numbers", one_line(error)) from error
        if values.shape != space.shape:
            received = f"{values.shape}, the space has {space.shape}"
            raise self._error(f"{flaw} of another shape than its space", received)
        changed = source.dtype.kind == "f" and values.dtype.kind in "iu"
        if changed and (space.dtype == np.uint8 or (values != source).any()):
            raise self._error(f"{flaw} of floats, its space has integers", f"dtype={source.dtype}")
        if values.dtype.kind != "f" and values is not source and (values != source).any():
            received = f"observation={source.tolist()}"[:200]
            raise self._error(f"{flaw} with integers beyond {values.dtype}", received)
        with np.errstate(over="ignore"):  # Observations become float32.
            is_finite = values.dtype.kind != "f" or np.isfinite(values.astype(np.float32)).all()
        if not is_finite:
            received = f"observation={values.tolist()}"[:200]
            raise self._error(f"{flaw} that is not finite", received)
        return values

    def _error(self, flaw: str, received: str) -> QuarlError:
        env_id = self.spec.id if self.spec is not None else "?"
        return QuarlError(
            f"{env_id} {flaw}; fix it, gymnasium.utils.env_checker.check_env may help. "
            f"Received: {received}"
        )


class UserEnvironment(_Checked, gym.Wrapper[Any, Any, Any, Any]):
    """A user's environment."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step."""
        with self._naming_errors("step"):
            observation, reward, terminated, truncated, info = self.env.step(action)
            reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        observation = self._fitting(self.observation_space, observation, "step")
        return observation, reward, terminated, truncated, _mapping(info)


class UserVector(_Checked, gym.vector.VectorWrapper):
    """Environments that a user has vectorised."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in each."""
        with self._naming_errors("step"):
            observations, rewards, *ends, info = self.env.step(actions)
            rewards = np.asarray(rewards, np.float64).reshape(self.num_envs)
            terminated, truncated = (np.asarray(e, np.bool_).reshape(self.num_envs) for e in ends)
        observations = self._fitting(self.observation_space, observations, "step")
        return observations, rewards, terminated, truncated, _mapping(info)


def _mapping(info: Any) -> dict[str, Any]:
    """Return the info of a step, which may be anything; empty if it has no names."""
    return info if isinstance(info, dict) else {}
