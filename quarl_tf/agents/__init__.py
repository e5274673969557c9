"""Agents, which act and learn during training: one module per algorithm.

Each module has `build(spec, preset, seed, prepare) -> Agent` and `build_network(spec, preset,
seed)`, the network that is exported.

Deviations of all from their papers: environments start new episodes at each checkpoint, so that a
resumed training equals an uninterrupted one; the network with the best greedy evaluation is kept,
not the last one.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import networks
from quarl_tf.environments import EnvSpec, require_actions
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.foundation.seeding import generator
from quarl_tf.networks import Weights
from quarl_tf.networks.layers import Floats
from quarl_tf.networks.normalizer import RunningStatistics
from quarl_tf.presets import ALGORITHMS, Preset

Arrays = dict[str, npt.NDArray[Any]]
#: A function from network to network; they may share variables.
Change = Callable[[keras.Model], keras.Model]


class Agent(ABC):
    """Acts and learns; the network is what remains after the training."""

    #: From observation to head; this is exported.
    network: keras.Model
    #: Target networks of `network`.
    targets: Sequence[keras.Model] = ()

    def __init__(self, spec: EnvSpec, preset: Preset, seed: int, draws: str) -> None:
        """Start without observations; `draws` names the random stream of what is learned from."""
        self._spec, self._distillation = spec, preset.distillation
        self._statistics = RunningStatistics(spec)
        self._act_random = generator(seed, "exploration")
        self._learn_random = generator(seed, draws)
        #: A network whose head the trained one imitates (Hinton et al., arXiv 1503.02531).
        self.teacher: keras.Model | None = None
        #: Mean distance between heads and a teacher's, both [n, outputs].
        self.distance: Callable[[Any, Any], Any] = squared_difference
        #: Variance [n] of the action distribution of each head [n, outputs]; None if there is none.
        self.action_variance: Callable[[Floats], Floats] | None = None
        #: Objects with `arrays` and `restore`, and single arrays, for checkpoints.
        self._parts: dict[str, Any] = {"statistics": self._statistics}
        self._arrays: Arrays = {}

    @abstractmethod
    def act(self, observations: npt.NDArray[Any], progress: float) -> npt.NDArray[Any]:
        """Choose exploring actions for a batch; `progress` runs from 0 to 1 over training."""

    def _with_distillation(self, loss: Any, observations: Any) -> Any:
        if self.teacher is None:
            return loss
        heads, targets = (
            networks.acting(network)(observations, training=False)
            for network in (self.network, self.teacher)
        )
        return loss + self._distillation * self.distance(heads, targets)

    @abstractmethod
    def observe(self, tick: Tick) -> None:
        """Store one tick of the vector environment."""

    def end_of_stream(self, observations: npt.NDArray[Any]) -> None:  # noqa: B027
        """Store the last observations before all environments start new episodes."""

    @abstractmethod
    def learn(self, observations: npt.NDArray[Any]) -> dict[str, float]:
        """Learn from all ticks since the last call, which `observations` follow; return metrics."""

    @abstractmethod
    def change_network(self, change: Change) -> None:
        """Replace the network and each target by the result of `change`."""

    @abstractmethod
    def refresh(self) -> None:
        """Act by the current weights from now on."""

    def forget(self) -> None:  # noqa: B027
        """Free the memory of a replay; nothing can be learned afterwards."""

    def start_from(self, weights: Weights, count: int) -> None:
        """Start from a trained network, whose normaliser has seen `count` observations."""
        teachers = [] if self.teacher is None else [self.teacher]
        for network in (self.network, *self.targets, *teachers):
            initial = networks.weights(network)  # Of which a flatbuffer may lack some,
            initial.pop("normalizer/mean:0", None)  # but not this one, where there is one.
            networks.set_weights(network, initial | weights)
        self._statistics.start_from(self.network, count)
        self.refresh()

    @abstractmethod
    def _variables(self) -> list[Any]:
        """Return all variables that gradient steps change, in the order of checkpoints."""

    def arrays(self) -> Arrays:
        """Return the whole state for a checkpoint."""
        states = (random.bit_generator.state for random in (self._act_random, self._learn_random))
        arrays = {
            "generators": np.frombuffer(json.dumps(list(states)).encode(), np.uint8),
            **{f"variable/{i}": v.numpy() for i, v in enumerate(self._variables())},
            **self._arrays,
        }
        parts = {name: part.arrays() for name, part in self._parts.items()}
        if self.teacher is not None:
            parts["teacher"] = networks.weights(self.teacher)
        for name, part in parts.items():
            arrays |= {f"{name}/{key}": array for key, array in part.items()}
        return arrays

    def copies(self) -> list[str]:
        """Return the names in `arrays` of the variables of the policy's target networks."""
        target_ids = {id(variable) for target in self.targets for variable in target.variables}
        return [f"variable/{i}" for i, v in enumerate(self._variables()) if id(v) in target_ids]

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the state of a checkpoint."""
        states = json.loads(arrays["generators"].tobytes())
        for random, state in zip((self._act_random, self._learn_random), states, strict=True):
            random.bit_generator.state = state
        for i, variable in enumerate(self._variables()):
            variable.assign(arrays[f"variable/{i}"])
        self._arrays = {name: arrays[name].copy() for name in self._arrays}
        for name, part in self._parts.items():
            part.restore(section(arrays, name))
        if self.teacher is not None:
            networks.set_weights(self.teacher, section(arrays, "teacher"))
        self.refresh()


def squared_difference(heads: Any, targets: Any) -> Any:
    """Return the mean squared difference of values or actions."""
    return tf.reduce_mean(tf.square(heads - targets))


def build(
    algo: str, spec: EnvSpec, preset: Preset, seed: int, prepare: Change = lambda network: network
) -> Agent:
    """Build the agent of an algorithm; `prepare` changes policy networks before they train."""
    agent: Agent = _module(algo, spec).build(spec, preset, seed, prepare)
    if preset.distillation:
        agent.teacher = build_network(algo, spec, preset, seed)
    return agent


def build_network(algo: str, spec: EnvSpec, preset: Preset, seed: int) -> keras.Model:
    """Build the network that an algorithm exports."""
    return _module(algo, spec).build_network(spec, preset, seed)


def head(algo: str, spec: EnvSpec) -> str:
    """Return the meaning of an algorithm's head: "q_values", "logits" or "action"."""
    if spec.num_actions is None:
        return "action"
    return "logits" if ALGORITHMS[algo].STOCHASTIC else "q_values"


def _module(algo: str, spec: EnvSpec) -> Any:
    require_actions(algo, spec)
    return import_module(f"quarl_tf.agents.{algo}")


def section(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Arrays:
    """Return the arrays of a checkpoint named `prefix/…`, by the rest of their names."""
    start = f"{prefix}/"
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
