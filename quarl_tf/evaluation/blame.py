"""Measure the error of int8 in each layer of a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quarl_tf import environments
from quarl_tf.evaluation.compare import Interval, different_n, mean_interval
from quarl_tf.evaluation.play import AGREEMENT_TOLERANCE
from quarl_tf.export import auto, calibration, integer
from quarl_tf.export.activations import tensor_values
from quarl_tf.export.graph import Graph
from quarl_tf.export.preparation import prepared
from quarl_tf.quantization.grid import Array, grid_between, snap
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Recipe, TensorFormat
from quarl_tf.spec.actions import agreement

_WORST = 3  #: Layers whose gain in return is measured, those with the largest share of the error.
_BYTE = TensorFormat(bits=8)


@dataclass(frozen=True)
class Blame:
    """The effect of int8 on one layer."""

    layer: str
    low: float  #: Smallest output over rollouts, and the largest.
    high: float
    codes: int  #: Codes that the outputs take, of 256.
    saturated: float  #: Share of the outputs at the ends of the grid.
    noise: float  #: Signal to rounding noise of the outputs, in dB.
    share: float  #: Share of the squared error of the head, each layer alone in int8.
    disagreement: float  #: Share of states with another action than fp32's, this layer in float.
    gain: Interval | None = None  #: Paired return gained with this layer in float; None if unknown.


@flatbuffer.understood()
def blame(content: bytes, policy: Policy, episodes: int) -> list[Blame]:
    """Measure each layer on rollouts, and the worst by the return of so many episodes.

    `content` is the fp32 flatbuffer that `policy` was loaded from.
    """
    observations = calibration.observations(policy)[: auto.SEEN]
    content = prepared(content, observations, policy.sidecar.num_actions)
    wanted = auto.heads(content, policy, observations)
    graph = Graph(content)
    layers = graph.layers()

    def heads(recipe: Recipe) -> Array:
        return auto.heads(integer.quantized(content, observations, recipe), policy, observations)

    errors = {name: np.square(heads(auto.only(name)) - wanted).mean() for name in layers}
    found = [
        _judged(
            name,
            tensor_values(graph, layer, "outputs", observations),
            float(errors[name] / max(sum(errors.values()), 1e-30)),
            _disagreement(heads(auto.without(auto.INT8, name)), wanted, policy),
        )
        for name, layer in layers.items()
    ]
    worst = sorted(found, key=lambda one: -one.share)[:_WORST]

    def earned(recipe: Recipe) -> list[float]:
        made = Policy(integer.quantized(content, observations, recipe), policy.sidecar)
        return calibration.selection_returns(made, episodes)

    base, game = earned(auto.INT8), environments.rules(policy.sidecar.env_id)
    gains: dict[str, Interval] = {}
    for layer in (one.layer for one in worst):
        returns = earned(auto.without(auto.INT8, layer))
        gains[layer] = mean_interval(np.subtract(returns, base), different_n(game, returns, base))
    return [replace(one, gain=gains.get(one.layer)) for one in found]


def _disagreement(found: Array, wanted: Array, policy: Policy) -> float:
    if policy.sidecar.num_actions is not None:
        return 1 - agreement(found, wanted, policy.sidecar.num_actions)
    low, high = np.array(policy.sidecar.action_low), np.array(policy.sidecar.action_high)
    apart = np.abs(np.clip(found, low, high) - np.clip(wanted, low, high))
    return float((apart > AGREEMENT_TOLERANCE * (high - low)).any(axis=1).mean())


def _judged(layer: str, outputs: Array, share: float, disagreement: float) -> Blame:
    low, high = float(outputs.min()), float(outputs.max())
    grid = grid_between(np.array(low), np.array(high), _BYTE)
    on_grid = snap(outputs, grid, _BYTE)
    noise = max(float(np.square(on_grid - outputs).mean()), 1e-30)
    # Zeros of ReLU are not saturated.
    ends = (on_grid >= on_grid.max()) | ((on_grid <= on_grid.min()) & (low < 0))
    return Blame(
        layer,
        low,
        high,
        codes=len(np.unique(np.rint(on_grid / grid.step))),
        saturated=float(ends.mean()),
        noise=10 * float(np.log10(max(float(outputs.var()), 1e-30) / noise)),
        share=share,
        disagreement=disagreement,
    )
