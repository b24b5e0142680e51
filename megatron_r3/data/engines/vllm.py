"""Decodes what vLLM returns with `--enable-return-routed-experts`: JSON, or Python objects.

A server sends routes on /v1/completions, /v1/chat/completions and /inference/v1/generate. The
request must have `return_token_ids` and `logprobs`. Routes are base64 of a `.npy`.

The Python API returns routes, too: `LLM(..., enable_return_routed_experts=True)`. Its
`CompletionOutput.routed_experts` may be an array (until 0.20: int32, of all hidden layers) or
base64 of a `.npy`. 0.14 is too old: with EPLB its ids are not the model's. vLLM itself is not
imported: the objects are read by their attributes.

Shape suffixes (docs/glossary.md): G, N.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_r3.data.engines.body import (
    choices_in_order,
    id_array,
    integer_array,
    most_tokens,
    option,
    prompt_array,
    prompts,
    sampled_logprobs,
    whole_number,
)
from megatron_r3.data.engines.checks import (
    STREAMED,
    checked_routes,
    checked_tokens,
    refuse_half_way,
    refuse_response,
)
from megatron_r3.data.engines.conversation import Increment, read_choices
from megatron_r3.data.engines.said import kept_sets, read_said, version_spans
from megatron_r3.data.engines.shape import EngineError, ModelShape, naming
from megatron_r3.replay.routes import Routes
from megatron_r3.replay.words import quoted

# A response of /v1/completions, without the fields that are not read here. Base64 of a .npy begins
# with "k05VTVBZ":
#
#   {"model": "tiny", "choices": [{
#       "index": 0, "finish_reason": "length", "prompt_token_ids": [5, 9], "token_ids": [7, 3],
#       "logprobs": {"token_logprobs": [-0.5, -1.2], "tokens": ["token_id:7", "token_id:3"]},
#       "routed_experts": "k05VTVBZ..."}]}              3 rows: of the tokens 5, 9 and 7

_ASK_IDS = "ask with return_token_ids true"
# vLLM takes the number of log-probs of a chat from top_logprobs: null there means none
_ASK_LOGPROBS = "ask with logprobs 1 (chat: true, and top_logprobs 0 or left out, not null)"


def decode_increments(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
) -> list[Increment]:
    """The increment of each choice; its routes begin at `routed_experts_prompt_start`.

    Args:
        response: the body that the server returned, or a finished `RequestOutput` of a request
            with `SamplingParams(logprobs=1)`.
        request: the body that was sent. A `RequestOutput` holds the prompt itself. For it only
            `routed_experts_prompt_start`, `n` and `max_tokens` are read; each may be left out.
        shape, where: see `engines.decode`.

    Raises:
        EngineError: naming `where` and, as far as the fault has them, choice, token and layer.
    """
    with naming(where):
        if isinstance(response, str):
            raise EngineError(STREAMED)
        if isinstance(response, Mapping):
            body = response
            refuse_response(body, request)
        else:
            body, request = _from_python(response, request)
        start = whole_number(option(request, "routed_experts_prompt_start", 0), "start")
        count = whole_number(option(request, "n", 1), "n", 1)
        asked = prompts("vllm", request)
        choices = choices_in_order(body.get("choices"), count * len(asked))

    return read_choices(
        *(choices, where, count),
        lambda choice, group: _increment(body, choice, request, asked[group], start, shape),
    )


def _increment(
    body: Mapping[str, Any],
    choice: Mapping[str, Any],
    request: Mapping[str, Any],
    asked: Any,
    start: int,
    shape: ModelShape,
) -> Increment:
    refuse_half_way(choice.get("finish_reason"))
    # completions have the prompt's ids in each choice, chat has them once, beside the choices
    returned = choice.get("prompt_token_ids")
    returned = body.get("prompt_token_ids") if returned is None else returned
    prompt = prompt_array(asked, returned, _ASK_IDS)
    response_G = id_array(choice.get("token_ids"), "token_ids", _ASK_IDS)
    tokens_N = checked_tokens(prompt, response_G, request, shape)
    logprobs_G = sampled_logprobs(choice.get("logprobs"), response_G, _ASK_LOGPROBS, len(prompt))
    if body.get("prompt_routed_experts") is not None:
        raise EngineError(
            "prompt_routed_experts are the form of vLLM 0.21, which loses rows of cached prefixes "
            "and misplaces dense layers: take 0.22 or later"
        )
    routes = decode_routes(choice, len(tokens_N), shape, start)
    # /inference/v1/generate sends a mask if the server has --return-sampling-mask. Such a server
    # needs --logprobs-mode processed_logprobs, so its log-probs are normalised over the mask.
    kept = kept_sets(choice.get("sampling_mask"), "sampling_mask", len(prompt), len(response_G))
    versions_G = version_spans(choice.get("weight_versions"), len(response_G))
    return Increment(
        *(tokens_N, len(prompt), logprobs_G, routes, start),
        kept=kept,
        versions_G=versions_G,
        said=read_said(body, choice),
    )


def decode_routes(
    choice: Mapping[str, Any], num_tokens: int, shape: ModelShape, start: int = 0
) -> Routes:
    """The routes of one choice, from token `start` (`routed_experts_prompt_start`) on.

    Args:
        choice: an entry of a response's `choices`.
        num_tokens: N, of prompt and response together.
        shape: the MoE layers of the model that the server runs.
        start: the token of row 0.

    Raises:
        EngineError: the number of rows, layers or experts of a row is wrong, a dense layer has
            routes, or rows were not captured.
        RoutesError: an id is out of range, or twice in a row.
    """
    routed = choice.get("routed_experts")
    if routed is None:
        raise EngineError("no routed_experts; start the server with --enable-return-routed-experts")
    return checked_routes(integer_array(routed, "routed_experts"), num_tokens, shape, start)


def _from_python(
    response: Any, request: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A `RequestOutput` in the form of the server's JSON: the response, and its request."""
    outputs = getattr(response, "outputs", None)
    prompt = getattr(response, "prompt_token_ids", None)
    if not isinstance(outputs, (list, tuple)) or prompt is None:
        raise EngineError(
            "a response is a JSON object, or a RequestOutput, which has "
            f"outputs and prompt_token_ids; got {type(response).__name__}"
        )
    if getattr(response, "finished", True) is not True:
        raise EngineError("the request is not finished: give its last RequestOutput")
    body = {
        "choices": [_python_choice(output) for output in outputs],
        "prompt_routed_experts": getattr(response, "prompt_routed_experts", None),
    }
    asked = {
        "max_tokens": most_tokens(request),
        "prompt": list(prompt) if isinstance(prompt, tuple) else prompt,
        "n": option(request, "n", len(outputs)),
        "routed_experts_prompt_start": option(request, "routed_experts_prompt_start", 0),
    }
    return body, asked


