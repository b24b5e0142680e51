"""Bodies as each engine's released serializer writes them, around made-up routes.

`proof/fuzz/bodies.py` makes most of them. All go through JSON, so that a decoder sees what a client
sees.

Shape suffixes (docs/glossary.md): K, N, T, Y.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.data.rollout import Rollout
from proof.fuzz import bodies
from proof.fuzz.bodies import as_bytes
from proof.fuzz.bodies import int32 as int32_text
from proof.fuzz.bodies import npy as npy_text

__all__ = ["as_bytes", "int32_text", "npy_text"]  # beside what is made here
EXPERTS, TOPK, HIDDEN = 16, 4, 5
SHAPE = ModelShape(EXPERTS, TOPK, (1, 2, 4), HIDDEN)
PROMPT, RESPONSE = [11, 12, 13, 14, 15, 16], [21, 22, 23, 24]
ROWS = len(PROMPT) + len(RESPONSE) - 1
LOGPROBS = [-0.5, -1.25, -2.0, -0.125]


def made_rows(rows: int = ROWS, seed: int = 0, shape: ModelShape = SHAPE) -> np.ndarray:
    """`[T, Y, K]` int32 of all hidden layers; dense ones are zero."""
    return bodies.made_rows(rows, seed, shape)


def moe_ids(rows_TYK: np.ndarray, shape: ModelShape = SHAPE) -> np.ndarray:
    """What must come out: `[L, T, K]`."""
    return rows_TYK[:, list(shape.moe_layers)].transpose(1, 0, 2)


def logprobs_of(rollout: Rollout) -> np.ndarray:
    """The log-probs `[G]` of the sampled tokens; those of all others must be 0."""
    assert not rollout.logprobs_N[~rollout.response_N].any()
    return rollout.logprobs_N[rollout.response_N]


def sent(body: Any) -> Any:
    return json.loads(json.dumps(body))


def answer(rows: np.ndarray, response: list[int] = RESPONSE, **more: Any) -> bodies.Answer:
    choice = bodies.Choice(response, LOGPROBS[: len(response)], rows, **more)
    return bodies.Answer(PROMPT, PROMPT, [choice], max_tokens=4)


def sglang_item(rows: np.ndarray, response: list[int] = RESPONSE, **meta: Any) -> dict[str, Any]:
    """A sample of /generate."""
    item, _ = bodies.sglang(answer(rows, response))
    return {**item, "meta_info": {**item["meta_info"], **meta}}


def sglang(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    body, request = bodies.sglang(answer(rows))
    return sent(body), request


def sglang_openai(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    """`sglext` beside the choices."""
    body, request = bodies.sglang_openai(answer(rows, names=["a"] * 4))
    return sent(body), request


def vllm(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    body, request = bodies.completions(answer(rows, names=["a"] * 4))
    return sent(body), request


def vllm_python(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    """vllm/outputs.py of 0.14-0.20: an int32 array of all hidden layers."""
    output = SimpleNamespace(
        index=0,
        token_ids=list(RESPONSE),
        logprobs=[
            {token: SimpleNamespace(logprob=value, rank=1), 3: SimpleNamespace(logprob=-9.0)}
            for token, value in zip(RESPONSE, LOGPROBS, strict=True)
        ],
        routed_experts=rows.astype(np.int32),
    )
    return SimpleNamespace(prompt_token_ids=list(PROMPT), outputs=[output], finished=True), {}


def megatron(
    rows: np.ndarray, dtype: str | None = "int16", mtp: np.ndarray | None = None
) -> tuple[Any, dict[str, Any]]:
    """megatron/core/inference/inference_request.py, `serialize`, and endpoints/completions.py.

    0.18.0-0.19.0 send `["ndarray", {data, dtype}]`, 0.17.0-0.17.1 (dtype None) nested lists.
    """
    moe = rows[:, list(SHAPE.moe_layers)]
    moe = moe if mtp is None else np.concatenate([moe, mtp], axis=1)
    content = moe.astype(dtype or np.int32)
    routed = content.tolist()
    choice = {
        "index": 0,
        "text": "made up",
        "logprobs": {"token_logprobs": [None, *LOGPROBS], "tokens": ["a"] * 4},
        "finish_reason": "length",
        "prompt_token_ids": PROMPT,
        "generation_token_ids": RESPONSE,
        "generation_log_probs": LOGPROBS,
        "policy_epoch": None,
        "kv_cache_epoch": None,
        "num_evictions": 0,
        "moe_topk_indices": ["ndarray", {"data": routed, "dtype": dtype}] if dtype else routed,
    }
    # the server slices the tagged pair as if it were the rows
    choice["prompt_moe_topk_indices"] = choice["moe_topk_indices"][: len(PROMPT)]
    body = {"id": "b2b8", "object": "text_completion", "model": "EMPTY", "choices": [choice]}
    return sent(body), {"prompt": PROMPT, "max_tokens": 4, "logprobs": 0}


def arrays(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    sequence = {"token_ids": RESPONSE, "logprobs": LOGPROBS, "routes": rows}
    return [sequence], {"prompt": np.array(PROMPT)}


# the engine, and what makes a body and its request from rows, by the name of the form
ENGINES: dict[str, tuple[str, Callable[[np.ndarray], tuple[Any, dict[str, Any]]]]] = {
    "vllm": ("vllm", vllm),
    "vllm-python": ("vllm", vllm_python),
    "sglang": ("sglang", sglang),
    "sglang-openai": ("sglang", sglang_openai),
    "megatron": ("megatron", megatron),
    "megatron-0.17": ("megatron", lambda rows: megatron(rows, None)),
    "arrays": ("own", lambda rows: arrays(rows.tolist())),
}
