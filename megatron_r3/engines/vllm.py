"""What a vLLM server returns with `--enable-return-routed-experts`, decoded into samples.

/v1/completions, /v1/chat/completions and /inference/v1/generate, asked with `return_token_ids` and
`logprobs`; streamed, /inference/v1/generate alone carries routes. They come as base64 of a `.npy`
(0.22 on), as nested lists with the prompt's rows apart (0.21), or as an array (the Python API, see
`engines.vllm_python`). Every fault is an `EngineError`: no row is ever guessed.

Shape suffixes: T rows, N tokens, P prompt tokens, G response tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines import body as bodies
from megatron_r3.engines.body import integer_array, whole_number
from megatron_r3.engines.checks import checked_routes, checked_tokens
from megatron_r3.engines.conversation import Increment, Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.routes import Routes
from megatron_r3.untrusted import read_json, said

PROMPT_FIELDS = ("token_ids", "prompt")  # of a request: the first that is there counts

_ASK_IDS = "ask with return_token_ids true"
_ASK_LOGPROBS = "ask with logprobs 1 (chat: true)"


def decode(
    response: Mapping[str, Any] | str, request: Mapping[str, Any], shape: ModelShape, where: str
) -> list[Sample]:
    """The samples of one response, in the order of its choices.

    Args:
        response: the body that the server returned; the text of a streamed one.
        request: the body that was sent.
        shape: of the model that the server runs.
        where: what errors call the request.

    Returns:
        One sample for each choice; `group` is the index of its prompt in the request.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one; routes
            that start late (`routed_experts_prompt_start`) are for `decode_increments`.
    """
    return [one.whole() for one in decode_increments(response, request, shape, where)]


def decode_increments(
    response: Mapping[str, Any] | str,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    cached_rows: str = "refuse",
) -> list[Increment]:
    """What each choice of one response tells of its conversation: rows from the start on.

    Args:
        response, request, shape, where: those of `decode`.
        cached_rows: of prefix-cached tokens, whose rows are zeros in 0.21: "refuse", or "missing"
            for a response whose conversation already has them.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one.
    """
    body = _body(response, request, where)
    start = bodies.whole_number(
        bodies.option(request, "routed_experts_prompt_start", 0), "start", where
    )
    count = bodies.whole_number(bodies.option(request, "n", 1), "n", where, 1)
    prompts = bodies.prompts(request, PROMPT_FIELDS, where)
    choices = bodies.choices_in_order(body.get("choices"), count * len(prompts), where)
    return [
        _increment(
            body, choice, request, prompts[i // count], i // count, start, shape,
            f"{where}, choice {i}", cached_rows,
        )
        for i, choice in enumerate(choices)
    ]  # fmt: skip


def decode_routes(
    choice: Mapping[str, Any],
    num_tokens: int,
    shape: ModelShape,
    where: str,
    start: int = 0,
    cached_rows: str = "refuse",
) -> Routes:
    """The routes of one choice, from token `start` (`routed_experts_prompt_start`) on.

    Args:
        choice: an entry of a response's `choices`.
        num_tokens: N, prompt and response.
        shape: of the model that the server runs.
        where: what errors call the choice.
        start: the first token that has a row.
        cached_rows: that of `decode_increments`.

    Returns:
        `N - 1 - start` rows; row 0 is token `start`.

    Raises:
        EngineError: wrong rows, layers or top-k, wrong ids, or rows that were not captured.
    """
    routed = choice.get("routed_experts")
    if routed is None:
        raise EngineError(
            f"{where}: no routed_experts; start the server with --enable-return-routed-experts"
        )
    rows_THK = integer_array(routed, f"{where}: routed_experts")
    return checked_routes(rows_THK, num_tokens, shape, where, start, cached_rows)


def _body(
    response: Mapping[str, Any] | str, request: Mapping[str, Any], where: str
) -> Mapping[str, Any]:
    text = response.get("_raw_text") if isinstance(response, Mapping) else response
    if isinstance(text, str):
        if "token_ids" not in request:
            raise EngineError(
                f"{where}: a streamed response carries no routes; ask with stream false"
            )
        response = joined_stream(text, where)
    if not isinstance(response, Mapping):
        raise EngineError(f"{where}: a response is a JSON object; got {type(response).__name__}")
    failed = bodies.failure(response)
    if failed:
        raise EngineError(f"{where}: {failed}")
    if request.get("stream") and not isinstance(text, str):
        raise EngineError(f"{where}: a streamed response carries no routes; ask with stream false")
    bodies.refuse_echo(request, where)
    bodies.refuse_other_model(response, request, where)
    return response


def _increment(
    response: Mapping[str, Any],
    choice: Mapping[str, Any],
    request: Mapping[str, Any],
    prompt: Any,
    group: int,
    start: int,
    shape: ModelShape,
    where: str,
    cached_rows: str,
) -> Increment:
    bodies.refuse_half_way(choice.get("finish_reason"), where)
    returned = choice.get("prompt_token_ids")
    returned = response.get("prompt_token_ids") if returned is None else returned
    prompt_P = bodies.prompt_array(prompt, returned, _ASK_IDS, where)
    response_G = bodies.id_array(choice.get("token_ids"), "token_ids", _ASK_IDS, where)
    tokens_N = checked_tokens(prompt_P, response_G, request, shape, where)
    logprobs_G = bodies.sampled_logprobs(
        choice.get("logprobs"), response_G, _ASK_LOGPROBS, where, len(prompt_P)
    )
    if response.get("prompt_routed_experts") is not None:
        if start:
            raise EngineError(f"{where}: vLLM 0.21 knows no routed_experts_prompt_start")
        rows_THK = _prompt_and_response_rows(response, choice, len(prompt_P), shape, where)
        routes = checked_routes(rows_THK, len(tokens_N), shape, where, 0, cached_rows)
    else:
        routes = decode_routes(choice, len(tokens_N), shape, where, start, cached_rows)
    increment = Increment(tokens_N, len(prompt_P), logprobs_G, routes, start, group, where)
    increment.check()
    return increment


def _prompt_and_response_rows(
    response: Mapping[str, Any],
    choice: Mapping[str, Any],
    prompt_length: int,
    shape: ModelShape,
    where: str,
) -> np.ndarray:
    """vLLM 0.21: P prompt rows beside the choices, G - 1 rows in each; MoE layers only."""
    if shape.moe_layers != tuple(range(shape.num_hidden_layers)):
        raise EngineError(f"{where}: vLLM 0.21 misplaces the layers of a model with dense layers")
    name = f"{where}: prompt_routed_experts"
    prompt_THK = integer_array(response["prompt_routed_experts"], name)
    if len(prompt_THK) != prompt_length:
        raise EngineError(f"{name}: {len(prompt_THK)} rows for {prompt_length} prompt tokens")
    routed = choice.get("routed_experts")
    if routed is None or (isinstance(routed, (list, tuple)) and not routed):
        return prompt_THK  # one response token: no row of its own
    response_THK = integer_array(routed, f"{where}: routed_experts")
    if response_THK.shape[1:] != prompt_THK.shape[1:]:
        raise EngineError(
            f"{where}: prompt rows are {prompt_THK.shape[1:]}, response rows "
            f"{response_THK.shape[1:]} [layers, topk]"
        )
    return np.concatenate([prompt_THK, response_THK])


# The text of a streamed /inference/v1/generate response, joined into the body it would have been.
#
# Each event holds some tokens of one choice; the last event of a choice holds its routes.


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
