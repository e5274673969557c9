"""Errors a user can cause or fix; the command line shows each as one line, without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class QuarlError(ValueError):
    """A failure with one clear line: what was wrong, what was received, what to do next."""

    exit_code = 1


class UsageError(QuarlError):
    """A request that cannot be meant as it stands: an unknown name, a value out of range."""

    exit_code = 2


class GateError(QuarlError):
    """A quality gate that did not hold: a scheme loses more reward than the user allows."""

    exit_code = 3


#: Names that a line still holds.
_FEW = 20


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> UsageError:
    """Build the error for a name that is not among the known ones, naming the closest.

    `kind` is what the name stands for, and `hint` says what to do if none of these is meant.
    """
    choices = sorted(known)
    by_lower = {choice.lower(): choice for choice in choices}
    # Of a few names all are shown where none is close; of many the closest, however far.
    cutoff = 0.5 if len(choices) <= _FEW else 0.0
    close = [by_lower[c] for c in get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)]
    advice = (
        f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(choices)}."
    )
    advice = f"{advice} {hint}".strip()
    return UsageError(f"Unknown {kind}: {advice} Received: {kind}={name!r}")


def one_line(error: Exception) -> str:
    """Return what an error says on one line; the name of its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
