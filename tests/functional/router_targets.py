"""Targets for the routers of a tiny model, as code that is written for RouterReplay gives them.

Shape suffixes (docs/glossary.md): K, T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_r3 import ReplayError, local_routers
from proof.fidelity.tiny import BATCH, EXPERTS, SEQUENCE, batch

TOKENS = BATCH * SEQUENCE
ASKED = {"moe_router_replay": False, "moe_enable_routing_replay": True}


def targets(seed: int = 0, layers: int = 4) -> list[torch.Tensor]:
    """Drawn routes of each layer, int64, as RouterReplay takes them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(TOKENS, EXPERTS, generator=generator).topk(2).indices for _ in range(layers)]


def wanted_maps(given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The routing maps bool `[T, E]` of routers that take these targets."""
    return [
        torch.zeros(len(ids_TK), EXPERTS, dtype=torch.bool).scatter(1, ids_TK, True)
        for ids_TK in given
    ]


def give(gpt: Any, given: list[torch.Tensor], action: str = "replay_forward") -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for router, ids_TK in zip(local_routers(gpt).values(), given, strict=True):
        router.router_replay.set_target_indices(ids_TK)
        router.router_replay.set_router_replay_action(RouterReplayAction(action))


def clear() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()


def refusal(what: Callable[[], Any]) -> str:
    try:
        what()
    except (ReplayError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def forward(gpt: Any) -> torch.Tensor:
    tokens, positions, labels = batch()
    return gpt(tokens, positions, None, labels=labels).sum()
