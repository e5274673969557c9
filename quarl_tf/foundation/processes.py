"""Work in processes of their own."""

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from itertools import cycle
from multiprocessing import current_process, get_context, parent_process, resource_tracker
from typing import Any

from quarl_tf.foundation.errors import QuarlError


def may_start() -> bool:
    """Tell whether this process may start others: a worker of multiprocessing.Pool may not."""
    return not current_process().daemon


def outcomes(
    work: Callable[..., Iterable[Any]], shares: Sequence[Sequence[Any]], crash: str
) -> Generator[Any, None, None]:
    """Do the work in a process for each tuple of arguments; yield their outcomes in turn.

    They end where the next process has none. An exception of the work is raised here, and a
    QuarlError with the message `crash` where a process is killed.
    """
    if not may_start():
        raise QuarlError(
            "A worker of multiprocessing.Pool may not start processes; call this in a process of "
            f"concurrent.futures or in the first one. Received: process={current_process().name!r}"
        )
    # Forked processes would have locks of threads that they lack.
    context, processes, receivers = get_context("spawn"), list[Any](), list[Any]()
    resource_tracker.ensure_running()  # Its start unblocks SIGINT.
    try:
        # While they start, they have Python's handler, which prints a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for arguments in shares:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send, args=(sender, work, arguments))
                process.start()
                processes.append(process)
                receivers.append(receiver)
                sender.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for receiver in cycle(receivers):
            try:
                message = receiver.recv()
            except (EOFError, OSError) as error:
                raise QuarlError(crash) from error
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            yield message[0]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _send(sender: Any, work: Callable[..., Iterable[Any]], arguments: Sequence[Any]) -> None:
    """Send the outcomes of work, then None, or the exception that ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent, interrupted, kills this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(BrokenPipeError):
        try:
            for outcome in work(*arguments):
                sender.send((outcome,))
            sender.send(None)
        except Exception as error:
            sender.send(_portable(error))


def _portable(error: Exception) -> Exception:
    """Return an exception that can be sent; others than of this package have their traceback."""
    if not isinstance(error, QuarlError):
        error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(traceback.format_exc())
    return error


def _end_with_parent() -> None:
    """End this process with its parent, which may be killed."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
