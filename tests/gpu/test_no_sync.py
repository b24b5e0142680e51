"""On a CUDA device: the router's part of a replay never makes the host wait."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_r3.replay import MicrobatchRoutes, replaying
from megatron_r3.seams.load import RouterLoad
from megatron_r3.seams.router import RouterHook

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

T, E, K = 512, 64, 8
CONFIG = SimpleNamespace(
    moe_router_enable_expert_bias=True,
    moe_router_replay_expert_bias="live",
    moe_router_replay_aux_loss="replayed",
)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def live_topk(scores: Any, topk: int, **_: Any) -> Any:
    return torch.topk(scores, topk, dim=1)


@pytest.fixture
def routes() -> MicrobatchRoutes:
    """Everything at once: missing rows, padding, mismatch counted."""
    tokens = torch.arange(T, device="cuda")
    return MicrobatchRoutes(
        {1: torch.rand(T, E, device="cuda").topk(K, dim=1).indices.to(torch.uint8)},
        live_T=tokens % 7 == 0,
        counted_T=tokens % 5 == 0,
        padding_T=tokens > T - 20,
        mean_tokens=float(T - 20),
    )


def test_a_replayed_router_does_not_wait(
    routes: MicrobatchRoutes, waiting_is_an_error: None
) -> None:
    hook = RouterHook(CONFIG, layer_number=1)
    load = RouterLoad(SimpleNamespace(config=CONFIG, router_replay=hook))
    routed_live = torch.zeros(T, E, dtype=torch.bool, device="cuda")
    load.live_map = lambda logits_TE: routed_live  # type: ignore[method-assign]  # Megatron's own
    scores = torch.randn(T, E, device="cuda", requires_grad=True)
    for _ in range(2):  # the first pass settles the microbatch, a recompute repeats it
        with replaying(routes):
            values, ids = hook.get_replay_topk(scores, K, None, None, live_topk)
            routed = torch.zeros(T, E, dtype=torch.bool, device="cuda").scatter(1, ids, True)
            padding = load.padding_mask(None)
            load.map_for_aux_loss(routed, routed, padding)
            load.map_for_expert_bias(scores, routed)
            load.mean_tokens(T)
            load.real_tokens(T)
        values.sum().backward()


def test_the_check_can_fail(waiting_is_an_error: None) -> None:
    with pytest.raises(RuntimeError):
        torch.ones(1, device="cuda").item()
