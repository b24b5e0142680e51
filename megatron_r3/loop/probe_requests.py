"""The request for the log-probs and the routes of given tokens, and how its answer is read.

Shape suffixes (docs/glossary.md): L, N, T, Y, K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_r3.data.engines.body import bare_array, integer_array, number_array
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.replay.words import said


@dataclass(frozen=True)
class Asked:
    """What a sampler answered for one sequence of N tokens.

    Attributes:
        logprobs_N: float32; the first is 0. All are 0 if the request did not ask for them.
        routes_LNK: the experts of each token.
        next_logprob: the log-prob of the likeliest token after the sequence.
    """

    logprobs_N: np.ndarray
    routes_LNK: np.ndarray
    next_logprob: float


def probe_request(
    engine: str, model: str, ids: list[int], with_prompt: bool
) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for the routes of some tokens and the likeliest next token.

    Args:
        model: the name under which vLLM serves the model.
        with_prompt: whether to ask for the log-probs of `ids` too. If so, an engine computes all
            tokens anew; if not, the engine may use its prefix cache.
    """
    if engine == "vllm":
        body: dict[str, Any] = {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return "/v1/completions", body | ({"prompt_logprobs": 0} if with_prompt else {})
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "return_routed_experts": True,
        "stream": False,
    }
    return "/generate", body | ({"logprob_start_len": 0} if with_prompt else {})


def read_answer(
    answer: Any, body: Mapping[str, Any], engine: str, shape: ModelShape, where: str
) -> Asked:
    """Read a server's answer to a `probe_request`.

    Raises:
        EngineError: the answer lacks a field, or has another number of tokens or layers.
    """
    read = _vllm if engine == "vllm" else _sglang
    try:
        ids, values, rows_TYK, logprob = read(answer, body, shape)
    except EngineError as error:
        raise EngineError(f"{where}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"{where}: the answer lacks log-probs or routes, or has them in another form "
            f"({error!r})"
        ) from error
    if len(rows_TYK) < len(ids):
        raise EngineError(
            f"{where}: {len(rows_TYK)} rows of routes for {len(ids)} tokens; expected one for each"
        )
    if rows_TYK.shape[1] == shape.num_hidden_layers:
        rows_TYK = rows_TYK[:, list(shape.moe_layers)]
    if rows_TYK.shape[1:] != (len(shape.moe_layers), shape.topk):
        raise EngineError(
            f"{where}: routes of shape {rows_TYK.shape} (tokens, layers, top-k); the model has "
            f"{shape.num_hidden_layers} layers, {len(shape.moe_layers)} of them MoE with top-"
            f"{shape.topk}"
        )
    logprobs_N = np.zeros(len(ids), np.float32)
    if values is not None:
        if len(values) != len(ids) - 1:
            raise EngineError(
                f"{where}: {len(values)} log-probs for {len(ids)} prompt tokens; expected one for "
                "each but the first"
            )
        logprobs_N[1:] = number_array(values, "the prompt's log-probs")
    return Asked(logprobs_N, rows_TYK[: len(ids)].transpose(1, 0, 2), float(logprob))


_Read = tuple[list[int], "list[float] | None", np.ndarray, float]


def _sglang(answer: Any, body: Mapping[str, Any], shape: ModelShape) -> _Read:
    meta, ids, values = answer["meta_info"], body["input_ids"], None
    logprob = meta["output_token_logprobs"][0][0]
    if "logprob_start_len" in body:
        entries = meta["input_token_logprobs"]
        if (named := [entry[1] for entry in entries]) != ids:
            raise EngineError(
                f"input_token_logprobs are of the tokens {said(named)}; {said(ids)} were sent"
            )
        values = [entry[0] for entry in entries[1:]]
    flat = bare_array(meta["routed_experts"], "<i4", "routed_experts")
    return ids, values, flat.reshape(-1, shape.num_hidden_layers, shape.topk), logprob


def _vllm(answer: Any, body: Mapping[str, Any], shape: ModelShape) -> _Read:
    choice, ids, values = answer["choices"][0], body["prompt"], None
    if "prompt_logprobs" in body:
        entries = choice["prompt_logprobs"]
        # an entry for each token, {"token id": {"logprob": ...}}; the first token's is None
        values = [
            entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)
        ]
    rows_TYK = integer_array(choice["routed_experts"], "routed_experts")
    return ids, values, rows_TYK, choice["logprobs"]["token_logprobs"][0]
