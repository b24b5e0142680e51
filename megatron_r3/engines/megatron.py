"""What Megatron-LM's inference server returns with `moe_enable_routing_replay`, from 0.17 on.

/v1/completions and /v1/chat/completions of the dynamic text generation server: `moe_topk_indices`
of each choice, nested lists in 0.17, `["ndarray", {data, dtype}]` with int16 from 0.18 on. They
hold the MoE layers in the order in which routers were made: the decoder's, then those of MTP.
0.17's /v1/completions returns no token ids and cannot be read. `prompt_moe_topk_indices` repeats
what the other field says, or is cut off in the middle, and is not looked at.

Shape suffixes: T rows, N tokens, P prompt tokens, G response tokens, L layers as sent, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines import body as bodies
from megatron_r3.engines.body import integer_array, number_array
from megatron_r3.engines.checks import checked_routes, checked_tokens
from megatron_r3.engines.conversation import Increment, Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.untrusted import quoted, said

_DTYPES = ("int16", "int32", "int64")
_ASK_IDS = "0.17's /v1/completions returns none; chat: ask with return_tokenized_data true"
_ASK_LOGPROBS = "ask with logprobs 1 (chat: true)"


def decode(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    num_mtp_layers: int = 0,
) -> list[Sample]:
    """The samples of one response, in the order of its choices.

    Args:
        response: the body that the server returned.
        request: the body that was sent.
        shape: of the model that the server runs.
        where: what errors call the request.
        num_mtp_layers: MoE layers of multi-token prediction in the server's model; their routes
            come last and are dropped.

    Returns:
        One sample for each choice; `group` is the index of its prompt in the request.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one.
    """
    found = decode_increments(response, request, shape, where, num_mtp_layers=num_mtp_layers)
    return [one.whole() for one in found]


def decode_increments(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    num_mtp_layers: int = 0,
) -> list[Increment]:
    """What each choice tells of its conversation, always from token 0 on.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one.
    """
    if not isinstance(response, Mapping):  # an error's body is a bare text
        raise EngineError(f"{where}: the server refused the request: {said(response)}")
    failed = bodies.failure(response)
    if failed:
        raise EngineError(f"{where}: {failed}")
    if request.get("stream"):
        raise EngineError(f"{where}: a streamed response is not read; ask with stream false")
    bodies.refuse_echo(request, where)
    if response.get("model") != "EMPTY":  # what it calls any model
        bodies.refuse_other_model(response, request, where)
    prompts = bodies.prompts(request, ("prompt",), where)
    chat_count = bodies.option(request, "n", 1) if "messages" in request else 1
    count = bodies.whole_number(chat_count, "n", where, 1)
    choices = bodies.choices_in_order(response.get("choices"), count * len(prompts), where)
    return [
        _increment(
            choice, request, prompts[i // count], i // count, shape, num_mtp_layers,
            f"{where}, choice {i}",
        )
        for i, choice in enumerate(choices)
    ]  # fmt: skip


def _increment(
    choice: Mapping[str, Any],
    request: Mapping[str, Any],
    prompt: Any,
    group: int,
    shape: ModelShape,
    num_mtp_layers: int,
    where: str,
) -> Increment:
    bodies.refuse_half_way(choice.get("finish_reason"), where)
    message = choice.get("message")
    told = {**(message if isinstance(message, Mapping) else {}), **choice}
    evictions = told.get("num_evictions")
    if evictions:
        raise EngineError(
            f"{where}: evicted {quoted(evictions, 20)} times and resumed: its routes are lost"
        )
    prompt_P = bodies.prompt_array(prompt, told.get("prompt_token_ids"), _ASK_IDS, where)
    response_G = bodies.id_array(
        told.get("generation_token_ids"), "generation_token_ids", _ASK_IDS, where
    )
    tokens_N = checked_tokens(prompt_P, response_G, request, shape, where)
    rows_TLK = _rows(choice.get("moe_topk_indices"), shape, num_mtp_layers, where)
    increment = Increment(
        tokens_N,
        len(prompt_P),
        _logprobs(told, response_G, len(prompt_P), where),
        checked_routes(rows_TLK, len(tokens_N), shape, where, 0),
        0,
        group,
        where,
    )
    increment.check()
    return increment


def _logprobs(
    told: Mapping[str, Any], response_G: np.ndarray, prompt_length: int, where: str
) -> np.ndarray:
    values = told.get("generation_log_probs")
    if isinstance(values, list) and values:
        return number_array(values, f"{where}: generation_log_probs")
    logprobs = told.get("logprobs")
    if isinstance(logprobs, Mapping):
        values = logprobs.get("token_logprobs")
        if isinstance(values, list) and values[:1] == [None]:  # not of a token: a place before it
            logprobs = {"token_logprobs": values[1:]}
    return bodies.sampled_logprobs(logprobs, response_G, _ASK_LOGPROBS, where, prompt_length)


def _rows(value: Any, shape: ModelShape, num_mtp_layers: int, where: str) -> np.ndarray:
    """The decoder's layers of `[T, L, K]` ids."""
    name = f"{where}: moe_topk_indices"
    if value is None:
        raise EngineError(
            f"{name}: there are none; start the server with --moe-enable-routing-replay (an "
            "evicted request loses them)"
        )
    rows_TLK = _array(value, name)
    layers, num_moe = rows_TLK.shape[1], len(shape.moe_layers)
    if layers != num_moe + num_mtp_layers:
        raise EngineError(
            f"{name}: {layers} layers; the model has {num_moe} MoE layers and {num_mtp_layers} of "
            "multi-token prediction"
        )
    return rows_TLK[:, :num_moe]


def _array(value: Any, name: str) -> np.ndarray:
    tagged = isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)
    if not tagged:
        return integer_array(value, name)
    kind, content = value
    if kind == "tensor":
        return integer_array(content, name)
    if kind != "ndarray" or not isinstance(content, Mapping) or set(content) != {"data", "dtype"}:
        raise EngineError(f"{name}: [ndarray, {{data, dtype}}]; got {quoted(kind, 20)}")
    dtype = content["dtype"]
    if dtype not in _DTYPES:
        raise EngineError(f"{name}: ids are integers ({', '.join(_DTYPES)}); got {quoted(dtype)}")
    array = integer_array(content["data"], name)
    if array.size and not np.iinfo(dtype).min <= array.min() <= array.max() <= np.iinfo(dtype).max:
        raise EngineError(f"{name}: an id does not fit {dtype}")
    return array
