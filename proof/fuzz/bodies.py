"""Response bodies with made-up samples, as the servers of vLLM, SGLang and Megatron write them.

The fields are those of the recorded responses in tests/data/vllm, and of the engines' serializers:

- vLLM 0.22-0.33, as recorded from 0.30;
- SGLang: managers/tokenizer_manager.py and managers/detokenizer_manager.py of 0.5.7-0.5.23, and
  entrypoints/openai/serving_completions.py of 0.5.23;
- Megatron's server with the patches 0020.

Shape suffixes (docs/glossary.md): K, T, Y.
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

Exchange = tuple[Any, dict[str, Any]]  # a body, and the request that led to it


@dataclass
class Choice:
    """One sample of an answer. Any value may be impossible, where a try wants that.

    Attributes:
        rows: the expert ids, rows x hidden layers x top-k.
        names: the tokens' names beside their log-probs. None: names made of the token ids.
        reason: why the sample ended.
    """

    tokens: list[Any]
    logprobs: list[Any]
    rows: np.ndarray
    names: list[Any] | None = None
    reason: Any = "length"


@dataclass
class Answer:
    """What a server answers to one prompt.

    Attributes:
        returned_prompt: the prompt's tokens as the body repeats them.
        choices: the samples, as many as the request's `n`.
        extra: fields that a decoder does not know.
    """

    prompt: list[int]
    returned_prompt: list[int]
    choices: list[Choice] = field(default_factory=list)
    model: Any = "tiny"
    max_tokens: int = 8
    extra: dict[str, Any] = field(default_factory=dict)


def made_rows(rows: int, seed: int, shape: ModelShape) -> np.ndarray:
    """Made-up ids `[T, Y, K]`, int32, of all hidden layers; those of dense layers are zero."""
    rng = np.random.default_rng(seed)
    ids = rng.random((rows, shape.num_hidden_layers, shape.num_experts)).argsort(-1)
    ids_TYK: np.ndarray = ids[..., : shape.topk].astype(np.int32)
    dense = [i for i in range(shape.num_hidden_layers) if i not in shape.moe_layers]
    ids_TYK[:, dense] = 0
    return ids_TYK


def make_rows(rng: random.Random, rows: int, shape: ModelShape) -> np.ndarray:
    """As `made_rows`, with a seed from `rng`."""
    return made_rows(rows, rng.getrandbits(64), shape)


def make_answer(rng: random.Random, shape: ModelShape, choices: int) -> Answer:
    """An answer with a made-up prompt and made-up samples; all values are possible."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 7))]
    answer = Answer(prompt, prompt)
    for _ in range(choices):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        logprobs = [rng.choice((0.0, -0.25, -8 * rng.random(), -60.0)) for _ in tokens]
        rows = make_rows(rng, len(prompt) + len(tokens) - 1, shape)
        answer.choices.append(Choice(tokens, logprobs, rows))
    return answer


# -- the encodings of routes


def npy(rows: np.ndarray) -> str:
    """Routes as vLLM 0.22 and later send them: a `.npy` file in base64, in uint8 if all ids fit."""
    small = rows.dtype.kind == "i" and rows.size and rows.min() >= 0 and rows.max() < 256
    stream = io.BytesIO()
    np.save(stream, rows.astype(np.uint8) if small else rows)
    return base64.b64encode(stream.getvalue()).decode()


def int32(rows: np.ndarray) -> str:
    """Routes as SGLang sends them: the bytes of an int32 tensor in base64, without its shape."""
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def shaped(rows: np.ndarray) -> list[Any]:
    """Routes as a patched Megatron sends them: bytes in base64, beside their dtype and shape."""
    small = rows.size and rows.min() >= -(1 << 15) and rows.max() < 1 << 15
    return as_bytes(rows.astype("<i2" if small else "<i4"))


def as_bytes(rows: np.ndarray) -> list[Any]:
    """Rows as `shaped` sends them, in their own dtype."""
    data = base64.b64encode(rows.tobytes()).decode()
    return ["ndarray", {"data": data, "dtype": str(rows.dtype), "shape": list(rows.shape)}]


# -- the parts of a body in the form of OpenAI's API


def _names(choice: Choice) -> list[Any]:
    return [f"token_id:{one}" for one in choice.tokens] if choice.names is None else choice.names


def _listed(choice: Choice) -> dict[str, Any]:
    return {"token_logprobs": choice.logprobs, "tokens": _names(choice), "top_logprobs": None}


def _content(choice: Choice) -> dict[str, Any]:
    pairs = zip_longest(_names(choice)[: len(choice.logprobs)], choice.logprobs, fillvalue="odd")
    return {"content": [{"token": n, "logprob": v, "bytes": None} for n, v in pairs]}


def _sent(choice: Choice) -> dict[str, Any]:
    """The fields of a choice in all bodies of vLLM; /v1/completions has other log-probs."""
    routes = {"routed_experts": npy(choice.rows)}
    return {"logprobs": _content(choice), "token_ids": choice.tokens, **routes}


