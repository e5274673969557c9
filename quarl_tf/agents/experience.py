"""What off-policy agents keep of what they see: a replay, and statistics to normalise with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.agents import Arrays, section
from quarl_tf.environments import EnvSpec
from quarl_tf.keras import keras
from quarl_tf.networks import RunningStatistics
from quarl_tf.presets import DdpgPreset, DqnPreset
from quarl_tf.replay import Replay
from quarl_tf.seeding import generator


class Experience:
    """A replay that samples batches, and running statistics of all observations."""

    def __init__(self, spec: EnvSpec, preset: DqnPreset | DdpgPreset, seed: int) -> None:
        """Start empty; transitions span as many steps as the preset says."""
        self._preset = preset
        self._statistics = RunningStatistics(spec)
        self._pending: list[npt.NDArray[Any]] = []
        self._replay = Replay(
            spec,
            preset.buffer_size,
            preset.num_envs,
            n_step=preset.n_step,
            discount=preset.discount,
        )
        self.generator = generator(seed, "replay")

    @property
    def warming_up(self) -> bool:
        """Whether there is too little to learn from yet."""
        return len(self._replay) < self._preset.learning_starts

    def observe(
        self,
        observations: npt.NDArray[Any],
        actions: npt.NDArray[Any],
        rewards: npt.NDArray[Any],
        terminated: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.bool_],
    ) -> None:
        """Store one tick."""
        self._pending.append(observations)
        self._replay.add(observations, actions, rewards, terminated, starts)

    def break_stream(self, observations: npt.NDArray[Any]) -> None:
        """Mark the end of the stream."""
        self._replay.add_break(observations)

    def forget(self) -> None:
        """Let go of all observations; nothing can be learned any more."""
        self._pending.clear()
        del self._replay

    def learn(self, networks: Sequence[keras.Model], burst: Callable[..., Any]) -> dict[str, float]:
        """Bring the normalisers up to date; learn one burst once the replay has warmed up.

        Args:
            networks: What is to be normalised alike.
            burst: Takes the fields of stacked batches, returns the mean loss.
        """
        self._statistics.update(np.concatenate(self._pending))
        self._pending.clear()
        if self.warming_up:
            return {}
        self._statistics.apply_to(networks)
        shape = (self._preset.gradient_steps, self._preset.batch_size)
        batches = self._replay.sample(shape, self.generator)
        return {"loss": float(burst(*batches))}

    def arrays(self) -> Arrays:
        """Return statistics and replay for a checkpoint."""
        return {
            **{f"statistics/{k}": v for k, v in self._statistics.arrays().items()},
            **{f"replay/{k}": v for k, v in self._replay.arrays().items()},
        }

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take both back."""
        self._statistics.restore(section(arrays, "statistics"))
        self._replay.restore(section(arrays, "replay"))


def decay_steps(preset: DqnPreset | DdpgPreset) -> int | None:
    """Return the gradient steps of the whole training, where the step size falls over them."""
    if not preset.learning_rate_decay:
        return None
    learning = max(1, preset.steps - preset.learning_starts)
    return learning * preset.gradient_steps // preset.train_frequency
