"""How each engine is asked for one sample with its routes, and what its answer says beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_r3 import engines
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.rollout import Rollout
from megatron_r3.rollouts.prompts import Prompt, PromptError
from megatron_r3.store import SamplingSettings
from megatron_r3.values import wrong_text

ENGINES = ("vllm", "sglang")
Decode = Callable[[Mapping[str, Any], Mapping[str, Any], ModelShape, str], list[Rollout]]


@dataclass(frozen=True)
class Sampling:
    """How to sample: the same for every request; a seed gives each sample one of its own.

    Attributes:
        max_tokens: of a response.
        temperature, top_p: as everywhere.
        top_k: so many of the likeliest tokens; 0: all.
        seed: None: the engine's.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    @property
    def settings(self) -> SamplingSettings:
        """What a store says of it."""
        return SamplingSettings(self.temperature, self.top_p, self.top_k, 0.0, self.max_tokens)

    def seed_of(self, group: int, sample: int, policy_version: int) -> int | None:
        """The seed of one sample, whichever were sampled before it; 31 bits."""
        if self.seed is None:
            return None
        text = f"{self.seed} {policy_version} {group} {sample}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def decoder(engine: str) -> Decode:
    """`engines.decode` for one engine."""
    return partial(engines.decode, engine)


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
        "top_k": sampling.top_k,  # 0: all
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
        "top_k": sampling.top_k or -1,  # -1: all
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
    item = _choice(response, index)
    message = item.get("message") or {}
    text = item.get("text", message.get("content")) or ""
    reason = item.get("finish_reason", (item.get("meta_info") or {}).get("finish_reason"))
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    reason = reason or ""
    for name, value in (("text", text), ("finish reason", reason)):
        if not isinstance(value, str):
            raise EngineError(f"{where}: its {name} is a text; got {type(value).__name__}")
    if reason in ("abort", "error"):
        raise EngineError(f"{where}: the engine ended it with {reason!r}, half-way")
    return text, reason


def refuse_nameless(response: Any, asked: str, where: str) -> None:
    """Refuse a response that names no model where one was asked for.

    vLLM names it in each; that it is the one asked for is the decoder's to say. SGLang's /generate
    takes no name and gives none.

    Raises:
        EngineError: naming the model that was asked for.
    """
    if asked and not response.get("model"):
        raise EngineError(f"{where}: the response names no model; {asked!r} was asked for")


def policies_of(response: Any, index: int, where: str) -> list[str]:
    """The versions of the engine's weights that sampled one choice, as far as the response says.

    SGLang has `weight_version` and `weight_versions: [{"version", "start", "end"}]` in meta_info,
    vLLM from 0.32 on the latter. Two of them: new weights came while the choice was sampled.

    Raises:
        EngineError: one of them is no text.
    """
    item = _choice(response, index)
    found = []
    for part in (response, item, item.get("meta_info")):
        if not isinstance(part, Mapping):
            continue
        spans = part.get("weight_versions") or []
        for version in (part.get("weight_version"), *(span["version"] for span in spans)):
            if version is None:
                continue
            version = str(version) if type(version) is int else version
            wrong = wrong_text(version)
            if wrong is not None:
                raise EngineError(f"{where}: the version of its weights is {wrong}")
            found.append(version)
    return list(dict.fromkeys(found))


def _choice(response: Any, index: int) -> Mapping[str, Any]:
    """One choice of a response; its shape was checked by the decoder."""
    if isinstance(response, list):  # SGLang, asked for several
        response = response[index]
    if "choices" in response:
        response = next(c for c in response["choices"] if c.get("index") == index)
    found: Mapping[str, Any] = response
    return found
