"""Measure the error of int8 in each layer of a policy."""

from dataclasses import dataclass, replace

import numpy as np

from quarl_tf.evaluation.compare import Interval, differences, mean_interval
from quarl_tf.evaluation.play import AGREEMENT_TOLERANCE
from quarl_tf.export import auto, calibration, integer
from quarl_tf.export.activations import tensor_values
from quarl_tf.export.graph import Graph
from quarl_tf.export.preparation import prepared
from quarl_tf.quantization.grid import BYTE, Array, grid_between, snap
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Recipe
from quarl_tf.spec.actions import agreement

_TWO_STAGES = replace(BYTE, bits=16)  #: The format of a head in two stages.

_WORST = 3  #: Layers whose gain in return is measured, those with the largest share of the error.


@dataclass(frozen=True)
class Blame:
    """The effect of int8 on one layer."""

    layer: str
    low: float  #: Smallest output over rollouts, and the largest.
    high: float
    codes: int  #: Codes that the outputs take, of 256; of 65,536 for a head in two stages.
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
    observations = calibration.observations(policy)
    content = prepared(content, observations, policy.sidecar.num_actions)
    seen = auto.seen(observations)
    reference_heads = auto.heads(content, policy, seen)
    graph, errors = Graph(content), auto.errors(content, policy, observations)
    effects = []
    for name, layer in graph.layers().items():
        outputs = tensor_values(graph, layer, "outputs", observations)
        low, high = float(outputs.min()), float(outputs.max())
        if name == "head" and integer.has_two_stages(graph):
            reach = np.array(integer.ROOM * max(-low, high))
            grid, form = grid_between(-reach, reach, _TWO_STAGES), _TWO_STAGES
        else:
            grid, form = grid_between(np.array(low), np.array(high), BYTE), BYTE
        rounded = snap(outputs, grid, form)
        noise = max(float(np.square(rounded - outputs).mean()), 1e-30)
        # Zeros of ReLU are not saturated.
        is_lowest = (rounded < grid.low + grid.step / 2) & (low < 0)
        saturated = is_lowest | (rounded > grid.high - grid.step / 2)
        quantized = integer.quantized(content, observations, auto.INT8.without(name))
        heads = auto.heads(quantized, policy, seen)
        effect = Blame(
            name,
            low,
            high,
            codes=len(np.unique(np.rint(rounded / grid.step))),
            saturated=float(saturated.mean()),
            noise=10 * float(np.log10(max(float(outputs.var()), 1e-30) / noise)),
            share=float(errors[name] / max(sum(errors.values()), 1e-30)),
            disagreement=_disagreement(heads, reference_heads, policy),
        )
        effects.append(effect)

    def selection_returns(recipe: Recipe) -> list[float]:
        quantized = Policy(integer.quantized(content, observations, recipe), policy.sidecar)
        return calibration.selection_returns(quantized, episodes)

    int8_returns, gains = selection_returns(auto.INT8), dict[str, Interval]()
    for effect in sorted(effects, key=lambda effect: -effect.share)[:_WORST]:
        returns = selection_returns(auto.INT8.without(effect.layer))
        gains[effect.layer] = mean_interval(differences(returns, int8_returns))
    return [replace(effect, gain=gains.get(effect.layer)) for effect in effects]


def _disagreement(heads: Array, reference_heads: Array, policy: Policy) -> float:
    if policy.sidecar.num_actions is not None:
        return 1 - agreement(heads, reference_heads, policy.sidecar.num_actions)
    low, high = np.array(policy.sidecar.action_low), np.array(policy.sidecar.action_high)
    distances = np.abs(np.clip(heads, low, high) - np.clip(reference_heads, low, high))
    return float((distances > AGREEMENT_TOLERANCE * (high - low)).any(axis=1).mean())
