"""Record the experts that a model chooses, and replay them: loss and gradients stay bitwise equal.

The model is made of megatron.core alone, so the tree needs no training loop.
Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): T, K.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_r3.cpu import CPU_CONFIG
from megatron_r3.replay.active import MicrobatchRoutes, recording, replaying
from proof.fidelity.models import EXPERTS, SEQ_LENGTH, TOPK, VOCAB_SIZE

CONFIG = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_replay": True,
    **CPU_CONFIG,
}
# The layouts in their order: a layer runs once; a layer runs again in the backward pass; a layer
# sends tokens to another rank.
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "full recompute": (1, {**RECOMPUTE, "recompute_num_layers": 1}),
    "EP2": (2, {}),
}

LossAndGradients = tuple[torch.Tensor, dict[str, torch.Tensor]]


def record_and_replay(rank: int, options: dict[str, Any]) -> list[str]:
    """Record a micro-batch, and replay it as recorded, and with each of two faults.

    Args:
        options: fields of Megatron's config. The experts are spread over all ranks.

    Returns:
        The claims that do not hold.
    """
    model = _build(options).train()
    live = _run(model, rank, contextlib.nullcontext)
    with recording() as microbatch:
        recorded = _run(model, rank, lambda: replaying(microbatch))
    ids = dict(microbatch.ids)

    def replay(change: Callable[[torch.Tensor], torch.Tensor]) -> LossAndGradients:
        changed = {layer: change(ids_TK) for layer, ids_TK in ids.items()}
        return _run(model, rank, lambda: replaying(MicrobatchRoutes(changed)))

    claims = {
        "every layer is recorded": sorted(ids) == [1, 2, 3, 4],
        "recording changes nothing": _same(live, recorded),
        "replay is bitwise what was recorded": _same(live, replay(lambda ids_TK: ids_TK)),
        "other experts show": not _same(live, replay(lambda ids_TK: (ids_TK + 1) % EXPERTS)),
        "shifted tokens show": not _same(live, replay(lambda ids_TK: ids_TK.roll(1, 0))),
    }
    return [claim for claim, holds in claims.items() if not holds]


def _build(options: dict[str, Any]) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo")
    parallel = {"expert_model_parallel_size": int(os.environ["WORLD_SIZE"])}
    parallel_state.initialize_model_parallel(**parallel)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(**CONFIG, **parallel, **options)
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, layers, VOCAB_SIZE + 1, SEQ_LENGTH, position_embedding_type="rope")


def _run(
    model: torch.nn.Module, rank: int, active: Callable[[], AbstractContextManager[Any]]
) -> LossAndGradients:
    """The loss and the gradients of one micro-batch, a different one on each rank."""
    ids = torch.arange(SEQ_LENGTH + 1)[None] * (7 + 2 * rank) % VOCAB_SIZE
    positions = torch.arange(SEQ_LENGTH)[None]
    model.zero_grad(set_to_none=True)
    with active():
        loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).sum()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _same(one: LossAndGradients, other: LossAndGradients) -> bool:
    return (
        torch.equal(one[0], other[0])
        and one[1].keys() == other[1].keys()
        and all(torch.equal(grad, other[1][name]) for name, grad in one[1].items())
    )
