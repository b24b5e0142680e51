"""Replaying what was recorded live changes nothing, to the last bit; anything else shows."""

from __future__ import annotations

import pytest
import torch

from megatron_r3.replay.active import MicrobatchRoutes, recording, replaying
from proof.fidelity.record_replay import record_and_replay
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import (
    BATCH,
    FULL,
    SEQUENCE,
    batch,
    config,
    loss_and_gradients,
    model,
    start,
)

RECOMPUTE = {
    "none": {},
    "full": FULL,
    "block": {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_replaying_what_was_recorded_is_bitwise_live(patched: TreeWorker, recompute: str) -> None:
    assert patched.run(record_and_replay, 1, RECOMPUTE[recompute]) == [[]]


def other_routes(layers: int = 4) -> MicrobatchRoutes:
    """Routes that no live router would choose."""
    first = torch.arange(BATCH * SEQUENCE)
    ids = {n: torch.stack([(first + n) % 8, (first + n + 3) % 8], 1) for n in range(1, layers + 1)}
    return MicrobatchRoutes({n: layer_ids.to(torch.uint8) for n, layer_ids in ids.items()})


def recompute_sees_its_own_routes(rank: int, bound: bool) -> bool:
    """Replay without and with recompute, other microbatches in between, backward out of order."""
    from megatron.core.deferred import set_deferred_binder

    start()
    plain, recomputing = model(config()), model(config(**RECOMPUTE["full"]))
    if not bound:
        set_deferred_binder(None)
    tokens, positions, labels = batch()
    want = loss_and_gradients(plain, replaying(other_routes()))
    with replaying(other_routes()):
        first = recomputing(tokens, positions, None, labels=labels).sum()
    with recording() as live:
        second = recomputing(tokens, positions, None, labels=labels).sum()
    third = recomputing(tokens, positions, None, labels=labels).sum()  # no microbatch at all
    with replaying(live):
        with torch.no_grad():  # a block in which no router takes its routes is an error
            recomputing(tokens, positions, None, labels=labels)
        (second + third).backward()
        recomputing.zero_grad(set_to_none=True)
        first.backward()
    got = {n: p.grad for n, p in recomputing.named_parameters() if p.grad is not None}
    return torch.equal(first.detach(), want[0]) and all(
        torch.allclose(gradient, want[1][name], atol=1e-7) for name, gradient in got.items()
    )


def test_a_recompute_takes_the_routes_of_its_own_forward_pass(patched: TreeWorker) -> None:
    assert patched.run(recompute_sees_its_own_routes, 1, True) == [True]


def test_without_the_binding_a_recompute_takes_other_routes(patched: TreeWorker) -> None:
    assert patched.run(recompute_sees_its_own_routes, 1, False) == [False]


def mtp_stays_live(rank: int) -> list[tuple[int, bool]]:
    from megatron.core.transformer.moe.router import TopKRouter

    start()
    from megatron.core.models.gpt import gpt_layer_specs as specs

    mtp, local = config(mtp_num_layers=1), {"use_transformer_engine": False}
    spec = specs.get_gpt_decoder_block_spec(mtp, **local)
    dense = config(mtp_num_layers=1, moe_layer_freq=[0] * 4)
    gpt, without = (
        model(mtp, layers, mtp_block_spec=specs.get_gpt_mtp_block_spec(mtp, spec, **local))
        for layers in (spec, specs.get_gpt_decoder_block_spec(dense, **local))
    )
    routers = [m for m in gpt.modules() if isinstance(m, TopKRouter)]
    assert [r.is_mtp_layer for r in routers] == [False] * 4 + [True]
    tokens, positions, labels = batch()
    with replaying(other_routes()):  # an MTP router that replayed would take those of layer 1
        gpt(tokens, positions, None, labels=labels)
    with recording() as nothing:  # the only routers of this chunk are those of MTP: no error
        without(tokens, positions, None, labels=labels)
    with replaying(nothing):
        without(tokens, positions, None, labels=labels)
    assert not nothing.ids
    return [(r.router_replay.layer_number, r.router_replay.has_routes) for r in routers]


def test_mtp_routers_are_live_and_alias_no_decoder_layer(patched: TreeWorker) -> None:
    (hooks,) = patched.run(mtp_stays_live, 1)
    assert hooks == [(1, True), (2, True), (3, True), (4, True), (1, False)]
