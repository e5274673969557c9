"""Work in processes of its own."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from itertools import cycle
from multiprocessing import get_context, parent_process, resource_tracker
from typing import Any

from quarl_tf.foundation.errors import QuarlError


def in_turn(
    work: Callable[..., Iterable[Any]], shares: Sequence[Sequence[Any]], crash: str
) -> Generator[Any, None, None]:
    """Work in a process for each share of arguments; yield their outcomes in turn.

    The outcomes end where the next process has none. An exception of the work is raised here, and a
    QuarlError with the message `crash` where a process is killed.
    """
    # Forked processes would have locks of threads that they lack.
    context, processes, receivers = get_context("spawn"), list[Any](), list[Any]()
    resource_tracker.ensure_running()  # Its start unblocks SIGINT.
    try:
        # While they start, they have Python's handler, which prints a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for arguments in shares:
                receiver, sender = context.Pipe(duplex=False)
                words = (sender, work, arguments)
                processes.append(context.Process(target=_send, args=words, daemon=True))
                processes[-1].start()
                receivers.append(receiver)
                sender.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for receiver in cycle(receivers):
            message = receiver.recv()
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            yield message[0]
    except EOFError as error:
        raise QuarlError(crash) from error
    finally:
        for process in processes:
            process.kill()


def _send(sender: Any, work: Callable[..., Iterable[Any]], arguments: Sequence[Any]) -> None:
    """Send the outcomes of work, then None, or the exception that ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent, interrupted, kills this process.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(BrokenPipeError):
        try:
            for outcome in work(*arguments):
                sender.send((outcome,))
            sender.send(None)
        except Exception as error:
            sender.send(error)


def _end_with_parent() -> None:
    """End this process with its parent, which may be killed."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
