"""What upstream's RouterReplay gets wrong or cannot do, on the microbatch: right, or one error.

Shape suffixes (docs/glossary.md): K, T, E.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny import BATCH, SEQUENCE, SHAPE, batch, config, loss_and_gradients, model, start

from fidelity.rig.worker import TreeWorker
from megatron_r3.replay import MicrobatchRoutes, ReplayError, active_microbatch, replaying

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TOKENS, EXPERTS = BATCH * SEQUENCE, 8
ASKED = {"moe_router_replay": False, "moe_enable_routing_replay": True}


def targets(seed: int = 0, layers: int = 4) -> list[torch.Tensor]:
    """Drawn routes of each layer, int64, as RouterReplay takes them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(TOKENS, 8, generator=generator).topk(2).indices for _ in range(layers)]


def routers_of(gpt: Any) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in gpt.decoder.modules() if isinstance(module, TopKRouter)]


def give(gpt: Any, given: list[torch.Tensor], action: str = "replay_forward") -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for router, ids_TK in zip(routers_of(gpt), given, strict=True):
        router.router_replay.set_target_indices(ids_TK)
        router.router_replay.set_router_replay_action(RouterReplayAction(action))


def clear() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one[0], other[0]) and all(
        torch.equal(gradient, other[1][name]) for name, gradient in one[1].items()
    )


def maps_of(gpt: Any) -> list[tuple[int, torch.Tensor]]:
    """What each decoder router does from now on: layer, and routing map."""
    seen: list[tuple[int, torch.Tensor]] = []
    for router in routers_of(gpt):
        router.register_forward_hook(
            lambda r, _, out: seen.append((r.layer_number, out[1].clone()))
        )
    return seen


