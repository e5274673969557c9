"""What the values of a user's file or option must be."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quarl_tf.foundation.errors import UsageError, unknown


class Kind(NamedTuple):
    """What a value must be: in words, and what tells it. To Python, but not here, True is 1."""

    text: str
    fits: Callable[[Any], bool]

    def require(self, name: str, value: Any) -> None:
        """Refuse a value of another kind."""
        if not self.fits(value):
            raise UsageError(f"{name} must be {self.text}. Received: {name}={value!r}")


def number(text: str, fits: Callable[[float], bool]) -> Kind:
    """Return the kind of finite floats of which something holds."""
    return Kind(text, lambda value: type(value) is float and value < math.inf and fits(value))


def one_of(choices: Sequence[Any]) -> Kind:
    """Return the kind of some words."""
    return Kind(" or ".join(choices), lambda value: type(value) is str and value in choices)


def listed(text: str, types: tuple[type, ...], least: int = 1) -> Kind:
    """Return the kind of lists of so many values or more of some types, `text` in the plural."""
    more = "one or more " * least
    return Kind(
        f"a list of {more}{text}",
        lambda v: type(v) is list and len(v) >= least and all(type(one) in types for one in v),
    )


INTEGER = Kind("a whole number", lambda value: type(value) is int)
WHOLE = Kind("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)
COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
FLAG = Kind("true or false", lambda value: type(value) is bool)
NAME = Kind("a name", lambda value: type(value) is str)
TEXT = Kind("text", lambda value: type(value) is str)
MAPPING = Kind("a mapping", lambda value: type(value) is dict and all(map(NAME.fits, value)))


def require_all(values: Mapping[str, Any], kinds: Mapping[str, Kind], what: str) -> None:
    """Refuse a key that is not known in `what`, and a value of another kind."""
    for name, value in values.items():
        if name not in kinds:
            raise unknown(what, name, kinds)
        kinds[name].require(name, value)
