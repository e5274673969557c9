"""Tell which layer of a policy int8 hurts, and choose a recipe by return."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quarl_tf.export import calibration, integer
from quarl_tf.quantization.grid import Array, grid_between, snap
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import LayerFormat, Recipe, Scheme, TensorFormat
from quarl_tf.spec.actions import agreement

#: Observations that layers are judged on, at most.
_SEEN = 1000

#: Layers whose return is played for, those with the largest share of the error.
_WORST = 3

#: Rollouts that a recipe is chosen by.
_ROLLOUTS = 20

_INT8 = Scheme.parse("int8").recipe
_BYTE = TensorFormat(bits=8)


@dataclass(frozen=True)
class Blame:
    """What int8 does to one layer.

    Attributes:
        low: Least output over rollouts; `high` the greatest.
        codes: Codes that the outputs take, of 256.
        saturated: Share of the outputs at the ends of the grid.
        noise: Signal to rounding noise of the outputs, in dB.
        share: Its share of the squared error of the head, each layer alone in int8.
        disagreement: Share of states with another action than fp32's if it alone is in float.
        gain: Mean return gained if it alone is in float; None where it was not played.
    """

    layer: str
    low: float
    high: float
    codes: int
    saturated: float
    noise: float
    share: float
    disagreement: float
    gain: float | None = None


@flatbuffer.understood()
def blame(content: bytes, policy: Policy, episodes: int) -> list[Blame]:
    """Judge each layer of a policy on rollouts; the worst are played for.

    Args:
        content: The fp32 flatbuffer.
        policy: The same, loaded.
        episodes: Episodes to play for each of the worst.
    """
    observations = calibration.observations(policy)[:_SEEN]
    discrete = policy.sidecar.num_actions is not None
    content = integer.prepared(content, observations, discrete=discrete)
    wanted = _heads(content, policy, observations)
    layers = list(integer.Graph(content).layers())

    def heads(recipe: Recipe) -> Array:
        return _heads(integer.quantized(content, observations, recipe), policy, observations)

    errors = {name: np.square(heads(_only(name)) - wanted).mean() for name in layers}
    outputs = _outputs(content, observations)
    found = [
        _judged(
            name,
            outputs[name],
            float(errors[name] / max(sum(errors.values()), 1e-30)),
            _disagreement(heads(without(_INT8, name)), wanted, policy),
        )
        for name in layers
    ]
    worst = sorted(found, key=lambda one: -one.share)[:_WORST]

    def earned(recipe: Recipe) -> float:
        made = Policy(integer.quantized(content, observations, recipe), policy.sidecar)
        return statistics.fmean(calibration.selection_returns(made, episodes))

    base = earned(_INT8)
    gains = {one.layer: earned(without(_INT8, one.layer)) - base for one in worst}
    return [replace(one, gain=gains.get(one.layer)) for one in found]


def chosen(content: bytes, policy: Policy, observations: Array) -> tuple[bytes, dict[str, Any]]:
    """Return the int8 file of the recipe that earns most on selection seeds, and what each earns.

    Of equal ones it is the first: they are in the order of what they leave in float.
    """
    discrete = policy.sidecar.num_actions is not None
    ready = integer.prepared(content, observations, discrete=discrete)
    plain = integer.centred(content) if discrete else content
    wanted = _heads(ready, policy, observations[:_SEEN])
    layers = list(integer.Graph(ready).layers())

    def error(name: str) -> float:
        made = integer.quantized(ready, observations, _only(name))
        return float(np.square(_heads(made, policy, observations[:_SEEN]) - wanted).mean())

    worst = max(layers[:-1] or layers, key=error)
    tensor = Scheme.parse("int8_tensor").recipe
    recipes: Mapping[str, tuple[bytes, Recipe]] = {
        "int8": (ready, _INT8),
        "not equalised": (plain, _INT8),
        "int8_tensor": (plain, tensor),
        "head in float": (ready, without(_INT8, "head")),
        f"{worst} in float": (ready, without(_INT8, worst)),
        f"{worst} and head in float": (ready, without(without(_INT8, worst), "head")),
    }
    files = {n: integer.quantized(c, observations, r) for n, (c, r) in recipes.items()}
    earned = {
        name: statistics.fmean(
            calibration.selection_returns(Policy(made, policy.sidecar), _ROLLOUTS)
        )
        for name, made in files.items()
    }
    best = max(earned, key=lambda name: earned[name])
    return files[best], {"recipe": best, "selection_returns": earned}


def without(recipe: Recipe, layer: str) -> Recipe:
    """Return a recipe that leaves a layer in float."""
    if layer == "head":
        return replace(recipe, head=LayerFormat())
    return replace(recipe, by_layer={**recipe.by_layer, layer: LayerFormat()})


def _only(layer: str) -> Recipe:
    """Return the recipe that has one layer in int8."""
    alone = Recipe(observation=_INT8.observation)
    if layer == "head":
        return replace(alone, head=_INT8.head)
    return replace(alone, by_layer={layer: _INT8.default})


def _heads(content: bytes, policy: Policy, observations: Array) -> Array:
    made = Policy(content, policy.sidecar)
    return np.array([made.head(observation) for observation in observations])


def _disagreement(found: Array, wanted: Array, policy: Policy) -> float:
    if policy.sidecar.num_actions is not None:
        return 1 - agreement(found, wanted, policy.sidecar.num_actions)
    span = np.subtract(policy.sidecar.action_high or [1.0], policy.sidecar.action_low or [0.0])
    return float((np.abs(found - wanted) > 0.01 * span).any(axis=1).mean())


def _outputs(content: bytes, observations: Array) -> dict[str, Array]:
    graph = integer.Graph(content)
    names = {operator.outputs[0]: name for name, operator in graph.layers().items()}
    seen: dict[str, list[Array]] = {name: [] for name in names.values()}

    def see(index: int, values: Array) -> None:
        if index in names:
            seen[names[index]].append(values.reshape(-1).copy())

    visit: Callable[..., Any] = integer.visit
    visit(content, observations, see)
    return {name: np.concatenate(values) for name, values in seen.items()}


def _judged(layer: str, outputs: Array, share: float, disagreement: float) -> Blame:
    low, high = float(outputs.min()), float(outputs.max())
    grid = grid_between(np.array(low), np.array(high), _BYTE)
    on_grid = snap(outputs, grid, _BYTE)
    noise = max(float(np.square(on_grid - outputs).mean()), 1e-30)
    # What ReLU made 0 is not cut off.
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
