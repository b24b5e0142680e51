"""Routes that were given are taken, or there is an error: in whatever order options were set.

Shape suffixes (docs/glossary.md): K, T.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from router_targets import refusal, targets

from megatron_r3.replay.active import MicrobatchRoutes, Mode, recording, replaying
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import (
    FULL,
    batch,
    config,
    loss_and_gradients,
    model,
    same,
    start,
)


def routes(seed: int = 0) -> dict[int, torch.Tensor]:
    """Drawn routes of four layers: distinct ids that no live router would choose."""
    return {n: ids_TK.to(torch.uint8) for n, ids_TK in enumerate(targets(seed), start=1)}


def set_on_a_made_config(rank: int) -> dict[str, bool]:
    """A framework makes the config first, and sets the option on it by attribute."""
    start()
    late_config = config(moe_router_replay=False, **FULL)
    late_config.moe_router_replay = True
    late = model(late_config)
    # run before any other config has the option: that one would bind recomputes for all of them
    got = loss_and_gradients(late, replaying(MicrobatchRoutes(routes())))
    at_once = model(config(**FULL))
    want = loss_and_gradients(at_once, replaying(MicrobatchRoutes(routes())))
    other = loss_and_gradients(at_once, replaying(MicrobatchRoutes(routes(1))))
    return {
        "forward and recompute replay": same(want, got),
        "other routes show": not same(other, got),
    }


def test_the_option_set_on_a_made_config_replays_in_recompute_too(patched: TreeWorker) -> None:
    (results,) = patched.run(set_on_a_made_config, 1)
    assert all(results.values()), results


def both_options(rank: int) -> dict[str, str]:
    start()
    after = model(config())
    after.config.moe_enable_routing_replay = True
    other_after = model(config(moe_router_replay=False, moe_enable_routing_replay=True))
    other_after.config.moe_router_replay = True
    given = MicrobatchRoutes(routes())
    return {
        "theirs": refusal(lambda: loss_and_gradients(after, replaying(given))),
        "ours": refusal(lambda: loss_and_gradients(other_after, replaying(given))),
    }


def test_neither_replay_option_is_set_once_the_model_is_made(patched: TreeWorker) -> None:
    (told,) = patched.run(both_options, 1)
    assert "moe_enable_routing_replay was set after this model was made" in told["theirs"]
    assert "moe_router_replay was set after this model was made" in told["ours"]


def recorder_that_replays(rank: int) -> dict[str, Any]:
    """Code for RouterReplay, beside our option, and without the import that puts it on ours."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    start()
    both = model(config(moe_enable_routing_replay=True))
    wanted = routes()
    loss_and_gradients(both, replaying(MicrobatchRoutes(wanted)))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    tokens, positions, _ = batch()
    with torch.no_grad():
        both(tokens, positions, None)
    recorded = RouterReplay.get_recorded_data()
    RouterReplay.set_replay_data(recorded)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return {
        "recorded": [ids is not None for ids in recorded],
        "live": refusal(lambda: loss_and_gradients(both, replaying(None))),
        "replayed": refusal(lambda: loss_and_gradients(both, replaying(MicrobatchRoutes(wanted)))),
    }


def test_beside_our_option_router_replay_records_and_never_replays(patched: TreeWorker) -> None:
    (told,) = patched.run(recorder_that_replays, 1)
    assert told["recorded"] == [True] * 4
    for text in (told["live"], told["replayed"]):
        assert "RouterReplay was told to replay_forward" in text


def with_slimes_list(rank: int) -> str:
    """What slime's patch of the tree does to a router: `register_routing_replay`."""
    start()
    registered = model(config())
    for router in (layer.mlp.router for layer in registered.decoder.layers):
        router.routing_replay = object()
    return refusal(lambda: loss_and_gradients(registered, replaying(None)))


def test_slimes_own_replay_beside_ours_is_refused(patched: TreeWorker) -> None:
    (told,) = patched.run(with_slimes_list, 1)
    assert told.startswith("ReplayError")
    assert "unset ENABLE_ROUTING_REPLAY" in told


BLOCKS: dict[str, Callable[[], Any]] = {
    "given": lambda: replaying(MicrobatchRoutes(routes())),
    "observed": lambda: replaying(MicrobatchRoutes(routes(), mode=Mode.OBSERVE)),
    "no routes": lambda: replaying(MicrobatchRoutes({})),
    "recording": recording,
    "live": lambda: replaying(None),
}


def blocks_around(gpt: Any) -> dict[str, str]:
    """What each kind of block says of a forward pass of this model."""
    return {
        way: refusal(partial(loss_and_gradients, gpt, block())) for way, block in BLOCKS.items()
    }


def nobody_takes_them(rank: int) -> dict[str, dict[str, str]]:
    start()
    off = {"moe_router_replay": False}
    return {
        "off": blocks_around(model(config(**off))),
        "off, with recompute": blocks_around(model(config(**off, **FULL))),
        "a dense chunk": blocks_around(model(config(moe_layer_freq=[0] * 4))),
    }


NOTHING = {
    "given": "routes of layers [1, 2, 3, 4] were given, and no router took them: ",
    "observed": "routes of layers [1, 2, 3, 4] were given, and no router took them: ",
    "no routes": "there were no routes, and nothing was replayed: ",
    "recording": "nothing was recorded: ",
}


def test_a_forward_pass_that_took_no_routes_is_an_error(patched: TreeWorker) -> None:
    (told,) = patched.run(nobody_takes_them, 1)
    dense = told.pop("a dense chunk")
    for ways in told.values():
        assert ways.pop("live") == "not refused"
        for way, text in ways.items():
            assert NOTHING[way] + "the model was built with moe_router_replay off" in text
    # a stage of a pipeline without MoE layers has no routes: only routes that were given are wrong
    for way in ("given", "observed"):
        assert "the model chunk that ran has none of these layers" in dense.pop(way)
    assert dense == dict.fromkeys(("no routes", "recording", "live"), "not refused")


def on_an_unpatched_tree(rank: int) -> dict[str, str]:
    start()
    return blocks_around(model(config(moe_router_replay=False)))


def test_an_unpatched_tree_is_named(unpatched: TreeWorker, megatron_tree: Path) -> None:
    (told,) = unpatched.run(on_an_unpatched_tree, 1)
    assert told.pop("live") == "not refused"
    for way, text in told.items():
        why = f"the Megatron-LM in {megatron_tree} is not patched; run `megatron-r3 apply"
        assert NOTHING[way] + why in text


def replaced_routing(rank: int) -> dict[str, str]:
    """What a framework's monkey patch does: another `routing`, which asks nobody."""
    from megatron.core.transformer.moe.router import TopKRouter

    start()
    made_before = model(config(**FULL))
    original = TopKRouter.routing

    def routing(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.config.moe_router_replay = False
        hook, self.router_replay = self.router_replay, None
        try:
            return original(self, logits, *args, **kwargs)
        finally:
            self.router_replay = hook

    TopKRouter.routing = routing
    given = MicrobatchRoutes(routes())
    return {
        "config after it": refusal(lambda: config(**FULL)),
        "model before it": refusal(lambda: loss_and_gradients(made_before, replaying(given))),
    }


def test_a_replaced_routing_function_is_named(patched: TreeWorker) -> None:
    (told,) = patched.run(replaced_routing, 1)
    assert "test_untaken has replaced TopKRouter.routing" in told["config after it"]
    assert "no router took them" in told["model before it"]
    assert "test_untaken has replaced TopKRouter.routing" in told["model before it"]
