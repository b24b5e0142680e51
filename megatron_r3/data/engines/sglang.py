"""Decodes what an SGLang server returns with `--enable-return-routed-experts`.

A request asks for routes with `return_routed_experts`. /generate returns routes of every sample
(`meta_info.routed_experts`). OpenAI's endpoints return routes of the first choice alone
(`sglext.routed_experts`); from 0.5.18 on they return routes of every choice if the request has
`return_meta_info`. Use 0.5.10 or later: an older server that balances experts (EPLB) sends ids that
are not the model's.

The routes are base64 of little-endian int32 ids of all hidden layers, without a header: the
response says neither their shape nor their first token.

Shape suffixes (docs/glossary.md): G, K, N, T, Y.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.data.engines.body import (
    NULL_LOGPROB,
    bare_array,
    choices_in_order,
    id_array,
    number_array,
    option,
    prompt_array,
    prompts,
    refuse_none_sampled,
    sampled_logprobs,
    token_array,
    whole_number,
)
from megatron_r3.data.engines.checks import (
    ANOTHER_MODEL,
    STREAMED,
    checked_routes,
    checked_tokens,
    refuse_half_way,
    refuse_response,
    row_cause,
)
from megatron_r3.data.engines.conversation import Increment, read_choices
from megatron_r3.data.engines.said import kept_sets, read_said, version_spans
from megatron_r3.data.engines.shape import EngineError, ModelShape, naming
from megatron_r3.data.kept import KeptSets
from megatron_r3.replay.words import quoted

# A sample of /generate, and a response of /v1/completions, without the fields that are not read:
#
#   {"output_ids": [7, 3], "meta_info": {
#       "prompt_tokens": 2, "finish_reason": {"type": "length"}, "num_retractions": 0,
#       "output_token_logprobs": [[-0.5, 7, null], [-1.2, 3, null]],
#       "routed_experts": "AwAAAAEAAAA..."}}
#
#   {"choices": [{"index": 0, "token_ids": [7, 3], "prompt_token_ids": [5, 9], "logprobs": {...}}],
#    "sglext": {"routed_experts": "AwAAAAEAAAA..."}}

# fields of 0.5.23 with return_sampling_mask (SGLang's `TokenizerManager._handle_batch_output`)
_MASK, _MASK_LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"

_ASK_PROMPT = "send input_ids, not text"
_ASK_IDS = "ask with return_token_ids true (0.5.23; chat: return_prompt_token_ids), or /generate"
_ASK_LOGPROBS = "ask with return_logprob true (OpenAI's routes: logprobs 1, chat: true)"


def decode_increments(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
) -> list[Increment]:
    """The increment of each sample: first the `n` samples of the first prompt, and so on.

    Args:
        response: the body that the server returned.
        request: the body that was sent; `routed_experts_start_len` is the token of the first row.
        shape, where: see `engines.decode`.

    Raises:
        EngineError: naming `where` and, as far as the fault has them, choice, token and layer.
    """
    with naming(where):
        if isinstance(response, str) or request.get("stream"):
            raise EngineError(STREAMED)
        asked = prompts("sglang", request)
        count = whole_number(_samples_of_one(request), "n", 1)
        start = request.get("routed_experts_start_len")
        start = whole_number(0 if start is None else start, "start")
        items = _items(response, request, count * len(asked))

    return read_choices(
        *(items, where, count),
        lambda item, group: _increment(item, request, asked[group], start, shape),
    )


def _samples_of_one(request: Mapping[str, Any]) -> Any:
    """How many samples the request asks for with each prompt."""
    params = request.get("sampling_params")
    if not isinstance(params, list):
        return option(request, "n", 1)
    # a list has one entry for each prompt: [{"n": 2}, {"n": 2}]
    counts = [one.get("n", 1) if isinstance(one, Mapping) else None for one in params]
    if not counts or any(count != counts[0] for count in counts):
        raise EngineError("n differs between the prompts of one request: give all the same n")
    return counts[0]


def _items(response: Any, request: Mapping[str, Any], expected: int) -> list[dict[str, Any]]:
    """The samples of /generate or of an OpenAI endpoint, each as a dict with the same keys."""
    if isinstance(response, Mapping):
        refuse_response(response, request)
        if "meta_info" not in response:
            return _openai_items(response, expected)
        response = [response]  # /generate, asked for one sample
    if not isinstance(response, list) or len(response) != expected:
        count = len(response) if isinstance(response, list) else type(response).__name__
        raise EngineError(f"{count} samples; the request asks for {expected}")
    for item in response:
        if not isinstance(item, Mapping) or not isinstance(item.get("meta_info"), Mapping):
            raise EngineError("a sample of /generate must have an object `meta_info`")
    return [
        {
            "token_ids": item.get("output_ids"),
            "prompt_token_ids": item.get("prompt_token_ids"),
            "logprobs": None,  # they are in meta_info
            "meta_info": item["meta_info"],
            "hint": _ASK_PROMPT,
            "says": (item, item),
        }
        for item in response
    ]


def _openai_items(response: Mapping[str, Any], expected: int) -> list[dict[str, Any]]:
    extension = response.get("sglext")
    extension = extension if isinstance(extension, Mapping) else {}
    choices = choices_in_order(response.get("choices"), expected)
    items = []
    for choice in choices:
        meta = choice.get("meta_info")
        if not isinstance(meta, Mapping):
            if expected > 1:
                raise EngineError(
                    f"only the first of {expected} choices has routes; ask for one choice, "
                    "ask with return_meta_info, or use /generate"
                )
            meta = {"routed_experts": extension.get("routed_experts")}
        items.append(
            {
                "token_ids": choice.get("token_ids") or choice.get("response_token_ids"),
                "prompt_token_ids": choice.get("prompt_token_ids"),
                "logprobs": choice.get("logprobs"),
                "meta_info": {"finish_reason": choice.get("finish_reason"), **meta},
                "hint": _ASK_IDS,
                "says": (response, choice),
            }
        )
    return items


def _increment(
    item: Mapping[str, Any],
    request: Mapping[str, Any],
    asked: Any,
    start: int,
    shape: ModelShape,
) -> Increment:
    meta = item["meta_info"]
    refuse_half_way(meta.get("finish_reason"))
    if retracted := meta.get("num_retractions"):
        raise EngineError(
            f"the server retracted the request {quoted(retracted, 20)} times: the first tokens of "
            "the response have routes of a later run and log-probs of the first; sample it again"
        )
    prompt = prompt_array(asked, item["prompt_token_ids"], item["hint"])
    counted = meta.get("prompt_tokens")
    if counted is not None and counted != len(prompt):
        raise EngineError(
            f"the server counted {quoted(counted, 20)} prompt tokens; {len(prompt)} were sent"
        )
    response_G, logprobs_G = _response(item, len(prompt))
    tokens_N = checked_tokens(prompt, response_G, request, shape)
    kept = kept_sets(meta.get(_MASK), _MASK, len(prompt), len(response_G))
    if kept is not None:
        logprobs_G = _logprobs_of_mask(meta, tokens_N, kept, len(prompt))
    versions_G = version_spans(meta.get("weight_versions"), len(response_G))
    rows_TYK = _rows(meta.get("routed_experts"), len(tokens_N), start, shape)
    routes = checked_routes(rows_TYK, len(tokens_N), shape, start)
    return Increment(
        *(tokens_N, len(prompt), logprobs_G, routes, start),
        kept=kept,
        versions_G=versions_G,
        said=read_said(*item["says"]),
    )


def _response(item: Mapping[str, Any], prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids and log-probs of the sampled tokens."""
    tokens, native = item["token_ids"], item["meta_info"].get("output_token_logprobs")
    if native is None:
        response_G = id_array(tokens, "output_ids", item["hint"])
        logprobs_G = sampled_logprobs(item["logprobs"], response_G, _ASK_LOGPROBS, prompt_tokens)
        return response_G, logprobs_G
    named_G, logprobs_G = _native_logprobs(native)  # /generate always names the tokens by id
    response_G = id_array(named_G if tokens is None else tokens, "output_ids", item["hint"])
    if not np.array_equal(response_G, named_G):
        raise EngineError("output_token_logprobs name other ids than output_ids")
    return response_G, logprobs_G


