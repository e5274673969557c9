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
        self._n_step, self._discount = n_step, discount
        rows = capacity // num_envs
        kind: type[_Observations] = _FrameStacks if spec.frame_stack > 1 else _Observations
        self._observations = kind(rows, num_envs, spec)
        shape = (rows, num_envs) if spec.num_actions else (rows, num_envs, spec.action_size)
        self._actions = np.zeros(shape, np.int32 if spec.num_actions else np.float32)
        self._rewards, self._continues = np.zeros((2, rows, num_envs), np.float32)
        self._starts = np.zeros((rows, num_envs), np.bool_)
        self._fields: dict[str, npt.NDArray[Any]] = {
            "actions": self._actions,
            "rewards": self._rewards,
            "continues": self._continues,
            "starts": self._starts,
        }
        self._rows_added = 0

    def __len__(self) -> int:
        """Return the number of stored observations."""
        rows, num_envs = self._starts.shape
        return min(self._rows_added, rows) * num_envs

    def add(self, tick: Tick) -> None:
        """Store one tick of the stream."""
        row = self._rows_added % len(self._starts)
        self._observations.put(row, tick.observations)
        self._actions[row] = tick.actions
        self._rewards[row] = tick.rewards
        self._continues[row] = ~tick.terminated
        self._starts[row] = tick.starts
        self._rows_added += 1

    def add_break(self, observation: npt.NDArray[Any]) -> None:
        """Store the last observations before all environments start new episodes."""
        false = np.zeros(len(observation), np.bool_)
        self.add(Tick(observation, np.zeros_like(self._actions[0]), false, false, false))

    def sample(self, shape: tuple[int, ...], random: np.random.Generator) -> Transitions:
        """Draw transitions uniformly, with replacement; `shape` is (batches, batch_size)."""
        rows, num_envs = self._starts.shape
        # The oldest stacks of a full ring have overwritten frames, the newest row no successor.
        lost_rows = self._observations.reach if self._rows_added > rows else 0
        usable_rows = min(self._rows_added, rows) - lost_rows
        pairs = (usable_rows - 1) * num_envs
        oldest = self._rows_added - usable_rows
        row, env = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        rejected = np.ones(shape, np.bool_)
        while rejected.any():
            index = random.integers(pairs, size=np.count_nonzero(rejected))
            row[rejected] = (oldest + index // num_envs) % rows
            env[rejected] = index % num_envs
            rejected[rejected] = ~self._starts[row[rejected], env[rejected]]
        newest = (self._rows_added - 1) % rows
        first_row, reward, weight = row, self._rewards[row, env], self._continues[row, env]
        row = (row + 1) % rows
        for _ in range(self._n_step - 1):
            # The transition ends early at an episode's last observation and at the newest row.
            goes_on = (weight > 0) & self._starts[row, env] & (row != newest)
            weight = np.where(goes_on, weight * np.float32(self._discount), weight)
            reward = reward + np.where(goes_on, weight * self._rewards[row, env], 0.0)
            weight = np.where(goes_on, weight * self._continues[row, env], weight)
            row = np.where(goes_on, (row + 1) % rows, row)
        return Transitions(
            self._observations.take(first_row, env),
            self._actions[first_row, env],
            reward.astype(np.float32),
            weight,
            self._observations.take(row, env),
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state for a checkpoint, without unwritten rows."""
        rows = min(self._rows_added, len(self._starts))
        rings = self._fields | self._observations.rings
        arrays = {name: ring[:rows] for name, ring in rings.items()}
        return {**arrays, "rows_added": np.array(self._rows_added)}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the state of a checkpoint."""
        self._rows_added = int(arrays["rows_added"])
        for name, ring in self._fields.items():
            ring[: len(arrays[name])] = arrays[name]
        for name, ring in self._observations.rings.items():
            saved = arrays[name]
            if len(saved) < len(ring):  # A full ring may be large: it is not copied.
                ring[: len(saved)] = saved
                saved = ring
            self._observations.rings[name] = saved


class _Observations:
    #: Number of earlier rows that an observation is assembled from.
    reach = 0

    def __init__(self, rows: int, num_envs: int, spec: EnvSpec) -> None:
        shape = (rows, num_envs, *spec.observation_shape)
        self.rings = {"observations": np.zeros(shape, spec.observation_dtype)}

    def put(self, row: int, observation: npt.NDArray[Any]) -> None:
        self.rings["observations"][row] = observation

    def take(self, row: npt.NDArray[Any], env: npt.NDArray[Any]) -> npt.NDArray[Any]:
        observations: npt.NDArray[Any] = self.rings["observations"][row, env]
        return observations


class _FrameStacks(_Observations):
    """Stores the newest frame of each stack and its age: how many frames are of its game."""

    def __init__(self, rows: int, num_envs: int, spec: EnvSpec) -> None:
        height, width, self._depth = spec.observation_shape
        self.reach = self._depth - 1
        frames = np.zeros((rows, num_envs, height, width), spec.observation_dtype)
        self.rings = {"frames": frames, "ages": np.zeros((rows, num_envs), np.uint8)}
        self._newest_stacks: npt.NDArray[Any] | None = None
        self._age = np.zeros(num_envs, np.uint8)

    def put(self, row: int, observation: npt.NDArray[Any]) -> None:
        goes_on = np.zeros(len(observation), np.bool_)
        if self._newest_stacks is not None:
            goes_on = (self._newest_stacks[..., 1:] == observation[..., :-1]).all(axis=(1, 2, 3))
        self._age = np.where(goes_on, np.minimum(self._age + 1, self._depth), 1).astype(np.uint8)
        self._newest_stacks = observation.copy()
        self.rings["frames"][row], self.rings["ages"][row] = observation[..., -1], self._age

    def take(self, row: npt.NDArray[Any], env: npt.NDArray[Any]) -> npt.NDArray[Any]:
        frames, ages = self.rings["frames"], self.rings["ages"]
        offsets = np.arange(self.reach, -1, -1)
        rows = (row.reshape(-1, 1) - offsets) % len(frames)
        planes = frames[rows, env.reshape(-1, 1)]
        # A game's first stacks are padded with zeros.
        planes[offsets >= ages[row, env].reshape(-1, 1)] = 0
        return channels_last(planes).reshape(*row.shape, *planes.shape[2:], self._depth)
