"""What a vLLM server returns with `--enable-return-routed-experts`, decoded into samples.

/v1/completions, /v1/chat/completions and /inference/v1/generate, not streamed, asked with
`return_token_ids` and `logprobs`. Routes come as base64 of a `.npy` (0.22 on), as nested lists with
the prompt's rows apart (0.21), or as an array (the Python API). Every fault is an `EngineError`: no
row is ever guessed.

Shape suffixes: T rows, N tokens, G response tokens, L MoE layers, H hidden layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines.array import integer_array, token_array
from megatron_r3.engines.checks import checked_routes
from megatron_r3.engines.sample import Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.routes import Routes

__all__ = ["decode", "decode_routes"]


def decode(
    response: Mapping[str, Any], request: Mapping[str, Any], shape: ModelShape, where: str
) -> list[Sample]:
    """The samples of one response, in the order of its choices.

    Args:
        response: the body that the server returned.
        request: the body that was sent.
        shape: of the model that the server runs.
        where: what errors call the request.

    Returns:
        One sample for each choice; `group` is the index of its prompt in the request.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one.
    """
    _refuse_unusable(response, request, where)
    count = _integer(_option(request, "n", 1), "n", where)
    prompts = _prompts(request, where)
    choices = _in_order(response["choices"], count * len(prompts), where)
    return [
        _sample(response, choice, prompts[i // count], i // count, shape, f"{where}, choice {i}")
        for i, choice in enumerate(choices)
    ]


def decode_routes(
    choice: Mapping[str, Any], num_tokens: int, shape: ModelShape, where: str, start: int = 0
) -> Routes:
    """The routes of one choice, from token `start` (`routed_experts_prompt_start`) on.

    Args:
        choice: an entry of a response's `choices`.
        num_tokens: N, prompt and response.
        shape: of the model that the server runs.
        where: what errors call the choice.
        start: the first token that has a row.

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
    return checked_routes(
        integer_array(routed, f"{where}: routed_experts"), num_tokens, shape, where, start
    )


def _refuse_unusable(response: Mapping[str, Any], request: Mapping[str, Any], where: str) -> None:
    if not isinstance(response, Mapping) or "_raw_text" in response or request.get("stream"):
        raise EngineError(f"{where}: a streamed response carries no routes; ask with stream false")
    failed = response.get("error") or response.get("detail")
    if failed:
        text = failed.get("message", failed) if isinstance(failed, Mapping) else failed
        raise EngineError(f"{where}: the server refused the request: {text}")
    if not isinstance(response.get("choices"), list) or not response["choices"]:
        raise EngineError(f"{where}: the response has no choices")
    if request.get("echo"):
        raise EngineError(f"{where}: echo mixes prompt and response; ask with echo false")
    start = _integer(_option(request, "routed_experts_prompt_start", 0), "start", where)
    if start != 0:
        raise EngineError(
            f"{where}: routes start at token {start}: stitching increments is not supported yet; "
            "ask with routed_experts_prompt_start 0"
        )


def _option(request: Mapping[str, Any], name: str, default: int) -> Any:
    value = request.get(name)
    if value is None:
        value = (request.get("sampling_params") or {}).get(name)
    return default if value is None else value


def _integer(value: Any, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"{where}: {name} is a whole number; got {value!r}")
    return value


def _prompts(request: Mapping[str, Any], where: str) -> list[list[int] | None]:
    """Token ids of each prompt of a request; None for a text or a chat."""
    if "messages" in request:
        return [None]
    prompt = request.get("token_ids", request.get("prompt"))
    if isinstance(prompt, str):
        return [None]
    if not isinstance(prompt, list) or not prompt:
        raise EngineError(f"{where}: the request has no prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [None if isinstance(one, str) else one for one in prompt]


def _in_order(choices: list[Any], expected: int, where: str) -> list[Any]:
    if not all(isinstance(choice, Mapping) for choice in choices):
        raise EngineError(f"{where}: a choice is not an object")
    indices = [_integer(choice.get("index"), "a choice's index", where) for choice in choices]
    if sorted(indices) != list(range(expected)):
        raise EngineError(
            f"{where}: choices {sorted(indices)}; the request asks for {expected}, 0 to "
            f"{expected - 1}"
        )
    return [choices[indices.index(i)] for i in range(expected)]


def _sample(
    response: Mapping[str, Any],
    choice: Mapping[str, Any],
    prompt: list[int] | None,
    group: int,
    shape: ModelShape,
    where: str,
) -> Sample:
    prompt_ids = _prompt_ids(response, choice, prompt, where)
    response_ids = _ids(choice.get("token_ids"), "token_ids", where)
    tokens_N = np.concatenate([prompt_ids, response_ids])
    logprobs_G = _logprobs(choice.get("logprobs"), where)
    if response.get("prompt_routed_experts") is not None:
        rows_THK = _prompt_and_response_rows(response, choice, len(prompt_ids), shape, where)
        routes = checked_routes(rows_THK, len(tokens_N), shape, where, 0)
    else:
        routes = decode_routes(choice, len(tokens_N), shape, where)
    sample = Sample(tokens_N, len(prompt_ids), logprobs_G, routes, group)
    sample.check(where)
    return sample


def _ids(value: Any, name: str, where: str) -> np.ndarray:
    if value is None:
        raise EngineError(f"{where}: no {name}; ask with return_token_ids true")
    return token_array(value, f"{where}: {name}")


def _prompt_ids(
    response: Mapping[str, Any], choice: Mapping[str, Any], prompt: list[int] | None, where: str
) -> np.ndarray:
    returned = choice.get("prompt_token_ids")
    returned = response.get("prompt_token_ids") if returned is None else returned
    if prompt is None:
        return _ids(returned, "prompt_token_ids", where)
    asked = _ids(prompt, "prompt", where)
    if returned is not None:
        got = _ids(returned, "prompt_token_ids", where)
        if not np.array_equal(asked, got):
            raise EngineError(f"{where}: prompt_token_ids are not the prompt of the request")
    return asked


def _logprobs(logprobs: Any, where: str) -> np.ndarray:
    values = None
    if isinstance(logprobs, Mapping):
        values = logprobs.get("token_logprobs")
        if values is None and isinstance(logprobs.get("content"), list):
            values = [entry.get("logprob") for entry in logprobs["content"]]
    if not isinstance(values, list) or not values:
        raise EngineError(f"{where}: no log-probs; ask with logprobs 1 (chat: true)")
    if not all(isinstance(value, (int, float)) for value in values):
        raise EngineError(f"{where}: a response token has no log-prob")
    return np.asarray(values, np.float32)


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
    if not choice.get("routed_experts"):  # one response token: no row of its own
        return prompt_THK
    response_THK = integer_array(choice["routed_experts"], f"{where}: routed_experts")
    if response_THK.shape[1:] != prompt_THK.shape[1:]:
        raise EngineError(
            f"{where}: prompt rows are {prompt_THK.shape[1:]}, response rows "
            f"{response_THK.shape[1:]} [layers, topk]"
        )
    return np.concatenate([prompt_THK, response_THK])
