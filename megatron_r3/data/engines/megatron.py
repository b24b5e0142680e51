"""Decodes what Megatron-LM's inference server returns with `moe_enable_routing_replay`.

From 0.17 on, the server puts `moe_topk_indices` into each choice of /v1/completions and
/v1/chat/completions: nested lists in 0.17, `["ndarray", {data, dtype}]` with int16 from 0.18 on.
An unpatched server sends all MoE layers: the layers of the decoder, then the layers of multi-token
prediction (MTP). A patched server sends the layers of the decoder alone, as bytes:
`["ndarray", {data, dtype, shape}]`. 0.17's /v1/completions returns no token ids and cannot be read.

Shape suffixes (docs/glossary.md): G, K, L, N, T.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.data.engines.body import (
    choices_in_order,
    id_array,
    integer_array,
    number_array,
    option,
    prompt_array,
    prompts,
    shaped_array,
    whole_number,
)
from megatron_r3.data.engines.checks import (
    checked_routes,
    checked_tokens,
    refuse_half_way,
    refuse_response,
)
from megatron_r3.data.engines.conversation import Increment, read_choices
from megatron_r3.data.engines.said import read_said
from megatron_r3.data.engines.shape import EngineError, ModelShape, naming
from megatron_r3.replay.words import quoted, said

# A choice of /v1/completions from 0.18 on. Left out are its text, finish_reason and policy_epoch,
# which are read too, and the fields that are not read:
#
#   {"index": 0, "prompt_token_ids": [5, 9], "generation_token_ids": [7, 3], "num_evictions": 0,
#    "generation_log_probs": [-0.5, -1.2],
#    "moe_topk_indices": ["ndarray", {"data": [3 rows of L lists of K ids], "dtype": "int16"}]}
#
# Patched: ["ndarray", {"data": "AQADAA...", "dtype": "int16", "shape": [3, L, K]}], in base64.

_DTYPES = ("int16", "int32", "int64")
_ASK_IDS = "in a chat ask with return_tokenized_data true; Megatron 0.17's completions have none"
_ASK_LOGPROBS = "ask with logprobs 1 (chat: true)"


def decode_increments(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    num_mtp_layers: int = 0,
) -> list[Increment]:
    """The increment of each choice; the routes always start at token 0.

    Args:
        response: the body that the server returned.
        request: the body that was sent.
        shape, where: see `engines.decode`.
        num_mtp_layers: how many MTP layers with MoE the model of an unpatched server has; their
            routes come last and are dropped. 0 for a patched server, which does not send them.

    Raises:
        EngineError: naming `where` and, as far as the fault has them, choice, token and layer.
    """
    with naming(where):
        if not isinstance(response, Mapping):  # the body of an error is a bare text
            raise EngineError(f"the server refused the request: {said(response)}")
        refuse_response(response, request, any_model="EMPTY")
        asked = prompts("megatron", request)
        # /v1/completions ignores n: there is one choice for each prompt
        count = whole_number(option(request, "n", 1) if "messages" in request else 1, "n", 1)
        choices = choices_in_order(response.get("choices"), count * len(asked))

    return read_choices(
        *(choices, where, count),
        lambda choice, group: _increment(
            response, choice, request, asked[group], shape, num_mtp_layers
        ),
    )


def _increment(
    body: Mapping[str, Any],
    choice: Mapping[str, Any],
    request: Mapping[str, Any],
    asked: Any,
    shape: ModelShape,
    num_mtp_layers: int,
) -> Increment:
    refuse_half_way(choice.get("finish_reason"))
    # chat: 0.19 has ids and log-probs in the message only, 0.17 has them in the choice too
    message = choice.get("message")
    fields = {**(message if isinstance(message, Mapping) else {}), **choice}
    evictions = fields.get("num_evictions")
    if evictions and choice.get("moe_topk_indices") is None:
        raise EngineError(
            f"the server evicted and resumed the request {quoted(evictions, 20)} times, and lost "
            "its routes; a server with the patches keeps such routes (make apply)"
        )
    prompt = prompt_array(asked, fields.get("prompt_token_ids"), _ASK_IDS)
    response_G = id_array(fields.get("generation_token_ids"), "generation_token_ids", _ASK_IDS)
    tokens_N = checked_tokens(prompt, response_G, request, shape)
    # prompt_moe_topk_indices is not looked at: it repeats the first rows of moe_topk_indices, and
    # from 0.18 on the server slices the pair ["ndarray", {...}] as if the pair were the rows
    rows_TLK = _rows(choice.get("moe_topk_indices"), shape, num_mtp_layers)
    values = fields.get("generation_log_probs")
    if not isinstance(values, list) or not values:
        raise EngineError(f"no log-probs; {_ASK_LOGPROBS}")
    logprobs_G = number_array(values, "generation_log_probs")
    routes = checked_routes(rows_TLK, len(tokens_N), shape)
    versions_G = policy_versions(fields.get("policy_epoch"), len(prompt), len(response_G))
    told = read_said(body, choice, [] if versions_G is None else versions_G.tolist())
    return Increment(tokens_N, len(prompt), logprobs_G, routes, versions_G=versions_G, said=told)


def policy_versions(epochs: Any, prompt_length: int, num_sampled: int) -> np.ndarray | None:
    """The version of the weights that sampled each token, int64 `[G]`.

    Example: `[[0, 3], [6, 4]]` after a prompt of 5 tokens. The first forward pass of version 4 had
    token 6 as its input. So version 3 sampled the tokens 5 and 6, and version 4 sampled token 7.

    Args:
        epochs: the response's `policy_epoch`, pairs of first token and version, ascending; None if
            the server does not count versions. Then the result is None too.

    Raises:
        EngineError: `epochs` is not a list of such pairs.
    """
    if not epochs:
        return None
    pairs: list[Any] = epochs if isinstance(epochs, list) else [epochs]
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise EngineError(
                f"policy_epoch: expected pairs of token and version; got {said(pair)}"
            )
    firsts = [whole_number(first, "policy_epoch: a first token") for first, _ in pairs]
    numbers = [whole_number(number, "policy_epoch: a version") for _, number in pairs]
    if firsts[0] != 0 or firsts != sorted(firsts):
        raise EngineError(f"policy_epoch: first tokens must ascend from 0; got {said(firsts)}")
    # the forward pass of a token samples the token behind it
    forwarded_G = np.arange(prompt_length - 1, prompt_length - 1 + num_sampled)
    which_G = np.searchsorted(firsts, forwarded_G, side="right") - 1
    return np.array(numbers, np.int64)[which_G]


def _rows(value: Any, shape: ModelShape, num_mtp_layers: int) -> np.ndarray:
    """The ids of the decoder's layers, `[T, L, K]`."""
    name = "moe_topk_indices"
    if value is None:
        raise EngineError(
            f"the response has no {name}; start the server with --moe-enable-routing-replay, on a "
            "tree with the patches (on other trees many requests lose their routes)"
        )
    rows_TLK = routes_array(value, name)
    layers, num_moe = rows_TLK.shape[1], len(shape.moe_layers)
    if layers != num_moe + num_mtp_layers:
        raise EngineError(
            f"{name}: {layers} layers; the model has {num_moe} MoE layers and {num_mtp_layers} MTP "
            "layers (the argument num_mtp_layers)"
        )
    return rows_TLK[:, :num_moe]


