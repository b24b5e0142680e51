"""Recorded requests and responses, JSON lines: what a line says beside tokens and routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompts import prompt_digest
from megatron_r3.collect.request_fields import refuse_other_fields
from megatron_r3.data.engines import body as bodies
from megatron_r3.data.engines.shape import EngineError, naming
from megatron_r3.data.store.schema import SamplingSettings
from megatron_r3.data.untrusted import read_json
from megatron_r3.replay.words import quoted

# Bytes of one line. 16 samples of 32,768 tokens of a model with 94 layers and top-8 are half of it.
_MOST_BYTES = 1 << 30
_MOST_NUMBER = 2.0**31


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line that is not empty: how errors call it, and its object.

    Raises:
        EngineError: the file cannot be read, or a line is no `{"request": {}, "response": ...}`.
    """
    try:
        with path.open("rb") as file:
            number = 0
            # One byte more than allowed, so that `read_json` sees that a line is too long.
            while data := file.readline(_MOST_BYTES + 1):
                number += 1
                if data.strip():
                    where = f"{path}, line {number}"
                    yield where, _line(data, where)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error.strerror or error})") from error


def _line(data: bytes, where: str) -> dict[str, Any]:
    try:
        line = read_json(data, where, _MOST_BYTES)
    except ValueError as error:
        raise EngineError(str(error)) from error
    if not isinstance(line, dict) or not {"request", "response"} <= line.keys():
        raise EngineError(f"{where}: an object with `request` and `response` is expected")
    if not isinstance(line["request"], dict):
        raise EngineError(f"{where}: `request` must be the JSON object that was sent")
    return line


def settings_of(request: Mapping[str, Any], where: str) -> SamplingSettings:
    """How a request asks for tokens. A setting that the request leaves out is None.

    The engine takes what a request leaves out from the model's generation_config.json or from its
    own options (`refuse_defaults`).

    Raises:
        EngineError: naming `where` and the field: a field that is not known to leave the sampled
            tokens as they are, a value of another type, a number that cannot be, or prompts of one
            request that are sampled in different ways.
    """
    refuse_other_fields(request, where)
    top_k = _number(request, "top_k", where)
    if top_k is not None and (top_k != int(top_k) or top_k < -1):
        raise EngineError(f"{where}: top_k must be a whole number from -1 on; got {quoted(top_k)}")
    with naming(where):
        max_tokens = bodies.most_tokens(request)
    return SamplingSettings(
        temperature=_number(request, "temperature", where),
        top_p=_number(request, "top_p", where, 1.0),
        top_k=None if top_k is None else max(int(top_k), 0),  # both -1 and 0 cut nothing off
        min_p=_number(request, "min_p", where, 1.0),
        max_tokens=max_tokens,
    )


def _number(
    request: Mapping[str, Any], name: str, where: str, most: float = _MOST_NUMBER
) -> float | None:
    """A number of a request; None if the request does not have it.

    vLLM has it at the top level. SGLang has it in `sampling_params`, which is a list if the request
    has several prompts; then all of them must say the same.
    """
    nested = request.get("sampling_params")
    holders = nested if isinstance(nested, list) else [nested]
    values = [holder.get(name) if isinstance(holder, Mapping) else None for holder in holders]
    if request.get(name) is not None:
        values = [request[name], *(value for value in values if value is not None)]
    # `is not` first: NaN is not equal to itself, and is refused as a number below.
    if any(value is not values[0] and value != values[0] for value in values):
        raise EngineError(
            f"{where}: {name} differs between the prompts of one request, or between the request "
            "and its sampling_params"
        )
    value = values[0] if values else None
    if value is None:
        return None
    least = -1.0 if name == "top_k" else 0.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise EngineError(
            f"{where}: {name} must be a number from {least:g} to {most:g}; got {quoted(value)}"
        )
    return float(value)


def digests_of(engine: str, request: Mapping[str, Any], where: str) -> list[int]:
    """The digest of each prompt of a request (`Rollout.prompt_digest`)."""
    fields = import_module(f"megatron_r3.data.engines.{engine}").PROMPT_FIELDS
    with naming(where):
        contents = bodies.prompt_contents(request, fields)
    return [prompt_digest(content) for content in contents]
