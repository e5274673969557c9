"""Choose the int8 recipe of a policy by return: `int8_auto`."""

import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from quarl_tf.export import calibration, integer
from quarl_tf.export.graph import Graph
from quarl_tf.export.preparation import centred, prepared
from quarl_tf.quantization.grid import Array
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import LayerFormat, Recipe, Scheme

#: Most observations that layers are compared on.
SEEN = 1000

#: Rollouts that each recipe plays.
_ROLLOUTS = 20

INT8 = Scheme.parse("int8").recipe


def chosen(content: bytes, policy: Policy, observations: Array) -> tuple[bytes, dict[str, Any]]:
    """Return the int8 file with the highest return on selection seeds, and the returns of all.

    Recipes that leave less in float come first and win ties.
    """
    choices = policy.sidecar.num_actions
    ready, plain = prepared(content, observations, choices), centred(content, choices)
    whole = prepared(content, observations, choices, float_head=True)
    wanted = heads(ready, policy, observations[:SEEN])
    layers = list(Graph(ready).layers())

    def error(name: str) -> float:
        made = integer.quantized(ready, observations, only(name))
        return float(np.square(heads(made, policy, observations[:SEEN]) - wanted).mean())

    worst = max([one for one in layers if one != "head"] or layers, key=error)
    recipes = {
        "int8": (ready, INT8),
        "not equalised": (plain, INT8),
        "int8_tensor": (plain, Scheme.parse("int8_tensor").recipe),
        "head in float": (whole, without(INT8, "head")),
        f"{worst} in float": (ready, without(INT8, worst)),
        f"{worst} and head in float": (whole, without(without(INT8, worst), "head")),
    }
    files, earned = {}, {}
    for name, (given, recipe) in recipes.items():
        files[name] = integer.quantized(given, observations, recipe)
        made = Policy(files[name], policy.sidecar)
        earned[name] = statistics.fmean(calibration.selection_returns(made, _ROLLOUTS))
    best = max(earned, key=lambda name: earned[name])
    return files[best], {"recipe": best, "selection_returns": earned}


def without(recipe: Recipe, layer: str) -> Recipe:
    """Return a recipe that leaves a layer in float."""
    return replace(recipe, by_layer={**recipe.by_layer, layer: LayerFormat()})


def only(layer: str) -> Recipe:
    """Return the recipe with one layer alone in int8."""
    return Recipe(observation=INT8.observation, by_layer={layer: INT8.of(layer)})


def heads(content: bytes, policy: Policy, observations: Array) -> Array:
    """Return the heads of another flatbuffer of a policy, [n, outputs]."""
    made = Policy(content, policy.sidecar)
    return np.array([made.head(observation) for observation in observations])
