"""What a vLLM server returns with `--enable-return-routed-experts`, decoded into samples.

/v1/completions, /v1/chat/completions and /inference/v1/generate, asked with `return_token_ids` and
`logprobs`; streamed, /inference/v1/generate alone carries routes. They come as base64 of a `.npy`
(0.22 on), as nested lists with the prompt's rows apart (0.21), or as an array (the Python API, see
`engines.vllm_python`). Every fault is an `EngineError`: no row is ever guessed.

Shape suffixes: T rows, N tokens, P prompt tokens, G response tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines import bodies
from megatron_r3.engines.array import integer_array
from megatron_r3.engines.checks import checked_routes, checked_tokens
from megatron_r3.engines.sample import Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.engines.stitch import Increment
from megatron_r3.engines.vllm_stream import joined_stream
from megatron_r3.routes import Routes

__all__ = ["PROMPT_FIELDS", "decode", "decode_increments", "decode_routes"]

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
