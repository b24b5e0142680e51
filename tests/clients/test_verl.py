"""verl's own engine, unchanged, replays through megatron_r3: R2 and R3 in every layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from replay_layouts import RECOMPUTE
from verl_engine import LAYOUTS, Engine, Passes

from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import LAYERS

MATRIX = ("1", "EP2", "TP2 SP EP2", "PP2", "PP2 VPP2", "CP2")


def recorded_by(engine: Engine) -> list[torch.Tensor]:
    """R2: what verl's log-prob pass recorded; it is known on the last stage, verl's trainer sends
    it on.
    """
    found = engine.run(engine.batch(None), forward_only=True).model_output.get("routed_experts")
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    if found is not None:
        found = [route.long() for route in found.unbind()]
    torch.distributed.all_gather_object(everywhere, found)
    return next(routes for routes in everywhere if routes is not None)


def in_a_layout(rank: int, layout: str, recompute: str, mode: str) -> dict[str, Any]:
    """An update, the same after a log-prob pass, and controls."""
    engine = Engine(layout, recompute, mode)
    if mode == "R2":
        # the experts after the recorded ones: live routing would show
        routes = [(route + 1) % 8 for route in recorded_by(engine)]
        given = routes
    else:
        routes, given = engine.routes, engine.given(engine.routes)
    step = engine.run(engine.batch(given))
    before = Passes()
    if mode == "R3":
        before = engine.run(engine.batch(given), forward_only=True)
    else:
        recorded_by(engine)
    again = engine.run(engine.batch(given))
    controls = {}
    for name, shifted in {
        "token": [route.roll(1, 0) for route in given],
        "expert": [(route + 1) % 8 for route in given],
    }.items():
        passes = engine.run(engine.batch(shifted))
        controls[name] = engine.wrong(passes, routes) == len(passes.maps)
    same = torch.equal(torch.tensor(step.loss or [0.0]), torch.tensor(again.loss or [0.0]))
    return {
        "passes": len(step.maps),
        "wrong": engine.wrong(step, routes),
        "log-prob pass": (len(before.maps), engine.wrong(before, routes)),
        "after it": (engine.wrong(again, routes), same),
        "gradients after it": all(
            torch.equal(gradient, again.routers[layer]) for layer, gradient in step.routers.items()
        ),
        "controls": controls,
        "loss": step.loss,
        "routers": step.routers,
    }


@functools.cache
def alone(verl: TreeWorker, mode: str, even: bool) -> dict[str, Any]:
    """One process without recompute; `even` as for the layouts with interleaved stages."""
    return verl.run(one_process, 1, mode, even, timeout_s=120)[0]


def one_process(rank: int, mode: str, even: bool) -> dict[str, Any]:
    engine = Engine("1", "none", mode, even)
    given = engine.given(engine.routes)
    if mode == "R2":
        given = [(route + 1) % 8 for route in recorded_by(engine)]
    step = engine.run(engine.batch(given))
    return {"loss": step.loss, "routers": step.routers}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize("layout", MATRIX)
def test_verl_replays(verl: TreeWorker, layout: str, mode: str, recompute: str) -> None:
    ranks = verl.run(in_a_layout, LAYOUTS[layout][0], layout, recompute, mode, timeout_s=180)
    forward = LAYERS * 2 // (2 if "PP" in layout else 1)  # layers and micro-batches of a rank
    for result in ranks:
        assert result["passes"] == forward * (1 if recompute == "none" else 2)
        assert result["wrong"] == 0
        assert result["log-prob pass"] == (forward if mode == "R3" else 0, 0)
        assert result["after it"] == (0, True)
        assert result["gradients after it"]
        assert result["controls"] == {"token": True, "expert": True}
    want = alone(verl, mode, "VPP2" in layout)
    for result in ranks:
        if result["loss"] is not None:
            torch.testing.assert_close(
                torch.tensor(result["loss"]), torch.tensor(want["loss"]), rtol=1e-4, atol=1e-5
            )
    for layer, gradient in want["routers"].items():
        parts = [result["routers"][layer] for result in ranks if layer in result["routers"]]
        got = parts
        if "SP" in layout:  # each rank has the gradient of its own tokens; Megatron sums them
            got = [torch.stack(parts).sum(0)]
        elif "CP" in layout:
            # verl gathers log-probs over the context-parallel ranks, whose backward pass counts
            # each loss once a rank; Megatron's DDP takes the mean over these ranks
            got = [torch.stack(parts).mean(0)]
        for one in got:
            torch.testing.assert_close(one, gradient, rtol=1e-3, atol=1e-4)
