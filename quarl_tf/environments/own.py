"""A user's own environment, whose mistakes become errors of one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import gymnasium as gym
import numpy as np

from quarl_tf.foundation.errors import QuarlError, one_line


class Own(gym.Wrapper[Any, Any, Any, Any]):
    """Raises a QuarlError for exceptions, and for observations that do not fit their space.

    A vector that the user has vectorised is not wrapped.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Start an episode."""
        with self._naming_errors("reset"):
            observation, info = self.env.reset(seed=seed, options=options)
        return self._checked(observation, "reset"), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step."""
        with self._naming_errors("step"):
            observation, reward, terminated, truncated, info = self.env.step(action)
        return self._checked(observation, "step"), reward, terminated, truncated, info

    @contextmanager
    def _naming_errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            frames = extract_tb(error.__traceback__)
            source = getattr(sys.modules[type(self.unwrapped).__module__], "__file__", None)
            frame = next((f for f in frames[::-1] if f.filename == source), frames[-1])
            raise self._error(
                f"raised {type(error).__name__} in {method} ({frame.filename}:{frame.lineno})",
                one_line(error),
            ) from error

    def _checked(self, observation: Any, method: str) -> Any:
        space, flaw = self.observation_space, f"in {method} returned an observation"
        try:
            with np.errstate(all="ignore"):  # What is beyond the type is not finite in it.
                values = np.asarray(observation, space.dtype)
        except (TypeError, ValueError) as error:
            raise self._error(f"{flaw} that is no array of numbers", one_line(error)) from error
        if values.shape != space.shape:
            received = f"{values.shape}, the space has {space.shape}"
            raise self._error(f"{flaw} of another shape than its space", received)
        if not np.isfinite(values).all():
            received = f"observation={values.tolist()}"[:200]
            raise self._error(f"{flaw} that is not finite", received)
        return observation

    def _error(self, flaw: str, received: str) -> QuarlError:
        env_id = self.spec.id if self.spec is not None else "?"
        return QuarlError(
            f"{env_id} {flaw}; fix it, gymnasium.utils.env_checker.check_env may help. "
            f"Received: {received}"
        )
