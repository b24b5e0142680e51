"""Makes the request for one sample, and bounds the size of its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt, PromptError
from megatron_r3.data.engines.shape import ModelShape

# Bytes that an answer may have; real answers have about a tenth.
_OF_ANY_ANSWER = 1 << 20  # names, times, counts: whatever a server sends beside its tokens
_OF_A_TOKEN = 1024  # its id twice, its text, its log-prob, and the same of one alternative
_OF_AN_ID = 14  # twice the longest text of an expert id in a nested list, `65535, `
_OF_A_KEPT_ID = 16  # `2147483647, ` and some blanks
_MOST_KEPT = 65_536  # kept ids of a token, if no vocabulary is known; SGLang's default is 4096
_TEMPLATE_TOKENS = 4096  # tokens that a chat template adds to the messages


def build_request(
    engine: str,
    prompt: Prompt,
    sampling: Sampling,
    seed: int | None,
    model: str,
    start: int = 0,
    stop: Sequence[str] = (),
) -> tuple[str, dict[str, Any]]:
    """The path and body of a request that asks for one sample: token ids, log-probs and routes.

    The request asks for kept sets if `sampling` wants them; vLLM returns kept sets only at
    /inference/v1/generate. Each sample has its own request, and so its own seed and repetitions.

    Args:
        seed: the sample's seed; None leaves the choice to the engine. Megatron's server takes none.
        model: the name under which the server has the model. If it is empty, the request names no
            model, and the server takes its only one.
        start: the token of the first row to return. Megatron's server returns all rows.
        stop: texts at which a response ends. Megatron's server takes none.

    Raises:
        PromptError: this engine does not take such a prompt.
    """
    if engine == "megatron":
        return _megatron(prompt, sampling)
    path, body, params = (
        _vllm(prompt, sampling, model) if engine == "vllm" else _sglang(prompt, sampling)
    )
    if seed is not None:
        params["seed" if engine == "vllm" else "sampling_seed"] = seed
    if stop:
        params["stop"] = list(stop)
    if start and engine == "vllm":
        params["routed_experts_prompt_start"] = start
    elif start:
        body["routed_experts_start_len"] = start
    return path, body


# the path, the body, and the part of the body that says how to sample
_Asked = tuple[str, dict[str, Any], dict[str, Any]]


def _vllm(prompt: Prompt, sampling: Sampling, model: str) -> _Asked:
    params = {"max_tokens": sampling.max_tokens, "n": 1, **_drawn(sampling, 0)}
    named: dict[str, Any] = {"model": model} if model else {}
    if sampling.wants_kept:  # /v1/completions and /v1/chat return no sampling masks
        if prompt.tokens is None:
            raise PromptError(
                f"{prompt.where}: vLLM returns kept sets for prompts of token ids alone; give "
                "`prompt` as token ids"
            )
        # output_mode has vLLM 0.32 and later return the text too; 0.30 ignores it.
        params |= {"logprobs": 1}
        body = {"token_ids": prompt.tokens, "sampling_params": params, "output_mode": "text"}
        return "/inference/v1/generate", body | named, params
    # Two ids may have the same text, so each log-prob comes with "token_id:523" instead of " the".
    params |= {"return_token_ids": True, "return_tokens_as_token_ids": True, **named}
    if prompt.is_chat:
        params |= {"messages": prompt.content, "logprobs": True}
        return "/v1/chat/completions", params, params
    params |= {"prompt": prompt.content, "logprobs": 1}
    return "/v1/completions", params, params


def _drawn(sampling: Sampling, all_tokens: int) -> dict[str, Any]:
    """How vLLM and SGLang are to draw a token; `all_tokens` is the top-k that cuts nothing off."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or all_tokens,
        # These values change nothing. Without them vLLM takes those of generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def _sglang(prompt: Prompt, sampling: Sampling) -> _Asked:
    if prompt.tokens is None:
        raise PromptError(
            f"{prompt.where}: with SGLang's /generate a prompt is a list of token ids, no text and "
            "no chat; give `prompt` as token ids"
        )
    params = {"max_new_tokens": sampling.max_tokens, **_drawn(sampling, -1)}
    body = {
        "input_ids": prompt.tokens,
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": True,
        "stream": False,
    }
    if sampling.wants_kept:
        body["return_sampling_mask"] = True
    return "/generate", body, params


def _megatron(prompt: Prompt, sampling: Sampling) -> tuple[str, dict[str, Any]]:
    """The path and body for Megatron's server, which takes no seed: it draws the tokens of all
    requests from one stream of random numbers.
    """
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        # 0 switches top-p off. 1 does not: rounded probabilities may sum to more than 1, and the
        # tokens after the sum has passed 1 are cut. Upstream also refuses 1 together with a top-k.
        "top_p": sampling.top_p if sampling.top_p < 1 else 0.0,
        "top_k": sampling.top_k,
    }
    if prompt.is_chat:
        chat = {"messages": prompt.content, "logprobs": True, "return_tokenized_data": True}
        return "/v1/chat/completions", {**body, **chat, "n": 1}
    return "/v1/completions", {**body, "prompt": prompt.content, "logprobs": 0}


def answer_limit(shape: ModelShape, prompt: Prompt, sampling: Sampling) -> int:
    """The largest number of bytes that the answer to a request for one sample may have.

    Example: 48 layers, top-8, a prompt of 1,000 tokens and 1,024 sampled tokens: 14 MB. vLLM's
    routes in base64 and its log-probs take 1.3 MB of them.
    """
    if prompt.tokens is not None:
        prompt_tokens = len(prompt.tokens)
    else:  # a token of a text has at least one byte of the text
        prompt_tokens = len(json.dumps(prompt.content)) + _TEMPLATE_TOKENS
    of_a_row = _OF_AN_ID * shape.num_hidden_layers * shape.topk
    limit = _OF_ANY_ANSWER + (prompt_tokens + sampling.max_tokens) * (_OF_A_TOKEN + of_a_row)
    if sampling.wants_kept:  # tokens as likely as the last of the top-k are kept too
        kept = min(2 * sampling.top_k, shape.vocab_size or _MOST_KEPT)
        limit += sampling.max_tokens * _OF_A_KEPT_ID * kept
    return limit
