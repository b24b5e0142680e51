"""The reward: how the user's function is loaded and called, and what the function gets.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.data.engines.said import BESIDE_CONTENT, Said
from megatron_r3.data.rollout import Rollout
from megatron_r3.data.values import wrong_reward
from megatron_r3.replay.words import one_line, quoted


class RewardError(ValueError):
    """A reward or a reward function that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class RewardSample:
    """What a reward function gets.

    Attributes:
        fields: the prompt's whole line, which may hold an answer or a task's name; with `convert`,
            the line of the recorded response.
        prompt_tokens, response_tokens: token ids.
        message: what the model wrote, as the engine returns it: `content`, and what the server's
            parsers took out of the content, e.g. `reasoning` and `tool_calls`. Empty if the engine
            sends no text, for example for lack of a tokenizer.
        finish_reason: why the response ended, in the engine's words: "stop", "length".
        group, sample: the number of the prompt's group, and of the sample in the group.
    """

    fields: Mapping[str, Any]
    prompt_tokens: list[int]
    response_tokens: list[int]
    message: Mapping[str, Any]
    finish_reason: str
    group: int
    sample: int

    @classmethod
    def of(
        cls,
        decoded: Rollout,
        fields: Mapping[str, Any],
        said: Said,
        group: int,
        sample: int,
    ) -> RewardSample:
        """The RewardSample of a response."""
        tokens, length = decoded.tokens_N.tolist(), decoded.prompt_length
        prompt, response = tokens[:length], tokens[length:]
        return cls(fields, prompt, response, said.message, said.finish_reason, group, sample)

    @property
    def response_text(self) -> str:
        """The response as one text.

        Raises:
            RewardError: the engine sent no text, or the text lacks a part of what the model wrote.
        """
        if "content" not in self.message:
            raise RewardError("the engine sent no text: read sample.response_tokens instead")
        others = [name for name in BESIDE_CONTENT if self.message.get(name)]
        if others:
            raise RewardError(
                f"the message has {' and '.join(others)} too, and response_text is the content "
                "alone: read sample.message instead"
            )
        return self.message["content"] or ""


RewardFunction = Callable[[RewardSample], float]


def load_reward(spec: str, folder: Path | None = None, option: str = "--reward") -> Any:
    """The function that `module:function` names: a reward function, or an agent.

    Args:
        folder: where the module is looked for first. None adds the working directory in front of
            sys.path, if sys.path lacks it.
        option: where the name was given, for messages.

    Raises:
        RewardError: `spec` has another form, the module cannot be imported, or it has no such
            function.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise RewardError(f"{option} {spec}: give it as module:function")
    first = os.getcwd() if folder is None else str(folder)
    # `python -m` puts the working directory on sys.path; the command `megatron-r3` does not.
    if first not in (sys.path if folder is None else sys.path[:1]):
        sys.path.insert(0, first)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may fail in any way, sys.exit included
        raise RewardError(f"{option} {spec}: {_text_of(error)}") from error
    if not callable(function):
        raise RewardError(f"{option} {spec}: not a function")
    return function


def score(function: RewardFunction, sample: RewardSample, where: str) -> float:
    """The reward that the function gives.

    Raises:
        RewardError: the function raised, or returned no finite number; the message begins with
            `where`.
    """
    name = one_line(f"{function.__module__}:{getattr(function, '__name__', function)}", 200)
    try:
        value = function(sample)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end this process with no error
        raise RewardError(f"{where}: the reward {name} raised {_text_of(error)}") from error
    return checked_reward(value, f"{where}: the reward {name} returned")


def checked_reward(value: Any, prefix: str) -> float:
    """The value as a number that the store can hold.

    Raises:
        RewardError: the value is no finite number; the message begins with `prefix` and the value.
    """
    try:
        wrong = wrong_reward(value)
    except Exception as error:  # a value of any class may come, for example a tensor of 2 numbers
        wrong = f"a reward is a number ({_text_of(error)})"
    if wrong is not None:
        raise RewardError(f"{prefix} {quoted(value, 200)}; {wrong}")
    return float(value)


def _text_of(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 500)
