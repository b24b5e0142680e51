"""The reward: a function of the user's, and what it gets to see."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardSample",
    "checked_reward",
    "load_reward",
    "score",
]


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
    except Exception as error:  # a module may fail in any way
        raise RewardError(f"--reward {spec}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise RewardError(f"--reward {spec}: not a function")
    return function  # type: ignore[no-any-return]


def score(function: RewardFunction, sample: RewardSample, where: str) -> float:
    """What the function says.

    Raises:
        RewardError: naming `where`: it raised, or returned what is no finite number.
    """
    name = f"{function.__module__}:{getattr(function, '__name__', function)}"
    try:
        value = function(sample)
    except Exception as error:
        raise RewardError(
            f"{where}: the reward {name} raised {type(error).__name__}: {error}"
        ) from error
    return checked_reward(value, f"{where}: the reward {name} returned")


def checked_reward(value: Any, what: str) -> float:
    """A number that the store can hold.

    Raises:
        RewardError: beginning with `what`.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{what} {value!r}; a reward is a number") from error
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise RewardError(f"{what} {value!r}; a reward is finite, in float32")
    return number
