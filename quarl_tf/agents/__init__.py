"""What acts and learns while training; one module per algorithm, each with the same functions.

`build(spec, preset, seed, prepare) -> Agent`, and `network_factory(spec, preset, seed)` of the
network that is exported.

Deviations of all from their papers: environments start fresh episodes at each checkpoint, by which
a resumed training is the uninterrupted one; what is kept is the network of the best greedy
evaluation, not the last.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quarl_tf.environments import EnvSpec, require_actions
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import keras
from quarl_tf.foundation.seeding import generator
from quarl_tf.networks import NetworkFactory
from quarl_tf.networks.normalizer import RunningStatistics
from quarl_tf.presets import Preset
from quarl_tf.spec import STOCHASTIC_ALGORITHMS

Arrays = dict[str, npt.NDArray[Any]]
#: A function from network to network; they may share variables.
Change = Callable[[keras.Model], keras.Model]


class Stateful(Protocol):
    """A part of an agent that has a state of its own."""

    def arrays(self) -> Arrays:
        """Return the state for a checkpoint."""

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""


class Agent(ABC):
    """What acts and learns; after the training only its network is left."""

    #: Observation in, head out: what is exported.
    network: keras.Model
    #: Copies of the network that follow it.
    targets: Sequence[keras.Model] = ()

    def __init__(self, spec: EnvSpec, seed: int, draws: str) -> None:
        """Start without observations; `draws` names what is drawn to learn from."""
        self._statistics = RunningStatistics(spec)
        self._explore, self._draw = generator(seed, "exploration"), generator(seed, draws)
        self._parts: dict[str, Stateful] = {"statistics": self._statistics}

    @abstractmethod
    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose exploring actions for a batch; `progress` runs from 0 to 1 over training."""

    @abstractmethod
    def observe(self, tick: Tick) -> None:
        """Take in one tick of the vector environment."""

    @abstractmethod
    def end_of_rollout(self, observations: npt.NDArray[Any]) -> None:
        """Take in the last observations before all environments start fresh episodes."""

    @abstractmethod
    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Learn from what was observed since the last call; return metrics by name.

        Args:
            observations: What the environments show now, after the last tick.
        """

    @abstractmethod
    def change_network(self, change: Change) -> None:
        """Go on with what `change` makes of the network, and of each target."""

    @abstractmethod
    def refresh(self) -> None:
        """Act from now on by the network as it stands."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of all observations, which may be most of the memory: nothing more is learned."""

    @abstractmethod
    def _variables(self) -> list[Any]:
        """Return all that gradient steps change, in the order of checkpoints."""

    def arrays(self) -> Arrays:
        """Return all state for a checkpoint: variables, generators and every part's own."""
        states = (random.bit_generator.state for random in (self._explore, self._draw))
        arrays = {
            "generators": np.frombuffer(json.dumps(list(states)).encode(), np.uint8),
            **{f"variable/{i}": v.numpy() for i, v in enumerate(self._variables())},
        }
        for name, part in self._parts.items():
            arrays |= {f"{name}/{key}": array for key, array in part.arrays().items()}
        return arrays

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""
        states = json.loads(arrays["generators"].tobytes())
        for random, state in zip((self._explore, self._draw), states, strict=True):
            random.bit_generator.state = state
        for i, variable in enumerate(self._variables()):
            variable.assign(arrays[f"variable/{i}"])
        for name, part in self._parts.items():
            part.restore(section(arrays, name))
        self.refresh()


@runtime_checkable
class Stochastic(Protocol):
    """An agent whose policy is a distribution."""

    def action_variance(self, heads: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the variances [n] of the distributions that heads [n, ...] stand for."""


def build(
    algo: str, spec: EnvSpec, preset: Preset, seed: int, prepare: Change = lambda network: network
) -> Agent:
    """Build the agent of an algorithm; `prepare` changes policy networks before they train."""
    agent: Agent = _module(algo, spec).build(spec, preset, seed, prepare)
    return agent


def network_factory(algo: str, spec: EnvSpec, preset: Preset, seed: int) -> NetworkFactory:
    """Return the factory of the network that an algorithm exports."""
    factory: NetworkFactory = _module(algo, spec).network_factory(spec, preset, seed)
    return factory


def head(algo: str, spec: EnvSpec) -> str:
    """Return what the numbers of an algorithm's head are: "q_values", "logits" or "action"."""
    if spec.num_actions is None:
        return "action"
    return "logits" if algo in STOCHASTIC_ALGORITHMS else "q_values"


def _module(algo: str, spec: EnvSpec) -> Any:
    require_actions(algo, spec)
    return import_module(f"quarl_tf.agents.{algo}")


def section(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Arrays:
    """Return the arrays of a checkpoint whose names start with `prefix/`, without it."""
    start = f"{prefix}/"
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
