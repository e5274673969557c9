"""Measure how fast we train, and where the time goes: our side of `training_throughput.py`."""

import math
import tempfile
import time
import timeit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from quarl_tf import environments, presets
from quarl_tf.spec import Run

PARTS = ("environment", "acting", "replay", "learning")

_ALONE_SECONDS = 3.0

#: Side of the square matrices whose product is timed, and how many times.
_SIDE, _PRODUCTS = 2048, 30

#: No evaluation, checkpoint or end of the training comes near the clock.
_ENDLESS = {
    "steps": 10**9,
    "evaluation_every": 10**9,
    "evaluation_episodes": 1,
    "checkpoint_every": 10**9,
    "learning_rate_decay": False,
}
#: Exploration is at its final value from the first step on: what is timed is the usual step.
_EXPLORED = {"exploration_fraction": 1e-9}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training to time; `workloads.yaml` says what its fields mean."""

    algo: str
    env_id: str
    warm_up: int
    steps: int
    peers: Sequence[str]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    zoo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_atari(self) -> bool:
        """Whether it sees images."""
        return "NoFrameskip" in self.env_id

    def preset(self) -> presets.Preset:
        """Return the hyper-parameters that all libraries train with."""
        explores = issubclass(presets.ALGORITHMS[self.algo], presets.EpsilonGreedyPreset)
        explored = _EXPLORED if explores else {}
        return presets.load(self.algo, self.env_id, {**_ENDLESS, **explored, **self.overrides})


def workloads() -> dict[str, Workload]:
    """Read `workloads.yaml`, by name."""
    table = yaml.safe_load(Path(__file__).with_name("workloads.yaml").read_text())
    return {name: Workload(**values) for name, values in table.items()}


def speed(workload: Workload, seed: int, steps: int) -> float:
    """Return environment steps per second of our training."""
    with started(workload, seed) as training:
        return _rate(training, steps)


def shares(workload: Workload, steps: int) -> dict[str, float]:
    """Return the percentage of our training's time that each part takes."""
    with started(workload, 0) as training:
        calls = {"environment": time_calls(training.collector.envs, "step")}
        for part, method in (("acting", "act"), ("replay", "observe"), ("learning", "learn")):
            calls[part] = time_calls(training.agent, method)
        replay = getattr(training.agent, "_replay", None)
        samples = [] if replay is None else time_calls(replay, "sample")
        start = time.perf_counter()
        _rate(training, steps)
        total = time.perf_counter() - start
    seconds, sampling = {part: sum(calls[part]) for part in PARTS}, sum(samples)
    seconds["replay"] += sampling
    seconds["learning"] -= sampling
    seconds["rest"] = total - sum(seconds.values())
    return {part: 100 * value / total for part, value in seconds.items()}


def time_calls(owner: Any, method: str) -> list[float]:
    """Time all further calls of a method; return the list that their seconds are added to."""
    call, durations = getattr(owner, method), list[float]()

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        durations.append(time.perf_counter() - start)
        return result

    setattr(owner, method, timed)
    return durations


@contextmanager
def started(workload: Workload, seed: int) -> Iterator[Any]:
    """Give a training that has warmed up, without its evaluations at the end."""
    from quarl_tf.training.loop import _Training

    with tempfile.TemporaryDirectory() as folder:
        run = Run(workload.algo, workload.env_id, seed)
        training = _Training(Path(folder), run, workload.preset())
        training.resume()
        while training.step < workload.warm_up:
            training.burst()
        yield training


def _rate(training: Any, steps: int) -> float:
    first_step, start = training.step, time.perf_counter()
    while training.step < first_step + steps:
        training.burst()
    return float((training.step - first_step) / (time.perf_counter() - start))


def alone(workload: Workload) -> float:
    """Return steps per second of the environments with random actions, drawn beforehand."""
    preset = workload.preset()
    envs = environments.make_vector(workload.env_id, preset.num_envs, training=True)
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(256)]
    envs.reset(seed=0)
    steps, starts = 0, np.ones(preset.num_envs, np.bool_)
    start = time.perf_counter()
    while time.perf_counter() - start < _ALONE_SECONDS:
        for action in actions:
            _, _, terminated, truncated, _ = envs.step(action)
            # As in training: the tick that resets an environment is no step.
            steps += int(np.count_nonzero(starts))
            starts = ~(terminated | truncated)
    return steps / (time.perf_counter() - start)


def multiplications(workload: Workload) -> float:
    """Return the multiplications of numbers, each with an addition, that one step takes.

    Acting is a pass through the network; learning from a transition is three (forward, gradients of
    the weights and of the inputs, the first layer's left out), and what the targets take. The value
    head behind the papers' layers for images, one unit, is left out.
    """
    from quarl_tf import agents

    preset: Any = workload.preset()
    spec = environments.env_spec(workload.env_id)
    agent: Any = agents.build(workload.algo, spec, preset, 0)
    if isinstance(preset, presets.OnPolicyPreset):
        total, first = _passes(*agent._models)
        return total + preset.epochs * (3 * total - first)
    transitions = preset.batch_size * preset.gradient_steps / preset.train_frequency
    total, first = _passes(agent.network)
    if workload.algo == "dqn":  # Double DQN asks two networks about what follows.
        return total + transitions * ((5 if preset.double else 4) * total - first)
    critic, critics_first = _passes(agent._normalised_networks[0])
    # The critic passes a gradient on to the actor, besides learning; both have targets.
    return total + transitions * (4 * total - first + 6 * critic - critics_first)


def _passes(*networks: Any) -> tuple[float, float]:
    """Return the multiplications of one observation's forward pass, and those of first layers."""
    total = first_layers = 0
    for network in networks:
        layers = [layer for layer in network.layers if hasattr(layer, "kernel")]
        counts = [x.kernel.shape.num_elements() * math.prod(x.output_shape[1:-1]) for x in layers]
        total += sum(counts)
        first_layers += counts[0]
    return total, first_layers


def multiplications_per_second() -> dict[str, float]:
    """Return the multiplications a second of large matrices at best, for each precision."""
    from quarl_tf.foundation.keras import tf

    rates = {}
    for precision in ("float32", "bfloat16"):
        matrix = tf.cast(tf.random.normal((_SIDE, _SIDE)), precision)
        product = partial(tf.matmul, matrix, matrix)
        rates[precision] = _SIDE**3 / min(timeit.repeat(product, number=1, repeat=_PRODUCTS))
    return rates
