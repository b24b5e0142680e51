"""Record the experts that a model chooses, and replay them: loss and gradients stay bitwise equal.

The model is made of megatron.core alone, so the tree needs no training loop.
Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): T, K.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_r3.replay.active import MicrobatchRoutes, active_microbatch, recording, replaying
from proof.fidelity.tiny import (
    EXPERTS,
    FULL,
    LossAndGradients,
    config,
    loss_and_gradients,
    model,
    same,
    start,
)

# The layouts in their order: a layer runs once; a layer runs again in the backward pass; a layer
# sends tokens to another rank.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "full recompute": (1, FULL),
    "EP2": (2, {}),
}


def record_and_replay(rank: int, options: dict[str, Any]) -> list[str]:
    """Record a micro-batch, and replay it as recorded, and with each of three faults.

    Args:
        options: fields of Megatron's config. The experts are spread over all ranks.

    Returns:
        The claims that do not hold.
    """
    parallel = {"expert_model_parallel_size": int(os.environ["WORLD_SIZE"])}
    start(**parallel)
    gpt = model(config(**parallel, **options))

    def run(context: Any) -> LossAndGradients:
        return loss_and_gradients(gpt, context, seed=5 + rank)

    def replay(change: Callable[[torch.Tensor], torch.Tensor]) -> LossAndGradients:
        return run(replaying(MicrobatchRoutes({n: change(ids_TK) for n, ids_TK in ids.items()})))

    live = run(contextlib.nullcontext())
    with recording() as microbatch:
        recorded = run(replaying(microbatch))
    ids = dict(microbatch.ids)
    swapped = MicrobatchRoutes({**ids, 1: ids[2], 2: ids[1]})
    claims = {
        "every layer is recorded": sorted(ids) == [1, 2, 3, 4],
        "recording changes nothing": same(live, recorded),
        "replay is bitwise what was recorded": same(live, replay(lambda ids_TK: ids_TK)),
        "nothing stays active": active_microbatch() is None,
        "without replay it is live again": same(live, run(contextlib.nullcontext())),
        "other experts show": not same(live, replay(lambda ids_TK: (ids_TK + 1) % EXPERTS)),
        "shifted tokens show": not same(live, replay(lambda ids_TK: ids_TK.roll(1, 0))),
        "swapped layers show": not same(live, run(replaying(swapped))),
    }
    # With a recomputed MoE layer this does not hold: the first pass of such a layer runs without
    # gradients, where upstream's own top-k is unsorted. The order inside a route then moves the
    # last bit of a sum.
    if options.get("recompute_modules", ["layernorm"]) == ["layernorm"] and options != FULL:
        claims["another order is the same"] = same(live, replay(lambda ids_TK: ids_TK.flip(1)))
    return [claim for claim, holds in claims.items() if not holds]
