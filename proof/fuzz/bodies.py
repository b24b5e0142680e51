"""Response bodies around made-up samples, as the servers of vLLM, SGLang and Megatron write them.

The fields were taken from the recorded responses in tests/data/vllm and from
tests/support/engine_bodies.py.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from megatron_r3.data.engines.shape import ModelShape

VOCABULARY = 64
EVERY_LAYER = ModelShape(16, 4, (0, 1, 2), 3, VOCABULARY)
SHAPE = ModelShape(16, 4, (1, 2, 4), 5, VOCABULARY)


@dataclass
class Choice:
    """One sample of an answer. Each value may be an impossible one.

    Attributes:
        rows: the expert ids, rows x hidden layers x top-k, or what is sent in their place.
        names: what the log-probs call their tokens. None means that they are called by their ids.
        reason: why the sample ended.
    """

    tokens: list[Any]
    logprobs: list[Any]
    rows: Any
    names: list[Any] | None = None
    reason: Any = "length"


@dataclass
class Answer:
    """What a server answers to one prompt: `n` choices."""

    prompt: list[int]
    choices: list[Choice]
    returned_prompt: Any = None
    model: Any = "tiny"
    max_tokens: int = 8
    extra: dict[str, Any] = field(default_factory=dict)


def make_rows(rng: random.Random, rows: int, shape: ModelShape) -> np.ndarray:
    """Made-up ids, int32, rows x hidden layers x top-k; those of dense layers are zero."""
    numbers = np.random.default_rng(rng.getrandbits(64))
    ids = numbers.random((rows, shape.num_hidden_layers, shape.num_experts)).argsort(-1)
    ids = ids[..., : shape.topk].astype(np.int32)
    ids[:, [i for i in range(shape.num_hidden_layers) if i not in shape.moe_layers]] = 0
    return ids


def make_answer(rng: random.Random, shape: ModelShape, choices: int) -> Answer:
    """An answer with a made-up prompt and possible samples of it."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 7))]
    answer = Answer(prompt, [])
    for _ in range(choices):
        count = rng.randint(1, 6)
        tokens = [rng.randrange(VOCABULARY) for _ in range(count)]
        logprobs = [rng.choice((0.0, -rng.random(), -8 * rng.random(), -60.0)) for _ in tokens]
        rows = make_rows(rng, len(prompt) + count - 1, shape)
        answer.choices.append(Choice(tokens, logprobs, rows))
    return answer


# -- the encodings of routes


def npy(rows: Any) -> Any:
    """vLLM from 0.22 on: a `.npy` file in base64; its ids are uint8 where they fit."""
    if not isinstance(rows, np.ndarray):
        return rows
    stream = io.BytesIO()
    small = rows.dtype.kind == "i" and rows.size and rows.min() >= 0 and rows.max() < 256
    np.save(stream, rows.astype(np.uint8) if small else rows)
    return base64.b64encode(stream.getvalue()).decode()


def int32(rows: Any) -> Any:
    """SGLang: the bytes of an int32 tensor in base64, without its shape."""
    if not isinstance(rows, np.ndarray):
        return rows
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def _plain(rows: Any) -> Any:
    return rows.tolist() if isinstance(rows, np.ndarray) else rows


# -- the parts of a body in the form of OpenAI's API


def _names(choice: Choice) -> list[Any]:
    return [f"token_id:{one}" for one in choice.tokens] if choice.names is None else choice.names


def _listed(choice: Choice) -> dict[str, Any]:
    return {
        "text_offset": [0] * len(choice.tokens),
        "token_logprobs": choice.logprobs,
        "tokens": _names(choice),
        "top_logprobs": [{name: value} for name, value in zip(map(str, _names(choice)),
                                                              choice.logprobs, strict=False)],
    }  # fmt: skip


def _content(choice: Choice) -> dict[str, Any]:
    pairs = zip_longest(_names(choice)[: len(choice.logprobs)], choice.logprobs, fillvalue="odd")
    return {"content": [{"token": n, "logprob": v, "bytes": None} for n, v in pairs]}


def _openai(answer: Answer, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"id": "b2b8", "object": kind, "created": 1795225217, "model": answer.model}
    return {
        **body,
        "choices": choices,
        "usage": {"prompt_tokens": len(answer.prompt)},
        **answer.extra,
    }


def _asked(answer: Answer, **more: Any) -> dict[str, Any]:
    request = {"model": "tiny", "max_tokens": answer.max_tokens, "n": len(answer.choices)}
    return {**request, "return_token_ids": True, **more}


def _returned(answer: Answer) -> Any:
    return answer.prompt if answer.returned_prompt is None else answer.returned_prompt


# -- the dialects


def completions(answer: Answer) -> tuple[Any, dict[str, Any]]:
    """vLLM's /v1/completions, routes as base64."""
    choices = [
        {
            "index": i, "text": "made up", "logprobs": _listed(one), "finish_reason": one.reason,
            "stop_reason": None, "token_ids": one.tokens, "prompt_token_ids": _returned(answer),
            "routed_experts": npy(one.rows),
        }
        for i, one in enumerate(answer.choices)
    ]  # fmt: skip
    return _openai(answer, "text_completion", choices), _asked(
        answer, prompt=answer.prompt, logprobs=1
    )


