"""Off-policy agents: they learn in bursts from a replay."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Agent, Change
from quarl_tf.agents.replay import Replay
from quarl_tf.agents.tf_agents import ModelNetwork, gradient_step, transition
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import tf
from quarl_tf.networks import inference
from quarl_tf.networks.inference import Snapshot
from quarl_tf.presets import OffPolicyPreset

#: A loss of a batch of transitions, its network and its optimizer.
Step = tuple[Callable[[Any], Any], ModelNetwork, Any]


class OffPolicyAgent(Agent):
    """Stores ticks in a replay and learns from samples of it."""

    def __init__(
        self,
        spec: EnvSpec,
        preset: OffPolicyPreset,
        seed: int,
        agent: Any,
        steps: Sequence[Step],
        target: ModelNetwork,
    ) -> None:
        """Learn by the steps; `agent` is that of TF-Agents.

        The loss of the first step is reported; the network of the last, whose target network is
        `target`, is exported.
        """
        super().__init__(spec, preset, seed, "replay")
        self._preset, self._agent, self._steps, self._target = preset, agent, steps, target
        self._new_observations: list[npt.NDArray[Any]] = []
        size = preset.buffer_size, preset.num_envs
        self._replay = Replay(spec, *size, n_step=preset.n_step, discount=preset.discount)
        self._parts["replay"] = self._replay
        self._take_networks()

    def _take_networks(self) -> None:
        self._normalised_networks = [network.model for _, network, _ in self._steps]
        self.network, self.targets = self._normalised_networks[-1], [self._target.model]
        self._snapshot = Snapshot(networks.acting(self.network))
        self._burst = inference.compiled(self._train_on, self.network)

    def change_network(self, change: Change) -> None:
        """Replace the network and its target by the results of `change`."""
        for network in (self._steps[-1][1], self._target):
            network.model = change(network.model)
        self._take_networks()

    @property
    def _warming_up(self) -> bool:
        return len(self._replay) < self._preset.learning_starts

    def _greedy(self, observations: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._spec.greedy(self._snapshot(observations))

    def observe(self, tick: Tick) -> None:
        """Store one tick."""
        self._new_observations.append(tick.observations)
        self._replay.add(tick)

    def end_of_stream(self, observations: npt.NDArray[Any]) -> None:
        """Mark a break in the stream."""
        self._replay.add_break(observations)

    def forget(self) -> None:
        """Free the replay."""
        self._new_observations.clear()
        del self._replay, self._parts["replay"]

    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Update the normalisers; take a burst of gradient steps once the replay has warmed up."""
        del observations
        self._statistics.update(np.concatenate(self._new_observations))
        self._new_observations.clear()
        if self._warming_up:
            return {}
        self._statistics.apply_to(self._normalised_networks)
        shape = (self._preset.gradient_steps, self._preset.batch_size)
        loss = float(self._burst(*self._replay.sample(shape, self._learn_random)))
        self.refresh()
        return {"loss": loss}

    def _train_on(self, *batches: Any) -> Any:
        steps = self._preset.gradient_steps
        total = tf.constant(0.0)
        for i in tf.range(steps):
            total += self._gradient_step(transition(*(field[i] for field in batches)))
        return total / steps

    # AutoGraph would take seconds to convert this, for nothing: its control flow is Python's.
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _gradient_step(self, batch: Any) -> Any:
        def total_loss(loss: Callable[[Any], Any], network: ModelNetwork) -> Any:
            value = loss(batch)
            if network is not self._steps[-1][1]:
                return value
            return self._with_distillation(value, batch.time_step.observation)

        # TF-Agents' own `train` cannot add a distance from a teacher.
        losses = [
            gradient_step(
                optimizer, partial(total_loss, loss, network), network.model.trainable_variables
            )
            for loss, network, optimizer in self._steps
        ]
        self._agent.train_step_counter.assign_add(1)
        self._agent._update_target()
        return losses[0]

    def refresh(self) -> None:
        """Act by the current weights from now on."""
        self._snapshot.refresh()

    def _variables(self) -> list[Any]:
        optimizers = (optimizer for *_, optimizer in self._steps)
        return [*self._agent.variables, *(v for o in optimizers for v in o.variables())]
