"""Greedy choice of one discrete action, or of several at once, by the values of a head."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The number of discrete actions; for a MultiDiscrete space one per action.
Choices = int | Sequence[int]


def split(heads: NDArray[Any], choices: Choices) -> list[NDArray[Any]]:
    """Split values into those of each choice, [..., n]."""
    if isinstance(choices, int):
        return [heads]
    return [heads[..., end - n : end] for n, end in zip(choices, accumulate(choices), strict=True)]


def centred(heads: NDArray[Any], choices: Choices) -> NDArray[Any]:
    """Subtract from the values [..., n] of each choice their mean."""
    parts = [part - part.mean(axis=-1, keepdims=True) for part in split(heads, choices)]
    return np.concatenate(parts, axis=-1)


def best(heads: NDArray[Any], choices: Choices) -> NDArray[Any]:
    """Return the best actions [...] or [..., choices] of heads [..., n]; the first of equals."""
    indices: list[NDArray[Any]] = [values.argmax(axis=-1) for values in split(heads, choices)]
    return indices[0] if isinstance(choices, int) else np.stack(indices, axis=-1)


def agreement(heads: NDArray[Any], others: NDArray[Any], choices: Choices) -> float:
    """Return the share of rows of two heads [n, outputs] whose best actions are the same."""
    same = best(heads, choices) == best(others, choices)
    return float(same.reshape(len(same), -1).all(axis=1).mean())
