"""Plain spaces: observations as one array of floats or bytes, actions as indices or one vector.

Dict, Tuple, Discrete, MultiDiscrete and MultiBinary observations are flattened as by
`gymnasium.spaces.flatten`, discrete ones one-hot; all types but float32 and uint8 become float32.
"""

from collections.abc import Callable
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.wrappers import TransformAction, TransformObservation
from gymnasium.wrappers.vector import VectorizeTransformAction, VectorizeTransformObservation

VectorEnv = gym.vector.VectorEnv[Any, Any, Any]
#: A plain space, and the function to it (observations) or from it (actions).
_Change = tuple[Space[Any], Callable[[Any], Any]]


def plain(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Wrap an environment whose spaces are not plain."""
    if (change := _action(env.action_space)) is not None:
        env = TransformAction(env, change[1], change[0])
    if (change := _observation(env.observation_space)) is not None:
        env = TransformObservation(env, change[1], change[0])
    return env


def plain_vector(envs: VectorEnv) -> VectorEnv:
    """Wrap a vector environment as `plain` wraps a single one."""
    if (change := _action(envs.single_action_space)) is not None:
        space, convert = change
        envs = VectorizeTransformAction(envs, TransformAction, func=convert, action_space=space)
    if (change := _observation(envs.single_observation_space)) is not None:
        kind, space = TransformObservation, change[0]
        envs = VectorizeTransformObservation(envs, kind, func=change[1], observation_space=space)
    return envs


def flaw(observation: Space[Any], action: Space[Any]) -> str | None:
    """Return what spaces must be, if plain spaces are not supported."""
    if not isinstance(observation, Box) or 0 in observation.shape:
        kinds = "a Box, (Multi)Discrete, MultiBinary, or a Dict or Tuple of them"
        return f"Observations must be {kinds}"
    fits = isinstance(action, Discrete | MultiDiscrete)
    if isinstance(action, Box) and np.issubdtype(action.dtype, np.floating):
        fits = action.is_bounded() and bool((action.low < action.high).all())
    if fits and action.shape != (0,):
        return None
    kinds = "(Multi)Discrete, MultiBinary or a Box of floats, bounded, low below high"
    return f"Actions must be {kinds}"


def _observation(space: Space[Any]) -> _Change | None:
    """Return how to flatten observations; None if they are plain."""
    is_array = isinstance(space, Box) and bool(space.shape)
    if not _is_of_numbers(space) or (is_array and space.dtype in (np.float32, np.uint8)):
        return None
    flat_space = cast(Box, space if is_array else gym.spaces.flatten_space(space))
    with np.errstate(over="ignore"):  # Gymnasium's own wrapper, DtypeObservation, warns of that.
        box = Box(flat_space.low.astype(np.float32), flat_space.high.astype(np.float32))
    flatten: Callable[..., Any] = gym.spaces.flatten
    return box, lambda value: flatten(space, value).astype(np.float32).reshape(box.shape)


def _is_of_numbers(space: Space[Any]) -> bool:
    if isinstance(space, Dict | Tuple):
        parts = space.spaces if isinstance(space, Tuple) else space.spaces.values()
        return bool(parts) and all(_is_of_numbers(part) for part in parts)
    return isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary)


def _action(space: Space[Any]) -> _Change | None:
    """Return how to turn plain actions into those of a space; None if it is plain."""
    flat_space: Space[Any] = space
    if isinstance(space, Discrete):
        flat_space = Discrete(int(space.n))
    elif isinstance(space, MultiDiscrete):
        flat_space = MultiDiscrete(space.nvec.flatten())
    elif isinstance(space, MultiBinary):
        flat_space = MultiDiscrete(np.full(int(np.prod(space.shape)), 2))
    elif isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        ends = space.low.flatten(), space.high.flatten()
        low, high = (end.astype(np.float32) for end in ends)
        if not (np.array_equal(low, ends[0]) and np.array_equal(high, ends[1])):
            # An end that is rounded to float32 may lie beyond that of the space.
            return Box(low, high), lambda action: np.clip(
                np.reshape(action, space.shape).astype(space.dtype), space.low, space.high
            )
        flat_space = Box(*ends, dtype=cast(Any, space.dtype))
    if flat_space == space:
        return None
    shape, start = space.shape or (), getattr(space, "start", 0)
    return flat_space, lambda action: (np.reshape(action, shape) + start).astype(space.dtype)
