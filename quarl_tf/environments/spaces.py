"""Observations as floats or bytes in one array, actions as indices from 0 or one vector.

Dict, Tuple, Discrete, MultiDiscrete and MultiBinary observations are flattened as
`gymnasium.spaces.flatten` does, discrete ones one-hot; what is neither float32 nor uint8 becomes
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

#: A space, and what maps to it (observations) or from it (actions).
_Change = tuple[Space[Any], Callable[[Any], Any]]


def plain(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Wrap an environment where its spaces need it."""
    if (action := _action(env.action_space)) is not None:
        env = gym.wrappers.TransformAction(env, action[1], action[0])
    if (observation := _observation(env.observation_space)) is not None:
        env = gym.wrappers.TransformObservation(env, observation[1], observation[0])
    return env


def plain_vector(envs: gym.vector.VectorEnv[Any, Any, Any]) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Wrap a vector environment as `plain` wraps a single one."""
    if (action := _action(envs.single_action_space, (envs.num_envs,))) is not None:
        envs = gym.wrappers.vector.TransformAction(envs, action[1], single_action_space=action[0])
    observation, batched = _observation(envs.single_observation_space), envs.observation_space
    if observation is None:
        return envs
    space, convert = observation
    return gym.wrappers.vector.TransformObservation(
        envs,
        lambda seen: np.stack([convert(one) for one in gym.vector.utils.iterate(batched, seen)]),
        single_observation_space=space,
    )


def observation_flaw(space: Space[Any]) -> str | None:
    """Return why observations of a plain space are not supported."""
    if not isinstance(space, Box):
        return (
            "Observations must be a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or "
            "Tuple of them"
        )
    return "Observations must have at least one number" if 0 in space.shape else None


def action_flaw(space: Space[Any]) -> str | None:
    """Return why actions of a plain space are not supported."""
    if isinstance(space, Discrete) or (isinstance(space, MultiDiscrete) and space.nvec.size):
        return None
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        return "Actions must be Discrete, MultiDiscrete, MultiBinary or a bounded Box of floats"
    if not space.shape[0] or not space.is_bounded() or (space.low >= space.high).any():
        return "Each continuous action needs a lowest value below its highest, both finite"
    return None


def _observation(space: Space[Any]) -> _Change | None:
    """Return how observations become one array; None if they are."""
    if isinstance(space, Box) and space.shape:
        kept = space.dtype in (np.float32, np.uint8)
        return None if kept else (_narrowed(space), _narrow)
    if not _is_of_numbers(space):
        return None
    flat = cast(Box, gym.spaces.flatten_space(space))
    return _narrowed(flat), lambda seen: _narrow(gym.spaces.flatten(space, seen))


def _is_of_numbers(space: Space[Any]) -> bool:
    if isinstance(space, Dict | Tuple):
        parts = space.spaces if isinstance(space, Tuple) else space.spaces.values()
        return bool(parts) and all(_is_of_numbers(part) for part in parts)
    return isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary)


def _action(space: Space[Any], batch: tuple[int, ...] = ()) -> _Change | None:
    """Return how indices from 0, or a vector, become a space's actions; None if they are."""
    flat: Space[Any] = space
    if isinstance(space, Discrete):
        flat = Discrete(int(space.n))
    elif isinstance(space, MultiDiscrete):
        flat = MultiDiscrete(space.nvec.flatten())
    elif isinstance(space, MultiBinary):
        flat = MultiDiscrete(np.full(int(np.prod(space.shape)), 2))
    elif isinstance(space, Box):
        flat = Box(space.low.flatten(), space.high.flatten(), dtype=cast(Any, space.dtype))
    if flat == space:
        return None
    shape, start = (*batch, *(space.shape or ())), getattr(space, "start", 0)
    return flat, lambda action: (np.reshape(action, shape) + start).astype(space.dtype)


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.asarray(values, np.float32)


def _narrowed(space: Box) -> Box:
    # Gymnasium's own wrapper, DtypeObservation, warns of what is meant here.
    with np.errstate(over="ignore"):
        return Box(_narrow(space.low), _narrow(space.high), dtype=np.float32)
