"""RouterReplay's interface: rows that are no routes, a dispatch plan, mismatch, a hybrid model.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from router_targets import ASKED, TOKENS, clear, give, targets, wanted_maps
from watch import maps_of, watched_plans

from megatron_r3 import MicrobatchRoutes, local_routers, replaying
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import (
    EXPERTS,
    FULL,
    config,
    hybrid,
    loss_and_gradients,
    model,
    same,
    start,
)

# -- rows that are no routes


def bad_rows(rank: int, recompute: bool) -> dict[str, Any]:
    import megatron_r3.frameworks.router_replay  # noqa: F401

    start()
    gpt = model(config(**ASKED, **(FULL if recompute else {})))
    given = targets()
    given[1][3] = given[1][3, 0]  # layer 2, token 3: one expert twice
    given[1][4] = -1
    given[3][5, 1] = EXPERTS
    given = [ids_TK.clone() for ids_TK in given]
    seen = maps_of(gpt)
    give(gpt, given)
    result = loss_and_gradients(gpt, nullcontext())
    by_layer: dict[int, list[torch.Tensor]] = {}
    for layer, map_TE in seen:
        by_layer.setdefault(layer, []).append(map_TE)
    bad = {2: [3, 4], 4: [5]}
    claims = {}
    ids = {n: ids_TK.clamp(0, EXPERTS - 1) for n, ids_TK in enumerate(given, start=1)}
    want = wanted_maps([*ids.values()])
    for layer, maps in by_layer.items():
        good_T = torch.ones(TOKENS, dtype=torch.bool)
        good_T[bad.get(layer, [])] = False
        claims[f"layer {layer} replays"] = torch.equal(maps[0][good_T], want[layer - 1][good_T])
        claims[f"layer {layer} has two experts a token"] = bool((maps[0].sum(1) == 2).all())
        claims[f"layer {layer}, recompute"] = all(torch.equal(maps[0], m) for m in maps)
        claims[f"layer {layer}, passes"] = len(maps) == (2 if recompute else 1)
    # the same by hand: live in those layers only
    live_T = {layer: torch.zeros(TOKENS, dtype=torch.bool) for layer in bad}
    for layer, rows in bad.items():
        live_T[layer][rows] = True
    clear()
    by_hand = MicrobatchRoutes(ids, live_T=live_T, checked=True)
    claims["loss and gradients"] = same(loss_and_gradients(gpt, replaying(by_hand)), result)
    # control: live in all layers is another step
    anywhere_T = live_T[2] | live_T[4]
    every = loss_and_gradients(
        gpt, replaying(MicrobatchRoutes(ids, live_T=anywhere_T, checked=True))
    )
    claims["live in all layers would show"] = not same(every, result)
    return claims


@pytest.mark.parametrize("recompute", [False, True])
def test_a_row_that_is_no_route_is_live_once_and_in_its_layer(patched, recompute):
    (claims,) = patched.run(bad_rows, 1, recompute)
    assert all(claims.values()), claims


# -- options


def planned(rank: int, dispatcher: str, is_right: bool) -> dict[str, Any]:
    """Expert parallel, the plan compared with what the device counts, in forward and recompute."""
    import megatron_r3.frameworks.router_replay as drop_in

    start(expert_model_parallel_size=2)
    options = {**ASKED, **FULL, "expert_model_parallel_size": 2}
    options |= {"moe_token_dispatcher_type": dispatcher, "moe_router_replay_verify_plan": True}
    gpt = model(config(**options))
    if not is_right:
        plan = drop_in._plan
        drop_in._plan = lambda block, routes: dict(
            zip(plan(block, routes), reversed(plan(block, routes).values()), strict=True)
        )
    given = targets(rank)
    give(gpt, given)
    with watched_plans() as plans:
        try:
            loss_and_gradients(gpt, nullcontext())
        except Exception as error:
            return {"told": str(error)}
    given[0][0] = given[0][0, 0] if rank else given[0][0]  # one bad row on one rank: no plan
    give(gpt, given)
    with watched_plans() as without:
        loss_and_gradients(gpt, nullcontext())
    return {"told": "not refused", "taken": sum(plans), "with a bad row": sum(without)}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_dispatch_plan_is_taken_and_right(patched: TreeWorker, dispatcher: str) -> None:
    for result in patched.run(planned, 2, dispatcher, True):
        assert result == {"told": "not refused", "taken": 8, "with a bad row": 0}


def test_a_wrong_dispatch_plan_shows(patched: TreeWorker) -> None:
    for result in patched.run(planned, 2, "alltoall", False):
        assert "dispatch plan: layer" in result["told"]


def mismatch(rank: int) -> dict[str, Any]:
    import megatron_r3.frameworks.router_replay as drop_in

    start()
    gpt = model(config(**ASKED, **FULL))
    given = targets()
    given[0][2] = given[0][2, 0]
    seen: dict[int, torch.Tensor] = {}
    for router in local_routers(gpt).values():
        routing = router.routing

        def keep(
            logits: torch.Tensor, *args: Any, r: Any = router, f: Any = routing, **options: Any
        ) -> Any:
            seen.setdefault(r.layer_number, logits.detach().reshape(TOKENS, EXPERTS))
            return f(logits, *args, **options)

        router.routing = keep
    give(gpt, given)
    loss_and_gradients(gpt, nullcontext())
    off = drop_in.take_mismatch()
    seen.clear()
    drop_in.count_mismatch()
    for _ in range(2):
        give(gpt, given)
        loss_and_gradients(gpt, nullcontext())
    counted = drop_in.take_mismatch()
    want = {}
    for layer, scores_TE in seen.items():
        best = scores_TE.topk(2, dim=1).indices.sort(dim=1).values
        differs_T = (best != given[layer - 1].sort(dim=1).values).any(1)
        compared_T = torch.arange(TOKENS) != (2 if layer == 1 else -1)
        want[layer] = (2 * int((differs_T & compared_T).sum()), 2 * int(compared_T.sum()))
    return {"off": off, "counted": counted, "want": want, "again": drop_in.take_mismatch()}


def test_mismatch_counts_are_those_of_a_live_topk(patched: TreeWorker) -> None:
    (result,) = patched.run(mismatch, 1)
    assert result["off"] == result["again"] == {}
    assert result["counted"] == result["want"]
    assert set(result["want"]) == {1, 2, 3, 4}
    assert 0 < result["want"][1][0] < result["want"][1][1]


# -- another class of block


def hybrid_model(rank: int) -> dict[str, Any]:
    """A hybrid model of attention, MLP and MoE layers: another class of block."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    import megatron_r3.frameworks.router_replay  # noqa: F401

    start()
    made = hybrid("*E*-*E", **ASKED, **FULL)
    seen, given = maps_of(made), targets(layers=2)
    RouterReplay.set_replay_data(given)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss_and_gradients(made, nullcontext())
    want = dict(zip((2, 6), wanted_maps(given), strict=True))
    clear()
    replayed = list(seen)
    seen.clear()
    loss_and_gradients(made, nullcontext())
    return {
        "passes": len(replayed),
        "wrong": sum(not torch.equal(want[layer], map_TE) for layer, map_TE in replayed),
        "live passes that fit": sum(torch.equal(want[layer], map_TE) for layer, map_TE in seen),
    }


def test_a_hybrid_model_replays(patched: TreeWorker) -> None:
    assert patched.run(hybrid_model, 1) == [{"passes": 4, "wrong": 0, "live passes that fit": 0}]
