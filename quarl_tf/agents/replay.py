"""Experience replay of the stream of a vector environment; each observation is stored once.

Row t holds what environment e observed and did at tick t. The observation after it is row t + 1, so
a transition is a pair of neighbouring rows. Of stacked frames, each is stored once. `starts` tells
where a transition may begin: not at an episode's last observation (Gymnasium's NEXT_STEP autoreset
ignores the action there), and not at the last row before a break in the stream.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec, channels_last
from quarl_tf.environments.acting import Tick


class Transitions(NamedTuple):
    """Sampled n-step transitions; every array starts with the sampled shape."""

    observation: npt.NDArray[Any]
    action: npt.NDArray[Any]
    #: Discounted sum of the rewards up to `next_observation`.
    reward: npt.NDArray[np.float32]
    #: Weight of the next value, without the discount that TF-Agents multiplies by:
    #: discount ** (steps - 1), or 0 after termination. Truncation bootstraps.
    discount: npt.NDArray[np.float32]
    next_observation: npt.NDArray[Any]


class Replay:
    """A ring buffer of the newest rows of a vector environment's stream."""

    def __init__(
        self, spec: EnvSpec, capacity: int, num_envs: int, *, n_step: int = 1, discount: float = 1.0
    ) -> None:
        """Allocate `capacity` observations, in whole rows; presets say how many it takes.

        A transition spans `n_step` steps, or fewer where its episode ends.
        """
        self._n_step, self._discount, self._depth = n_step, discount, spec.frame_stack
        shape = capacity // num_envs, num_envs
        # Of stacked frames, the newest of each.
        observation = spec.observation_shape[:-1] if self._depth > 1 else spec.observation_shape
        action = () if spec.num_actions else (spec.action_size,)
        #: In the order of `add`.
        self._rings: dict[str, npt.NDArray[Any]] = {
            "observations": np.zeros((*shape, *observation), spec.observation_dtype),
            "actions": np.zeros((*shape, *action), np.int32 if spec.num_actions else np.float32),
            "rewards": np.zeros(shape, np.float32),
            "continues": np.zeros(shape, np.float32),
            "starts": np.zeros(shape, np.bool_),
        }
        self._rows_added = 0

    def __len__(self) -> int:
        """Return the number of stored observations."""
        rows, num_envs = self._rings["starts"].shape
        return int(min(self._rows_added, rows) * num_envs)

    def add(self, tick: Tick) -> None:
        """Store one tick of the stream."""
        observations = tick.observations[..., -1] if self._depth > 1 else tick.observations
        fields = observations, tick.actions, tick.rewards, ~tick.terminated, tick.starts
        for ring, field in zip(self._rings.values(), fields, strict=True):
            ring[self._rows_added % len(ring)] = field
        self._rows_added += 1

    def add_break(self, observation: npt.NDArray[Any]) -> None:
        """Store the last observations before all environments start new episodes."""
        false = np.zeros(len(observation), np.bool_)
        self.add(Tick(observation, np.zeros_like(self._rings["actions"][0]), false, false, false))

    def sample(self, shape: tuple[int, ...], random: np.random.Generator) -> Transitions:
        """Draw transitions uniformly, with replacement; `shape` is (batches, batch_size)."""
        _, actions, rewards, continues, starts = self._rings.values()
        rows, num_envs = starts.shape
        # The oldest stacks of a full ring have overwritten frames, the newest row no successor.
        lost_rows = self._depth - 1 if self._rows_added > rows else 0
        usable_rows = min(self._rows_added, rows) - lost_rows
        pairs = (usable_rows - 1) * num_envs
        oldest = self._rows_added - usable_rows
        row, env = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        rejected = np.ones(shape, np.bool_)
        while rejected.any():
            index = random.integers(pairs, size=np.count_nonzero(rejected))
            row[rejected] = (oldest + index // num_envs) % rows
            env[rejected] = index % num_envs
            rejected[rejected] = ~starts[row[rejected], env[rejected]]
        newest = (self._rows_added - 1) % rows
        first_row, reward, weight = row, rewards[row, env], continues[row, env]
        row = (row + 1) % rows
        for _ in range(self._n_step - 1):
            # The transition ends early at an episode's last observation and at the newest row.
            goes_on = (weight > 0) & starts[row, env] & (row != newest)
            weight = np.where(goes_on, weight * np.float32(self._discount), weight)
            reward = reward + np.where(goes_on, weight * rewards[row, env], 0.0)
            weight = np.where(goes_on, weight * continues[row, env], weight)
            row = np.where(goes_on, (row + 1) % rows, row)
        return Transitions(
            self._stored(first_row, env),
            actions[first_row, env],
            reward.astype(np.float32),
            weight,
            self._stored(row, env),
        )

    def _stored(self, row: npt.NDArray[Any], env: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return observations; of stacks, frames from before the current life are zeros."""
        ring, starts = self._rings["observations"], self._rings["starts"]
        if self._depth == 1:
            observations: npt.NDArray[Any] = ring[row, env]
            return observations
        rows = row.reshape(-1, 1) - np.arange(self._depth - 1, -1, -1)
        index = rows % len(ring), env.reshape(-1, 1)
        planes = ring[index]
        cut = ~starts[index] | ((rows < 0) & (self._rows_added <= len(ring)))
        cut[:, -1] = False
        planes[np.logical_or.accumulate(cut[:, ::-1], axis=1)[:, ::-1]] = 0
        return channels_last(planes).reshape(*row.shape, *planes.shape[2:], self._depth)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state for a checkpoint, without unwritten rows."""
        rows = min(self._rows_added, len(self._rings["starts"]))
        arrays = {name: ring[:rows] for name, ring in self._rings.items()}
        return {**arrays, "rows_added": np.array(self._rows_added)}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the state of a checkpoint."""
        self._rows_added = int(arrays["rows_added"])
        for name, ring in self._rings.items():
            saved = arrays[name]
            if len(saved) < len(ring):  # A full ring may be large: it is not copied.
                ring[: len(saved)] = saved
                saved = ring
            self._rings[name] = saved
