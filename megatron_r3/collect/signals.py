"""Ends a collection in order: signals, the tasks of its event loop, and its threads.

SIGINT, SIGTERM and SIGHUP raise `Interrupted` wherever the command is, as a Ctrl-C does. While
samples are on their way, an exception in the middle of a task could lose a group that is whole. So
inside a `Stop` a signal only sets an event, and the code that waits for samples looks at the event.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, TypeVar

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The command `timeout` signals a process and then its process group, so the same signal comes twice
# within a moment. What comes within this time of the first signal is not a second wish to stop.
_ONE_SIGNAL_S = 0.5
_CANCEL_AGAIN_S = 0.2

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A signal came, and the groups that were whole are stored.

    It is a KeyboardInterrupt because an `except Exception` must not hold it up.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def raising() -> Iterator[None]:
    """Have signals raise `Interrupted` inside the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        _end_at_the_next_signal()
        raise Interrupted(number, "interrupted: run the same command again for the rest")

    before = {number: signal.signal(number, stop) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Notes the first signal for the tasks of one event loop. A second signal ends the process.

    Attributes:
        number: of the first signal; None before it came.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = asyncio.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        """Take over the signals."""
        loop = asyncio.get_running_loop()

        # `loop.add_signal_handler` is of no use here: its handlers run between two callbacks of the
        # loop. While a shard is written, which is one long callback, both the first and the second
        # signal would wait. `signal.signal` runs between two bytecodes.
        def stop(number: int, frame: FrameType | None) -> None:
            self.number = number
            _end_at_the_next_signal()
            loop.call_soon_threadsafe(self._came.set)

        for number in _NUMBERS:
            self._before[number] = signal.signal(number, stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back. After a signal they stay taken: the next one ends the process."""
        if self.number is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    async def first(self, work: Awaitable[T]) -> T:
        """The result of the work, unless a signal comes before the work ends.

        Raises:
            Interrupted: a signal came, and the work was cancelled.
        """
        task, came = asyncio.ensure_future(work), asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait({task, came}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks({came, task} if not task.done() else {came})
        if self.number is not None:
            raise Interrupted(self.number, "interrupted: run the same command again for the rest")
        return task.result()


async def end_tasks(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks until each of them has ended.

    One cancel is not always enough. In Python 3.11 `asyncio.wait_for` swallows a cancel that comes
    in the same moment as its result: it returns the result, and the task goes on.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
    for task in tasks:  # asyncio prints a complaint about exceptions that nobody has looked at
        _ = task.cancelled() or task.exception()


def _end_at_the_next_signal() -> None:
    """From now on, let a signal end the process at once, as if it had no handler."""
    first = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - first > _ONE_SIGNAL_S:
            # A plain exit would hide from the shell that a signal ended this process. So the
            # default action is put back and the signal is sent once more.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _NUMBERS:
        signal.signal(number, end)


class BackgroundThread:
    """Calls functions one after the other in one thread, so they need not be safe in several.

    The thread is a daemon: a function that never returns does not keep the process alive, as it
    would in a `ThreadPoolExecutor`, whose threads Python joins at exit.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what the function returns, or raise what it raises."""
        if self._thread.ident is None:
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put((loop, future, function, arguments))
        return await future

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread after the call that it is at; drop the calls that wait.

        Args:
            wait_s: how many seconds to wait for the call that the thread is at.
        """
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        self._calls.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        for loop, future, function, arguments in iter(self._calls.get, None):
            value: Any = None
            raised: BaseException | None = None
            try:
                value = function(*arguments)
            except BaseException as error:
                raised = error
            try:
                loop.call_soon_threadsafe(_settle, future, value, raised)
            except RuntimeError:  # the loop is closed: nobody waits for the result
                return
            # Else the last result would be held until the next call returns.
            del future, function, arguments, value, raised


def _settle(future: asyncio.Future[Any], value: Any, raised: BaseException | None) -> None:
    if future.done():  # its task was cancelled
        return
    if raised is None:
        future.set_result(value)
    else:
        future.set_exception(raised)
