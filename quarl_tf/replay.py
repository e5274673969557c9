"""Experience replay over the stream of a vector environment; each observation is stored once.

Row t holds what environment e showed and did at tick t. The observation after it is row t + 1, so a
transition is a pair of neighbouring rows. `starts` tells where a transition may begin: not at an
episode's last observation (Gymnasium's NEXT_STEP autoreset ignores the action there), and not at
the last row before a break in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec


class Transitions(NamedTuple):
    """Sampled transitions; every array starts with the sampled shape."""

    observation: npt.NDArray[Any]
    action: npt.NDArray[Any]
    reward: npt.NDArray[np.float32]
    #: 0 where the episode terminated, else 1: truncation is bootstrapped through.
    discount: npt.NDArray[np.float32]
    next_observation: npt.NDArray[Any]


class Replay:
    """A ring of the newest rows of a vector environment's stream."""

    def __init__(self, spec: EnvSpec, capacity: int, num_envs: int) -> None:
        """Allocate room for `capacity` observations, rounded down to whole rows."""
        rows = capacity // num_envs
        shape = (rows, num_envs)
        action_shape = () if spec.num_actions else (len(spec.action_low or ()),)
        action_dtype = np.int32 if spec.num_actions else np.float32
        self._observations = np.zeros((*shape, *spec.observation_shape), spec.observation_dtype)
        self._actions = np.zeros((*shape, *action_shape), action_dtype)
        self._rewards = np.zeros(shape, np.float32)
        self._discounts = np.zeros(shape, np.float32)
        self._starts = np.zeros(shape, np.bool_)
        self._rows_added = 0

    def __len__(self) -> int:
        """Return how many observations are held."""
        rows, num_envs = self._starts.shape
        return min(self._rows_added, rows) * num_envs

    def add(
        self,
        observation: npt.NDArray[Any],
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        terminated: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.bool_],
    ) -> None:
        """Store one tick: the observation acted on, the action, and what came of it.

        Args:
            observation: Observations before the action, [num_envs, ...].
            action: Actions taken, [num_envs, ...].
            reward: Rewards received.
            terminated: Whether the episode terminated by this step; truncation does not count.
            starts: False where `observation` was the last of its episode.
        """
        row = self._rows_added % len(self._starts)
        self._observations[row] = observation
        self._actions[row] = action
        self._rewards[row] = reward
        self._discounts[row] = ~terminated
        self._starts[row] = starts
        self._rows_added += 1

    def add_break(self, observation: npt.NDArray[Any]) -> None:
        """Store the stream's last observations before all environments start afresh."""
        nothing = np.zeros(len(observation))
        self.add(
            observation, np.zeros_like(self._actions[0]), nothing, nothing > 0, starts=nothing > 0
        )

    def sample(self, shape: tuple[int, ...], random: np.random.Generator) -> Transitions:
        """Draw transitions uniformly, with replacement.

        Args:
            shape: Shape of the draw, e.g. (batches, batch_size).
            random: Generator of the draw.
        """
        rows, num_envs = self._starts.shape
        held = min(self._rows_added, rows)
        # The newest row has no successor yet; counted from the oldest row it is held - 1.
        pairs = (held - 1) * num_envs
        index = random.integers(pairs, size=shape)
        oldest = self._rows_added - held
        row, env = (oldest + index // num_envs) % rows, index % num_envs
        rejected = ~self._starts[row, env]
        while rejected.any():
            index = random.integers(pairs, size=np.count_nonzero(rejected))
            row[rejected] = (oldest + index // num_envs) % rows
            env[rejected] = index % num_envs
            rejected[rejected] = ~self._starts[row[rejected], env[rejected]]
        following = (row + 1) % rows
        return Transitions(
            self._observations[row, env],
            self._actions[row, env],
            self._rewards[row, env],
            self._discounts[row, env],
            self._observations[following, env],
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state for a checkpoint, without rows never written."""
        held = min(self._rows_added, len(self._starts))
        fields = {name: getattr(self, f"_{name}")[:held] for name in self._FIELDS}
        return {**fields, "rows_added": np.array(self._rows_added)}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""
        self._rows_added = int(arrays["rows_added"])
        for name in self._FIELDS:
            getattr(self, f"_{name}")[: len(arrays[name])] = arrays[name]

    _FIELDS = ("observations", "actions", "rewards", "discounts", "starts")
