"""Gymnasium environments by id: single ones to evaluate in, vectors to train in.

Vector environments keep Gymnasium's NEXT_STEP autoreset: the step after an episode's last
observation ignores its action and returns the first observation of the next episode with reward 0.
Whoever learns from the stream must leave that step out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from quarl_tf.errors import UsageError, unknown


@dataclass(frozen=True)
class EnvSpec:
    """Shapes and bounds of an environment's observations and actions.

    Attributes:
        observation_shape: Shape of one observation, without a batch dimension.
        observation_dtype: NumPy name, "float32" or "uint8".
        num_actions: Number of actions of a discrete space, else None.
        action_low: Lower bounds of a continuous action, else None.
        action_high: Upper bounds of a continuous action, else None.
    """

    observation_shape: tuple[int, ...]
    observation_dtype: str
    num_actions: int | None
    action_low: tuple[float, ...] | None = None
    action_high: tuple[float, ...] | None = None


def make(env_id: str) -> gym.Env[Any, Any]:
    """Make one environment, with its time limit and without per-step checks."""
    _check_known(env_id)
    return gym.make(env_id, disable_env_checker=True)


def make_vector(env_id: str, num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make a vector environment: NumPy-vectorised where Gymnasium has one, else in a loop."""
    _check_known(env_id)
    vectorised = gym.spec(env_id).vector_entry_point is not None
    mode = "vector_entry_point" if vectorised else "sync"
    return gym.make_vec(env_id, num_envs=num_envs, vectorization_mode=mode)


def env_spec(env_id: str) -> EnvSpec:
    """Read the spaces of an environment.

    Raises:
        UsageError: The environment is unknown, or its spaces are not among those supported: a Box
            of observations with a discrete or a bounded continuous action.
    """
    env = make(env_id)
    observation, action = env.observation_space, env.action_space
    env.close()
    if not isinstance(observation, gym.spaces.Box):
        raise UsageError(f"Observations must be a Box. Received: {env_id} with {observation}")
    dtype = "uint8" if observation.dtype == np.uint8 else "float32"
    if isinstance(action, gym.spaces.Discrete) and action.start == 0:
        return EnvSpec(observation.shape, dtype, int(action.n))
    if isinstance(action, gym.spaces.Box) and action.is_bounded():
        low, high = action.low.ravel().tolist(), action.high.ravel().tolist()
        return EnvSpec(observation.shape, dtype, None, tuple(low), tuple(high))
    raise UsageError(
        f"Actions must be Discrete from 0 or a bounded Box. Received: {env_id} with {action}"
    )


def _check_known(env_id: str) -> None:
    try:
        gym.spec(env_id)
    except gym.error.Error:
        raise unknown("environment", env_id, gym.registry) from None
