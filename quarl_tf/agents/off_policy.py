"""What off-policy agents have in common: they learn in bursts from a replay of what they saw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Agent, Arrays, Change
from quarl_tf.agents.replay import Replay
from quarl_tf.agents.tf_agents import Learner, transition
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import tf
from quarl_tf.networks import inference
from quarl_tf.networks.inference import Snapshot
from quarl_tf.presets import OffPolicyPreset


class Exploration(ABC):
    """How actions are tried that the network does not think best."""

    def __init__(self, **state: npt.NDArray[Any]) -> None:
        """Start from a state, if there is one."""
        self.state: Arrays = state

    @abstractmethod
    def act(
        self,
        greedy: Callable[[], npt.NDArray[Any]],
        random: np.random.Generator,
        progress: float,
        warming_up: bool,
    ) -> npt.NDArray[Any]:
        """Choose actions, at will those that `greedy` returns; while warming up none is learned."""

    def arrays(self) -> Arrays:
        """Return the state for a checkpoint."""
        return dict(self.state)

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""
        self.state = dict(arrays)


class OffPolicyAgent(Agent):
    """Acts by an exploration, keeps what it sees in a replay and learns from draws of it."""

    def __init__(
        self,
        spec: EnvSpec,
        preset: OffPolicyPreset,
        seed: int,
        learner: Learner,
        exploration: Exploration,
    ) -> None:
        """Start with an empty replay."""
        super().__init__(spec, seed, "replay")
        self._spec, self._preset, self._learner = spec, preset, learner
        self._pending: list[npt.NDArray[Any]] = []
        rows = preset.buffer_size, preset.num_envs
        self._replay = Replay(spec, *rows, n_step=preset.n_step, discount=preset.discount)
        self._exploration = exploration
        self._parts |= {"replay": self._replay, "exploration": exploration}
        self._take_networks()

    def _take_networks(self) -> None:
        self._normalised = [network.model for network in self._learner.networks]
        self.network = self._normalised[0]
        self.targets = [target.model for target in self._learner.targets]
        self._snapshot = Snapshot(networks.acting(self.network, self._spec))
        self._burst = inference.compiled(self._train_on, self.network)

    def change_network(self, change: Change) -> None:
        """Go on with another network, and other targets."""
        for network in (self._learner.networks[0], *self._learner.targets):
            network.model = change(network.model)
        self._take_networks()

    @property
    def _warming_up(self) -> bool:
        return len(self._replay) < self._preset.learning_starts

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Act greedily, or as the exploration has it."""
        return self._exploration.act(
            lambda: self._spec.greedy(self._snapshot(observations)),
            self._explore,
            progress,
            self._warming_up,
        )

    def observe(self, tick: Tick) -> None:
        """Store one tick."""
        self._pending.append(tick.observations)
        self._replay.add(tick)

    def end_of_rollout(self, observations: npt.NDArray[Any]) -> None:
        """Mark the end of the stream."""
        self._replay.add_break(observations)

    def forget(self) -> None:
        """Let go of the replay."""
        self._pending.clear()
        del self._replay, self._parts["replay"]

    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Bring the normalisers up to date; learn one burst once the replay has warmed up."""
        del observations
        self._statistics.update(np.concatenate(self._pending))
        self._pending.clear()
        if self._warming_up:
            return {}
        self._statistics.apply_to(self._normalised)
        shape = (self._preset.gradient_steps, self._preset.batch_size)
        loss = float(self._burst(*self._replay.sample(shape, self._draw)))
        self.refresh()
        return {"loss": loss}

    def _train_on(self, *batches: Any) -> Any:
        """Take one gradient step on each of the stacked batches; return the mean loss."""
        steps = self._preset.gradient_steps
        total = tf.constant(0.0)
        for i in tf.range(steps):
            total += self._learner.step(transition(*(field[i] for field in batches)))
        return total / steps

    def refresh(self) -> None:
        """Act from now on by the network as it stands."""
        self._snapshot.refresh()

    def _variables(self) -> list[Any]:
        return self._learner.variables()
