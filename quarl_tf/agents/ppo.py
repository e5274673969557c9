"""PPO (Schulman et al., arXiv 1707.06347) by TF-Agents' `PPOAgent`, clipped, in minibatches.

Deviations from the paper:

1. Observations are normalised by running statistics inside both networks. They are brought up to
   date after each round of learning, so that the ratio of new to old policy starts at 1.
2. Advantages are normalised per minibatch, over the transitions in it, where the preset says so.
3. The tick that resets an environment is no transition and is left out; a round of learning still
   has the same number of minibatches, topped up with transitions drawn a second time.
4. Truncated episodes bootstrap from the value of their last observation.
5. Each gradient step sees one minibatch; TF-Agents' own `train` would repeat the whole batch, so
   only its loss is used. All steps of a round run in one compiled call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.agents import Arrays, adapter, restore_variables, section, variable_arrays
from quarl_tf.environments import EnvSpec
from quarl_tf.errors import UsageError
from quarl_tf.keras import keras, tf
from quarl_tf.networks import Mlp, NetworkFactory, RunningStatistics, mlp_factory
from quarl_tf.presets import PpoPreset
from quarl_tf.seeding import generator

HEAD = "logits"

Floats = npt.NDArray[np.float32]


def network_factory(spec: EnvSpec, preset: PpoPreset, seed: int) -> NetworkFactory:
    """Return the factory of the policy network.

    Raises:
        UsageError: The actions are not discrete.
    """
    if spec.num_actions is None:
        raise UsageError(
            "ppo and a2c need discrete actions here; ddpg fits continuous ones. "
            f"Received: action_low={spec.action_low}"
        )
    # A head near zero starts with even chances (Andrychowicz et al., arXiv 2006.05990).
    return mlp_factory(spec, Mlp(preset.hidden_layers, spec.num_actions, "tanh", 0.01), seed)


def build(spec: EnvSpec, preset: PpoPreset, seed: int) -> ActorCritic:
    """Build the agent."""
    optimizer = keras.optimizers.Adam(learning_rate(preset), epsilon=1e-5)
    return ActorCritic(spec, preset, seed, optimizer)


def learning_rate(preset: PpoPreset) -> Any:
    """Return the step size, or its schedule over the gradient steps of the whole training."""
    if not preset.learning_rate_decay:
        return preset.learning_rate
    steps = preset.steps // preset.minibatch_size * preset.epochs
    return keras.optimizers.schedules.PolynomialDecay(
        preset.learning_rate, max(1, steps), end_learning_rate=0.0
    )


class ActorCritic:
    """Acts by its distribution, learns from each rollout and forgets it (see `agents.Agent`)."""

    def __init__(self, spec: EnvSpec, preset: PpoPreset, seed: int, optimizer: Any) -> None:
        """Create policy and value networks and the optimizer."""
        self._preset = preset
        self._statistics = RunningStatistics(spec.observation_shape)
        self._explore = generator(seed, "exploration")
        self._shuffle = generator(seed, "minibatches")
        self._rows: list[tuple[npt.NDArray[Any], ...]] = []
        actor = adapter.CategoricalNetwork(
            network_factory(spec, preset, seed), adapter.observation_spec(spec), name="Actor"
        )
        value_mlp = Mlp(preset.hidden_layers, 1, "tanh", 1.0)
        critic = adapter.ValueNetwork(
            mlp_factory(spec, value_mlp, seed, purpose="initial value weights"),
            adapter.observation_spec(spec),
            name="Value",
        )
        self._agent = adapter.ppo_agent.PPOAgent(
            adapter.time_step_spec(spec),
            adapter.action_spec(spec),
            optimizer=optimizer,
            actor_net=actor,
            value_net=critic,
            importance_ratio_clipping=preset.clip,
            entropy_regularization=preset.entropy_coefficient,
            value_pred_loss_coef=preset.value_coefficient,
            compute_value_and_advantage_in_train=False,
            # What the paper's clipped variant does without.
            normalize_rewards=False,
            normalize_observations=False,
            initial_adaptive_kl_beta=0.0,
            kl_cutoff_factor=0.0,
            train_step_counter=tf.Variable(0, dtype=tf.int64),
        )
        self._agent.initialize()
        self.network, self._value = actor.model, critic.model
        self._trainable = [*self.network.trainable_variables, *self._value.trainable_variables]
        self._optimizer = optimizer
        # Moments are else created by the first step, too late for a restore.
        optimizer.build(self._trainable)
        self._predict = tf.function(
            lambda seen: (tf.nn.log_softmax(self.network(seen)), self._value(seen)[:, 0]),
            jit_compile=True,
        )
        self._round = tf.function(self._train_on, jit_compile=True)

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[np.int64]:
        """Draw actions from the policy's distribution (Gumbel-max)."""
        del progress
        log_probabilities, values = (x.numpy() for x in self._predict(tf.constant(observations)))
        noise = self._explore.gumbel(size=log_probabilities.shape)
        actions: npt.NDArray[np.int64] = (log_probabilities + noise).argmax(axis=1)
        chosen = np.take_along_axis(log_probabilities, actions[:, None], axis=1)[:, 0]
        self._predicted = chosen, values
        return actions

    def observe(
        self,
        observations: npt.NDArray[Any],
        actions: npt.NDArray[Any],
        rewards: npt.NDArray[Any],
        terminated: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.bool_],
    ) -> None:
        """Store one tick."""
        row = (observations, actions, rewards, terminated, starts, *self._predicted)
        self._rows.append(tuple(np.copy(field) for field in row))

    def break_stream(self, observations: npt.NDArray[Any]) -> None:
        """Do nothing: a checkpoint comes after learning, when no rollout is under way."""

    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Learn from the rollout that ended with these observations, then forget it."""
        preset = self._preset
        seen, actions, rewards, terminated, starts, log_probabilities, values = (
            np.stack(field) for field in zip(*self._rows, strict=True)
        )
        self._rows.clear()
        last = self._predict(tf.constant(observations))[1].numpy()
        advantages = advantage_estimates(
            rewards, np.concatenate([values, last[None]]), terminated, starts, preset
        )
        returns = advantages + values
        valid = np.flatnonzero(starts)
        draws = [
            np.resize(self._shuffle.permutation(valid), starts.size) for _ in range(preset.epochs)
        ]
        index = np.stack(draws).reshape(-1, preset.minibatch_size)
        fields = [seen, actions.astype(np.int32), log_probabilities, returns, advantages]
        batches = [field.reshape(-1, *field.shape[2:])[index] for field in fields]
        loss = float(self._round(*map(tf.constant, batches)))
        self._statistics.update(seen.reshape(-1, *seen.shape[2:])[valid])
        for network in (self.network, self._value):
            self._statistics.apply_to(network)
        return {"loss": loss}

    def _train_on(self, *batches: Any) -> Any:
        """Take one gradient step on each of the stacked minibatches; return the mean loss."""
        total = tf.constant(0.0)
        steps = batches[0].shape[0]
        for i in tf.range(steps):
            total += self._gradient_step(*(field[i] for field in batches))
        return total / float(steps)

    def _gradient_step(
        self, seen: Any, actions: Any, log_probabilities: Any, returns: Any, advantages: Any
    ) -> Any:
        agent, optimizer = self._agent, self._optimizer
        if self._preset.normalize_advantages:
            mean, variance = tf.nn.moments(advantages, axes=[0])
            advantages = (advantages - mean) / (tf.sqrt(variance) + 1e-8)
        with tf.GradientTape() as tape:
            loss = agent.get_loss(
                adapter.time_steps(seen),
                actions,
                log_probabilities,
                returns,
                advantages,
                action_distribution_parameters=None,  # For the KL penalties, which are off.
                weights=tf.ones_like(returns),
                train_step=agent.train_step_counter,
                debug_summaries=False,
                training=True,
            ).loss
        gradients = tape.gradient(loss, self._trainable)
        gradients, _ = tf.clip_by_global_norm(gradients, self._preset.gradient_clip)
        optimizer.apply_gradients(zip(gradients, self._trainable, strict=True))
        return loss

    def _variables(self) -> list[Any]:
        return [*self.network.variables, *self._value.variables, *self._optimizer.variables]

    def arrays(self) -> Arrays:
        """Return networks, optimizer and statistics."""
        return {
            **variable_arrays(self._variables()),
            **{f"statistics/{k}": v for k, v in self._statistics.arrays().items()},
        }

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take all of it back."""
        restore_variables(self._variables(), arrays)
        self._statistics.restore(section(arrays, "statistics"))

    def generators(self) -> dict[str, np.random.Generator]:
        """Return the generators of exploration and of the minibatches."""
        return {"exploration": self._explore, "minibatches": self._shuffle}


def advantage_estimates(
    rewards: Floats,
    values: Floats,
    terminated: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.bool_],
    preset: PpoPreset,
) -> Floats:
    """Estimate advantages (generalised advantage estimation, arXiv 1506.02438).

    Args:
        rewards: Rewards, [ticks, num_envs].
        values: Values of the observations acted on and of the last ones, [ticks + 1, num_envs].
        terminated: Whether the episode terminated by the tick; truncation does not count.
        starts: False where the observation was its episode's last: there nothing starts, and the
            estimate before it must not look beyond.
        preset: Names discount and lambda.

    Returns:
        Advantages [ticks, num_envs]; what stands where nothing starts means nothing.
    """
    advantages = np.zeros_like(rewards, dtype=np.float32)
    following = np.zeros(rewards.shape[1], np.float32)
    for t in reversed(range(len(rewards))):
        discount = preset.discount * ~terminated[t]
        error = rewards[t] + discount * values[t + 1] - values[t]
        following = error + discount * preset.gae_lambda * following
        advantages[t] = following
        # The tick before this one must see nothing of what follows an episode's end.
        following = np.where(starts[t], following, 0.0).astype(np.float32)
    return advantages
