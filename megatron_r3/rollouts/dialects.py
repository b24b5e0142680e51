"""How each engine is asked for one sample with its routes, and what its answer says beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_r3.engines.sample import Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.rollouts.prompts import Prompt, PromptError

__all__ = [
    "ENGINES",
    "Decode",
    "Sampling",
    "answer_of",
    "build_request",
    "decoder",
    "version_paths",
]

ENGINES = ("vllm", "sglang")
Decode = Callable[[Mapping[str, Any], Mapping[str, Any], ModelShape, str], list[Sample]]


@dataclass(frozen=True)
class Sampling:
    """How to sample: the same for every request; a seed gives each sample one of its own."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def seed_of(self, group: int, sample: int, policy_version: int) -> int | None:
        """The seed of one sample, whichever were sampled before it; 31 bits."""
        if self.seed is None:
            return None
        text = f"{self.seed} {policy_version} {group} {sample}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def decoder(engine: str) -> Decode:
    """The engine's `decode`."""
    decode: Decode = import_module(f"megatron_r3.engines.{engine}").decode
    return decode


def version_paths(engine: str) -> tuple[str, ...]:
    """Where the engine tells its version: the first of these that answers."""
    return ("/version",) if engine == "vllm" else ("/server_info", "/get_server_info")


def build_request(
    engine: str, prompt: Prompt, sampling: Sampling, seed: int | None, model: str
) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for one sample, with token ids, log-probs and routes.

    Args:
        model: the name under which the server has it; empty: its only one.

    Raises:
        PromptError: the engine cannot be asked this way.
    """
    if engine == "vllm":
        return _vllm(prompt, sampling, seed, model)
    return "/generate", _sglang(prompt, sampling, seed)


def _vllm(
    prompt: Prompt, sampling: Sampling, seed: int | None, model: str
) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,  # off, whatever the model's generation_config says
        "n": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if model:
        body["model"] = model
    if seed is not None:
        body["seed"] = seed
    if prompt.is_chat:
        return "/v1/chat/completions", {**body, "messages": prompt.content, "logprobs": True}
    return "/v1/completions", {**body, "prompt": prompt.content, "logprobs": 1}


def _sglang(prompt: Prompt, sampling: Sampling, seed: int | None) -> dict[str, Any]:
    if prompt.tokens is None:
        raise PromptError(
            f"{prompt.where}: SGLang's /generate returns no token ids of a text or chat; give "
            "`prompt` as token ids"
        )
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    if seed is not None:
        params["sampling_seed"] = seed
    return {
        "input_ids": prompt.tokens,
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": True,
        "stream": False,
    }


def answer_of(response: Any, index: int, where: str) -> tuple[str, str]:
    """Text and finish reason of one choice of a response that was decoded.

    Raises:
        EngineError: the engine gave the request up half-way, so the response is not the policy's.
    """
    if isinstance(response, list):  # SGLang, asked for several
        response = response[index]
    if "choices" in response:
        choice = next(c for c in response["choices"] if c.get("index") == index)
        text = choice.get("text", (choice.get("message") or {}).get("content"))
        reason = choice.get("finish_reason")
    else:
        text = response.get("text")
        reason = (response.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    if reason in ("abort", "error"):
        raise EngineError(f"{where}: the engine ended it with {reason!r}, half-way")
    return text or "", reason or ""
