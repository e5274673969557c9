"""Agents that learn from each rollout of the current policy, in minibatches."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.agents import Agent, tf_agents
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks import Weights, inference
from quarl_tf.networks.inference import Snapshot
from quarl_tf.networks.layers import Floats
from quarl_tf.presets import OnPolicyPreset


class OnPolicyAgent(Agent):
    """Learns from each rollout once, then discards it."""

    _optimizer: Any

    def __init__(self, spec: EnvSpec, preset: OnPolicyPreset, seed: int) -> None:
        super().__init__(spec, preset, seed, "minibatches")
        self._preset = preset
        self._rows: list[tuple[npt.NDArray[Any], ...]] = []
        #: Of the latest tick: actions as drawn, what else a gradient step needs, values.
        self._draws: tuple[npt.NDArray[Any], ...] = ()

    def _use(self, network: keras.Model, *models: keras.Model) -> None:
        """Continue with this policy network; the models, which include it, act and learn."""
        self.network, self._models = network, models
        self._trained = [v for model in models for v in model.trainable_variables]
        self._snapshots = [Snapshot(model) for model in models]
        #: The variables whose values `refresh` takes.
        self._read_variables = [v for s in self._snapshots for v in s.read_variables]
        self._round = inference.compiled(self._train_on, network)

    def _adam(self) -> Any:
        """Return Adam, which clips gradients as a whole."""
        rate, clip = self._preset.learning_rate, self._preset.gradient_clip
        settings = {"epsilon": 1e-5, "global_clipnorm": clip}
        return tf_agents.adam(rate, self._preset, self._trained, **settings)

    @abstractmethod
    def _predict(self, observations: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        """Return heads [n, outputs] and values of states [n] by the weights of the last refresh."""

    def start_from(self, weights: Weights, count: int) -> None:
        """Start from a trained network, whose statistics all models take."""
        super().start_from(weights, count)
        self._statistics.apply_to(self._models)
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
        last_values = self._predict(observations)[1]
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
        statistics_changed = self._statistics.apply_to(self._models)
        # Reading all variables takes long: only the statistics may have changed since the steps.
        current_values = {
            id(v): (v if statistics_changed and not v.trainable else tensor).numpy()
            for v, tensor in zip(self._read_variables, tensors, strict=True)
        }
        self.refresh(current_values)
        return {"loss": float(loss)}

    def _train_on(self, index: Any, *fields: Any) -> tuple[Any, ...]:
        """Take a step on each minibatch; return the mean loss and values of `_read_variables`."""
        total = tf.constant(0.0)
        steps = index.shape[0]
        for i in tf.range(steps):
            total += self._gradient_step(*(tf.gather(field, index[i]) for field in fields))
        return total / float(steps), *(v.read_value() for v in self._read_variables)

    # AutoGraph would take seconds to convert this, for nothing: its control flow is Python's.
    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def _gradient_step(self, observations: Any, *fields: Any) -> Any:
        def loss() -> Any:
            return self._with_distillation(self._loss(observations, *fields), observations)

        return tf_agents.gradient_step(self._optimizer, loss, self._trained)

    @abstractmethod
    def _loss(self, observations: Any, *fields: Any) -> Any:
        """Return the loss of a minibatch."""

    def refresh(self, values: Mapping[int, npt.NDArray[Any]] | None = None) -> None:
        """Act by the current weights from now on, or by values of `_read_variables` by `id`."""
        for snapshot in self._snapshots:
            snapshot.refresh(values)

    def _variables(self) -> list[Any]:
        variables = [v for snapshot in self._snapshots for v in snapshot.variables]
        return [*variables, *self._optimizer.variables()]


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
