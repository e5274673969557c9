"""Progress bars and spinners on standard error; a line per minute if it is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Column

#: Called with the finished amount, the total and a short note.
Update = Callable[..., None]

#: Seconds between two lines where a bar cannot be drawn.
_SECONDS_BETWEEN = 60.0


def spinner(title: str) -> Status:
    """Show a spinner in a terminal while the block runs, whose progress is unknown."""
    return Console(stderr=True).status(title)


@contextmanager
def progress_bar(title: str) -> Iterator[Update]:
    """Show a bar while the block runs; yield the function that moves it.

    Without a terminal, print the progress every minute.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, title)
        return
    # A narrow terminal truncates words, never numbers.
    text_column: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis", "ratio": 1}
    columns = (
        TextColumn("[bold]{task.description}", table_column=Column(**text_column)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=15)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[note]}", table_column=Column(**text_column)),
    )
    progress = Progress(*columns, console=console, expand=True)
    task = progress.add_task(title, total=None, note="")

    def update(done: int, total: int, note: str = "") -> None:
        progress.start()  # Only now: a finished block shows no bar.
        progress.update(task, completed=done, total=total, note=note)

    try:
        yield update
    finally:
        progress.stop()


def _lines(console: Console, title: str) -> Update:
    last_time = time.monotonic()

    def update(done: int, total: int, note: str = "") -> None:
        nonlocal last_time
        if time.monotonic() - last_time >= _SECONDS_BETWEEN:
            last_time = time.monotonic()
            console.print(f"{title}: {done:,} of {total:,}  {note}", soft_wrap=True, markup=False)

    return update