def _logprobs_of_mask(
    meta: Mapping[str, Any], tokens_N: np.ndarray, kept: KeptSets, prompt_length: int
) -> np.ndarray:
    """Float32 log-probs `[G]`, normalised over the kept sets.

    The log-probs of `output_token_logprobs` are normalised over all tokens. An entry of
    `output_token_sampling_logprobs` is the log-prob of the sampled token. If the request has
    `sampling_logprobs_mode` "support", an entry is a list: the log-probs of all tokens of the mask,
    in the order of the mask.
    """
    values, masks = meta.get(_MASK_LOGPROBS), meta[_MASK]
    if not isinstance(values, list) or len(values) != len(masks):
        raise EngineError(f"{_MASK_LOGPROBS} must have an entry for each token of {_MASK}")
    chosen = []
    for value, mask, token in zip(values, masks, tokens_N[prompt_length:].tolist(), strict=True):
        if isinstance(value, list):
            if len(value) != len(mask):
                raise EngineError(
                    f"{_MASK_LOGPROBS}: {len(value)} log-probs for a mask of {len(mask)} tokens"
                )
            value = value[mask.index(token)] if token in mask else math.nan
        if value is None:
            raise EngineError(NULL_LOGPROB)
        chosen.append(value)
    return number_array(chosen, _MASK_LOGPROBS)


