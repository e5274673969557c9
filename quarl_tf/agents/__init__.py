"""What acts and learns while training; one module per algorithm, each with the same functions.

`build(spec, preset, seed, prepare) -> Agent`, and `network_factory(spec, preset, seed)` of the
network that is exported.

Deviations of all from their papers: environments start fresh episodes at each checkpoint, by which
a resumed training is the uninterrupted one; what is kept is the network of the best greedy
evaluation, not the last.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.agents.distillation import Distance, Teacher, squared_difference
from quarl_tf.environments import EnvSpec, require_actions
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import keras
from quarl_tf.foundation.seeding import generator
from quarl_tf.networks import NetworkFactory, Weights
from quarl_tf.networks.layers import Floats
from quarl_tf.networks.normalizer import RunningStatistics
from quarl_tf.presets import ALGORITHMS, Preset

Arrays = dict[str, npt.NDArray[Any]]
#: A function from network to network; they may share variables.
Change = Callable[[keras.Model], keras.Model]


class Agent(ABC):
    """What acts and learns; after the training only its network is left."""

    #: Observation in, head out: what is exported.
    network: keras.Model
    #: Copies of the network that follow it.
    targets: Sequence[keras.Model] = ()
    #: What the head is held to, if anything.
    teacher: Teacher | None = None

    def __init__(self, spec: EnvSpec, seed: int, draws: str) -> None:
        """Start without observations; `draws` names what is drawn to learn from."""
        self._statistics = RunningStatistics(spec)
        self._explore, self._draw = generator(seed, "exploration"), generator(seed, draws)
        #: What has `arrays` and `restore` of its own, and arrays as they are.
        self._parts: dict[str, Any] = {"statistics": self._statistics}
        self._kept: Arrays = {}

    @abstractmethod
    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose exploring actions for a batch; `progress` runs from 0 to 1 over training."""

    def action_variance(self, heads: Floats) -> Floats | None:
        """Return the variances [n] of the distributions that heads [n, ...] stand for, if any."""
        del heads
        return None

    @property
    def distance(self) -> Distance:
        """How far a head is from a teacher's."""
        return squared_difference

    def hold_to(self, teacher: Teacher) -> None:
        """Learn from now on with the head held to that of a network, which `start_from` sets."""
        self.teacher = self._parts["teacher"] = teacher

    def _held(self, loss: Any, observations: Any) -> Any:
        """Return the loss of the network over a batch of observations, with the teacher's."""
        held = self.teacher and self.teacher.loss(self.network, observations)
        return loss if held is None else loss + held

    @abstractmethod
    def observe(self, tick: Tick) -> None:
        """Take in one tick of the vector environment."""

    def end_of_rollout(self, observations: npt.NDArray[Any]) -> None:  # noqa: B027
        """Take in the last observations before all environments start fresh episodes."""

    @abstractmethod
    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Learn from all since the last call, which led to these observations; return metrics."""

    @abstractmethod
    def change_network(self, change: Change) -> None:
        """Go on with what `change` makes of the network, and of each target."""

    @abstractmethod
    def refresh(self) -> None:
        """Act from now on by the network as it stands."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of all observations, which may be most of the memory: nothing more is learned."""

    def start_from(self, weights: Weights, seen: int) -> None:
        """Begin with a trained network, whose normaliser has seen so many observations."""
        teachers = [self.teacher.network] if self.teacher else []
        for network in (self.network, *self.targets, *teachers):
            variables = {variable.name: variable for variable in network.variables}
            for name, value in weights.items():
                variables[name].assign(value)
        self._statistics.start_from(self.network, seen)
        self.refresh()

    @abstractmethod
    def _variables(self) -> list[Any]:
        """Return all that gradient steps change, in the order of checkpoints."""

    def arrays(self) -> Arrays:
        """Return all state for a checkpoint: variables, generators and every part's own."""
        states = (random.bit_generator.state for random in (self._explore, self._draw))
        arrays = {
            "generators": np.frombuffer(json.dumps(list(states)).encode(), np.uint8),
            **{f"variable/{i}": v.numpy() for i, v in enumerate(self._variables())},
            **self._kept,
        }
        for name, part in self._parts.items():
            arrays |= {f"{name}/{key}": array for key, array in part.arrays().items()}
        return arrays

    def copies(self) -> list[str]:
        """Return the names, among `arrays`, of what targets copy from the network."""
        copied = {id(variable) for target in self.targets for variable in target.variables}
        return [f"variable/{i}" for i, v in enumerate(self._variables()) if id(v) in copied]

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the state of a checkpoint back."""
        states = json.loads(arrays["generators"].tobytes())
        for random, state in zip((self._explore, self._draw), states, strict=True):
            random.bit_generator.state = state
        for i, variable in enumerate(self._variables()):
            variable.assign(arrays[f"variable/{i}"])
        self._kept = {name: arrays[name].copy() for name in self._kept}
        for name, part in self._parts.items():
            part.restore(section(arrays, name))
        self.refresh()


def build(
    algo: str, spec: EnvSpec, preset: Preset, seed: int, prepare: Change = lambda network: network
) -> Agent:
    """Build the agent of an algorithm; `prepare` changes policy networks before they train."""
    agent: Agent = _module(algo, spec).build(spec, preset, seed, prepare)
    if preset.distillation:
        network = network_factory(algo, spec, preset, seed)()
        agent.hold_to(Teacher(network, spec, preset.distillation, agent.distance))
    return agent


def network_factory(algo: str, spec: EnvSpec, preset: Preset, seed: int) -> NetworkFactory:
    """Return the factory of the network that an algorithm exports."""
    factory: NetworkFactory = _module(algo, spec).network_factory(spec, preset, seed)
    return factory


def head(algo: str, spec: EnvSpec) -> str:
    """Return what the numbers of an algorithm's head are: "q_values", "logits" or "action"."""
    if spec.num_actions is None:
        return "action"
    return "logits" if ALGORITHMS[algo].STOCHASTIC else "q_values"


def _module(algo: str, spec: EnvSpec) -> Any:
    require_actions(algo, spec)
    return import_module(f"quarl_tf.agents.{algo}")


def section(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Arrays:
    """Return the arrays of a checkpoint whose names start with `prefix/`, without it."""
    start = f"{prefix}/"
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
