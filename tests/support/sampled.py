"""Rollouts of a tiny transformers model whose routes are recorded in one way and live in another.

Shape suffixes (docs/glossary.md): L, T, K, N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tiny_models import qwen

from megatron_r3.data.engines.transformers import capture_routes
from megatron_r3.data.rollout import Rollout, turns_of
from megatron_r3.data.truth import Compared
from megatron_r3.replay.routes import Routes

LAYERS, EXPERTS, TOPK, VOCABULARY = 4, 16, 4, 64
PROMPT, TURN, TEXT, TURNS = 12, 14, 5, 3  # tokens


def tiny_model(seed: int = 0) -> Any:
    """A Qwen3-MoE in float32 whose routers are as sure of their choice as trained ones are."""
    return qwen(
        seed,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        initializer_range=0.2,
        attn_implementation="eager",
    )


def moved(model: Any, by: float, seed: int = 1) -> Any:
    """A copy of a model after an update: each weight changed by a share of what it varies."""
    other = tiny_model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), model.parameters(), strict=True):
            noise = torch.randn(its.shape, generator=generator)
            mine.copy_(its + by * its.std() * noise if its.dim() > 1 else its)
    return other


@contextmanager
def noisy_routers(model: Any, scale: float, seed: int = 0) -> Iterator[None]:
    """Gaussian noise on what each router is given, in units of what it varies."""
    generator = torch.Generator().manual_seed(seed)

    def add(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (hidden,) = args
        noise = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
        return (hidden + scale * hidden.std() * noise,)

    routers = [layer.mlp.gate for layer in model.model.layers]
    handles = [router.register_forward_pre_hook(add) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rollouts(number: int = 10, turns: int = TURNS, version: int = 0) -> list[Rollout]:
    """Conversations of random tokens, no two of one length; their routes are still zeros."""
    made = []
    for sample in range(number):
        rng = np.random.default_rng(sample)
        response = [False] * (PROMPT + sample)
        for turn in range(turns):
            response += [True] * TURN + [False] * (TEXT if turn < turns - 1 else 0)
        response_N = np.array(response)
        tokens_N = rng.integers(1, VOCABULARY, len(response)).astype(np.int32)
        none = np.zeros((LAYERS, len(response) - 1, TOPK), np.uint8)
        routes = Routes(none, EXPERTS, np.ones(len(response) - 1, bool))
        logprobs = np.zeros(len(response), np.float32)
        made.append(Rollout(tokens_N, response_N, logprobs, 0.0, sample, version, routes))
    return made


@dataclass(frozen=True)
class Run:
    """What a model does with some tokens: the routes, and the log-prob that each row predicts."""

    ids_LTK: np.ndarray
    logprobs_T: np.ndarray


def run(model: Any, rollout: Rollout, cached: int = 0, cache_of: Any = None) -> Run:
    """Run a rollout through a model.

    Args:
        cached: this many tokens come out of a prefix cache: their keys, values and routes are those
            of the model `cache_of`.
    """
    ids = torch.from_numpy(rollout.tokens_N.astype(np.int64))[None]
    parts, logits, cache = [], [], None
    steps = (
        ((cache_of, ids[:, :cached]), (model, ids[:, cached:-1]))
        if cached
        else ((model, ids[:, :-1]),)
    )
    for network, part in steps:
        with torch.no_grad(), capture_routes(network) as captured:
            output = network(part, past_key_values=cache, use_cache=bool(cached))
        cache = output.past_key_values
        parts.append(captured.take()[0].numpy())
        logits.append(output.logits[0].float())
    logprobs = torch.cat(logits).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return Run(np.concatenate(parts, 1), logprobs.numpy())


def compared(
    given: Sequence[Rollout], recorded: Sequence[Run], live: Sequence[Run]
) -> list[Compared]:
    """Rollouts with the one's routes and log-probs as recorded, beside the other's."""
    made = []
    for number, (rollout, there, here) in enumerate(zip(given, recorded, live, strict=True)):
        routes = Routes.from_array(there.ids_LTK, EXPERTS)
        logprobs_N = np.append(0, there.logprobs_T) * rollout.response_N
        rollout = replace(rollout, routes=routes, logprobs_N=logprobs_N.astype(np.float32))
        made.append(Compared(rollout, here.ids_LTK, f"rollout {number}"))
    return made


def with_rows(one: Compared, ids_LTK: np.ndarray) -> Compared:
    """The same rollout with other recorded routes, whatever they are: nobody checks them."""
    routes = replace(one.rollout.routes, ids_LTK=np.ascontiguousarray(ids_LTK))
    return replace(one, rollout=replace(one.rollout, routes=routes))


def first_turn(one: Compared) -> int:
    """The first sampled token."""
    return int(turns_of(one.rollout.response_N)[0, 0])