def refusal(what: Callable[[], Any]) -> str:
    try:
        what()
    except (ReplayError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def forward(gpt: Any) -> torch.Tensor:
    tokens, positions, labels = batch()
    return gpt(tokens, positions, None, labels=labels).sum()


# -- several models, several passes


def two_models(rank: int) -> dict[str, bool]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    import megatron_r3.integrations.router_replay  # noqa: F401

    start()
    first = model(config(**ASKED, **FULL))
    give(first, targets())
    alone = loss_and_gradients(first, nullcontext())
    ids = dict(enumerate(targets(), start=1))
    both = refusal(lambda: loss_and_gradients(first, replaying(MicrobatchRoutes(ids))))
    clear()
    native = loss_and_gradients(first, replaying(MicrobatchRoutes(ids)))
    second = model(config(**ASKED, **FULL))
    listed = len(RouterReplay.global_router_replay_instances)
    live = loss_and_gradients(second, nullcontext())
    # the first waits for its backward pass while the second replays other routes, and is live
    give(first, targets())
    first.zero_grad(set_to_none=True)
    loss = forward(first)
    give(second, targets(1))
    other = loss_and_gradients(second, nullcontext())
    clear()
    beside = loss_and_gradients(second, nullcontext())
    loss.backward()
    mixed = {n: p.grad for n, p in first.named_parameters() if p.grad is not None}
    RouterReplay.clear_global_router_replay_instances()  # what a framework does for a new engine
    give(first, targets())
    return {
        "both are in the list": listed == 8,
        "as replaying": equal(alone, native),
        "replaying around an action is an error": "no router took them" in both,
        "the other model in between": equal(alone, (loss.detach(), mixed)),
        "the other model replays its own": not equal(other, live) and not equal(other, alone),
        "the other model is live again": equal(live, beside),
        "an emptied list": equal(alone, loss_and_gradients(first, nullcontext())),
    }


def test_two_models_in_a_process_do_not_mix(patched: TreeWorker) -> None:
    (results,) = patched.run(two_models, 1)
    assert all(results.values()), results


def passes_in_flight(rank: int) -> dict[str, bool]:
    """Two forward passes before their backward passes, which come in the wrong order."""
    import megatron_r3.integrations.router_replay  # noqa: F401

    start()
    gpt = model(config(**ASKED, **FULL))
    give(gpt, targets(1))
    with torch.no_grad():
        forward(gpt)  # upstream's queue would keep these targets
    want = []
    for seed in (2, 3):
        give(gpt, targets(seed))
        want.append(loss_and_gradients(gpt, nullcontext()))
    losses = []
    for seed in (2, 3):
        give(gpt, targets(seed))
        losses.append(forward(gpt))
    clear()  # a framework clears before the backward pass, and sets what the next forward does
    give(gpt, targets(4))
    results = {}
    for number in (0, 1):
        gpt.zero_grad(set_to_none=True)
        losses[number].backward()
        got = {n: p.grad.clone() for n, p in gpt.named_parameters() if p.grad is not None}
        results[f"pass {number}"] = equal(want[number], (losses[number].detach(), got))
    clear()
    live = forward(gpt)
    give(gpt, targets(4))  # the recompute of a live pass, with an action set for the next one
    gpt.zero_grad(set_to_none=True)
    live.backward()
    got = {n: p.grad.clone() for n, p in gpt.named_parameters() if p.grad is not None}
    clear()
    results["a live pass"] = equal(loss_and_gradients(gpt, nullcontext()), (live.detach(), got))
    return results


def test_a_recompute_takes_the_targets_of_its_own_forward_pass(patched: TreeWorker) -> None:
    (results,) = patched.run(passes_in_flight, 1)
    assert all(results.values()), results


# -- errors


def errors(rank: int) -> dict[str, Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction
    from megatron.core.transformer.transformer_block import TransformerBlock

    import megatron_r3.integrations.router_replay  # noqa: F401

    start()
    gpt = model(config(**ASKED))
    hooks = [router.router_replay for router in routers_of(gpt)]
    live = loss_and_gradients(gpt, nullcontext())
    told: dict[str, Any] = {}

    def after(what: str) -> None:
        told[f"{what}: nothing is left"] = active_microbatch() is None and all(
            hook.target_topk_idx is None and hook.router_replay_action is None for hook in hooks
        )
        told[f"{what}: live again"] = equal(live, loss_and_gradients(gpt, nullcontext()))

    give(gpt, targets())
    hooks[2].clear_indices()
    told["no target"] = refusal(lambda: forward(gpt))
    after("no target")
    give(gpt, targets(), "replay_backward")
    told["backward"] = refusal(lambda: forward(gpt))
    after("backward")
    give(gpt, targets())
    hooks[1].clear_router_replay_action()
    told["mixed"] = refusal(lambda: forward(gpt))
    after("mixed")
    give(gpt, [ids_TK[:-1] for ids_TK in targets()])
    told["other tokens"] = refusal(lambda: forward(gpt))
    after("other tokens")
    give(gpt, [ids_TK[:, :1] for ids_TK in targets()])
    told["other K"] = refusal(lambda: forward(gpt))

    def fails(*_: Any) -> None:
        raise ValueError("a layer failed")

    give(gpt, targets())
    handle = gpt.decoder.layers[2].register_forward_pre_hook(fails)
    told["in a layer"] = refusal(lambda: forward(gpt))
    handle.remove()
    after("in a layer")

    class OwnForward(TransformerBlock):
        def forward(self, hidden_states: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
            hidden_states = hidden_states if self.pre_process else self.input_tensor
            for layer in self.layers:
                hidden_states, _ = layer(hidden_states, None)
            return hidden_states

    give(gpt, targets())
    gpt.decoder.__class__ = OwnForward
    told["own forward"] = refusal(lambda: forward(gpt))
    clear()
    told["own forward, live"] = refusal(lambda: forward(gpt))
    late = config(**ASKED)
    late.overlap_moe_expert_parallel_comm = True
    told["overlap"] = refusal(lambda: model(late))
    told["upstream's own check"] = refusal(lambda: RouterReplayAction("replay_sideways"))
    return told


def test_a_mistake_is_one_error_and_leaves_nothing_behind(patched: TreeWorker) -> None:
    (told,) = patched.run(errors, 1)
    assert "the routers of layers [3] have no targets" in told["no target"]
    assert "began with the action replay_backward" in told["backward"]
    assert "different actions: {1: 'replay_forward', 2: None," in told["mixed"]
    assert "routes 32 tokens to top-2; its microbatch has routes (31, 2)" in told["other tokens"]
    assert "its microbatch has routes (32, 1)" in told["other K"]
    assert told["in a layer"] == "ValueError: a layer failed"
    assert (
        "layer 1: the action is replay_forward, and the router runs outside" in told["own forward"]
    )
    assert told["own forward, live"] == "not refused"
    assert "moe_enable_routing_replay: with overlap_moe_expert_parallel_comm" in told["overlap"]
    left = {name: value for name, value in told.items() if value is not True and ":" in name}
    assert not left, left


def on_an_unpatched_tree(rank: int) -> str:
    def imported() -> None:
        import megatron_r3.integrations.router_replay  # noqa: F401

    return refusal(imported)


def test_an_unpatched_tree_is_one_error_at_import(unpatched: TreeWorker) -> None:
    (told,) = unpatched.run(on_an_unpatched_tree, 1)
    assert "is not patched; run `megatron-r3 apply` on it" in told


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
    late = routers_of(gpt)[3].router_replay
    late.has_routes = False  # what 0.15 and 0.16 do to an MTP router, after it was made
    return {
        "routers": len(all_routers),
        "wrong": sum(not torch.equal(want[layer - 1], map_TE) for layer, map_TE in seen),
        "passes": len(seen),
        "the list": len(RouterReplay.global_router_replay_instances),
    }


def test_mtp_routers_are_in_no_list_and_stay_live(patched: TreeWorker) -> None:
    assert patched.run(mtp, 1) == [{"routers": 5, "wrong": 0, "passes": 8, "the list": 3}]


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


# -- off


def upstreams_config(**options: Any) -> Any:
    """As `config`, without an option that an unpatched tree does not have."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    more = {"moe_router_load_balancing_type": "none", "num_layers": 4}
    return TransformerConfig(**SHAPE, **more, **options)


def off(rank: int, imported: bool) -> list[Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    if imported:
        import megatron_r3.integrations.router_replay  # noqa: F401
    start()
    plain = model(upstreams_config())
    live = loss_and_gradients(plain, nullcontext())
    gpt = model(upstreams_config(moe_enable_routing_replay=True))
    classes = {type(router.router_replay).__name__ for router in routers_of(gpt)}
    plain_hooks = {type(router.router_replay).__name__ for router in routers_of(plain)}
    RouterReplay.set_replay_data(targets())
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return [sorted(classes), sorted(plain_hooks), live, loss_and_gradients(gpt, nullcontext())]


def test_off_upstreams_class_is_untouched(patched: TreeWorker, unpatched: TreeWorker) -> None:
    (theirs,) = unpatched.run(off, 1, False)
    (on_ours,) = patched.run(off, 1, False)
    (dropped_in,) = patched.run(off, 1, True)
    assert theirs[0] == on_ours[0] == ["RouterReplay"]
    assert dropped_in[0] == ["BoundRouterReplay"]
    assert theirs[1] == on_ours[1] == dropped_in[1] == ["NoneType"]
    for other in (on_ours, dropped_in):
        assert equal(theirs[2], other[2])
    assert equal(theirs[3], on_ours[3])
    assert not equal(theirs[2], theirs[3])
