"""Progress bars and spinners on standard error; a line per minute if it is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Column

Update = Callable[..., None]  #: Called with the finished amount, the total and a short note.
_SECONDS_BETWEEN = 60.0  #: Between two lines where a bar cannot be drawn.


def spinner(title: str) -> Status:
    """Show a spinner in a terminal while the block runs, whose progress is unknown."""
    return Console(stderr=True).status(title)


@contextmanager
def progress_bar(title: str) -> Iterator[Update]:
    """Show a bar, or a line a minute without a terminal; yield the function that moves it."""
    console = Console(stderr=True)
    printed_at = time.monotonic()
    # A narrow terminal truncates words, never numbers.
    words = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("[bold]{task.description}", table_column=words),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=15)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[note]}", table_column=words),
    )
    progress = Progress(*columns, console=console, expand=True)
    task = progress.add_task(title, total=None, note="")

    def update(done: int, total: int, note: str = "") -> None:
        nonlocal printed_at
        if console.is_terminal:
            progress.start()  # Only now: a finished block shows no bar.
            progress.update(task, completed=done, total=total, note=note)
        elif time.monotonic() - printed_at >= _SECONDS_BETWEEN:
            printed_at = time.monotonic()
            console.print(f"{title}: {done:,} of {total:,}  {note}", soft_wrap=True, markup=False)

    try:
        yield update
    finally:
        if console.is_terminal:  # Elsewhere it would print an empty line.
            progress.stop()
