"""Progress bars and spinners on standard error, quiet when it is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

#: Called with the amount done, the total, and a short note.
Update = Callable[..., None]


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """Show that something is going on while the block runs, where no amount of it can be told."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(title):
        yield


@contextmanager
def progress_bar(title: str) -> Iterator[Update]:
    """Show a bar while the block runs; the block calls what it is given to move it."""
    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, note="")

        def update(done: int, total: int, note: str = "") -> None:
            progress.update(task, completed=done, total=total, note=note)

        yield update