def chat(answer: Answer) -> tuple[Any, dict[str, Any]]:
    """vLLM's /v1/chat/completions. Only the response says which tokens the prompt has."""
    choices = [
        {
            "index": i, "message": {"role": "assistant", "content": "made up"},
            "logprobs": _content(one), "finish_reason": one.reason, "token_ids": one.tokens,
            "routed_experts": npy(one.rows),
        }
        for i, one in enumerate(answer.choices)
    ]  # fmt: skip
    body = _openai(answer, "chat.completion", choices) | {"prompt_token_ids": _returned(answer)}
    messages = [{"role": "user", "content": "say something"}]
    return body, _asked(answer, messages=messages, logprobs=True)


def generate(answer: Answer) -> tuple[Any, dict[str, Any]]:
    """vLLM's /inference/v1/generate."""
    choices = [
        {
            "index": i, "logprobs": _content(one), "finish_reason": one.reason,
            "token_ids": one.tokens, "routed_experts": npy(one.rows),
        }
        for i, one in enumerate(answer.choices)
    ]  # fmt: skip
    body = _openai(answer, "generate", choices)
    params = {"max_tokens": answer.max_tokens, "logprobs": 1, "n": len(answer.choices)}
    return body, {"model": "tiny", "token_ids": answer.prompt, "sampling_params": params}


def sglang(answer: Answer) -> tuple[Any, dict[str, Any]]:
    """SGLang's /generate."""
    items = [
        {
            "text": "made up", "output_ids": one.tokens,
            "meta_info": {
                "id": "b2b8", "finish_reason": {"type": one.reason, "length": len(one.tokens)},
                "prompt_tokens": len(p) if isinstance(p := _returned(answer), list) else -1,
                "weight_version": "default", "num_retractions": 0,
                "output_token_logprobs": [
                    [value, named, None]
                    for value, named in zip_longest(
                        one.logprobs,
                        (one.tokens if one.names is None else one.names)[: len(one.logprobs)],
                        fillvalue=3,
                    )
                ],
                "completion_tokens": len(one.tokens), "cached_tokens": 0,
                "routed_experts": int32(one.rows),
            },
            **answer.extra,
        }
        for one in answer.choices
    ]  # fmt: skip
    request = {
        "input_ids": answer.prompt, "return_logprob": True, "return_routed_experts": True,
        "sampling_params": {"max_new_tokens": answer.max_tokens, "n": len(answer.choices)},
    }  # fmt: skip
    return (items[0] if len(items) == 1 else items), request


def sglang_openai(answer: Answer) -> tuple[Any, dict[str, Any]]:
    """SGLang's /v1/completions: `sglext` for one choice, `meta_info` in each of several."""
    body, request = completions(answer)
    for one, choice in zip(answer.choices, body["choices"], strict=True):
        del choice["routed_experts"]
        if len(answer.choices) > 1:
            choice["meta_info"] = {"routed_experts": int32(one.rows), "num_retractions": 0}
        else:
            body["sglext"] = {"routed_experts": int32(one.rows), "cached_tokens_details": None}
    return body, {**request, "return_routed_experts": True, "return_meta_info": True}


def megatron(answer: Answer) -> tuple[Any, dict[str, Any]]:
    """A patched Megatron's /v1/chat/completions. Only the response says what the prompt is."""
    choices = [
        {
            "index": i, "finish_reason": one.reason, "logprobs": _content(one),
            "message": {
                "role": "assistant", "content": "made up", "prompt_token_ids": answer.prompt,
                "generation_token_ids": one.tokens, "generation_log_probs": one.logprobs,
                "policy_epoch": None, "num_evictions": 0,
            },
            "moe_topk_indices": _shaped(one.rows),
        }
        for i, one in enumerate(answer.choices)
    ]  # fmt: skip
    body = _openai(answer, "chat.completion", choices)
    return body, _asked(answer, messages=[{"role": "user", "content": "hi"}], logprobs=True)


def _shaped(rows: Any) -> Any:
    """Bytes in base64 beside dtype and shape."""
    if not isinstance(rows, np.ndarray):
        return rows
    small = rows.size and rows.min() >= -(1 << 15) and rows.max() < 1 << 15
    sent = rows.astype("<i2" if small else "<i4")
    data = base64.b64encode(sent.tobytes()).decode()
    return ["ndarray", {"data": data, "dtype": str(sent.dtype), "shape": list(sent.shape)}]


@dataclass(frozen=True)
class Dialect:
    """The form in which one HTTP endpoint of one engine answers.

    Attributes:
        engine: the engine whose decoder reads the body.
        build: makes the body, and the request that led to it.
        shape: the model that sampled.
        names_tokens: whether each log-prob says which token it belongs to.
        names_model: whether the body says which model sampled.
        returns_prompt: whether the body repeats the prompt's tokens or says how many there are.
    """

    engine: str
    build: Callable[[Answer], tuple[Any, dict[str, Any]]]
    shape: ModelShape = SHAPE
    names_tokens: bool = True
    names_model: bool = True
    returns_prompt: bool = True


DIALECTS = {
    "completions": Dialect("vllm", completions),
    "chat": Dialect("vllm", chat, returns_prompt=False),
    "generate": Dialect("vllm", generate, returns_prompt=False),
    "sglang": Dialect("sglang", sglang, names_model=False),
    "sglang openai": Dialect("sglang", sglang_openai),
    "megatron": Dialect("megatron", megatron, EVERY_LAYER, False, returns_prompt=False),
}
