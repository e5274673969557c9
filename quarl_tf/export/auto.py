"""Choose the int8 recipe of a policy by return: `int8_auto`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quarl_tf.export import calibration, integer
from quarl_tf.quantization.grid import Array
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import LayerFormat, Recipe, Scheme

#: Observations that layers are judged on, at most.
SEEN = 1000

#: Rollouts that a recipe is chosen by.
_ROLLOUTS = 20

INT8 = Scheme.parse("int8").recipe


def chosen(content: bytes, policy: Policy, observations: Array) -> tuple[bytes, dict[str, Any]]:
    """Return the int8 file of the recipe that earns most on selection seeds, and what each earns.

    Of equal ones it is the first: they are in the order of what they leave in float.
    """
    discrete = policy.sidecar.num_actions is not None
    ready = integer.prepared(content, observations, discrete=discrete)
    plain = integer.centred(content) if discrete else content
    wanted = heads(ready, policy, observations[:SEEN])
    layers = list(integer.Graph(ready).layers())

    def error(name: str) -> float:
        made = integer.quantized(ready, observations, only(name))
        return float(np.square(heads(made, policy, observations[:SEEN]) - wanted).mean())

    worst = max(layers[:-1] or layers, key=error)
    tensor = Scheme.parse("int8_tensor").recipe
    recipes: Mapping[str, tuple[bytes, Recipe]] = {
        "int8": (ready, INT8),
        "not equalised": (plain, INT8),
        "int8_tensor": (plain, tensor),
        "head in float": (ready, without(INT8, "head")),
        f"{worst} in float": (ready, without(INT8, worst)),
        f"{worst} and head in float": (ready, without(without(INT8, worst), "head")),
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


def only(layer: str) -> Recipe:
    """Return the recipe that has one layer in int8."""
    alone = Recipe(observation=INT8.observation)
    if layer == "head":
        return replace(alone, head=INT8.head)
    return replace(alone, by_layer={layer: INT8.default})


def heads(content: bytes, policy: Policy, observations: Array) -> Array:
    """Return the heads of a flatbuffer of a policy's, [n, outputs]."""
    made = Policy(content, policy.sidecar)
    return np.array([made.head(observation) for observation in observations])
