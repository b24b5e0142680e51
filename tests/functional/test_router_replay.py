"""Code that is written for upstream's RouterReplay replays through the microbatch, unchanged."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from replay_layouts import (
    LAYOUTS,
    RECOMPUTE,
    Data,
    Step,
    live,
    own_rows,
    replay_as_upstream_says,
    replay_natively,
    run_step,
    same,
)
from slow import slow

from megatron_r3 import local_routers
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import make_chunks


def reference(rank: int) -> Step:
    """One process, without recompute, by `replaying`; the drop-in is not imported."""
    chunks = make_chunks({}, moe_router_replay=True)
    step = run_step(chunks, Data(), replay_natively)
    step.maps = []
    return step


@functools.cache
def reference_of(patched: TreeWorker) -> Step:
    return patched.run(reference, 1)[0]


def in_a_layout(rank: int, layout: str, recompute: str) -> dict[str, Any]:
    """A forward-only pass that nobody clears, a step, its controls, and record and replay."""
    import megatron_r3.frameworks.router_replay  # noqa: F401

    chunks = make_chunks(LAYOUTS[layout][1], moe_enable_routing_replay=True, **RECOMPUTE[recompute])
    data = Data()
    with torch.no_grad():
        run_step(chunks, Data(1), replay_as_upstream_says, forward_only=True)
    step = run_step(chunks, data, replay_as_upstream_says)
    own = [own_rows(ids, chunks[0]) for ids in data.routes]
    shifted = {
        "token": [ids.roll(1, 1) for ids in data.routes],
        "expert": [(ids + 1) % 8 for ids in data.routes],
    }
    controls = {
        name: run_step(chunks, data, replay_as_upstream_says, routes)
        for name, routes in shifted.items()
    }
    wrong, step_maps, step.maps = step.wrong_passes(own), len(step.maps), []
    return {
        "step": step,
        "passes": step_maps,
        "wrong": wrong,
        "controls": {
            name: (control.wrong_passes(own), not same(step, control))
            for name, control in controls.items()
        },
        "queues": sum(
            len(router.router_replay.replay_backward_list)
            for chunk in chunks
            for router in local_routers(chunk).values()
        ),
    }


# every layout, and every recompute, but not each with each
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [*((layout, "full") for layout in LAYOUTS), ("1", "none"), ("EP2", "moe")],
)
def test_every_layout_replays_as_one_process_does(patched, layout, recompute):
    want = reference_of(patched)
    ranks = patched.run(in_a_layout, LAYOUTS[layout][0], layout, recompute)
    passes_of_a_rank = 4 * 4 // (2 if "PP" in layout else 1)  # layers, micro-batches
    for result in ranks:
        assert result["wrong"] == 0
        assert result["passes"] == passes_of_a_rank * (1 if recompute == "none" else 2)
        assert result["queues"] == 0
        for name, (wrong, differs) in result["controls"].items():
            assert wrong == result["passes"], name
            assert differs, name
    losses = [result["step"].loss for result in ranks if result["step"].loss is not None]
    for loss in losses:
        torch.testing.assert_close(loss, want.loss, rtol=1e-5, atol=0)
    for layer, gradient in want.routers.items():
        parts = [r["step"].routers[layer] for r in ranks if layer in r["step"].routers]
        # each rank of a sequence-parallel group has the gradient of its own tokens; otherwise a
        # rank that has the layer has the whole gradient
        got = [torch.stack(parts).sum(0)] if layout == "TP2 SP" else parts
        for one in got:
            torch.testing.assert_close(one, gradient, rtol=1e-4, atol=1e-4)


def record_and_replay(rank: int, layout: str, recompute: str) -> dict[str, bool]:
    """What was recorded in a training step, replayed in another one."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    import megatron_r3.frameworks.router_replay  # noqa: F401

    chunks = make_chunks(LAYOUTS[layout][1], moe_enable_routing_replay=True, **RECOMPUTE[recompute])
    data = Data()
    lived = run_step(chunks, data, live)
    kept: dict[int, list[torch.Tensor]] = {}

    def record(chunk: Any, _: torch.Tensor, run: Any) -> Any:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        output = run()
        for layer, router in local_routers(chunk).items():
            indices = router.router_replay.get_recorded_indices()
            kept.setdefault(layer, []).append(indices.clone())
        RouterReplay.clear_global_router_replay_action()
        return output

    recorded = run_step(chunks, data, record)
    played: dict[int, int] = {}

    def replay(shift: int, chunk: Any, _: torch.Tensor, run: Any) -> Any:
        for layer, router in local_routers(chunk).items():
            number = played.setdefault(layer, 0)
            indices = (kept[layer][number % 4] + shift) % 8
            played[layer] += 1
            router.router_replay.set_target_indices(indices)
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = run()
        for router in local_routers(chunk).values():
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return output

    dtypes = {indices.dtype for layer in kept.values() for indices in layer}
    return {
        "int64": dtypes == {torch.int64},
        "recording changes nothing": same(lived, recorded),
        "replay is live": same(lived, run_step(chunks, data, functools.partial(replay, 0))),
        "shifted experts show": not same(
            lived, run_step(chunks, data, functools.partial(replay, 1))
        ),
    }


@pytest.mark.parametrize(("layout", "recompute"), [("TP2 SP", "full"), slow("PP2 VPP2", "moe")])
def test_what_was_recorded_replays_to_the_bit(patched, layout, recompute):
    for results in patched.run(record_and_replay, LAYOUTS[layout][0], layout, recompute):
        assert all(results.values()), results
