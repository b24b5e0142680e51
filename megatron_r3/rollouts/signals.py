"""Signals that end a collection in order: whole groups are stored first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["cancelled_by_signals"]


@contextmanager
def cancelled_by_signals(tasks: Sequence[asyncio.Future[None]]) -> Iterator[list[int]]:
    """Cancel the tasks when SIGINT, SIGTERM or SIGHUP comes; yields a list that then holds it.

    A second signal ends the process at once.
    """
    loop = asyncio.get_running_loop()
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int) -> None:
        came.append(number)
        for one in numbers:
            loop.remove_signal_handler(one)
        for task in tasks:
            task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield came
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
