"""Exploration of Q-learners."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec
from quarl_tf.presets import EpsilonGreedyPreset


def epsilon_greedy(
    preset: EpsilonGreedyPreset,
    progress: float,
    random: np.random.Generator,
    spec: EnvSpec,
    greedy: Callable[[], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    """Return greedy actions, each random with probability epsilon, which falls linearly from 1."""
    share = min(1.0, progress / preset.exploration_fraction)
    epsilon = 1.0 + share * (preset.exploration_final - 1.0)
    exploring = random.random(preset.num_envs) < epsilon
    actions = random.integers(spec.action_size, size=preset.num_envs)
    return actions if exploring.all() else np.where(exploring, actions, greedy())
