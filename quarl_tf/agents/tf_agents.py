"""TF-Agents' view of our Keras networks and environments; optimizers and gradient steps."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gym_notices.notices
import numpy as np

from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.presets import A2cPreset, Preset

# TF-Agents imports the old gym, which prints advice to move to Gymnasium. We use Gymnasium.
gym_notices.notices.notices.clear()
# Traced by TensorFlow's AutoGraph, TF-Agents' code compares with `is ()`; each trace would warn.
warnings.filterwarnings("ignore", '"is( not)?" with', SyntaxWarning)
with warnings.catch_warnings():
    # Its sources, and old gym's, predate today's Python and NumPy.
    warnings.simplefilter("ignore")
    import tensorflow_probability
    import tf_agents.agents
    from tf_agents.networks import network as tfa_network
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import policy_step, trajectory
    from tf_agents.trajectories import time_step as ts
    from tf_agents.utils.common import element_wise_squared_loss

#: TF-Agents' own agents.
published: Any = tf_agents.agents
distributions = tensorflow_probability.distributions
squared_loss = element_wise_squared_loss


class ModelNetwork(tfa_network.Network):  # type: ignore[misc]
    """A TF-Agents network around a Keras model, which may be replaced by another; see `wrap`."""

    #: No argument of the constructor, since TF-Agents keeps those in the network's variables.
    model: keras.Model

    def __init__(self, input_tensor_spec: Any, name: str, read: Callable[[Any], Any]) -> None:
        """Start without a model; `read` maps its head to a distribution, or to values [n]."""
        super().__init__(input_tensor_spec=input_tensor_spec, state_spec=(), name=name)
        self._read = read

    def call(
        self, observation: Any, step_type: Any = None, network_state: Any = (), training: Any = None
    ) -> tuple[Any, Any]:
        """Return the read head, and the (empty) state."""
        return self._read(self.model(observation, training=training)), network_state


def wrap(
    model: keras.Model,
    input_tensor_spec: Any,
    name: str,
    read: Callable[[Any], Any] = lambda head: head,
) -> ModelNetwork:
    """Return the TF-Agents network around a model."""
    network = ModelNetwork(input_tensor_spec, name, read)
    network.model = model
    return network


def gradient_step(optimizer: Any, loss: Callable[[], Any], variables: Sequence[Any]) -> Any:
    """Take one step of the variables; return the loss."""
    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return value


class SingleDqnAgent(tf_agents.agents.DqnAgent):  # type: ignore[misc]
    """TF-Agents' DQN with one pass of the target network instead of two for its best value."""

    def _compute_next_q_values(self, next_time_steps: Any, info: Any) -> Any:
        del info
        values, _ = self._target_q_network(next_time_steps.observation)
        return tf.reduce_max(values, axis=-1)


def observation_spec(spec: EnvSpec) -> Any:
    """Return TF-Agents' specification of the observations."""
    if spec.observation_dtype == "uint8":
        # TF-Agents samples inputs below the maximum plus 1; 256 does not fit a byte.
        return tensor_spec.BoundedTensorSpec(spec.observation_shape, tf.uint8, 0, 254)
    return tensor_spec.TensorSpec(spec.observation_shape, tf.as_dtype(spec.observation_dtype))


def action_spec(spec: EnvSpec) -> Any:
    """Return TF-Agents' specification of an action."""
    if spec.num_actions is not None:
        maximum = np.array(spec.num_actions) - 1
        return tensor_spec.BoundedTensorSpec(maximum.shape, tf.int32, 0, maximum)
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    return tensor_spec.BoundedTensorSpec(low.shape, tf.float32, low, high)


def build(kind: Any, input_spec: Any, spec: EnvSpec, **settings: Any) -> Any:
    """Build a TF-Agents agent of class `kind`, whose networks take inputs of `input_spec`."""
    agent = kind(
        ts.time_step_spec(input_spec),
        action_spec(spec),
        train_step_counter=tf.Variable(0, dtype=tf.int64),
        **settings,
    )
    agent.initialize()
    return agent


def time_steps(observation: Any) -> Any:
    """Return time steps inside an episode, for losses that use observations only."""
    size = tf.shape(observation)[:1]
    return ts.TimeStep(tf.fill(size, ts.StepType.MID), tf.zeros(size), tf.ones(size), observation)


def transition(observation: Any, action: Any, reward: Any, discount: Any, following: Any) -> Any:
    """Return a batch of transitions that TF-Agents' agents train on."""
    next_steps = time_steps(following)._replace(reward=reward, discount=discount)
    return trajectory.Transition(
        time_steps(observation), policy_step.PolicyStep(action, (), ()), next_steps
    )


def adam(rate: float, preset: Preset, variables: Sequence[Any], **settings: float) -> Any:
    """Return Adam with its moments; settings are Keras', of epsilon and the norm of gradients.

    Keras' legacy version has one fused operation a variable, which takes half the time.
    """
    optimizer = keras.optimizers.legacy.Adam(_schedule(rate, preset), **settings)
    # The first step would create them, too late for a restore.
    optimizer._create_all_weights(variables)
    return optimizer


def rmsprop(preset: A2cPreset, variables: Sequence[Any]) -> Any:
    """Return RMSprop with its moments, with the constants of OpenAI baselines' a2c.py.

    Epsilon is under the root. Keras' legacy version adds it to the root, where 1e-5 is too small.
    """
    rate = _schedule(preset.learning_rate, preset)
    optimizer = keras.optimizers.RMSprop(
        rate, rho=0.99, epsilon=preset.epsilon, global_clipnorm=preset.gradient_clip
    )
    optimizer.build(variables)
    return optimizer


def _schedule(learning_rate: float, preset: Preset) -> Any:
    if not preset.learning_rate_decay:
        return learning_rate
    return keras.optimizers.schedules.PolynomialDecay(
        learning_rate, max(1, preset.updates), end_learning_rate=0.0
    )
