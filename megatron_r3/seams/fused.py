"""Replay under `moe_router_fusion`: what stands in for Transformer Engine's fused top-k.

Upstream's fused function chooses experts inside a kernel that does not know the routes. A replayed
gate has nothing to choose: one kernel of ours makes weights and map from logits and ids.

Shape suffixes: T tokens of this rank, E experts, K top-k.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from megatron_r3.gate import GateInputs, GateOptions, has_kernel, replayed_gate
from megatron_r3.gate.options import MAX_EXPERTS, MAX_TOPK
from megatron_r3.replay import MicrobatchRoutes

_said: set[str] = set()


def fused_gate(
    microbatch: MicrobatchRoutes,
    layer_number: int,
    logits_TE: Tensor,
    topk: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor] | None:
    """Probabilities and routing map `[T, E]` of a replayed layer, from one kernel.

    Args:
        options: what Megatron gives `topk_routing_with_score_function` by name.

    Returns:
        None where the kernel does not do it: without Triton or CUDA, for a router in float64 or
        larger than the kernel's limits, and for a group-limited router where the microbatch has
        tokens to choose for or to count. It is None in all passes of a layer or in none, so that a
        recompute rounds as its forward pass did.

    Raises:
        ReplayError: the layer has no routes, or not as many as the router has tokens.
    """
    fits = logits_TE.shape[1] <= MAX_EXPERTS and topk <= MAX_TOPK
    if not has_kernel(logits_TE.device) or not fits or logits_TE.dtype == torch.float64:
        return None
    chooses = microbatch.live_T is not None or microbatch.counted_T is not None
    if chooses and options.get("group_topk") is not None:
        return None
    ids_TK, live_T, counted_T = microbatch.unsettled(layer_number, logits_TE, topk)
    score_function = options["score_function"]
    bias_E = None if score_function == "softmax" else options["expert_bias"]
    out = replayed_gate(
        GateInputs(logits_TE, ids_TK, bias_E, live_T, counted_T),
        GateOptions(score_function, options["use_pre_softmax"], options["scaling_factor"]),
    )
    microbatch.settle(layer_number, out.ids_TK, out.differs_T)
    return out.probs_TE, out.routing_map_TE


def settle_fusion(config: Any) -> None:
    """Decide what `moe_router_fusion` means for this config, when it is made.

    `moe_router_replay_fused_gate` says whether replayed layers try the kernel. Where Transformer
    Engine has no fused router, upstream would stop at the first auxiliary loss: there
    `moe_router_fusion` is turned off, and all but the replayed gate is unfused.
    """
    # a second call, after moe_router_fusion was turned off below, leaves the first one's answer
    before = getattr(config, "moe_router_replay_fused_gate", False)
    config.moe_router_replay_fused_gate = before or bool(config.moe_router_fusion)
    if config.moe_router_fusion and not _upstream_fuses():
        config.moe_router_fusion = False
        _say_once(
            "moe_router_fusion: no Transformer Engine with a fused router here; the router is "
            "unfused, but for replayed layers on a CUDA device with Triton"
        )


def _upstream_fuses() -> bool:
    try:
        from megatron.core.extensions.transformer_engine import fused_topk_with_score_function
    except ImportError:
        return False
    return fused_topk_with_score_function is not None


def _say_once(text: str) -> None:
    if text not in _said and os.environ.get("RANK", "0") == "0":
        logging.getLogger(__name__).warning(text)
    _said.add(text)
