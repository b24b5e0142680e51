"""The reward: a function of the user's, what it gets to see, and the thread that it runs in."""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_r3.untrusted import one_line
from megatron_r3.values import wrong_reward


class RewardError(ValueError):
    """A reward function that cannot be used; the message names it and the prompt."""


@dataclass(frozen=True)
class RewardSample:
    """What a reward function gets.

    Attributes:
        fields: the prompt's line, with all that it holds: an answer, a task's name.
        prompt_tokens, response_tokens: token ids.
        response_text: where the engine has a tokenizer, else empty.
        finish_reason: the engine's: "stop", "length".
        group, sample: which sample of which prompt.
    """

    fields: Mapping[str, Any]
    prompt_tokens: list[int]
    response_tokens: list[int]
    response_text: str
    finish_reason: str
    group: int
    sample: int


RewardFunction = Callable[[RewardSample], float]


def load_reward(spec: str) -> RewardFunction:
    """The function that `module:function` names; modules of the working directory are found too.

    Raises:
        RewardError: there is none.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise RewardError(f"--reward {spec}: give it as module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with python -m, whatever started this
    try:
        function = getattr(importlib.import_module(module_name), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may fail in any way, sys.exit included
        raise RewardError(f"--reward {spec}: {_said(error)}") from error
    if not callable(function):
        raise RewardError(f"--reward {spec}: not a function")
    return function  # type: ignore[no-any-return]


def score(function: RewardFunction, sample: RewardSample, where: str) -> float:
    """What the function says.

    Raises:
        RewardError: naming `where`: it raised, or returned what is no finite number.
    """
    name = one_line(f"{function.__module__}:{getattr(function, '__name__', function)}", 200)
    try:
        value = function(sample)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, too: it would end this process without a word
        raise RewardError(f"{where}: the reward {name} raised {_said(error)}") from error
    return checked_reward(value, f"{where}: the reward {name} returned")


def checked_reward(value: Any, what: str) -> float:
    """A number that the store can hold.

    Raises:
        RewardError: beginning with `what`.
    """
    try:
        wrong = wrong_reward(value)
    except Exception as error:  # of a class of its own: a tensor of two numbers
        wrong = f"a reward is a number ({_said(error)})"
    if wrong is not None:
        raise RewardError(f"{what} {one_line(repr(value), 200)}; {wrong}")
    return float(value)


def _said(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 500)


class RewardThread:
    """Calls functions one after the other in one thread: a reward need not be safe in several.

    The thread is a daemon: a reward that never returns does not keep the process alive, as one in a
    `ThreadPoolExecutor` does.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reward")

    async def run(self, function: Callable[..., float], *arguments: Any) -> float:
        """What the function returns; what it raises."""
        if self._thread.ident is None:
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        self._calls.put((loop, future, function, arguments))
        return await future

    def close(self) -> None:
        """End the thread after its call; those that wait are dropped."""
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        self._calls.put(None)

    def _run(self) -> None:
        for loop, future, function, arguments in iter(self._calls.get, None):
            value: float | None = None
            raised: BaseException | None = None
            try:
                value = function(*arguments)
            except BaseException as error:
                raised = error
            try:
                loop.call_soon_threadsafe(_settle, future, value, raised)
            except RuntimeError:  # the loop is closed: nobody waits
                return


def _settle(future: asyncio.Future[Any], value: Any, raised: BaseException | None) -> None:
    if future.done():  # its task was cancelled
        return
    if raised is None:
        future.set_result(value)
    else:
        future.set_exception(raised)
