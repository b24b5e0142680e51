"""What vLLM's Python API returns, `LLM(..., enable_return_routed_experts=True)`, from 0.14 on.

`CompletionOutput.routed_experts` is an int32 array of all hidden layers until 0.20, later of the
forms that a server sends. vLLM itself is not imported: the objects are read by their attributes.

0.14.x returns physical expert ids: where experts were moved (EPLB), they are not the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_r3.engines import body as bodies
from megatron_r3.engines import vllm
from megatron_r3.engines.conversation import Increment, Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.untrusted import quoted


def decode(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    eplb: bool = False,
    version: str | None = None,
) -> list[Sample]:
    """The samples of one `RequestOutput`, in the order of its outputs.

    Args:
        response: a finished `RequestOutput`, of a request with `SamplingParams(logprobs=1)`.
        request: what was asked that the object does not say: `routed_experts_prompt_start`, `n`,
            `max_tokens`; empty for none.
        shape: of the model that the engine runs.
        where: what errors call the request.
        eplb: the engine balances experts (`enable_eplb`).
        version: of vLLM; asked for with `eplb` only.

    Raises:
        EngineError: naming `where` and the output, and token and layer where there is one.
    """
    found = decode_increments(response, request, shape, where, eplb=eplb, version=version)
    return [one.whole() for one in found]


def decode_increments(
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    *,
    eplb: bool = False,
    version: str | None = None,
    cached_rows: str = "refuse",
) -> list[Increment]:
    """What each output tells of its conversation; arguments are those of `decode`.

    Raises:
        EngineError: naming `where` and the output, and token and layer where there is one.
    """
    if eplb:
        bodies.refuse_physical_ids("vLLM", version, (0, 15), where)
    outputs = getattr(response, "outputs", None)
    prompt = getattr(response, "prompt_token_ids", None)
    if not isinstance(outputs, (list, tuple)) or prompt is None:
        raise EngineError(f"{where}: a RequestOutput has outputs and prompt_token_ids")
    if getattr(response, "finished", True) is not True:
        raise EngineError(f"{where}: the request is not finished")
    body = {
        "choices": [_choice(output, where) for output in outputs],
        "prompt_routed_experts": getattr(response, "prompt_routed_experts", None),
    }
    start = bodies.option(request, "routed_experts_prompt_start", 0)
    asked = {
        "max_tokens": bodies.most_tokens(request, where),
        "prompt": list(prompt) if isinstance(prompt, tuple) else prompt,
        "n": bodies.option(request, "n", len(outputs)),
        "routed_experts_prompt_start": start,
    }
    return vllm.decode_increments(body, asked, shape, where, cached_rows=cached_rows)


def _choice(output: Any, where: str) -> dict[str, Any]:
    index = getattr(output, "index", None)
    tokens = getattr(output, "token_ids", None)
    tokens = list(tokens) if isinstance(tokens, tuple) else tokens
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": {
            "token_logprobs": _logprobs(tokens, getattr(output, "logprobs", None), index, where)
        },
        "routed_experts": getattr(output, "routed_experts", None),
        "finish_reason": getattr(output, "finish_reason", None),
    }


def _logprobs(tokens: Any, entries: Any, index: Any, where: str) -> list[Any]:
    """Of each token's `{token id: Logprob}` the sampled token's."""
    where = f"{where}, choice {quoted(index)}"
    if not isinstance(tokens, list) or not isinstance(entries, (list, tuple)):
        raise EngineError(f"{where}: no log-probs; ask with SamplingParams(logprobs=1)")
    if len(tokens) != len(entries) or not all(isinstance(entry, Mapping) for entry in entries):
        raise EngineError(f"{where}: {len(entries)} log-probs for {len(tokens)} response tokens")
    try:
        found = [entry.get(token) for token, entry in zip(tokens, entries, strict=True)]
    except TypeError as error:
        raise EngineError(f"{where}: a response token is no id ({quoted(error)})") from error
    return [getattr(one, "logprob", one) for one in found]
