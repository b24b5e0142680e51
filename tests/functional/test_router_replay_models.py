"""RouterReplay's interface on rows, models and options that upstream's class cannot take.

Shape suffixes (docs/glossary.md): K, T, E.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from router_targets import (
    ASKED,
    EXPERTS,
    FULL,
    TOKENS,
    clear,
    equal,
    give,
    maps_of,
    routers_of,
    targets,
)
from tiny import SEQUENCE, config, loss_and_gradients, model, start

from fidelity.rig.worker import TreeWorker
from megatron_r3.replay import MicrobatchRoutes, replaying

# -- rows that are no routes


def bad_rows(rank: int, recompute: bool) -> dict[str, Any]:
    import megatron_r3.integrations.router_replay  # noqa: F401

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
    for layer, maps in by_layer.items():
        good_T = torch.ones(TOKENS, dtype=torch.bool)
        good_T[bad.get(layer, [])] = False
        ids_TK = given[layer - 1].clamp(0, EXPERTS - 1)
        want_TE = torch.zeros_like(maps[0]).scatter(1, ids_TK, True)
        claims[f"layer {layer} replays"] = torch.equal(maps[0][good_T], want_TE[good_T])
        claims[f"layer {layer} has two experts a token"] = bool((maps[0].sum(1) == 2).all())
        claims[f"layer {layer}, recompute"] = all(torch.equal(maps[0], m) for m in maps)
        claims[f"layer {layer}, passes"] = len(maps) == (2 if recompute else 1)
    # the same by hand: live in those layers only
    live_T = {layer: torch.zeros(TOKENS, dtype=torch.bool) for layer in bad}
    for layer, rows in bad.items():
        live_T[layer][rows] = True
    ids = {n: ids_TK.clamp(0, EXPERTS - 1) for n, ids_TK in enumerate(given, start=1)}
    clear()
    want = loss_and_gradients(gpt, replaying(MicrobatchRoutes(ids, live_T=live_T, checked=True)))
    claims["loss and gradients"] = equal(want, result)
    # control: live in all layers is another step
    anywhere_T = live_T[2] | live_T[4]
    every = loss_and_gradients(
        gpt, replaying(MicrobatchRoutes(ids, live_T=anywhere_T, checked=True))
    )
    claims["live in all layers would show"] = not equal(every, result)
    return claims


@pytest.mark.parametrize("recompute", [False, True])
def test_a_row_that_is_no_route_is_live_once_and_in_its_layer(
    patched: TreeWorker, recompute: bool
) -> None:
    (claims,) = patched.run(bad_rows, 1, recompute)
    assert all(claims.values()), claims


# -- other models and options


def mtp(rank: int) -> dict[str, Any]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    import megatron_r3.integrations.router_replay  # noqa: F401

    start()
    made = config(**ASKED, **FULL, mtp_num_layers=1)
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False)
    gpt = GPTModel(
        made,
        spec,
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False),
    )
    seen = maps_of(gpt)
    all_routers = [module for module in gpt.modules() if isinstance(module, TopKRouter)]
    RouterReplay.set_replay_data(targets())  # four: the MTP router is not in the list
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss_and_gradients(gpt, nullcontext())
    want = [torch.zeros(TOKENS, 8, dtype=torch.bool).scatter(1, ids, True) for ids in targets()]
    replayed = list(seen)
    # code that walks the modules of the model finds the MTP router too, and gives it targets
    mine: list[torch.Tensor] = []
    (extra,) = [router for router in all_routers if router not in routers_of(gpt)]
    extra.register_forward_hook(lambda *given: mine.append(given[2][1]))
    before = loss_and_gradients(gpt, nullcontext())
    extra.router_replay.set_target_indices(targets()[0])
    extra.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    after = loss_and_gradients(gpt, nullcontext())
    late = routers_of(gpt)[3].router_replay
    late.has_routes = False  # what 0.15 and 0.16 do to an MTP router, after it was made
    return {
        "routers": len(all_routers),
        "wrong": sum(not torch.equal(want[layer - 1], map_TE) for layer, map_TE in replayed),
        "passes": len(replayed),
        "targets do nothing": equal(before, after) and torch.equal(mine[0], mine[-1]),
        "MTP takes them": sum(torch.equal(map_TE, want[0]) for map_TE in mine),
        "the list": len(RouterReplay.global_router_replay_instances),
    }


def test_mtp_routers_are_in_no_list_and_stay_live(patched: TreeWorker) -> None:
    (result,) = patched.run(mtp, 1)
    assert result == {
        "routers": 5,
        "wrong": 0,
        "passes": 8,
        "targets do nothing": True,
        "MTP takes them": 0,
        "the list": 3,
    }


def dense_first_layer(rank: int) -> dict[str, Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    import megatron_r3.integrations.router_replay  # noqa: F401

    start()
    gpt = model(config(**ASKED, **FULL, moe_layer_freq=[0, 1, 1, 1]))
    seen = maps_of(gpt)
    given = targets(layers=3)
    RouterReplay.set_replay_data(given)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss_and_gradients(gpt, nullcontext())
    want = [torch.zeros(TOKENS, 8, dtype=torch.bool).scatter(1, ids, True) for ids in given]
    return {
        "layers": sorted({layer for layer, _ in seen}),
        "wrong": sum(not torch.equal(want[layer - 2], map_TE) for layer, map_TE in seen),
        "shifted by a layer": sum(
            torch.equal(want[layer - 3], map_TE) for layer, map_TE in seen if layer > 2
        ),
    }


def test_a_dense_first_layer_shifts_nothing(patched: TreeWorker) -> None:
    (result,) = patched.run(dense_first_layer, 1)
    assert result == {"layers": [2, 3, 4], "wrong": 0, "shifted by a layer": 0}


def class_of_0_15(rank: int) -> dict[str, Any]:
    """With the class that the patches bring to 0.15, whose __init__ calls its other methods."""
    import megatron_r3.integrations.router_replay as drop_in
    from megatron_r3.router_replay import RouterReplay, RouterReplayAction

    start()
    drop_in._upstream = lambda: RouterReplay
    gpt = model(config(**ASKED, **FULL))
    seen = maps_of(gpt)
    RouterReplay.set_replay_data(targets())
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss_and_gradients(gpt, nullcontext())
    want = [torch.zeros(TOKENS, 8, dtype=torch.bool).scatter(1, ids, True) for ids in targets()]
    hooks = RouterReplay.global_router_replay_instances
    return {
        "queues": [hook.replay_backward_list for hook in hooks],
        "wrong": sum(not torch.equal(want[layer - 1], map_TE) for layer, map_TE in seen),
        "passes": len(seen),
    }


def test_the_class_of_0_15_is_bound_alike(patched: TreeWorker) -> None:
    assert patched.run(class_of_0_15, 1) == [{"queues": [[]] * 4, "wrong": 0, "passes": 8}]


def hybrid(rank: int) -> dict[str, Any]:
    """A hybrid model of attention, MLP and MoE layers: another class of block."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.spec_utils import import_module

    import megatron_r3.integrations.router_replay  # noqa: F401

    start()
    pattern = "*E*-*E"
    made = HybridModel(
        config(**ASKED, **FULL, num_layers=len(pattern), is_hybrid_model=True),
        import_module(("megatron_r3.cpu.hybrid_spec", "spec")),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    seen, given = maps_of(made), targets(layers=2)
    RouterReplay.set_replay_data(given)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss_and_gradients(made, nullcontext())
    want = {
        layer: torch.zeros(TOKENS, 8, dtype=torch.bool).scatter(1, ids, True)
        for layer, ids in zip((2, 6), given, strict=True)
    }
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
    assert patched.run(hybrid, 1) == [{"passes": 4, "wrong": 0, "live passes that fit": 0}]


def own_forward(rank: int) -> dict[str, Any]:
    """A class of layers with a `forward` that does not call TransformerBlock's: mcore-bridge's."""
    from megatron.core.tensor_parallel import checkpoint
    from megatron.core.transformer.transformer_block import TransformerBlock

    import megatron_r3.integrations.router_replay  # noqa: F401

    class OwnForward(TransformerBlock):
        def forward(self, hidden_states: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
            for layer in self.layers:

                def run(hidden_states: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                    output: torch.Tensor = layer(hidden_states, None)[0]
                    return output

                hidden_states = checkpoint(run, False, hidden_states)
            return hidden_states

    start()
    gpt = model(config(**ASKED))
    gpt.decoder.__class__ = OwnForward
    seen, given = maps_of(gpt), targets()
    give(gpt, given)
    loss_and_gradients(gpt, nullcontext())
    want = [torch.zeros(TOKENS, 8, dtype=torch.bool).scatter(1, ids, True) for ids in given]
    clear()
    replayed = list(seen)
    seen.clear()
    loss_and_gradients(gpt, nullcontext())
    return {
        "passes": len(replayed),
        "wrong": sum(not torch.equal(want[layer - 1], map_TE) for layer, map_TE in replayed),
        "live passes that fit": sum(torch.equal(want[layer - 1], map_TE) for layer, map_TE in seen),
    }


def test_a_block_with_a_forward_of_its_own_replays(patched: TreeWorker) -> None:
    assert patched.run(own_forward, 1) == [{"passes": 8, "wrong": 0, "live passes that fit": 0}]


def counts_of(rank: int) -> list[list[int]]:
    """Expert-bias counts with a mask `[T]`, `[T, 1]` as SkyRL hands it over, and by hand."""
    start()
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    router = routers_of(model(config(**bias)))[0]
    map_TE = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, targets()[0], True)
    padding_T = torch.arange(TOKENS) % 3 == 0
    counts = []
    for mask in (padding_T, padding_T.unsqueeze(-1)):
        router.local_tokens_per_expert.zero_()
        router._apply_expert_bias(map_TE, mask)
        counts.append(router.local_tokens_per_expert.long().tolist())
    return [*counts, map_TE[~padding_T].sum(0).tolist()]


def test_expert_bias_counts_take_a_mask_that_is_broadcast_already(patched: TreeWorker) -> None:
    ((one, other, want),) = patched.run(counts_of, 1)
    assert one == other == want


def fusion(rank: int) -> dict[str, Any]:
    """With moe_router_fusion, and the reference in place of the kernel that a CPU does not have."""
    import megatron_r3.integrations.router_replay  # noqa: F401
    from megatron_r3.gate import replayed_gate_reference, substitute_gate

    start()
    gpt = model(config(**ASKED, **FULL, moe_router_fusion=True))
    calls = []

    def gate(inputs: Any, options: Any) -> Any:
        calls.append(inputs.live_T is not None)
        return replayed_gate_reference(inputs, options)

    seen, given = maps_of(gpt), targets()
    given[2][6] = given[2][6, 0]
    with substitute_gate(gate):
        give(gpt, given)
        loss_and_gradients(gpt, nullcontext())
    good_T = torch.arange(TOKENS) != 6
    want = [torch.zeros(TOKENS, 8, dtype=torch.bool).scatter(1, ids, True) for ids in given]
    third = [map_TE for layer, map_TE in seen if layer == 3]
    return {
        "calls": len(calls),
        "wrong": sum(
            not torch.equal(want[layer - 1][good_T], map_TE[good_T]) for layer, map_TE in seen
        ),
        "the bad row": [int(map_TE[6].sum()) for map_TE in third],
        "the same in recompute": torch.equal(*third),
    }


def test_the_fused_gate_replays_targets(patched: TreeWorker) -> None:
    assert patched.run(fusion, 1) == [
        {"calls": 8, "wrong": 0, "the bad row": [2, 2], "the same in recompute": True}
    ]


def planned(rank: int, dispatcher: str, is_right: bool) -> dict[str, Any]:
    """Expert parallel, the plan compared with what the device counts, in forward and recompute."""
    import megatron_r3.integrations.router_replay as drop_in
    from megatron_r3.seams.dispatch_plan import PlanHook

    start(expert_model_parallel_size=2)
    options = {**ASKED, **FULL, "expert_model_parallel_size": 2}
    options |= {"moe_token_dispatcher_type": dispatcher, "moe_router_replay_verify_plan": True}
    gpt = model(config(**options))
    answers = []
    sizes = PlanHook.sizes

    def watched(self: PlanHook, *args: Any) -> Any:
        answer = sizes(self, *args)
        answers.append(answer is not None)
        return answer

    PlanHook.sizes = watched  # type: ignore[method-assign]
    if not is_right:
        plan = drop_in._plan
        drop_in._plan = lambda block, routes: dict(
            zip(plan(block, routes), reversed(plan(block, routes).values()), strict=True)
        )
    given = targets(rank)
    give(gpt, given)
    told = "not refused"
    try:
        loss_and_gradients(gpt, nullcontext())
    except Exception as error:
        return {"told": str(error)}
    taken = sum(answers)
    answers.clear()
    given[0][0] = given[0][0, 0] if rank else given[0][0]  # one bad row on one rank: no plan
    give(gpt, given)
    loss_and_gradients(gpt, nullcontext())
    return {"told": told, "taken": taken, "with a bad row": sum(answers)}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_dispatch_plan_is_taken_and_right(patched: TreeWorker, dispatcher: str) -> None:
    for result in patched.run(planned, 2, dispatcher, True):
        assert result == {"told": "not refused", "taken": 8, "with a bad row": 0}


def test_a_wrong_dispatch_plan_shows(patched: TreeWorker) -> None:
    for result in patched.run(planned, 2, "alltoall", False):
        assert "dispatch plan: layer" in result["told"]


def mismatch(rank: int) -> dict[str, Any]:
    import megatron_r3.integrations.router_replay as drop_in

    start()
    gpt = model(config(**ASKED, **FULL))
    given = targets()
    given[0][2] = given[0][2, 0]
    seen: dict[int, torch.Tensor] = {}
    for router in routers_of(gpt):
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
