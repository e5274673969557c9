"""Our Keras networks and Gymnasium environments as TF-Agents sees them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gym_notices.notices
import numpy as np

from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.build import NetworkFactory

# TF-Agents imports the old gym, which prints advice to move to Gymnasium. We use Gymnasium.
gym_notices.notices.notices.clear()
# Traced by TensorFlow's AutoGraph, TF-Agents' code compares with `is ()`; each trace would warn.
warnings.filterwarnings("ignore", '"is( not)?" with', SyntaxWarning)
with warnings.catch_warnings():
    # Its sources, and old gym's, predate today's Python and NumPy.
    warnings.simplefilter("ignore")
    import tensorflow_probability as tfp
    from tf_agents.agents.ddpg import ddpg_agent
    from tf_agents.agents.dqn import dqn_agent
    from tf_agents.agents.ppo import ppo_agent
    from tf_agents.networks import network as tfa_network
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import policy_step, trajectory
    from tf_agents.trajectories import time_step as ts
    from tf_agents.utils.common import element_wise_squared_loss

__all__ = [
    "CategoricalNetwork",
    "FactoryNetwork",
    "GaussianNetwork",
    "ValueNetwork",
    "action_spec",
    "adam",
    "ddpg_agent",
    "dqn_agent",
    "element_wise_squared_loss",
    "observation_spec",
    "ppo_agent",
    "rmsprop",
    "time_step_spec",
    "time_steps",
    "transition",
]


class FactoryNetwork(tfa_network.Network):  # type: ignore[misc]
    """A TF-Agents network around a Keras model made by a factory.

    TF-Agents copies a network (for targets) by calling its constructor again with the same
    arguments. A ready model would share its variables with the copy; a factory does not.
    """

    def __init__(self, factory: NetworkFactory, input_tensor_spec: Any, name: str = "Net") -> None:
        """Build the model."""
        super().__init__(input_tensor_spec=input_tensor_spec, state_spec=(), name=name)
        self.model = factory()

    def call(
        self, observation: Any, step_type: Any = None, network_state: Any = (), training: Any = None
    ) -> tuple[Any, Any]:
        """Return the head and the untouched (empty) state."""
        return self.model(observation, training=training), network_state


def observation_spec(spec: EnvSpec) -> Any:
    """Return TF-Agents' specification of the observations."""
    if spec.observation_dtype == "uint8":
        # TF-Agents draws an input from this, below the maximum plus 1; 256 would not fit a byte.
        return tensor_spec.BoundedTensorSpec(spec.observation_shape, tf.uint8, 0, 254)
    return tensor_spec.TensorSpec(spec.observation_shape, tf.as_dtype(spec.observation_dtype))


def time_step_spec(spec: EnvSpec) -> Any:
    """Return TF-Agents' specification of a time step."""
    return ts.time_step_spec(observation_spec(spec))


def action_spec(spec: EnvSpec) -> Any:
    """Return TF-Agents' specification of an action."""
    if spec.num_actions is not None:
        return tensor_spec.BoundedTensorSpec((), tf.int32, 0, spec.num_actions - 1)
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    return tensor_spec.BoundedTensorSpec(low.shape, tf.float32, low, high)


class CategoricalNetwork(FactoryNetwork):
    """A network whose head is the logits of a discrete action's distribution."""

    def call(
        self, observation: Any, step_type: Any = None, network_state: Any = (), training: Any = None
    ) -> tuple[Any, Any]:
        """Return the distribution and the untouched (empty) state."""
        logits = self.model(observation, training=training)
        return tfp.distributions.Categorical(logits=logits, dtype=tf.int32), network_state


class GaussianNetwork(FactoryNetwork):
    """A network whose head is the mean of a continuous action; the deviation is a variable."""

    def __init__(self, factory: NetworkFactory, input_tensor_spec: Any, logarithm: Any) -> None:
        """Keep the logarithm of the deviation."""
        super().__init__(factory, input_tensor_spec, name="Actor")
        self._logarithm = logarithm

    def call(
        self, observation: Any, step_type: Any = None, network_state: Any = (), training: Any = None
    ) -> tuple[Any, Any]:
        """Return the distribution and the untouched (empty) state."""
        mean = self.model(observation, training=training)
        deviation = tf.broadcast_to(tf.exp(self._logarithm), tf.shape(mean))
        return tfp.distributions.MultivariateNormalDiag(mean, deviation), network_state


class ValueNetwork(FactoryNetwork):
    """A network whose head is one value: of an observation, or of an observation and an action."""

    def call(
        self, observation: Any, step_type: Any = None, network_state: Any = (), training: Any = None
    ) -> tuple[Any, Any]:
        """Return values [n] and the untouched (empty) state."""
        return self.model(observation, training=training)[:, 0], network_state


def time_steps(observation: Any) -> Any:
    """Assemble time steps amid an episode, for losses that look at observations only."""
    batch = tf.shape(observation)[:1]
    return ts.TimeStep(
        tf.fill(batch, ts.StepType.MID), tf.zeros(batch), tf.ones(batch), observation
    )


def transition(observation: Any, action: Any, reward: Any, discount: Any, following: Any) -> Any:
    """Assemble a batch of transitions as TF-Agents' agents train on."""
    batch = tf.shape(reward)
    middle = tf.fill(batch, ts.StepType.MID)
    return trajectory.Transition(
        time_step=ts.TimeStep(middle, tf.zeros(batch), tf.ones(batch), observation),
        action_step=policy_step.PolicyStep(action, (), ()),
        next_time_step=ts.TimeStep(middle, reward, discount, following),
    )


def adam(
    learning_rate: float,
    variables: Sequence[Any],
    decay_steps: int | None = None,
    epsilon: float = 1e-7,
) -> Any:
    """Return Adam with its moments.

    Keras' legacy one: each variable takes one fused operation a step instead of ten, which halves
    the time of a step of Nature's network over 32 images.

    Args:
        learning_rate: Step size at the start.
        variables: What it will change.
        decay_steps: Gradient steps over which the step size falls linearly to 0; None to keep it.
        epsilon: What keeps its quotient finite.
    """
    rate = _schedule(learning_rate, decay_steps)
    optimizer = keras.optimizers.legacy.Adam(rate, epsilon=epsilon)
    # Else created by the first step, too late for a restore.
    optimizer._create_all_weights(variables)
    return optimizer


def rmsprop(
    learning_rate: float,
    variables: Sequence[Any],
    decay_steps: int | None = None,
    *,
    epsilon: float,
) -> Any:
    """Return RMSprop with its moments; A2C's constants (OpenAI baselines, a2c.py).

    Its epsilon is under the root, as there. Keras' legacy one adds it to the root, where 1e-5
    bounds next to nothing: small gradients would take steps a hundred times as large.

    Args:
        learning_rate: Step size at the start.
        variables: What it will change.
        decay_steps: Gradient steps over which the step size falls linearly to 0; None to keep it.
        epsilon: What keeps its quotient finite.
    """
    optimizer = keras.optimizers.RMSprop(
        _schedule(learning_rate, decay_steps), rho=0.99, epsilon=epsilon
    )
    optimizer.build(variables)
    return optimizer


def _schedule(learning_rate: float, decay_steps: int | None) -> Any:
    if decay_steps is None:
        return learning_rate
    return keras.optimizers.schedules.PolynomialDecay(
        learning_rate, max(1, decay_steps), end_learning_rate=0.0
    )
