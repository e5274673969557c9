"""Episodes that depend on their seed alone, where the environment's own reset keeps a past.

Bullet's locomotion environments restore a saved state over solver caches and contacts that stay,
and BipedalWalker builds its terrain in a world it has used before: the same seed and actions lead
elsewhere after other episodes. Evaluation on paired seeds and exact resume need the contrary.
"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as Registered

from quarl_tf.foundation import native_output

_KEEPING = ("gymnasium.envs.box2d.bipedal_walker:", "pybullet_envs_gymnasium.")


def keeps_a_past(registered: Registered) -> bool:
    """Tell whether an environment's seeded reset is known not to forget everything."""
    return str(registered.entry_point).startswith(_KEEPING)


class RebuildOnReset(gym.Wrapper[Any, Any, Any, Any]):
    """Makes the environment anew at every seeded reset; that takes 2 to 4 ms."""

    def __init__(self, create: Callable[[], gym.Env[Any, Any]]) -> None:
        # Bullet prints its build time when loaded, and a line at every connection.
        with native_output.silenced():
            super().__init__(create())
        self._create, self._used = create, False
        # Kept over all the environments to come, with whatever seed they were given.
        self.observation_space = self.env.observation_space
        self.action_space = self.env.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, in an environment without a past if there is a seed."""
        if self._used and seed is None:
            return self.env.reset(options=options)
        with native_output.silenced():
            if self._used:
                self.env.close()
                self.env = self._create()
            self._used = True
            return self.env.reset(seed=seed, options=options)
