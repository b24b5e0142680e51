"""The request for the log-probs and the routes of given tokens, and how its answer is read.

Shape suffixes (docs/glossary.md): G, K, L, N, T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.requests import build_request
from megatron_r3.data.engines import decode_increments
from megatron_r3.data.engines.body import number_array
from megatron_r3.data.engines.shape import EngineError, ModelShape, naming
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
    dialect: str, model: str, ids: list[int], with_prompt: bool
) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for the routes of some tokens and the likeliest next token.

    Args:
        dialect: the server's kind of requests: "vllm" or "sglang".
        model: the name under which vLLM serves the model.
        with_prompt: whether to ask for the log-probs of `ids` too. If so, an engine computes all
            tokens anew; if not, the engine may use its prefix cache.
    """
    prompt, likeliest = Prompt("the probe", 0, ids, {}), Sampling(max_tokens=1, temperature=0.0)
    path, body = build_request(dialect, prompt, likeliest, None, model)
    if with_prompt:
        body |= {"prompt_logprobs": 0} if dialect == "vllm" else {"logprob_start_len": 0}
    return path, body


def read_answer(
    answer: Any, body: Mapping[str, Any], dialect: str, shape: ModelShape, where: str
) -> Asked:
    """Read a server's answer to a `probe_request`.

    Raises:
        EngineError: the answer lacks log-probs or routes, or these do not fit tokens or model.
    """
    try:
        (increment,) = decode_increments(dialect, answer, body, shape, where)
        logprobs_N = np.zeros(increment.prompt_length, np.float32)
        with naming(where):
            if "prompt_logprobs" in body:
                values = _vllm_values(answer, body["prompt"])
                logprobs_N[1:] = number_array(values, "prompt_logprobs")
            elif "logprob_start_len" in body:
                values = _sglang_values(answer, body["input_ids"])
                logprobs_N[1:] = number_array(values, "input_token_logprobs")
    except EngineError:
        raise
    except Exception as error:  # JSON of some other service: a list where an object is expected
        raise EngineError(f"{where}: the answer cannot be read ({error!r})") from error
    next_logprob = float(increment.logprobs_G[0])
    return Asked(logprobs_N, increment.routes.ids_LTK, next_logprob)


def _sglang_values(answer: Any, ids: list[int]) -> list[float]:
    entries = answer["meta_info"]["input_token_logprobs"]
    if (named := [entry[1] for entry in entries]) != ids:
        raise EngineError(
            f"input_token_logprobs are of the tokens {said(named)}; {said(ids)} were sent"
        )
    return [entry[0] for entry in entries[1:]]


def _vllm_values(answer: Any, ids: list[int]) -> list[float]:
    # an entry for each token, {"token id": {"logprob": ...}}; the first token's is None
    entries = answer["choices"][0]["prompt_logprobs"]
    return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]
