"""A robot drives up to its charging dock: centred, straight and slow, its contacts meet best."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

#: Seconds of one step.
STEP = 0.1

#: What each action adds to the turn, in radians, and to the speed, in m/s.
ACTIONS = ((0.0, 0.0), (0.1, 0.0), (-0.1, 0.0), (0.0, 0.05), (0.0, -0.05))


class Docking(gym.Env[NDArray[np.float32], np.int64]):
    """A robot some 2 m in front of its dock, which it has 10 s to reach.

    It observes its distance and its offset from the dock's axis in m, its heading in radians, 0
    towards the dock, and its speed in m/s. It holds its course, turns left or right, drives faster
    or slower. The only reward comes when it touches the dock: 100 for a perfect contact, a share
    of it for one that is off the centre, oblique or hard.
    """

    observation_space = gym.spaces.Box(-5, 5, (4,), np.float32)
    action_space = gym.spaces.Discrete(len(ACTIONS))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Put the robot down somewhere, heading roughly for the dock."""
        super().reset(seed=seed)
        low, high = (1.5, -0.5, -0.5, 0.2), (2.0, 0.5, 0.5, 0.4)
        self._distance, self._offset, self._heading, self._speed = self.np_random.uniform(low, high)
        return self._observation(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Turn or change speed, then drive on for a step."""
        turn, push = ACTIONS[action]
        self._heading = float(np.clip(self._heading + turn, -1, 1))
        self._speed = float(np.clip(self._speed + push, 0.05, 0.5))
        self._distance -= STEP * self._speed * math.cos(self._heading)
        self._offset += STEP * self._speed * math.sin(self._heading)
        if self._distance > 0:
            return self._observation(), 0.0, False, False, {}
        error = abs(self._offset) / 0.2 + abs(self._heading) / 0.5 + (self._speed - 0.05) / 0.2
        return self._observation(), 100 * math.exp(-error), True, False, {}

    def _observation(self) -> NDArray[np.float32]:
        state = (self._distance, self._offset, self._heading, self._speed)
        return np.array(state, np.float32)


gym.register("Docking-v0", f"{__name__}:Docking", max_episode_steps=100)
