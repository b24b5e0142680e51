"""Replaying what was recorded live changes nothing, to the last bit; anything else shows."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tiny import BATCH, SEQUENCE, batch, config, loss_and_gradients, model, start

from megatron_r3.replay.active import MicrobatchRoutes, active_microbatch, recording, replaying
from proof.fidelity.rig.worker import TreeWorker

RECOMPUTE = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}


def same(a: Any, b: Any) -> bool:
    """Loss and every gradient bitwise equal."""
    return (
        torch.equal(a[0], b[0])
        and a[1].keys() == b[1].keys()
        and all(torch.equal(gradient, b[1][name]) for name, gradient in a[1].items())
    )


def record_and_replay(rank: int, recompute: str) -> dict[str, bool]:
    start()
    gpt = model(config(**RECOMPUTE[recompute]))
    live = loss_and_gradients(gpt, contextlib.nullcontext())
    with recording() as microbatch:
        recorded = loss_and_gradients(gpt, replaying(microbatch))
    ids = dict(microbatch.ids)
    layers = sorted(ids)
    shifted = {layer: (layer_ids + 1) % 8 for layer, layer_ids in ids.items()}
    swapped = {**ids, layers[0]: ids[layers[1]], layers[1]: ids[layers[0]]}
    reordered = {layer: layer_ids.flip(1) for layer, layer_ids in ids.items()}

    def replay(some_ids: dict[int, torch.Tensor]) -> Any:
        return loss_and_gradients(gpt, replaying(MicrobatchRoutes(some_ids)))

    claims = {
        "layers": layers == [1, 2, 3, 4],
        "recording changes nothing": same(live, recorded),
        "replay": same(live, replay(ids)),
        "nothing stays active": active_microbatch() is None,
        "live again": same(live, loss_and_gradients(gpt, contextlib.nullcontext())),
        "shifted experts show": not same(live, replay(shifted)),
        "swapped layers show": not same(live, replay(swapped)),
        "shifted tokens show": not same(
            live, replay({layer: layer_ids.roll(1, 0) for layer, layer_ids in ids.items()})
        ),
    }
    # With a recomputed MoE layer this does not hold: the first pass of such a layer runs without
    # gradients, where upstream's own top-k is unsorted. The order inside a route then moves the
    # last bit of a sum.
    if recompute in ("none", "layernorm"):
        claims["another order is the same"] = same(live, replay(reordered))
    return claims


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_replaying_what_was_recorded_is_bitwise_live(patched: TreeWorker, recompute: str) -> None:
    (results,) = patched.run(record_and_replay, 1, recompute)
    assert all(results.values()), results


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
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    mtp = config(mtp_num_layers=1)
    spec = get_gpt_decoder_block_spec(mtp, use_transformer_engine=False)
    dense = config(mtp_num_layers=1, moe_layer_freq=[0] * 4)
    gpt, without = (
        GPTModel(
            mtp,
            decoder,
            vocab_size=64,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(mtp, spec, use_transformer_engine=False),
        )
        for decoder in (spec, get_gpt_decoder_block_spec(dense, use_transformer_engine=False))
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
