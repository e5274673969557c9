"""Kinds of values in a user's files and options, and their checks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quarl_tf.foundation.errors import UsageError, require_known


class Kind(NamedTuple):
    """A kind of value: its description and its test, for which True is not 1."""

    text: str
    fits: Callable[[Any], bool]

    def require(self, name: str, value: Any) -> None:
        """Raise a UsageError for a value of another kind."""
        if not self.fits(value):
            plain = ", of Python itself" if hasattr(value, "item") else ""  # Not of NumPy.
            raise UsageError(f"{name} must be {self.text}{plain}. Received: {name}={value!r}")


def number(text: str, fits: Callable[[float], bool]) -> Kind:
    """Return the kind of finite floats that pass a test."""
    return Kind(text, lambda value: type(value) is float and value < math.inf and fits(value))


def one_of(choices: Sequence[Any]) -> Kind:
    """Return the kind of the given words."""
    return Kind(" or ".join(choices), lambda value: type(value) is str and value in choices)


def listed(text: str, types: tuple[type, ...], least: int = 1) -> Kind:
    """Return the kind of lists of at least `least` values of some types; `text` is plural."""
    minimum = "one or more " * least
    return Kind(
        f"a list of {minimum}{text}",
        lambda v: type(v) is list and len(v) >= least and all(type(item) in types for item in v),
    )


WHOLE = Kind("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)
COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
FLAG = Kind("true or false", lambda value: type(value) is bool)
NAME = Kind("a name", lambda value: type(value) is str)
PROBABILITY = Kind("a number above 0, at most 1", lambda v: type(v) in (int, float) and 0 < v <= 1)
TEXT = Kind("text", lambda value: type(value) is str)
MAPPING = Kind("a mapping", lambda v: isinstance(v, Mapping) and all(map(NAME.fits, v)))


def require_all(values: Mapping[str, Any], kinds: Mapping[str, Kind], what: str) -> None:
    """Raise a UsageError for a key that is unknown in `what`, or a value of another kind."""
    for name, value in values.items():
        require_known(what, name, kinds)
        kinds[name].require(name, value)