def _body(answer: Answer, kind: str, fields: Callable[[Choice], dict[str, Any]]) -> dict[str, Any]:
    choices = [
        {"index": i, "finish_reason": one.reason, "text": "made up", **fields(one)}
        for i, one in enumerate(answer.choices)
    ]
    body = {"id": "b2b8", "object": kind, "created": 1795225217, "model": answer.model}
    usage = {"prompt_tokens": len(answer.prompt)}
    return {**body, "choices": choices, "usage": usage, **answer.extra}


def _asked(answer: Answer, **more: Any) -> dict[str, Any]:
    request = {"model": "tiny", "max_tokens": answer.max_tokens, "n": len(answer.choices)}
    return {**request, "return_token_ids": True, **more}


_CHAT = {"messages": [{"role": "user", "content": "say something"}], "logprobs": True}


# -- the dialects


def completions(answer: Answer) -> Exchange:
    """A body of vLLM's /v1/completions, and its request."""

    def fields(one: Choice) -> dict[str, Any]:
        prompt = {"prompt_token_ids": answer.returned_prompt}
        return {**_sent(one), "logprobs": _listed(one), **prompt}

    request = _asked(answer, prompt=answer.prompt, logprobs=1)
    return _body(answer, "text_completion", fields), request


def chat(answer: Answer) -> Exchange:
    """A body of vLLM's /v1/chat/completions. Only the body has the token ids of the prompt."""
    body = _body(answer, "chat.completion", _sent)
    return {**body, "prompt_token_ids": answer.returned_prompt}, _asked(answer, **_CHAT)


def generate(answer: Answer) -> Exchange:
    """A body of vLLM's /inference/v1/generate, and its request."""
    params = {"max_tokens": answer.max_tokens, "logprobs": 1, "n": len(answer.choices)}
    request = {"model": "tiny", "token_ids": answer.prompt, "sampling_params": params}
    return _body(answer, "generate", _sent), request


def sglang(answer: Answer) -> Exchange:
    """A body of SGLang's /generate: one sample, or a list of several samples."""
    items = []
    for one in answer.choices:
        names = (one.tokens if one.names is None else one.names)[: len(one.logprobs)]
        pairs = zip_longest(one.logprobs, names, fillvalue=3)
        meta = {
            "id": "b2b8", "finish_reason": {"type": one.reason, "length": len(one.tokens)},
            "prompt_tokens": len(answer.returned_prompt), "routed_experts": int32(one.rows),
            "weight_version": "default", "num_retractions": 0, "cached_tokens": 0,
            "output_token_logprobs": [[value, named, None] for value, named in pairs],
            "completion_tokens": len(one.tokens),
        }  # fmt: skip
        sample = {"text": "made up", "output_ids": one.tokens, "meta_info": meta}
        items.append({**sample, **answer.extra})
    params = {"max_new_tokens": answer.max_tokens, "n": len(answer.choices)}
    flags = {"return_logprob": True, "return_routed_experts": True}
    request = {"input_ids": answer.prompt, **flags, "sampling_params": params}
    return (items[0] if len(items) == 1 else items), request


def sglang_openai(answer: Answer) -> Exchange:
    """A body of SGLang's /v1/completions, with routes in `sglext`, or in each choice if several."""
    body, request = completions(answer)
    for one, choice in zip(answer.choices, body["choices"], strict=True):
        del choice["routed_experts"]
        if len(answer.choices) > 1:
            choice["meta_info"] = {"routed_experts": int32(one.rows), "num_retractions": 0}
        else:
            body["sglext"] = {"routed_experts": int32(one.rows), "cached_tokens_details": None}
    return body, {**request, "return_routed_experts": True, "return_meta_info": True}


def megatron(answer: Answer) -> Exchange:
    """A body of Megatron's /v1/chat/completions. Only the body has the prompt's token ids."""

    def fields(one: Choice) -> dict[str, Any]:
        message = {
            "role": "assistant", "policy_epoch": None, "num_evictions": 0,
            "prompt_token_ids": answer.prompt, "generation_token_ids": one.tokens,
            "generation_log_probs": one.logprobs,
        }  # fmt: skip
        routes = {"moe_topk_indices": shaped(one.rows)}
        return {"message": message, "logprobs": _content(one), **routes}

    return _body(answer, "chat.completion", fields), _asked(answer, **_CHAT)


@dataclass(frozen=True)
class Dialect:
    """The form in which one HTTP endpoint of one engine answers.

    Attributes:
        engine: the engine whose decoder reads the body.
        build: makes a body and its request from an answer.
        shape: the shape of the model that sampled.
        names_tokens: whether the body names the token of each log-prob.
        names_model: whether the body says which model sampled.
        returns_prompt: whether the body has `returned_prompt` or its length, and the request the
            prompt, so that the two can be compared.
    """

    engine: str
    build: Callable[[Answer], Exchange]
    shape: ModelShape = SHAPE
    names_tokens: bool = True
    names_model: bool = True
    returns_prompt: bool = False


DIALECTS = {
    "completions": Dialect("vllm", completions, returns_prompt=True),
    "chat": Dialect("vllm", chat),
    "generate": Dialect("vllm", generate),
    "sglang": Dialect("sglang", sglang, names_model=False, returns_prompt=True),
    "sglang openai": Dialect("sglang", sglang_openai, returns_prompt=True),
    "megatron": Dialect("megatron", megatron, EVERY_LAYER, names_tokens=False),
}
