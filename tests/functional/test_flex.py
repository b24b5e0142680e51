"""A replayed expert of weight 0 keeps its token in the flex dispatcher too.

Shape suffixes (docs/glossary.md): T, E, P.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_r3.replay.active import MicrobatchRoutes, replaying
from proof.fidelity.observe import Observer
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import BATCH, SEQUENCE, batch, config, model, start

EP2: dict[str, Any] = {
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "flex",
    "moe_router_pre_softmax": True,
}


def experts_that_got_tokens(rank: int, asks_the_map: bool) -> list[int]:
    """How many tokens each of this rank's experts of layer 1 got; most have weight 0 there."""
    from megatron.core.transformer.moe.router import TopKRouter

    start(expert_model_parallel_size=2)
    gpt = model(config(**EP2, moe_flex_dispatcher_backend="deepep"))
    for router in (m for m in gpt.modules() if isinstance(m, TopKRouter)):
        router.weight.data *= 1e5  # the softmax leaves one expert, and exactly 0 for the others
    for layer in gpt.decoder.layers:
        if not asks_the_map:
            manager = layer.mlp.token_dispatcher._comm_manager
            manager.setup_metadata = partial(by_weight_alone, manager)
    observer = Observer()
    observer.attach([gpt])
    with replaying(MicrobatchRoutes({layer: routes() for layer in range(1, 5)})):
        tokens, positions, labels = batch(seed=rank)
        gpt(tokens, positions, None, labels=labels).sum().backward()
    (call,) = (seen for seen in observer.seen[""] if seen.layer == 1)
    counts = torch.bincount(torch.from_numpy(call.experts_P), minlength=8)
    return counts[4 * rank : 4 * rank + 4].tolist()


def by_weight_alone(manager: Any, routing_map_TE: torch.Tensor, probs_TE: torch.Tensor) -> None:
    """What a tree without the fix does."""
    probs_TE = probs_TE.reshape(len(routing_map_TE), manager.num_experts)
    manager.token_probs, manager.token_indices = torch.topk(probs_TE, manager.router_topk, dim=-1)


def routes() -> torch.Tensor:
    """A skewed load `[T, K]`, the same on both ranks."""
    first = torch.arange(BATCH * SEQUENCE) % 3
    return torch.stack([first, 7 - first], dim=1).to(torch.uint8)


def test_experts_of_weight_0_get_their_tokens(patched: TreeWorker) -> None:
    want = (2 * torch.bincount(routes().long().ravel(), minlength=8)).tolist()
    got = patched.run(experts_that_got_tokens, 2, True)
    assert got[0] + got[1] == want
    control = patched.run(experts_that_got_tokens, 2, False)
    assert control[0] + control[1] != want


def made_on(rank: int, device: str) -> bool:
    """A config that asks for flex, made where a model's parameters have no data yet."""
    start(expert_model_parallel_size=2)
    with torch.device(device):
        return bool(config(**EP2, moe_flex_dispatcher_backend="deepep").moe_router_replay)


def test_a_config_may_be_made_on_meta(patched: TreeWorker) -> None:
    assert patched.run(made_on, 2, "meta") == [True, True]
