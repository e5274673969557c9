"""One module per algorithm, each with the same `build(spec, preset, seed, prepare) -> Agent`.

Deviations of all from their papers: environments start fresh episodes at each checkpoint, by which
a resumed training is the uninterrupted one; what is kept is the network of the best greedy
evaluation, not the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import keras
from quarl_tf.networks.build import NetworkFactory
from quarl_tf.presets import Preset

Arrays = dict[str, npt.NDArray[Any]]
Prepare = Callable[[keras.Model], keras.Model]


class Agent(Protocol):
    """What acts and learns while training; afterwards only its network is left."""

    @property
    def network(self) -> keras.Model:
        """Observation in, head out: what is exported."""

    @property
    def targets(self) -> Sequence[keras.Model]:
        """Copies of the network that follow it."""

    def refresh(self) -> None:
        """Act from now on by the network as it stands."""

    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose exploring actions for a batch; `progress` runs from 0 to 1 over training."""

    def observe(
        self,
        observations: npt.NDArray[Any],
        actions: npt.NDArray[Any],
        rewards: npt.NDArray[Any],
        terminated: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.bool_],
    ) -> None:
        """Take in one tick of the vector environment (see `replay.Replay.add`)."""

    def end_of_rollout(self, observations: npt.NDArray[Any]) -> None:
        """Take in the last observations before all environments start rebuild."""

    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Learn from what was observed since the last call; return metrics by name.

        Args:
            observations: What the environments show now, after the last tick.
        """

    def forget(self) -> None:
        """Let go of all observations, which may be most of the memory: nothing more is learned."""

    def arrays(self) -> Arrays:
        """Return all state for a checkpoint: variables, optimizer, replay, statistics."""

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""

    def generators(self) -> dict[str, np.random.Generator]:
        """Return the random generators by purpose, to be kept in checkpoints."""


@runtime_checkable
class Stochastic(Protocol):
    """An agent whose policy is a distribution."""

    def action_variance(self, heads: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the variances [n] of the distributions that heads [n, ...] stand for."""


def build(
    algo: str, spec: EnvSpec, preset: Preset, seed: int, prepare: Prepare = lambda network: network
) -> Agent:
    """Build the agent of an algorithm.

    Args:
        algo: Name of the algorithm.
        spec: Shapes of observations and actions.
        preset: Hyper-parameters.
        seed: The run's seed.
        prepare: What becomes of a policy network before it trains.
    """
    agent: Agent = import_module(f"quarl_tf.agents.{algo}").build(spec, preset, seed, prepare)
    return agent


def network_factory(algo: str, spec: EnvSpec, preset: Preset, seed: int) -> NetworkFactory:
    """Return the factory of the network that an algorithm exports."""
    module = import_module(f"quarl_tf.agents.{algo}")
    factory: NetworkFactory = module.network_factory(spec, preset, seed)
    return factory


def head(algo: str, spec: EnvSpec) -> str:
    """Return what the numbers of an algorithm's head are: "q_values", "logits" or "action"."""
    kind: str = import_module(f"quarl_tf.agents.{algo}").head(spec)
    return kind


def section(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Arrays:
    """Return the arrays of a checkpoint whose names start with `prefix/`, without it."""
    start = f"{prefix}/"
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}


def variable_arrays(variables: Sequence[Any]) -> Arrays:
    """Return the values of variables for a checkpoint, by their place in the list."""
    return {f"variable/{i}": variable.numpy() for i, variable in enumerate(variables)}


def restore_variables(variables: Sequence[Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Take the values of variables back from a checkpoint."""
    for i, variable in enumerate(variables):
        variable.assign(arrays[f"variable/{i}"])
