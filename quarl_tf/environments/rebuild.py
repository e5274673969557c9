"""Environments whose own seeded reset keeps state of earlier episodes.

Bullet's locomotion environments restore a saved state but keep solver caches and contacts, and
BipedalWalker builds its terrain in a used world: the same seed and actions give other results after
other episodes. Evaluation on paired seeds and exact resume need episodes that depend on their seed.
"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as Registration

from quarl_tf.foundation import native_output

_KEEPS_STATE = ("gymnasium.envs.box2d.bipedal_walker:", "pybullet_envs_gymnasium.")

#: Bullet's functions of a step, which its client would wrap anew at every call.
_STEP_FUNCTIONS = (
    "getContactPoints",
    "getJointState",
    "getLinkState",
    "setJointMotorControl2",
    "stepSimulation",
)


def keeps_state(registration: Registration) -> bool:
    """Tell whether an environment's seeded reset is known to keep state."""
    return str(registration.entry_point).startswith(_KEEPS_STATE)


class RebuildOnReset(gym.Wrapper[Any, Any, Any, Any]):
    """Creates the environment again at every seeded reset, in 2 to 4 ms."""

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