def routes_array(value: Any, name: str) -> np.ndarray:
    """The ids `[T, L, K]` of all MoE layers in the response.

    Args:
        value: has one of three forms: nested lists, `["ndarray", {data, dtype}]` with nested lists
            as data, or `["ndarray", {data, dtype, shape}]` with base64 as data.
        name: the field that has the ids.

    Raises:
        EngineError: `value` has another form; the message calls it `name`.
    """
    tagged = isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)
    if not tagged:
        return integer_array(value, name)
    kind, content = value
    keys = set(content) if isinstance(content, Mapping) else set()
    if kind != "ndarray" or not {"data", "dtype"} <= keys <= {"data", "dtype", "shape"}:
        raise EngineError(
            f"{name}: expected [ndarray, {{data, dtype}}], with or without a shape; got "
            f"{quoted(kind, 20)} with the keys {quoted(list(keys))}"
        )
    dtype = content["dtype"]
    if dtype not in _DTYPES:
        raise EngineError(
            f"{name}: ids must be integers ({', '.join(_DTYPES)}); got {quoted(dtype)}"
        )
    if "shape" in content:
        return shaped_array(content["data"], dtype, content["shape"], name)
    array = integer_array(content["data"], name)
    if array.size and not np.iinfo(dtype).min <= array.min() <= array.max() <= np.iinfo(dtype).max:
        raise EngineError(f"{name}: an id does not fit {dtype}")
    return array
