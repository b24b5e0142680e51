"""Bodies as each engine's released serializer writes them, around made-up routes.

All go through JSON, so that a decoder sees what a client sees.

Shape suffixes (docs/glossary.md): K, N, T, Y.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.data.rollout import Rollout

EXPERTS, TOPK, HIDDEN = 16, 4, 5
SHAPE = ModelShape(EXPERTS, TOPK, (1, 2, 4), HIDDEN)
PROMPT, RESPONSE = [11, 12, 13, 14, 15, 16], [21, 22, 23, 24]
ROWS = len(PROMPT) + len(RESPONSE) - 1
LOGPROBS = [-0.5, -1.25, -2.0, -0.125]


def made_rows(rows: int = ROWS, seed: int = 0, shape: ModelShape = SHAPE) -> np.ndarray:
    """`[T, Y, K]` int32 of all hidden layers; dense ones are zero."""
    rng = np.random.default_rng(seed)
    ids = rng.random((rows, shape.num_hidden_layers, shape.num_experts)).argsort(-1)
    ids = ids[..., : shape.topk].astype(np.int32)
    dense = [i for i in range(shape.num_hidden_layers) if i not in shape.moe_layers]
    ids[:, dense] = 0
    return ids


def moe_ids(rows_TYK: np.ndarray, shape: ModelShape = SHAPE) -> np.ndarray:
    """What must come out: `[L, T, K]`."""
    return rows_TYK[:, list(shape.moe_layers)].transpose(1, 0, 2)


def logprobs_of(rollout: Rollout) -> np.ndarray:
    """The log-probs `[G]` of the sampled tokens; those of all others must be 0."""
    assert not rollout.logprobs_N[~rollout.response_N].any()
    return rollout.logprobs_N[rollout.response_N]


def sent(body: Any) -> Any:
    return json.loads(json.dumps(body))


def npy_text(rows: np.ndarray) -> str:
    """vLLM 0.22-0.33, as recorded from 0.30: a `.npy` of uint8 up to 256 experts, in base64."""
    stream = io.BytesIO()
    np.save(stream, rows.astype(np.uint8))
    return base64.b64encode(stream.getvalue()).decode()


def int32_text(rows: np.ndarray) -> str:
    """SGLang, managers/detokenizer_manager.py: the tensor's bytes in base64, nothing beside them.

    `_extract_routed_experts` in 0.5.7-0.5.9, `_b64_encode_per_request` in 0.5.12-0.5.23.
    """
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def sglang_item(rows: np.ndarray, response: list[int] = RESPONSE, **meta: Any) -> dict[str, Any]:
    """A sample of /generate, managers/tokenizer_manager.py of 0.5.7-0.5.23."""
    return {
        "text": "made up",
        "output_ids": response,
        "meta_info": {
            "id": "b2b8",
            "finish_reason": {"type": "length", "length": len(response)},
            "prompt_tokens": len(PROMPT),
            "weight_version": "default",
            "num_retractions": 0,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(LOGPROBS, response, strict=False)
            ],
            "completion_tokens": len(response),
            "cached_tokens": 0,
            "routed_experts": int32_text(rows),
            **meta,
        },
    }


def sglang(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    request = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 4},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    return sent(sglang_item(rows)), request


def sglang_openai(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    """entrypoints/openai/serving_completions.py of 0.5.23: `sglext` beside the choices."""
    choice = {
        "index": 0,
        "text": "made up",
        "logprobs": {"token_logprobs": LOGPROBS, "tokens": ["a"] * 4, "text_offset": [-1] * 4},
        "finish_reason": "length",
        "matched_stop": None,
        "token_ids": RESPONSE,
        "prompt_token_ids": PROMPT,
    }
    extension = {"routed_experts": int32_text(rows), "cached_tokens_details": None}
    body = {"id": "b2b8", "object": "text_completion", "choices": [choice], "sglext": extension}
    return sent(body), {"prompt": PROMPT, "logprobs": 1, "return_routed_experts": True}


def vllm(rows: np.ndarray) -> tuple[Any, dict[str, Any]]:
    choice = {
        "index": 0,
        "text": "made up",
        "logprobs": {"token_logprobs": LOGPROBS, "tokens": ["a"] * 4},
        "finish_reason": "length",
        "token_ids": RESPONSE,
        "prompt_token_ids": PROMPT,
        "routed_experts": npy_text(rows),
    }
    request = {"prompt": PROMPT, "logprobs": 1, "return_token_ids": True}
    return sent({"object": "text_completion", "choices": [choice]}), request


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


def as_bytes(rows: np.ndarray) -> list[Any]:
    """How a patched server sends rows: patches/*/0020."""
    data = base64.b64encode(rows.tobytes()).decode()
    return ["ndarray", {"data": data, "dtype": str(rows.dtype), "shape": list(rows.shape)}]


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
