"""Shrink reinforcement-learning policies and prove what that costs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["Policy", "Recipe", "Run", "evaluate", "export", "report", "train"]

_HOMES = {"Policy": "runtime.policy", "Recipe": "spec", "Run": "spec"}


def __getattr__(name: str) -> Any:
    """Load a public name where it is first asked for: a board has no use for most."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"quarl_tf.{_HOMES.get(name, 'pipeline')}")
    return getattr(home, name)
