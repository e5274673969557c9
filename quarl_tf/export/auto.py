"""Choose the int8 recipe of a policy by return: `int8_auto`."""

import math
from typing import Any

import numpy as np

from quarl_tf.export import calibration, integer
from quarl_tf.export.graph import Graph
from quarl_tf.export.preparation import centred, prepared
from quarl_tf.quantization.grid import Array
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Recipe, Scheme, actions

_SEEN = 1000  #: About how many observations layers are compared on at most.
_ROLLOUTS = 20  #: Of each recipe.

INT8 = Scheme.parse("int8").recipe


def chosen(content: bytes, policy: Policy, observations: Array) -> tuple[bytes, dict[str, Any]]:
    """Return the int8 file by the return on selection seeds, and the mean returns of all.

    Recipes that leave less in float come first. A later one has to earn more by twice the standard
    error of the difference, in which equal pairs of returns count once, and to be smaller than the
    float flatbuffer.
    """
    choices = policy.sidecar.num_actions
    int8_content = prepared(content, observations, choices)
    centred_content = centred(content, choices)
    layer_errors = errors(int8_content, policy, observations)
    worst = max(layer_errors, key=lambda layer: (layer != "head", layer_errors[layer]))
    recipes = {
        "int8": (int8_content, INT8),
        "not equalised": (centred_content, INT8),
        "int8_tensor": (centred_content, Scheme.parse("int8_tensor").recipe),
        "head in float": (int8_content, INT8.without("head")),
        f"{worst} in float": (int8_content, INT8.without(worst)),
        f"{worst} and head in float": (int8_content, INT8.without(worst).without("head")),
    }
    returns: dict[str, Array] = {}
    best, file = "", b""
    for name, (float_content, recipe) in recipes.items():
        copy = integer.quantized(float_content, observations, recipe)
        played = calibration.selection_returns(Policy(copy, policy.sidecar), _ROLLOUTS)
        returns[name] = np.array(played)
        pairs = np.stack([returns[name], returns[best or name]], axis=1)
        gains, different = pairs[:, 0] - pairs[:, 1], len(np.unique(pairs, axis=0))
        clear = different > 1 and gains.mean() > 2 * gains.std(ddof=1) / math.sqrt(different)
        if not best or (clear and len(copy) < len(content)):
            best, file = name, copy
    means = {name: float(values.mean()) for name, values in returns.items()}
    return file, {"recipe": best, "selection_returns": means}


def errors(content: bytes, policy: Policy, observations: Array) -> dict[str, Any]:
    """Return the mean squared error of the heads by layer, each alone in int8."""
    choices, sample = policy.sidecar.num_actions, seen(observations)
    reference_heads = heads(content, policy, sample)

    def error(layer: str) -> Any:
        recipe = Recipe(observation=INT8.observation, by_layer={layer: INT8.of(layer)})
        file = integer.quantized(content, observations, recipe)
        differences = heads(file, policy, sample) - reference_heads
        if choices is not None:  # What all actions share changes none.
            differences = actions.centred(differences, choices)
        return np.square(differences).mean()

    return {layer: error(layer) for layer in Graph(content).layers()}


def seen(observations: Array) -> Array:
    """Return evenly spread observations to compare layers on."""
    return observations[:: math.ceil(len(observations) / _SEEN)]


def heads(content: bytes, policy: Policy, observations: Array) -> Array:
    """Return the heads of another flatbuffer of a policy, [n, outputs]."""
    policy = Policy(content, policy.sidecar)
    return np.array([policy.head(observation) for observation in observations])
