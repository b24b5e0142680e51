"""Reads a request of an OpenAI client, and writes the answer in the form that the client expects.

A field that would change how tokens are drawn is refused, because a store has one way of sampling
(collect/request_fields.py). The recorder samples as it was told at its start, so a client's
temperature must be the same or be left out.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.request_fields import settings_of
from megatron_r3.data.engines.body import refuse_other_parts, whole_number
from megatron_r3.record.branches import Asked, Turn, digests_of
from megatron_r3.replay.words import quoted

_MOST_CHOICES = 128
# Fields that ask for something that the recorder does not return, or that change the prompt.
_REFUSED = (
    *("logprobs", "top_logprobs", "echo", "suffix", "prompt_logprobs", "documents"),
    *("continue_final_message", "chat_template", "reasoning_effort", "truncate_prompt_tokens"),
    *("stop_token_ids", "stop_regex", "ignore_eos", "include_stop_str_in_output"),
)
# Arguments of transformers' apply_chat_template that are no arguments of the template itself.
_NOT_OF_TEMPLATES = ("chat_template", "continue_final_message", "documents", "return_dict")


@dataclass(frozen=True)
class Question:
    """What a client asks.

    Attributes:
        asked: messages, text or ids.
        is_chat: whether `asked` is messages.
        settings: the tools and other arguments of the chat template.
        tools: calls of these tools are read from the response; None if no call is read.
        count: how many responses are asked for.
        max_tokens: the largest number of tokens of a response, or None.
        stop: texts at which a response ends.
        seed: the seed, or None.
        special: whether the tokenizer begins a text with its special ids.
        stream: whether the answer is sent as events.
        stream_usage: whether the last event has the numbers of tokens.
    """

    asked: Asked
    is_chat: bool
    settings: Mapping[str, Any]
    tools: Any
    count: int
    max_tokens: int | None
    stop: Sequence[str]
    seed: int | None
    special: bool
    stream: bool
    stream_usage: bool

    @property
    def begins(self) -> bool:
        """Whether no response was sent before: a chat that has no message of the assistant."""
        return self.is_chat and all(one.get("role") != "assistant" for one in self.asked)  # type: ignore[union-attr]

    @cached_property
    def digests(self) -> list[bytes]:
        """The digests of the messages (`digests_of`); empty for a text or ids."""
        return digests_of(self.asked, self.settings) if self.is_chat else []  # type: ignore[arg-type]


def read_question(body: Any, is_chat: bool, sampling: Sampling, engine: str) -> Question:
    """Read the body of a request to /v1/chat/completions or /v1/completions.

    Args:
        body: the parsed JSON.
        is_chat: whether the request is a chat.
        sampling: how the recorder samples.
        engine: the engine's name.

    Raises:
        ValueError: naming the field that cannot be taken, and what to do.
    """
    if not isinstance(body, Mapping):
        raise ValueError("the request must be a JSON object")
    # The engine is asked with ids alone, so no call can be forced: a forced call would be drawn
    # from another distribution. Clients such as smolagents ask for one in each request, and
    # verifiers has `strict` tools.
    asked = {**body, "tools": []}
    if body.get("tool_choice") not in (None, "none"):
        asked["tool_choice"] = "auto"
    for name in _REFUSED:
        if body.get(name):
            raise ValueError(f"{name}: the recorder does not take this field; leave it out")
    given, own = settings_of(asked, "the request"), sampling.settings
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value, expected = getattr(given, name), getattr(own, name)
        if value is not None and value != expected:
            option = f", or start the recorder with --{name.replace('_', '-')} {value:g}"
            raise ValueError(
                f"{name} is {value:g}, and this recorder samples with {expected:g}: leave the "
                f"field out{'' if name == 'min_p' else option}"
            )
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f"stop must be a text or a list of texts; got {quoted(stop)}")
    if stop and engine == "megatron":
        raise ValueError("stop: Megatron's server ends no response at a text; leave it out")
    seed = body.get("seed")
    if seed is not None and engine == "megatron":
        raise ValueError("seed: Megatron's server takes no seed; leave it out")
    tools = body.get("tools") or None if is_chat else None
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, Mapping) or any(name in extra for name in _NOT_OF_TEMPLATES):
        raise ValueError("chat_template_kwargs must be an object of the template's own arguments")
    if body.get("add_generation_prompt") not in (None, True):
        raise ValueError("add_generation_prompt: a response is always asked for; leave it out")
    if (given.max_tokens or 0) > sampling.max_tokens:
        raise ValueError(
            f"max_tokens is {given.max_tokens}, and this recorder takes at most "
            f"{sampling.max_tokens}: start it with --max-tokens {given.max_tokens}"
        )
    stream_options = body.get("stream_options") or {}
    return Question(
        asked=_messages(body) if is_chat else _prompt(body),
        is_chat=is_chat,
        settings={**extra, "tools": tools} if tools else dict(extra),
        tools=None if body.get("tool_choice") == "none" else tools,
        count=_count(body),
        max_tokens=given.max_tokens,
        stop=stop,
        seed=None if seed is None else whole_number(seed, "seed"),
        special=body.get("add_special_tokens") is not False,
        stream=bool(body.get("stream")),
        stream_usage=isinstance(stream_options, Mapping)
        and bool(stream_options.get("include_usage")),
    )


def _count(body: Mapping[str, Any]) -> int:
    count = whole_number(1 if body.get("n") is None else body["n"], "n", 1)
    if count > _MOST_CHOICES:
        raise ValueError(f"n is {count}; at most {_MOST_CHOICES} responses are asked for at a time")
    return count


def _messages(body: Mapping[str, Any]) -> Asked:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of objects, and not be empty")
    if not all(isinstance(message, Mapping) for message in messages):
        raise ValueError("messages must be a list of objects")
    refuse_other_parts(messages)
    return messages


def _prompt(body: Mapping[str, Any]) -> Asked:
    prompt = body.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise ValueError("prompt must be one text, or one list of token ids, and not be empty")
    return prompt  # type: ignore[no-any-return]


def answer_of(
    turns: Sequence[Turn], prompt_ids: int, question: Question, model: str
) -> dict[str, Any]:
    """The body of an answer.

    Args:
        turns: the responses.
        prompt_ids: the number of ids of the prompt.
        model: what the answer calls the model.
    """
    sampled = sum(turn.span[1] - turn.span[0] for turn in turns)
    choices = []
    for index, turn in enumerate(turns):
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        if question.is_chat:
            choice["message"] = turn.message
        else:
            choice["text"] = turn.message["content"]
        calls = turn.message.get("tool_calls")
        choices.append({**choice, "finish_reason": "tool_calls" if calls else turn.finish_reason})
    return {
        "id": f"{'chatcmpl' if question.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if question.is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_ids,
            "completion_tokens": sampled,
            "total_tokens": prompt_ids + sampled,
        },
    }


def events_of(answer: Mapping[str, Any], question: Question) -> Iterator[bytes]:
    """The answer as server-sent events, as a client that asked with `stream` expects it.

    The whole response is there before the first event: it is read, confirmed and recorded first.
    """
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if question.is_chat else "text_completion"
    for choice in answer["choices"]:
        ends = choice["finish_reason"]
        if question.is_chat:
            message = dict(choice["message"])
            if "tool_calls" in message:
                calls = enumerate(message["tool_calls"])
                message["tool_calls"] = [{"index": i, **call} for i, call in calls]
            parts = [{"delta": message, "finish_reason": None}]
            parts.append({"delta": {}, "finish_reason": ends})
        else:
            parts = [{"text": choice["text"], "finish_reason": ends}]
        for part in parts:
            yield _event({**head, "choices": [{"index": choice["index"], **part}]})
    if question.stream_usage:
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def refusal_of(message: str, status: int) -> dict[str, Any]:
    """The body of an error, in the form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
