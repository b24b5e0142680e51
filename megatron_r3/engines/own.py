"""Rollouts that hold plain arrays: those of an engine of your own, or saved ones.

Shape suffixes: T rows, N tokens, P prompt tokens, G response tokens, H layers as sent, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_r3.engines import body as bodies
from megatron_r3.engines.body import integer_array, number_array
from megatron_r3.engines.checks import checked_routes, checked_tokens
from megatron_r3.engines.conversation import Increment, Sample
from megatron_r3.engines.shape import EngineError, ModelShape


def decode(
    response: Any, request: Mapping[str, Any], shape: ModelShape, where: str
) -> list[Sample]:
    """The samples of one request.

    Args:
        response: one sampled sequence or a list of them, each a mapping: `token_ids` that were
            sampled, their `logprobs`, `routes` of `[T, H, K]` ids, all hidden layers or the MoE
            layers alone, of every token but the last; arrays or lists, routes base64 `.npy` too.
            `prompt_token_ids` may be left out where the request has them.
        request: `prompt`, the token ids that all of them continue; `start`, the token of the first
            row, 0 if left out; `max_tokens`, if none may be longer.
        shape: of the model that sampled.
        where: what errors call the request.

    Raises:
        EngineError: naming `where` and the sequence, and token and layer where there is one.
    """
    return [one.whole() for one in decode_increments(response, request, shape, where)]


def decode_increments(
    response: Any, request: Mapping[str, Any], shape: ModelShape, where: str
) -> list[Increment]:
    """What each sequence tells of its conversation; arguments are those of `decode`.

    Raises:
        EngineError: naming `where` and the sequence, and token and layer where there is one.
    """
    found = [response] if isinstance(response, Mapping) else response
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise EngineError(f"{where}: a sampled sequence or a list of them")
    start = bodies.whole_number(bodies.option(request, "start", 0), "start", where)
    return [
        _increment(one, request, start, shape, f"{where}, choice {i}")
        for i, one in enumerate(found)
    ]


def _increment(
    one: Any, request: Mapping[str, Any], start: int, shape: ModelShape, where: str
) -> Increment:
    if not isinstance(one, Mapping):
        raise EngineError(f"{where}: a sampled sequence is a mapping; got {type(one).__name__}")
    missing = [name for name in ("token_ids", "logprobs", "routes") if one.get(name) is None]
    if missing:
        raise EngineError(f"{where}: {missing} missing")
    prompt_P = bodies.prompt_array(
        request.get("prompt"), one.get("prompt_token_ids"), "name the prompt", where
    )
    response_G = bodies.id_array(one["token_ids"], "token_ids", "", where)
    tokens_N = checked_tokens(prompt_P, response_G, request, shape, where)
    rows_THK = integer_array(one["routes"], f"{where}: routes")
    routes = checked_routes(rows_THK, len(tokens_N), shape, where, start)
    logprobs_G = number_array(one["logprobs"], f"{where}: logprobs")
    increment = Increment(tokens_N, len(prompt_P), logprobs_G, routes, start, 0, where)
    increment.check()
    return increment
