"""Agents that learn from each rollout of the current policy, in minibatches."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.agents import Agent, Change, tf_agents
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Weights, inference
from quarl_tf.networks.inference import Snapshot
from quarl_tf.networks.layers import Floats
from quarl_tf.presets import OnPolicyPreset


class Networks(ABC):
    """The networks of an agent, evaluated with the weights of the last `refresh`."""

    def __init__(self, network: keras.Model) -> None:
        self.take(network)

    def take(self, network: keras.Model) -> None:
        """Continue with another policy network."""
        self.network = network
        self.normalised_networks = [network]  #: Those that have the normaliser's statistics.
        self.trainable_variables: Sequence[Any] = network.trainable_variables
        self._snapshots = [Snapshot(network)]

    @abstractmethod
    def predict(self, observations: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        """Return heads [n, outputs] and values of states [n]."""

    @property
    def variables(self) -> list[Any]:
        """All variables, in the order of checkpoints."""
        return [v for snapshot in self._snapshots for v in snapshot.variables]

    @property
    def read_variables(self) -> list[Any]:
        """The variables whose values `refresh` takes."""
        return [v for snapshot in self._snapshots for v in snapshot.read_variables]

    def refresh(self, values: Mapping[int, npt.NDArray[Any]] | None = None) -> None:
        """Predict by the current weights, or by values of `read_variables` by `id`."""
        for snapshot in self._snapshots:
            snapshot.refresh(values)


class OnPolicyAgent(Agent):
    """Learns from each rollout once, then discards it."""

    _step: tf_agents.GradientStep

    def __init__(self, spec: EnvSpec, preset: OnPolicyPreset, seed: int) -> None:
        super().__init__(spec, preset, seed, "minibatches")
        self._preset = preset
        self._rows: list[tuple[npt.NDArray[Any], ...]] = []
        #: Of the latest tick: actions as drawn, what else a gradient step needs, values.
        self._draws: tuple[npt.NDArray[Any], ...] = ()

    def _use(self, networks: Networks) -> None:
        self._networks, self.network = networks, networks.network
        self._round = inference.compiled(self._train_on, self.network)

    def change_network(self, change: Change) -> None:
        """Replace the policy network by the result of `change`."""
        self._networks.take(change(self.network))
        self._use(self._networks)

    def start_from(self, weights: Weights, count: int) -> None:
        """Start from a trained network, whose statistics all networks take."""
        super().start_from(weights, count)
        self._statistics.apply_to(self._networks.normalised_networks)
        self.refresh()

    def observe(self, tick: Tick) -> None:
        """Store one tick, with the actions as drawn."""
        row = (tick.observations, tick.rewards, tick.terminated, tick.starts, *self._draws)
        self._rows.append(tuple(np.copy(field) for field in row))

    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Learn from the rollout, which ended with these observations, then discard it."""
        preset = self._preset
        rollout_observations, rewards, terminated, starts, *draws, values = (
            np.stack(field) for field in zip(*self._rows, strict=True)
        )
        self._rows.clear()
        last_values = self._networks.predict(observations)[1]
        advantages = advantage_estimates(
            rewards, np.concatenate([values, last_values[None]]), terminated, starts, preset
        )
        returns = advantages + values
        step_index = np.flatnonzero(starts)
        if not step_index.size:  # All ticks are resets.
            return {}
        permute = self._learn_random.permutation
        permutations = [np.resize(permute(step_index), starts.size) for _ in range(preset.epochs)]
        index = np.stack(permutations).reshape(-1, preset.minibatch_size).astype(np.int32)
        fields = [rollout_observations, *draws, returns, advantages]
        flat_fields = [field.reshape(-1, *field.shape[2:]) for field in fields]
        loss, *tensors = self._round(index, *flat_fields)
        self._statistics.update(flat_fields[0][step_index])
        statistics_changed = self._statistics.apply_to(self._networks.normalised_networks)
        # Reading all variables takes long: only the statistics may have changed since the steps.
        current_values = {
            id(v): (v if statistics_changed and not v.trainable else tensor).numpy()
            for v, tensor in zip(self._networks.read_variables, tensors, strict=True)
        }
        self.refresh(current_values)
        return {"loss": float(loss)}

    def _train_on(self, index: Any, *fields: Any) -> tuple[Any, ...]:
        """Take a step on each minibatch; return the mean loss and values of `read_variables`."""
        total = tf.constant(0.0)
        steps = index.shape[0]
        for i in tf.range(steps):
            total += self._gradient_step(*(tf.gather(field, index[i]) for field in fields))
        return total / float(steps), *(v.read_value() for v in self._networks.read_variables)

    # AutoGraph would take seconds to convert this, for nothing: its control flow is Python's.
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _gradient_step(self, observations: Any, *fields: Any) -> Any:
        def loss() -> Any:
            return self._with_distillation(self._loss(observations, *fields), observations)

        return self._step(loss, self._networks.trainable_variables)

    @abstractmethod
    def _loss(self, observations: Any, *fields: Any) -> Any:
        """Return the loss of a minibatch."""

    def refresh(self, values: Mapping[int, npt.NDArray[Any]] | None = None) -> None:
        """Act by the current weights from now on, or by those values of `read_variables`."""
        self._networks.refresh(values)

    def _variables(self) -> list[Any]:
        return [*self._networks.variables, *self._step.variables()]


def advantage_estimates(
    rewards: Floats,
    values: Floats,
    terminated: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.bool_],
    preset: OnPolicyPreset,
) -> Floats:
    """Estimate advantages [ticks, num_envs] (generalised estimation, arXiv 1506.02438).

    `values` [ticks + 1, num_envs] end with those of the last observations. Truncation is not
    `terminated`. Ticks that only reset have `starts` False; their estimates mean nothing.
    """
    advantages = np.zeros_like(rewards, dtype=np.float32)
    next_advantages = np.zeros(rewards.shape[1], np.float32)
    for t in reversed(range(len(rewards))):
        discount = preset.discount * ~terminated[t]
        error = rewards[t] + discount * values[t + 1] - values[t]
        advantages[t] = error + discount * preset.gae_lambda * next_advantages
        # Nothing behind the end of an episode may reach the tick before.
        next_advantages = np.where(starts[t], advantages[t], 0.0).astype(np.float32)
    return advantages
