"""What off-policy agents have in common: they learn in bursts from a replay of what they saw."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Agent, Change
from quarl_tf.agents.replay import Replay
from quarl_tf.agents.tf_agents import Learner, transition
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import tf
from quarl_tf.networks import inference
from quarl_tf.networks.inference import Snapshot
from quarl_tf.presets import OffPolicyPreset

#: Chooses actions: at will the best ones, which the first argument returns, by a generator and the
#: share of the training that is done; while warming up none is learned. The last argument is noise
#: [num_envs, action size], 0 at first, that it may change.
Exploration = Callable[
    [Callable[[], npt.NDArray[Any]], np.random.Generator, float, bool, npt.NDArray[Any]],
    npt.NDArray[Any],
]


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
        super().__init__(spec, seed, "replay")
        self._spec, self._preset, self._learner = spec, preset, learner
        self._pending: list[npt.NDArray[Any]] = []
        rows = preset.buffer_size, preset.num_envs
        self._replay = Replay(spec, *rows, n_step=preset.n_step, discount=preset.discount)
        self._parts["replay"] = self._replay
        self._exploration = exploration
        self._kept["noise"] = np.zeros((preset.num_envs, spec.action_size))
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

        def greedy() -> npt.NDArray[Any]:
            return self._spec.greedy(self._snapshot(observations))

        state = progress, self._warming_up, self._kept["noise"]
        return self._exploration(greedy, self._explore, *state)

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
            total += self._learner.step(transition(*(field[i] for field in batches)), self._held)
        return total / steps

    def refresh(self) -> None:
        """Act from now on by the network as it stands."""
        self._snapshot.refresh()

    def _variables(self) -> list[Any]:
        return self._learner.variables()
