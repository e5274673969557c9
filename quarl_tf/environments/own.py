"""A user's own environment, whose mistakes become errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import gymnasium as gym
import numpy as np

from quarl_tf.foundation.errors import QuarlError, one_line


class Own(gym.Wrapper[Any, Any, Any, Any]):
    """Raises a QuarlError for exceptions, and for observations that do not fit their space."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Start an episode."""
        with self._understood("reset"):
            observation, info = self.env.reset(seed=seed, options=options)
        return self._checked(observation, "reset"), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step."""
        with self._understood("step"):
            observation, reward, terminated, truncated, info = self.env.step(action)
        return self._checked(observation, "step"), reward, terminated, truncated, info

    @contextmanager
    def _understood(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            where = extract_tb(error.__traceback__)[-1]
            raise self._error(
                f"raised {type(error).__name__} in {method} ({where.filename}:{where.lineno})",
                one_line(error),
            ) from error

    def _checked(self, observation: Any, method: str) -> Any:
        shape = self.observation_space.shape
        if np.shape(observation) != shape:
            flaw = f"returned an observation of another shape than its space in {method}"
            raise self._error(flaw, f"{np.shape(observation)}, the space has {shape}")
        if not np.isfinite(observation).all():
            flaw = f"returned an observation that is not finite in {method}"
            raise self._error(flaw, f"observation={observation.tolist()}"[:200])
        return observation

    def _error(self, flaw: str, received: str) -> QuarlError:
        env_id = self.spec.id if self.spec is not None else "?"
        return QuarlError(
            f"{env_id} {flaw}; fix it, gymnasium.utils.env_checker.check_env may help. "
            f"Received: {received}"
        )
