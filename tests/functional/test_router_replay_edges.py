"""RouterReplay's interface beside other models, after mistakes, and switched off.

Shape suffixes (docs/glossary.md): K, T.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from router_targets import ASKED, clear, forward, give, refusal, targets

from megatron_r3 import MicrobatchRoutes, local_routers, replaying
from megatron_r3.replay.active import active_microbatch
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import FULL, config, loss_and_gradients, model, same, start

# -- several models, several passes


def two_models(rank: int) -> dict[str, bool]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    import megatron_r3.frameworks.router_replay  # noqa: F401

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
        "as replaying": same(alone, native),
        "replaying around an action is an error": "no router took them" in both,
        "the other model in between": same(alone, (loss.detach(), mixed)),
        "the other model replays its own": not same(other, live) and not same(other, alone),
        "the other model is live again": same(live, beside),
        "an emptied list": same(alone, loss_and_gradients(first, nullcontext())),
    }


def test_two_models_in_a_process_do_not_mix(patched: TreeWorker) -> None:
    (results,) = patched.run(two_models, 1)
    assert all(results.values()), results


# -- errors


def errors(rank: int) -> dict[str, Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction
    from megatron.core.transformer.transformer_block import TransformerBlock

    import megatron_r3.frameworks.router_replay  # noqa: F401

    start()
    gpt = model(config(**ASKED))
    hooks = [router.router_replay for router in local_routers(gpt).values()]
    live = loss_and_gradients(gpt, nullcontext())
    told: dict[str, Any] = {}

    def after(what: str) -> None:
        told[f"{what}: nothing is left"] = active_microbatch() is None and all(
            hook.target_topk_idx is None and hook.router_replay_action is None for hook in hooks
        )
        told[f"{what}: live again"] = same(live, loss_and_gradients(gpt, nullcontext()))

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

    give(gpt, targets())
    mlp = gpt.decoder.layers[1].mlp
    mlp.forward = lambda hidden, *_, **__: (hidden, None)
    told["a layer asks no router"] = refusal(lambda: forward(gpt))
    del mlp.forward
    after("a layer asks no router")

    def fails(*_: Any) -> None:
        raise ValueError("a layer failed")

    give(gpt, targets())
    handle = gpt.decoder.layers[2].register_forward_pre_hook(fails)
    told["in a layer"] = refusal(lambda: forward(gpt))
    handle.remove()
    after("in a layer")

    class OwnCall(TransformerBlock):
        def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
            return self.forward(*args, **options)

    give(gpt, targets())
    gpt.decoder.__class__ = OwnCall
    told["own call"] = refusal(lambda: forward(gpt))
    clear()
    told["own call, live"] = refusal(lambda: forward(gpt))
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
    assert "ids of shape [31, 2]; expected [T, K] [32, 2]: the router has" in told["other tokens"]
    assert "ids of shape [32, 1]; expected [T, K] [32, 2]: moe_router_topk is 2" in told["other K"]
    assert "no router took the targets of layers [2]" in told["a layer asks no router"]
    assert told["in a layer"] == "ValueError: a layer failed"
    assert "layer 1: the action is replay_forward, and the router runs outside" in told["own call"]
    assert told["own call, live"] == "not refused"
    assert "moe_enable_routing_replay: with overlap_moe_expert_parallel_comm" in told["overlap"]
    left = {name: value for name, value in told.items() if value is not True and ":" in name}
    assert not left, left


def on_an_unpatched_tree(rank: int) -> str:
    def imported() -> None:
        import megatron_r3.frameworks.router_replay  # noqa: F401

    return refusal(imported)


def test_an_unpatched_tree_is_one_error_at_import(unpatched: TreeWorker) -> None:
    (told,) = unpatched.run(on_an_unpatched_tree, 1)
    assert "is not patched; run `megatron-r3 apply " in told


# -- off


def off(rank: int, imported: bool) -> list[Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    if imported:
        import megatron_r3.frameworks.router_replay  # noqa: F401
    start()
    plain = model(config(moe_router_replay=False))
    live = loss_and_gradients(plain, nullcontext())
    gpt = model(config(**ASKED))
    classes, plain_hooks = (
        {type(router.router_replay).__name__ for router in local_routers(made).values()}
        for made in (gpt, plain)
    )
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
        assert same(theirs[2], other[2])
    assert same(theirs[3], on_ours[3])
    assert not same(theirs[2], theirs[3])
