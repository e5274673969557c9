"""What off-policy agents have in common: they learn in bursts from a replay of what they saw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.agents import Arrays, restore_variables, section, tf_agents, variable_arrays
from quarl_tf.agents.replay import Replay
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.foundation.seeding import generator
from quarl_tf.networks import inference
from quarl_tf.networks.inference import Snapshot
from quarl_tf.networks.normalizer import RunningStatistics
from quarl_tf.presets import OffPolicyPreset


class OffPolicyAgent(ABC):
    """Keeps a replay, and running statistics of all observations (see `agents.Agent`)."""

    def __init__(self, spec: EnvSpec, preset: OffPolicyPreset, seed: int) -> None:
        """Start empty; `_start` takes the networks."""
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
        self._explore = generator(seed, "exploration")
        self._sampling = generator(seed, "replay")

    def _start(self, network: keras.Model, acting: keras.Model, *others: keras.Model) -> None:
        """Take the networks, once they are built.

        Args:
            network: What is exported.
            acting: What acts, by the same variables.
            others: What else learns from normalised observations.
        """
        self.network = network
        self._normalised = [network, *others]
        self._greedy = Snapshot(acting)
        self._burst = inference.compiled(self._train_on, network)

    @abstractmethod
    def _gradient_step(self, batch: Any) -> Any:
        """Take one gradient step on a batch of transitions; return the loss."""

    @abstractmethod
    def _variables(self) -> list[Any]:
        """Return all that gradient steps change, in the order of checkpoints."""

    @property
    def _warming_up(self) -> bool:
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

    def end_of_rollout(self, observations: npt.NDArray[Any]) -> None:
        """Mark the end of the stream."""
        self._replay.add_break(observations)

    def forget(self) -> None:
        """Let go of all observations; nothing can be learned any more."""
        self._pending.clear()
        del self._replay

    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Bring the normalisers up to date; learn one burst once the replay has warmed up."""
        del observations
        self._statistics.update(np.concatenate(self._pending))
        self._pending.clear()
        if self._warming_up:
            return {}
        self._statistics.apply_to(self._normalised)
        shape = (self._preset.gradient_steps, self._preset.batch_size)
        loss = float(self._burst(*self._replay.sample(shape, self._sampling)))
        self.refresh()
        return {"loss": loss}

    def _train_on(self, *batches: Any) -> Any:
        """Take one gradient step on each of the stacked batches; return the mean loss."""
        steps = self._preset.gradient_steps
        total = tf.constant(0.0)
        for i in tf.range(steps):
            total += self._gradient_step(tf_agents.transition(*(field[i] for field in batches)))
        return total / steps

    def refresh(self) -> None:
        """Act from now on by the network as it stands."""
        self._greedy.refresh()

    def arrays(self) -> Arrays:
        """Return networks, targets, optimizers, counters, statistics and replay."""
        return {
            **variable_arrays(self._variables()),
            **{f"statistics/{k}": v for k, v in self._statistics.arrays().items()},
            **{f"replay/{k}": v for k, v in self._replay.arrays().items()},
        }

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take all of it back."""
        restore_variables(self._variables(), arrays)
        self._statistics.restore(section(arrays, "statistics"))
        self._replay.restore(section(arrays, "replay"))
        self.refresh()

    def generators(self) -> dict[str, np.random.Generator]:
        """Return the generators of exploration and of replay sampling."""
        return {"exploration": self._explore, "replay": self._sampling}


def decay_steps(preset: OffPolicyPreset) -> int | None:
    """Return the gradient steps of the whole training, where the step size falls over them."""
    if not preset.learning_rate_decay:
        return None
    learning = max(1, preset.steps - preset.learning_starts)
    return learning * preset.gradient_steps // preset.train_frequency
