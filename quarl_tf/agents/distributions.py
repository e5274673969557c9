"""The action distributions of PPO and A2C."""

from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.agents import squared_difference
from quarl_tf.agents.tf_agents import distributions as tfd
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.layers import Floats
from quarl_tf.spec.actions import split


class Categorical:
    """Distribution of one or several discrete actions; the head is the logits."""

    def __init__(self, choices: int | tuple[int, ...]) -> None:
        self._choices = choices

    def read(self, logits: Any) -> Any:
        """Return the distribution for TF-Agents."""
        parts = [tfd.Categorical(part, dtype=tf.int32) for part in split(logits, self._choices)]
        return parts[0] if isinstance(self._choices, int) else tfd.Blockwise(parts)

    def draw(self, logits: Floats, random: np.random.Generator) -> tuple[npt.NDArray[Any], Floats]:
        """Draw actions (Gumbel-max); return them with their log probabilities."""
        draws = [_draw(part, random) for part in split(logits, self._choices)]
        if isinstance(self._choices, int):
            return draws[0]
        actions, log_probabilities = (np.stack(field, axis=1) for field in zip(*draws, strict=True))
        return actions, log_probabilities.sum(axis=1)

    def variance(self, logits: Floats) -> Floats:
        """Return the variance [n] of the actions' probabilities, the mean over several choices.

        The lower, the more exploration (QuaRL, Krishnan et al., arXiv 1910.01055, figure 1).
        """
        parts = split(logits, self._choices)
        odds = [np.exp(part - part.max(axis=1, keepdims=True)) for part in parts]
        variances = [(o / o.sum(axis=1, keepdims=True)).var(axis=1) for o in odds]
        return np.asarray(np.mean(variances, axis=0))

    def distance(self, logits: Any, targets: Any) -> Any:
        """Return the mean Kullback-Leibler divergence KL(targets || logits)."""
        return tf.reduce_mean(self.read(targets).kl_divergence(self.read(logits)))

    def refresh(self) -> None:
        """Do nothing: the head is the whole distribution."""


def _draw(logits: Floats, random: np.random.Generator) -> tuple[npt.NDArray[Any], Floats]:
    logits = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    noise = random.gumbel(size=logits.shape)
    actions = (log_probabilities + noise).argmax(axis=1).astype(np.int32)
    return actions, log_probabilities[np.arange(len(actions)), actions]


class Gaussian:
    """Independent normal distributions around the head with learned standard deviations."""

    def __init__(self, network: keras.Model) -> None:
        self._log_deviation = network.get_layer("action").log_deviation
        self.refresh()

    def read(self, means: Any) -> Any:
        """Return the distribution for TF-Agents."""
        deviation = tf.broadcast_to(tf.exp(self._log_deviation), tf.shape(means))
        return tfd.MultivariateNormalDiag(means, deviation)

    def draw(self, means: Floats, random: np.random.Generator) -> tuple[Floats, Floats]:
        """Draw actions; return them with their log densities."""
        noise = random.standard_normal(means.shape).astype(np.float32)
        constant = np.log(self._deviation) + np.float32(0.5 * np.log(2 * np.pi))
        return means + self._deviation * noise, -(noise * noise / 2 + constant).sum(axis=1)

    def variance(self, means: Floats) -> Floats:
        """Return the variance [n], the mean over the components; it does not depend on the head."""
        return np.full(len(means), (self._deviation**2).mean(), np.float32)

    distance = staticmethod(squared_difference)

    def refresh(self) -> None:
        """Read the current standard deviations."""
        self._deviation: Floats = np.exp(self._log_deviation.numpy())
