"""The actor-critic of PPO and A2C."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.agents import Change, tf_agents
from quarl_tf.agents.distributions import Categorical, Gaussian
from quarl_tf.agents.on_policy import OnPolicyAgent
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.foundation.seeding import generator
from quarl_tf.networks import Design
from quarl_tf.networks.layers import Floats
from quarl_tf.presets import A2cPreset, PpoPreset


def build_network(spec: EnvSpec, preset: PpoPreset, seed: int) -> keras.Model:
    """Build the policy network: logits, or the mean of continuous actions."""
    # A head near zero gives equal probabilities at first (Andrychowicz et al., arXiv 2006.05990).
    design = _design(preset, spec.action_size, 0.01)
    if spec.num_actions is not None:
        return networks.build_policy(spec, design, seed)
    return networks.build_actor(spec, design, seed, stochastic=True)


def _design(preset: PpoPreset, outputs: int, head_gain: float) -> Design:
    # As in the papers: ReLU in Nature's network, tanh in the small ones.
    activation = "relu" if preset.architecture.convolutions else "tanh"
    return Design.of(preset, outputs, activation=activation, head_gain=head_gain)


class ActorCritic(OnPolicyAgent):
    """Draws actions from its distribution and learns from each rollout once."""

    _preset: PpoPreset
    #: The layers that policy and value share, as in the papers' networks for images.
    _torso: keras.Model | None = None

    def __init__(self, spec: EnvSpec, preset: PpoPreset, seed: int, prepare: Change) -> None:
        super().__init__(spec, preset, seed)
        network = prepare(build_network(spec, preset, seed))
        purpose, self._input_spec = "initial value weights", spec
        if preset.architecture.convolutions:
            shape = network.get_layer("head").input.shape[1:]
            self._input_spec = EnvSpec(shape, "float32", spec.num_actions)
            weights_seed = int(generator(seed, purpose).integers(2**31))
            initializer = keras.initializers.Orthogonal(1.0, seed=weights_seed)
            self._features = keras.Input(shape)
            value = keras.layers.Dense(1, kernel_initializer=initializer, name="value")
            self._value = keras.Model(self._features, value(self._features))
        else:
            self._value = networks.build_policy(spec, _design(preset, 1, 1.0), seed, purpose)
        self._take(network)
        self._distribution: Gaussian | Categorical = (
            Categorical(spec.num_actions) if spec.num_actions else Gaussian(self.network)
        )
        self.distance = self._distribution.distance
        self.action_variance = self._distribution.variance
        self._agent = self._loss_agent(spec)
        if isinstance(preset, A2cPreset):
            self._optimizer = tf_agents.rmsprop(preset, self._trained)
        else:
            self._optimizer = self._adam()

    def _take(self, network: keras.Model) -> None:
        """Continue with this policy network."""
        if not self._preset.architecture.convolutions:
            self._policy = network
            self._use(network, network, self._value)
            return
        head, output_layer = network.get_layer("head"), network.layers[-1]
        # The torso may compute in bfloat16, the heads are float32.
        features = tf.cast(head.input, tf.float32)
        self._torso = keras.Model(network.input, features)
        logits = head(self._features)
        output = logits if output_layer is head else output_layer(logits)
        self._policy = keras.Model(self._features, output)
        self._use(network, keras.Model(network.input, [network.output, self._value(features)]))

    def _predict(self, observations: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        outputs = [snapshot(observations) for snapshot in self._snapshots]
        heads, values = outputs if self._torso is None else outputs[0]
        return heads, values[:, 0]

    def _loss_agent(self, spec: EnvSpec) -> Any:
        """Return TF-Agents' agent, which only computes losses."""
        preset, input_spec = self._preset, tf_agents.observation_spec(self._input_spec)
        self._actor = tf_agents.wrap(self._policy, input_spec, "Actor", self._distribution.read)
        return tf_agents.build(
            tf_agents.published.PPOAgent,
            input_spec,
            spec,
            optimizer=keras.optimizers.SGD(),
            actor_net=self._actor,
            value_net=tf_agents.wrap(self._value, input_spec, "Value", lambda head: head[:, 0]),
            importance_ratio_clipping=preset.clip,
            entropy_regularization=preset.entropy_coefficient,
            value_pred_loss_coef=preset.value_coefficient,
            compute_value_and_advantage_in_train=False,
            # Not part of the paper's clipped variant.
            normalize_rewards=False,
            normalize_observations=False,
            initial_adaptive_kl_beta=0.0,
            kl_cutoff_factor=0.0,
        )

    def change_network(self, change: Change) -> None:
        """Replace the policy network by the result of `change`."""
        self._take(change(self.network))
        self._actor.model = self._policy

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Draw actions from the policy's distribution."""
        del progress
        heads, values = self._predict(observations)
        actions, log_probabilities = self._distribution.draw(heads, self._act_random)
        self._draws = actions, log_probabilities, values
        return actions if self._spec.num_actions else np.clip(actions, *self._spec.bounds)

    def _loss(self, observations: Any, *fields: Any) -> Any:
        actions, log_probabilities, returns, advantages = fields
        if self._preset.normalize_advantages:
            mean, variance = tf.nn.moments(advantages, axes=[0])
            advantages = (advantages - mean) / (tf.sqrt(variance) + 1e-8)
        if self._torso is not None:
            observations = self._torso(observations, training=True)
        return self._agent.get_loss(
            tf_agents.time_steps(observations),
            actions,
            log_probabilities,
            returns,
            advantages,
            action_distribution_parameters=None,  # For the KL penalties, which are off.
            weights=tf.ones_like(returns),
            train_step=self._agent.train_step_counter,
            debug_summaries=False,
            training=True,
        ).loss

    def refresh(self, values: Mapping[int, npt.NDArray[Any]] | None = None) -> None:
        """Act by the current weights and standard deviations from now on."""
        super().refresh(values)
        self._distribution.refresh()