def _native_logprobs(entries: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and log-probs, `[G]` each, of `[[log-prob, token id, text or None], ...]`."""
    refuse_none_sampled(entries, "output_token_logprobs")
    if not isinstance(entries, list) or not all(
        isinstance(entry, (list, tuple)) and len(entry) >= 2 for entry in entries
    ):
        raise EngineError("output_token_logprobs must be a list of [log-prob, token id, text]")
    if any(entry[0] is None for entry in entries):
        raise EngineError(NULL_LOGPROB)
    name = "output_token_logprobs"
    return (
        token_array([entry[1] for entry in entries], name),
        number_array([entry[0] for entry in entries], name),
    )


def _rows(text: Any, num_tokens: int, start: int, shape: ModelShape) -> np.ndarray:
    """The ids of all hidden layers from token `start` on, `[T, Y, K]`, out of bare bytes.

    Only the number of bytes says which token is the first. Example: 10 tokens, 5 layers, top-4, and
    a request with a start of 4. 100 ids are 5 rows, from token 4 on. 180 ids are 9 rows, from token
    0 on; the first 4 rows are dropped. 0.5.8 to 0.5.11 ignore `routed_experts_start_len`.
    """
    if text is None:
        raise EngineError(
            "no routed_experts; start the server with --enable-return-routed-experts, ask with "
            "return_routed_experts true"
        )
    flat = bare_array(text, "<i4", "routed_experts")
    layers, topk = shape.num_hidden_layers, shape.topk
    rows, rest = divmod(flat.size, layers * topk)
    whole, asked = num_tokens - 1, num_tokens - 1 - start
    if rest:
        raise EngineError(
            f"routed_experts: {flat.size} ids are no whole number of rows of {layers} layers and "
            f"top-{topk}: {ANOTHER_MODEL}"
        )
    if rows not in (whole, asked):
        expected = f"{asked} rows from token {start} on" + (
            f", or {whole} rows from token 0 on" if start else ""
        )
        raise EngineError(
            f"routed_experts: {rows} rows of {layers} layers and top-{topk}; {num_tokens} tokens "
            f"have {expected}{row_cause(rows, whole)}"
        )
    rows_TYK = flat.reshape(rows, layers, topk)
    return rows_TYK if rows == asked else rows_TYK[start:]
