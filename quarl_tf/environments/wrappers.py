"""Wrappers of single environments: those that keep state over resets, and a user's own."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TransformObservation
from numpy.typing import NDArray

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError

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


def admitted(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Give observations the type of their space; a QuarlError where shape or values are wrong."""
    space = env.observation_space

    def admit(observation: Any) -> NDArray[Any]:
        values: NDArray[Any] = np.asarray(observation, space.dtype)
        if values.shape != space.shape or not np.isfinite(values).all():
            raise QuarlError(
                f"The environment gave an observation that is not of shape {space.shape} or not "
                f"finite; fix it. Received: shape={values.shape}, {values.tolist()!s:.200}"
            )
        return values

    return TransformObservation(env, admit, space)
