"""What an SGLang server returns with `--enable-return-routed-experts`, decoded into samples.

Asked with `return_routed_experts`, from 0.5.7 on /generate (`meta_info.routed_experts`, of every
sample), from 0.5.9 on OpenAI's routes (`sglext.routed_experts`, of the first choice only; with
`return_meta_info`, from 0.5.18, of every choice). It is base64 of bare little-endian int32, all
hidden layers, and says neither shape nor start: `routed_experts_start_len` is taken from 0.5.8 on
and ignored until 0.5.12, so the size tells which rows they are.

Up to 0.5.9 the ids are physical: where experts were moved (EPLB), they are not the model's.

Shape suffixes: T rows, N tokens, P prompt tokens, G response tokens, H hidden layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines import body as bodies
from megatron_r3.engines.body import bare_array, number_array, token_array
from megatron_r3.engines.checks import checked_routes, checked_tokens
from megatron_r3.engines.conversation import Increment, Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.untrusted import quoted

PROMPT_FIELDS = ("input_ids", "text", "prompt")  # of a request: the first that is there counts

_ASK_PROMPT = "send input_ids, not text"
_ASK_IDS = "ask with return_token_ids true (0.5.23; chat: return_prompt_token_ids), or /generate"
_ASK_LOGPROBS = "ask with return_logprob true (OpenAI's routes: logprobs 1, chat: true)"


def decode(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    eplb: bool = False,
    version: str | None = None,
    accept_retracted: bool = False,
) -> list[Sample]:
    """The samples of one response, in the order of the request: each prompt's `n` together.

    Args:
        response: the body that the server returned.
        request: the body that was sent.
        shape: of the model that the server runs.
        where: what errors call the request.
        eplb: the server balances experts (`--enable-eplb`, `--init-expert-location`).
        version: of SGLang; asked for with `eplb` only.
        accept_retracted: take samples that were retracted and prefilled again: the routes of their
            first tokens are the new ones, their log-probs the old ones.

    Returns:
        One sample for each prompt and n; `group` is the index of its prompt in the request.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one; routes
            that start late (`routed_experts_start_len`) are for `decode_increments`.
    """
    found = decode_increments(
        response, request, shape, where,
        eplb=eplb, version=version, accept_retracted=accept_retracted,
    )  # fmt: skip
    return [one.whole() for one in found]


def decode_increments(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    eplb: bool = False,
    version: str | None = None,
    accept_retracted: bool = False,
) -> list[Increment]:
    """What each sample of one response tells of its conversation; arguments are those of `decode`.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one.
    """
    if eplb:
        bodies.refuse_physical_ids("SGLang", version, (0, 5, 10), where)
    if isinstance(response, str) or request.get("stream"):
        raise EngineError(f"{where}: a streamed response is not read; ask with stream false")
    prompts = bodies.prompts(request, PROMPT_FIELDS, where)
    count = bodies.whole_number(_samples_of_one(request, where), "n", where, 1)
    start = request.get("routed_experts_start_len")
    start = bodies.whole_number(0 if start is None else start, "start", where)
    items = _items(response, request, count * len(prompts), where)
    found = []
    for i, item in enumerate(items):
        name = f"{where}, choice {i}"
        _refuse_unusable(item["meta_info"], accept_retracted, name)
        found.append(_increment(item, request, prompts[i // count], i // count, start, shape, name))
    return found


def _samples_of_one(request: Mapping[str, Any], where: str) -> Any:
    params = request.get("sampling_params")
    if not isinstance(params, list):
        return bodies.option(request, "n", 1)
    counts = [one.get("n", 1) if isinstance(one, Mapping) else None for one in params]
    if not counts or any(count != counts[0] for count in counts):
        raise EngineError(f"{where}: n differs between the prompts of one request")
    return counts[0]


def _items(
    response: Any, request: Mapping[str, Any], expected: int, where: str
) -> list[dict[str, Any]]:
    """The samples of either form: tokens, prompt, log-probs as OpenAI has them, meta_info."""
    if isinstance(response, Mapping):
        failed = bodies.failure(response)
        if failed:
            raise EngineError(f"{where}: {failed}")
        if "meta_info" not in response:
            bodies.refuse_echo(request, where)
            bodies.refuse_other_model(response, request, where)
            return _openai_items(response, expected, where)
        response = [response]
    if not isinstance(response, list) or len(response) != expected:
        count = len(response) if isinstance(response, list) else type(response).__name__
        raise EngineError(f"{where}: {count} samples; the request asks for {expected}")
    for item in response:
        if not isinstance(item, Mapping) or not isinstance(item.get("meta_info"), Mapping):
            raise EngineError(f"{where}: a sample of /generate has a meta_info")
    return [
        {
            "token_ids": item.get("output_ids"),
            "prompt_token_ids": item.get("prompt_token_ids"),
            "logprobs": None,
            "meta_info": item["meta_info"],
            "hint": _ASK_PROMPT,
        }
        for item in response
    ]


def _openai_items(response: Mapping[str, Any], expected: int, where: str) -> list[dict[str, Any]]:
    extension = response.get("sglext")
    extension = extension if isinstance(extension, Mapping) else {}
    choices = bodies.choices_in_order(response.get("choices"), expected, where)
    outputs = extension.get("output_ids")
    outputs = outputs if isinstance(outputs, list) and len(outputs) == expected else None
    items = []
    for i, choice in enumerate(choices):
        meta = choice.get("meta_info")
        if not isinstance(meta, Mapping):
            if expected > 1:
                raise EngineError(
                    f"{where}: routes of the first of {expected} choices only; ask for one, with "
                    "return_meta_info, or /generate"
                )
            meta = {"routed_experts": extension.get("routed_experts")}
        tokens = next(
            (choice[name] for name in ("token_ids", "response_token_ids") if choice.get(name)),
            outputs[i] if outputs else None,
        )
        prompt = choice.get("prompt_token_ids")
        items.append(
            {
                "token_ids": tokens,
                "prompt_token_ids": extension.get("input_ids") if prompt is None else prompt,
                "logprobs": choice.get("logprobs"),
                "meta_info": {"finish_reason": choice.get("finish_reason"), **meta},
                "hint": _ASK_IDS,
            }
        )
    return items


def _refuse_unusable(meta: Mapping[str, Any], accept_retracted: bool, where: str) -> None:
    bodies.refuse_half_way(meta.get("finish_reason"), where)
    retracted = meta.get("num_retractions", meta.get("total_retractions"))  # 0.5.9 has the latter
    if retracted and not accept_retracted:
        raise EngineError(
            f"{where}: retracted {quoted(retracted, 20)} times: routes of its second prefill "
            "beside log-probs of before; accept_retracted takes it"
        )


def _increment(
    item: Mapping[str, Any],
    request: Mapping[str, Any],
    prompt: Any,
    group: int,
    start: int,
    shape: ModelShape,
    where: str,
) -> Increment:
    meta = item["meta_info"]
    prompt_P = bodies.prompt_array(prompt, item["prompt_token_ids"], item["hint"], where)
    told = meta.get("prompt_tokens")
    if told is not None and told != len(prompt_P):
        raise EngineError(f"{where}: {quoted(told, 20)} prompt tokens; {len(prompt_P)} were sent")
    tokens, logprobs_G = item["token_ids"], None
    if meta.get("output_token_logprobs") is not None:
        sampled_G, logprobs_G = _native_logprobs(meta["output_token_logprobs"], where)
        tokens = sampled_G if tokens is None else tokens
    response_G = bodies.id_array(tokens, "output_ids", item["hint"], where)
    if logprobs_G is None:
        logprobs_G = bodies.sampled_logprobs(
            item["logprobs"], response_G, _ASK_LOGPROBS, where, len(prompt_P)
        )
    elif not np.array_equal(response_G, sampled_G):
        raise EngineError(f"{where}: output_token_logprobs are not those of output_ids")
    tokens_N = checked_tokens(prompt_P, response_G, request, shape, where)
    rows_THK = _rows(meta.get("routed_experts"), len(tokens_N), start, shape, where)
    routes = checked_routes(rows_THK, len(tokens_N), shape, where, start)
    increment = Increment(tokens_N, len(prompt_P), logprobs_G, routes, start, group, where)
    increment.check()
    return increment


def _native_logprobs(entries: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and log-probs of `[[log-prob, token id, text or None], ...]`."""
    if not isinstance(entries, list) or not entries:
        raise EngineError(f"{where}: no log-probs; {_ASK_LOGPROBS}")
    if not all(isinstance(entry, (list, tuple)) and len(entry) >= 2 for entry in entries):
        raise EngineError(f"{where}: output_token_logprobs are [log-prob, token id, text]")
    if any(entry[0] is None for entry in entries):
        raise EngineError(f"{where}: a response token has no log-prob (JSON has no NaN)")
    name = f"{where}: output_token_logprobs"
    return (
        token_array([entry[1] for entry in entries], name),
        number_array([entry[0] for entry in entries], name),
    )


def _rows(text: Any, num_tokens: int, start: int, shape: ModelShape, where: str) -> np.ndarray:
    if text is None:
        raise EngineError(
            f"{where}: no routed_experts; start the server with --enable-return-routed-experts, "
            "ask with return_routed_experts true"
        )
    flat = bare_array(text, "<i4", f"{where}: routed_experts")
    layers, topk = shape.num_hidden_layers, shape.topk
    rows, rest = divmod(flat.size, layers * topk)
    whole, asked = num_tokens - 1, num_tokens - 1 - start
    if rest or rows not in (whole, asked):
        raise EngineError(
            f"{where}: {flat.size} expert ids fit neither {asked} rows from token {start} on nor "
            f"{whole} from token 0 on, of {layers} layers and top-{topk}"
        )
    rows_THK = flat.reshape(rows, layers, topk)
    # a server before 0.5.12 ignores the start
    return rows_THK[start:] if rows != asked else rows_THK
