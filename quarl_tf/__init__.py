"""Shrink reinforcement-learning policies and prove what that costs."""

from typing import TYPE_CHECKING, Any

# The rooms of these names first: one that loads later would take the place of the function.
import quarl_tf.export
import quarl_tf.report  # noqa: F401
from quarl_tf.pipeline import evaluate, export, report, train
from quarl_tf.spec import Chance, Recipe, Run

if TYPE_CHECKING:
    from quarl_tf.runtime.policy import Policy

__version__ = "0.2.0"

__all__ = ["Chance", "Policy", "Recipe", "Run", "evaluate", "export", "report", "train"]


def __dir__() -> list[str]:
    return [*globals(), "Policy"]  # It is loaded late.


def __getattr__(name: str) -> Any:
    """Load LiteRT with `Policy`, where that is asked for."""
    if name != "Policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quarl_tf.runtime.policy import Policy

    return Policy
