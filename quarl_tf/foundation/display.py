"""Progress bars and spinners on standard error; nothing if it is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.status import Status

#: Called with the finished amount, the total and a short note.
Update = Callable[..., None]


def spinner(title: str) -> Status:
    """Show a spinner in a terminal while the block runs, whose progress is unknown."""
    return Console(stderr=True).status(title)


@contextmanager
def progress_bar(title: str) -> Iterator[Update]:
    """Show a bar in a terminal while the block runs; yield the function that moves it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = ("[bold]{task.description}", BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeRemainingColumn(), "{task.fields[note]}", console=console)
    task = progress.add_task(title, total=None, note="")

    def update(done: int, total: int, note: str = "") -> None:
        progress.update(task, completed=done, total=total, note=note)
        progress.start()  # Only now: a finished block shows no bar.

    try:
        yield update
    finally:
        progress.stop()
