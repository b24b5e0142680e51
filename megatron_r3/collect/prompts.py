"""Prompts as JSON lines: what an engine is asked, and the prompt's group in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.digest import digest_number
from megatron_r3.data.engines.body import refuse_other_parts
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.untrusted import read_json
from megatron_r3.data.values import MOST_TOKEN_ID, wrong_token
from megatron_r3.replay.words import one_line

_BITS = 63  # bits of a digest that are used as a number, so that the number fits into int64


class PromptError(ValueError):
    """A prompt that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file.

    Attributes:
        where: file and line, for messages.
        group: the number that the rollouts of this prompt share in the store.
        content: token ids, a text, or the messages of a chat.
        fields: the whole line, as the reward function gets it.
    """

    where: str
    group: int
    content: list[int] | str | list[dict[str, Any]]
    fields: Mapping[str, Any]

    @property
    def tokens(self) -> list[int] | None:
        """The token ids; None if the prompt is a text or a chat."""
        if isinstance(self.content, str) or isinstance(self.content[0], dict):
            return None
        return self.content  # type: ignore[return-value]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is messages, which the model's chat template turns into a text."""
        return not isinstance(self.content, str) and isinstance(self.content[0], dict)

    @cached_property
    def digest(self) -> int:
        """The `prompt_digest` of the content."""
        return prompt_digest(self.content)

    def check_vocabulary(self, vocab_size: int | None) -> None:
        """Refuse token ids outside the model's vocabulary, unless `vocab_size` is None (unknown).

        Raises:
            PromptError: naming the token.
        """
        if self.tokens is None:
            return
        wrong = wrong_token(np.asarray(self.tokens, np.int64), vocab_size)
        if wrong is not None:
            raise PromptError(f"{self.where}: prompt token {wrong[0]} {wrong[1]}")


def prompt_digest(content: list[int] | str | list[dict[str, Any]]) -> int:
    """A number that tells prompts apart: 63 bits of the SHA-256 of the prompt's JSON.

    The number is never 0, because 0 in a store means that the digest is not known. Example: the
    JSON of token ids is `["tokens",[1,5,9]]`. A text has "text" in place of "tokens", and a chat
    "messages", so the text "[1,5,9]" is another prompt.

    Args:
        content: token ids, a text, or the messages of a chat.
    """
    kind = "tokens"
    if isinstance(content, str):
        kind = "text"
    elif content and isinstance(content[0], dict):
        kind = "messages"
    data = json.dumps([kind, content], sort_keys=True, separators=(",", ":"))
    return digest_number(data.encode(), _BITS) or 1


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of JSON lines `{"prompt": ids or text}` or `{"messages": [...]}`.

    The group of a prompt is the line's `group`. A line without `group` takes its `id`; an `id` that
    is a text becomes 63 bits of its SHA-256. A line with neither takes the line's number, from 0
    on.

    Raises:
        PromptError: the file is not readable or empty, a line is no prompt, a prompt cannot be sent
            as JSON, or two lines have the same group.
    """
    prompts: dict[int, Prompt] = {}
    try:
        # Not `splitlines`, which splits at a carriage return too: JSON may have one as a blank.
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PromptError(f"{path}: not readable ({error})") from error
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        prompt = _prompt(line, number, f"{path}, line {number + 1}")
        if prompt.group in prompts:
            raise PromptError(
                f"{prompt.where}: group {prompt.group} is already the group of "
                f"{prompts[prompt.group].where}; give each prompt a group of its own (--n says "
                "how many samples a prompt gets)"
            )
        prompts[prompt.group] = prompt
    if not prompts:
        raise PromptError(f"{path}: no prompts")
    return list(prompts.values())


def _prompt(line: bytes, number: int, where: str) -> Prompt:
    try:
        fields = read_json(line, where)
    except ValueError as error:
        raise PromptError(str(error)) from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise PromptError(f"{where}: expected an object with either `prompt` or `messages`")
    content = fields["prompt"] if "prompt" in fields else fields["messages"]
    if "prompt" in fields:
        if not isinstance(content, str) and not _all_ids(content):
            raise PromptError(f"{where}: `prompt` must be a text or a list of token ids from 0 on")
    elif not isinstance(content, list) or not all(isinstance(message, dict) for message in content):
        raise PromptError(f"{where}: `messages` must be a list of objects")
    else:
        try:
            refuse_other_parts(content)
        except EngineError as error:
            raise PromptError(f"{where}: {error}") from error
    if not content:
        raise PromptError(f"{where}: the prompt is empty")
    try:  # `read_json` takes NaN and half of a surrogate pair, which no request can carry
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        reason = one_line(str(error), 200)
        raise PromptError(f"{where}: the prompt cannot be sent as JSON ({reason})") from error
    return Prompt(where, _group(fields, number, where), content, fields)


def _all_ids(content: Any) -> bool:
    return isinstance(content, list) and all(
        # not `isinstance`, for which True is an int
        type(token) is int and 0 <= token <= MOST_TOKEN_ID
        for token in content
    )


def _group(fields: Mapping[str, Any], number: int, where: str) -> int:
    name = "group" if fields.get("group") is not None else "id"
    value = fields.get(name)
    if value is None:
        return number
    if name == "id" and isinstance(value, str):
        return digest_number(value.encode(errors="surrogatepass"), _BITS)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        or_text = " or a text" if name == "id" else ""
        raise PromptError(
            f"{where}: `{name}` must be a whole number of 64 bits{or_text}; "
            f"got {one_line(repr(value), 80)}"
        )
    return value
