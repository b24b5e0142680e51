"""Ends a collection without loss after a signal; ends tasks of the event loop, and threads.

Inside `raising`, SIGINT, SIGTERM and SIGHUP raise `Interrupted` at whatever line runs. While
samples are on their way, an exception in the middle of a task could lose a group that is whole. So
inside `noting` a signal only sets an event, and `Stop.first` waits for this event and for samples.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The command `timeout` signals a process and then its process group, so the same signal comes twice
# within a moment. A signal within this time of the first one is not a second request to stop.
_ONE_SIGNAL_S = 0.5
_CANCEL_AGAIN_S = 0.2

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A signal came. If `collect` was sampling, it has stored the groups that are whole.

    The base class is KeyboardInterrupt, so that no `except Exception` catches it.

    Attributes:
        number: the signal's number.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def raising() -> Iterator[None]:
    """Have the first signal inside the block raise `Interrupted`; the second ends the process."""

    def stop(number: int, frame: FrameType | None) -> None:
        _end_at_the_next_signal()
        raise Interrupted(number, "interrupted: run the same command again for the rest")

    before = take_signals(stop)
    try:
        yield
    finally:
        give_back(before)


@contextmanager
def noting() -> Iterator[Stop]:
    """Have the first signal inside the block set `Stop.came`, and the second end the process."""
    stop, loop = Stop(), asyncio.get_running_loop()

    # Handlers of `loop.add_signal_handler` run between two callbacks of the loop. The write of a
    # shard is one long callback, so even a second signal would wait for its end. Handlers of
    # `signal.signal` run between two bytecodes.
    def note(number: int, frame: FrameType | None) -> None:
        stop.number = number
        _end_at_the_next_signal()
        loop.call_soon_threadsafe(stop.came.set)

    before = take_signals(note)
    try:
        yield stop
    finally:
        if stop.number is None:  # after a signal the handlers stay: the next one ends the process
            give_back(before)


class Stop:
    """The first signal that came, for the tasks of one event loop.

    Attributes:
        number: the signal's number; None before it came.
        came: an event that is set once the signal has come.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.came = asyncio.Event()

    async def first(self, work: Awaitable[T]) -> T:
        """The result of the work, unless a signal comes before the work ends.

        Raises:
            Interrupted: a signal came, and the work was cancelled if it had not ended.
        """
        task, came = asyncio.ensure_future(work), asyncio.ensure_future(self.came.wait())
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
    for task in tasks:  # asyncio prints an error about each exception that was never retrieved
        _ = task.cancelled() or task.exception()


def _end_at_the_next_signal() -> None:
    """Have the next signal end the process at once, as a signal without a handler does.

    Signals of the first `_ONE_SIGNAL_S` seconds are ignored: `timeout` sends each signal twice.
    """
    first = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - first > _ONE_SIGNAL_S:
            # A plain exit would hide from the shell that a signal ended this process. So the
            # default action is put back and the signal is sent once more.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    take_signals(end)


def take_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[int] = _NUMBERS
) -> dict[int, Any]:
    """Set the handler of those signals that are not ignored; returns their former handlers.

    A signal that is ignored stays ignored. `nohup` starts a command with SIGHUP ignored, so that
    the command outlives its terminal.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def give_back(before: dict[int, Any]) -> None:
    """Set the handlers again that `take_signals` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


class BackgroundThread:
    """Calls functions one after the other in one thread, so they need not be thread-safe.

    The thread is a daemon, so a function that never returns does not keep the process alive. In a
    `ThreadPoolExecutor` it would: Python joins those threads at exit.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what the function returns, or raise what it raises."""
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, function, arguments))
        return await asyncio.wrap_future(future)

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread after its current call; drop the calls that wait.

        Args:
            wait_s: how many seconds to wait for the current call.
        """
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        self._calls.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        for future, function, arguments in iter(self._calls.get, None):
            if future.set_running_or_notify_cancel():  # False if the caller of `run` was cancelled
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            # Else this frame would keep the last result in memory until the next call comes.
            del future, function, arguments
