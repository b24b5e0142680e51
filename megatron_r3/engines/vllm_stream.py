"""The text of a streamed /inference/v1/generate response, joined into the body it would have been.

Each event holds some tokens of one choice; the last event of a choice holds its routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_r3.engines.bodies import whole_number
from megatron_r3.engines.shape import EngineError
from megatron_r3.untrusted import read_json, said

__all__ = ["joined_stream"]


def joined_stream(text: str, where: str) -> dict[str, Any]:
    """A response body with the choices of all events.

    Raises:
        EngineError: an event is broken, the stream or a choice of it does not end, a choice has
            routes twice, or the events name two models.
    """
    choices: dict[int, dict[str, Any]] = {}
    model = None
    for event in _events(text, where):
        if event.get("error"):
            return {"error": event["error"]}
        if model and event.get("model") not in (None, model):
            raise EngineError(f"{where}: the events of the stream are of two models")
        model = model or event.get("model")
        parts = event.get("choices")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise EngineError(f"{where}: an event of the stream has no choices")
        for part in parts:
            index = whole_number(part.get("index"), "a choice's index", where)
            _join(choices.setdefault(index, _empty(index)), part, f"{where}, choice {index}")
    for index, choice in choices.items():
        if choice["finish_reason"] is None:
            raise EngineError(f"{where}, choice {index}: the stream ends before the choice does")
    return {"model": model, "choices": list(choices.values())}


def _events(text: str, where: str) -> list[Mapping[str, Any]]:
    # not splitlines: a token's text may hold other line ends, U+2028 for one
    lines = [line[5:].strip() for line in re.split(r"\r\n|\r|\n", text) if line[:5] == "data:"]
    if not lines or lines[-1] != "[DONE]":
        raise EngineError(f"{where}: the stream does not end with [DONE]: it was cut off")
    try:
        events = [read_json(line, f"{where}, event {i}") for i, line in enumerate(lines[:-1])]
    except ValueError as error:
        raise EngineError(said(str(error), 4000)) from error
    if not all(isinstance(event, Mapping) for event in events):
        raise EngineError(f"{where}: an event of the stream is no JSON object")
    return events


def _empty(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": [],
        "logprobs": {"content": []},
        "routed_experts": None,
        "finish_reason": None,
    }


def _join(choice: dict[str, Any], part: Mapping[str, Any], where: str) -> None:
    if choice["finish_reason"] is not None:
        raise EngineError(f"{where}: the stream goes on after the choice's end")
    logprobs = part.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else []
    tokens = part.get("token_ids")
    if not isinstance(tokens, list) or not isinstance(content, list):
        raise EngineError(f"{where}: an event of the stream has no token_ids")
    choice["token_ids"] += tokens
    choice["logprobs"]["content"] += content
    choice["finish_reason"] = part.get("finish_reason")
    routed = part.get("routed_experts")
    if routed is not None:
        if choice["routed_experts"] is not None:
            raise EngineError(f"{where}: the stream carries routes twice")
        choice["routed_experts"] = routed
