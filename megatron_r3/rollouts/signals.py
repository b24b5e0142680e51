"""Signals that end a collection in order: whole groups are stored first.

SIGINT, SIGTERM and SIGHUP raise `Interrupted` wherever the command is, as a Ctrl-C does. While
samples are on their way (`Stop`), they set an event instead, and whoever works looks at it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# `timeout` signals a process and then its group: the same signal twice within a moment
_ONE_SIGNAL_S = 0.5
_CANCEL_AGAIN_S = 0.2

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A signal came; groups that were whole are stored. No `except Exception` holds it up.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


@contextmanager
def raising() -> Iterator[None]:
    """Signals raise `Interrupted`, inside."""

    def stop(number: int, frame: FrameType | None) -> None:
        _end_at_the_next()
        raise Interrupted(number, "interrupted: the same command takes what is missing")

    before = {number: signal.signal(number, stop) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Whether a signal came, for the tasks of one event loop; a second signal ends the process.

    Attributes:
        number: of the signal; None before it.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = asyncio.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        """Take the signals."""
        loop = asyncio.get_running_loop()

        # not the loop's own handlers: those run when a shard is written, and a second signal with
        # them
        def stop(number: int, frame: FrameType | None) -> None:
            self.number = number
            _end_at_the_next()
            loop.call_soon_threadsafe(self._came.set)

        for one in _NUMBERS:
            self._before[one] = signal.signal(one, stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back; after a first one the second keeps its meaning."""
        if self.number is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    async def first(self, work: Awaitable[T]) -> T:
        """What the work gives, unless a signal comes before it ends.

        Raises:
            Interrupted: the work was ended.
        """
        task, came = asyncio.ensure_future(work), asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait({task, came}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks({came, task} if not task.done() else {came})
        if self.number is not None:
            raise Interrupted(self.number, "interrupted: the same command takes what is missing")
        return task.result()


async def end_tasks(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks until each has ended.

    One cancel may get lost: Python 3.11's `asyncio.wait_for` swallows it where what it waits for
    has just come, and its caller goes on.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
    for task in tasks:  # asyncio complains of exceptions that nobody looked at
        _ = task.cancelled() or task.exception()


def _end_at_the_next() -> None:
    """From now on a signal ends the process at once, as if it had no handler."""
    first = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - first > _ONE_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _NUMBERS:
        signal.signal(number, end)
