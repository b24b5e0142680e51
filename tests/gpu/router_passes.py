"""`python router_passes.py`: whether a replayed TopKRouter makes the host wait, as JSON.

The router is that of the patched Megatron-LM that is importable, so what runs is what the patches
call, in the order in which they call it. On a CUDA device any wait is an error. On a CPU nothing
waits, so the reads are counted that would wait on a GPU (`proof.benchmarks.waits`). The script is a
process of its own, because it imports Megatron and instruments torch.

Shape suffixes (docs/glossary.md): T.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from megatron_r3.replay.active import MicrobatchRoutes, bind_to_microbatch, replaying
from megatron_r3.replay.tally import Tally
from proof.benchmarks.layers_model import start
from proof.benchmarks.waits import WAITS, instrument
from proof.fidelity import tiny

CUDA = torch.cuda.is_available()
TOKENS, EXPERTS, TOPK = 512, 8, 2
# everything that the patches ask the hook for: padding, both loads, the tokens of other ranks
OPTIONS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_replay_expert_bias": "live",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "calculate_per_token_loss": True,
}


def microbatch(checked: bool) -> MicrobatchRoutes:
    """Routes for the first MoE layer, with missing rows, padding, and mismatch counted."""
    tokens = torch.arange(TOKENS, device="cuda")
    return MicrobatchRoutes(
        {1: torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK, dim=1).indices.to(torch.uint8)},
        live_T=tokens % 7 == 0,
        tally=Tally(tokens % 5 == 0),
        padding_T=tokens > TOKENS - 20,
        mean_tokens=float(TOKENS - 20),
        checked=checked,
    )


def forward_and_recompute(router: Any, hidden: torch.Tensor, routes: MicrobatchRoutes) -> None:
    """A first pass, which settles the microbatch, and a recompute after it, which repeats it."""
    with replaying(routes):
        recompute = bind_to_microbatch(router)
        router(hidden)
    probs, _ = recompute(hidden)
    probs.sum().backward()


def waits(router: Any, hidden: torch.Tensor, checked: bool, counts: Counter[str]) -> int:
    """How often the host waited; on CUDA 1 stands for the first wait, which ends the passes."""
    routes = microbatch(checked)
    counts.clear()
    if not CUDA:
        forward_and_recompute(router, hidden, routes)
        return counts[WAITS]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_recompute(router, hidden, routes)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0


def main() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    start(CUDA)
    gpt = tiny.model(tiny.config(**OPTIONS)).cuda()
    router = next(module for module in gpt.modules() if isinstance(module, TopKRouter))
    hidden = torch.randn(TOKENS, 1, router.weight.shape[1], device="cuda", requires_grad=True)
    forward_and_recompute(router, hidden, microbatch(checked=True))  # whatever compiles, waits
    counts: Counter[str] = Counter()
    if not CUDA:
        instrument(counts)
    # ids that nobody has checked must be looked at, which takes a wait: the control
    results = {
        name: waits(router, hidden, name == "checked", counts) for name in ("checked", "not")
    }
    print(json.dumps(results))


if __name__ == "__main__":
    if not CUDA:
        from megatron_r3.cpu import install

        install()
    main()
