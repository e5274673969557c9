"""Errors that a user can fix; the command line shows each as one line, without a traceback."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class QuarlError(ValueError):
    """A failure, in one line: what is wrong, what to do, what was received."""

    exit_code = 1


class UsageError(QuarlError):
    """An invalid request: an unknown name, a value out of range."""

    exit_code = 2


class GateError(QuarlError):
    """A failed quality gate: a scheme loses more reward than the user allows."""

    exit_code = 3


class BusyError(QuarlError):
    """Another process works in the same folder."""

    exit_code = 4


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> UsageError:
    """Return the error for an unknown name of a `kind`, with the closest known ones.

    `hint` says what else to do.
    """
    choices = sorted(known)
    by_lower = {choice.lower(): choice for choice in choices}
    # If none is close, all names are shown if they fit on a line, else the closest.
    cutoff = 0.5 if len(choices) <= 20 else 0.0
    matches = [by_lower[m] for m in get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)]
    advice = f"choose from {', '.join(choices)}."
    if matches:
        advice = f"did you mean {' or '.join(matches)}?"
    advice = f"{advice} {hint}".strip()
    return UsageError(f"Unknown {kind}: {advice} Received: {kind}={name!r}")


def require_known(kind: str, name: str, known: Collection[str], hint: str = "") -> None:
    """Raise the error of `unknown` for a name that is not known."""
    if name not in known:
        raise unknown(kind, name, known, hint)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, or the name of its type without one."""
    return " ".join(str(error).split()) or type(error).__name__