def _python_choice(output: Any) -> dict[str, Any]:
    index = getattr(output, "index", None)
    tokens = getattr(output, "token_ids", None)
    tokens = list(tokens) if isinstance(tokens, tuple) else tokens
    with naming(f"choice {quoted(index)}"):
        logprobs = _python_logprobs(tokens, getattr(output, "logprobs", None))
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": logprobs},
        "routed_experts": getattr(output, "routed_experts", None),
        "finish_reason": getattr(output, "finish_reason", None),
        "sampling_mask": getattr(getattr(output, "sampling_mask", None), "token_ids", None),
        "weight_versions": getattr(output, "weight_versions", None),
    }


def _python_logprobs(tokens: Any, entries: Any) -> list[Any]:
    """The log-prob of each sampled token.

    An entry `{token id: Logprob}` may have more tokens than the sampled one.
    """
    if not isinstance(tokens, list) or not isinstance(entries, (list, tuple)):
        raise EngineError("no log-probs; ask with SamplingParams(logprobs=1)")
    if len(tokens) != len(entries) or not all(isinstance(entry, Mapping) for entry in entries):
        raise EngineError(f"{len(entries)} log-probs for {len(tokens)} response tokens")
    try:
        sampled = [entry.get(token) for token, entry in zip(tokens, entries, strict=True)]
    except TypeError as error:  # a list cannot be a key
        raise EngineError(f"a response token is no id ({quoted(error)})") from error
    return [getattr(one, "logprob", one) for one in sampled]
