"""What a recorded request and its response say beside tokens and routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_r3.engines import bodies
from megatron_r3.engines.shape import EngineError
from megatron_r3.engines.vllm_stream import joined_stream
from megatron_r3.rollouts.dialects import answer_of
from megatron_r3.rollouts.prompts import prompt_digest
from megatron_r3.store.schema import SamplingSettings
from megatron_r3.untrusted import quoted, read_json

__all__ = ["answers_of", "digests_of", "read_lines", "settings_of"]

# of one line: 16 samples of 32,768 tokens with 94 layers of top-8 as base64 are half of it
_MOST_BYTES = 1 << 30
_MOST = 2.0**31


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line that is not empty: what errors call it, and its object.

    Raises:
        EngineError: the file cannot be read, or a line is no `{"request": {}, "response": ...}`.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(_MOST_BYTES + 1):
                number += 1
                if text.strip():
                    where = f"{path}, line {number}"
                    yield where, _line(text, where)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error.strerror or error})") from error


def _line(text: bytes, where: str) -> dict[str, Any]:
    try:
        line = read_json(text, where, _MOST_BYTES)
    except ValueError as error:
        raise EngineError(str(error)) from error
    if not isinstance(line, dict) or not {"request", "response"} <= line.keys():
        raise EngineError(f"{where}: an object with `request` and `response` is expected")
    if not isinstance(line["request"], dict):
        raise EngineError(f"{where}: `request` is the body that was sent")
    return line


def settings_of(request: Mapping[str, Any], where: str) -> SamplingSettings:
    """How a request asks for tokens; None for what it does not say.

    What a request leaves out the engine takes from the model's generation_config.json or from its
    own options, which nobody here knows.

    Raises:
        EngineError: naming `where` and the field: another type, a number that cannot be, or prompts
            of one request that are sampled in different ways.
    """
    top_k = _one(request, "top_k", where)
    if top_k is not None and (top_k != int(top_k) or top_k < -1):
        raise EngineError(f"{where}: top_k is a whole number from -1 on; got {quoted(top_k)}")
    return SamplingSettings(
        temperature=_one(request, "temperature", where),
        top_p=_one(request, "top_p", where, 1.0),
        top_k=None if top_k is None else max(int(top_k), 0),  # -1 and 0: nothing is cut off
        min_p=_one(request, "min_p", where, 1.0),
        max_tokens=bodies.most_tokens(request, where),
    )


def _one(request: Mapping[str, Any], name: str, where: str, most: float = _MOST) -> float | None:
    """A number of a request, at its top level or in `sampling_params`, which may be a list."""
    nested = request.get("sampling_params")
    holders = nested if isinstance(nested, list) else [nested]
    values = [one.get(name) if isinstance(one, Mapping) else None for one in holders]
    if request.get(name) is not None:
        values = [request[name]]
    if any(value is not values[0] and value != values[0] for value in values):
        raise EngineError(f"{where}: {name} differs between the prompts of one request")
    value = values[0] if values else None
    if value is None:
        return None
    least = -1.0 if name == "top_k" else 0.0
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise EngineError(
            f"{where}: {name} is a number from {least:g} to {most:g}; got {quoted(value)}"
        )
    return float(value)


def answers_of(response: Any, count: int, where: str) -> list[tuple[str, str]]:
    """Text and finish reason of each choice of a response that was decoded.

    Raises:
        EngineError: the engine gave a choice up half-way, or what it says is no text.
    """
    streamed = response.get("_raw_text") if isinstance(response, Mapping) else response
    if isinstance(streamed, str):
        response = joined_stream(streamed, where)
    answers = [answer_of(response, i, where) for i in range(count)]
    for index, answer in enumerate(answers):
        if not all(isinstance(one, str) for one in answer):
            raise EngineError(
                f"{where}, choice {index}: text and finish reason are {quoted(answer)}; expected "
                "two texts"
            )
    return answers


def digests_of(engine: str, request: Mapping[str, Any], where: str) -> list[int]:
    """The digest of each prompt of a request (`Rollout.prompt_digest`)."""
    fields = import_module(f"megatron_r3.engines.{engine}").PROMPT_FIELDS
    return [prompt_digest(one) for one in bodies.prompt_contents(request, fields, where)]
