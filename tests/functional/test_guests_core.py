"""Guest experts in float64, without `pretrain()`: exact gradients, and faults that show.

Shape suffixes (docs/glossary.md): B, I, K, L, S, T, V.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import grouped_experts
import numpy as np
import pytest
import torch
from skewed_routes import Gradients, furthest, skewed
from training import same

from proof.fidelity import tiny
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

SLOTS = {"moe_router_replay_guest_slots": 2, "moe_router_replay_guest_tokens": 1}


def core(
    rank: int,
    options: dict[str, Any],
    fault: str = "",
    steps: int = 1,
    trained: tuple[str, ...] = ("",),
    unknown: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """Loss and gradients of a tiny float64 model after the last step, without `pretrain()`.

    Args:
        trained: parameters with one of these in their names; the others are frozen.
        unknown: the steps in which the second rank has a token without a route.
    """
    from megatron_r3 import ModelRoutes, RouteArrays, replaying

    tiny.start(expert_model_parallel_size=2)
    if options.get("moe_grouped_gemm"):
        grouped_experts.install()
    gpt = tiny.model(tiny.config(expert_model_parallel_size=2, **options)).double()
    if fault:
        FAULTS[fault]()
    tokens = tiny.BATCH * tiny.SEQUENCE
    ids_LTK = skewed((4, 2 * tokens, 2), 0.8, 2, 8)
    known = RouteArrays(ids_LTK, 8, range(4))
    with_hole = RouteArrays(ids_LTK, 8, range(4), np.arange(2 * tokens) != tokens)
    rows_BS = torch.arange(tokens).view(tiny.BATCH, tiny.SEQUENCE) + rank * tokens
    routes = ModelRoutes(gpt)
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    found: dict[str, torch.Tensor] = {}
    for step in range(steps):
        microbatch = routes.microbatch(with_hole if step in unknown else known, rows_BS)
        assert step not in unknown or microbatch.plan is None
        loss, found = tiny.loss_and_gradients(gpt, replaying(microbatch))
        found["loss"] = loss
        with torch.no_grad():
            for parameter in gpt.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-2 * parameter.grad
    return found


def late(rank: int) -> list[torch.Tensor]:
    """The weights that came to this rank's guest, and the gradients that came to its home.

    Rank 0 has the guest, and rank 1 is the home. Whoever sends begins 0.3 s after the receiver.
    """
    from megatron_r3.balance.places import LayerGuests
    from megatron_r3.balance.travel import Slots, Stay, Trip

    tiny.start(expert_model_parallel_size=2)
    group = torch.distributed.group.WORLD
    slots = Slots(group, [torch.Size([3])], torch.zeros(2, 1, 3))
    sends, receives = ([[], []], [0, 1]) if rank == 0 else ([[0], []], [0, 0])
    guests = LayerGuests(torch.empty(0), 0, sends, receives, [0] * sum(receives))
    weights = [[torch.full((3,), 5.0)]]
    torch.distributed.barrier()
    time.sleep(0.3 * (rank == 1))
    fetched = slots.fetch(Trip(Stay(1, 1, 1), guests, lambda: weights)).clone()
    torch.distributed.barrier()
    time.sleep(0.3 * (rank == 0))
    slots.send_home(guests, torch.full((3 * sum(receives),), 7.0))
    return [fetched, slots.come_home().clone()]


def dropped() -> None:
    """The gradients of guests do not come home."""
    from megatron_r3.balance.travel import Slots

    home = Slots.come_home
    Slots.come_home = lambda *given: home(*given) * 0  # type: ignore[method-assign]


def doubled() -> None:
    """The gradients of guests come home twice."""
    from megatron_r3.balance.travel import Slots

    home = Slots.come_home
    Slots.come_home = lambda *given: home(*given) * 2  # type: ignore[method-assign]


def sent_to_the_wrong_home() -> None:
    """The gradients of two guests of a rank are taken for each other's."""
    from megatron_r3.balance.travel import Slots

    home = Slots.come_home
    Slots.come_home = lambda *given: home(*given).roll(1, 0)  # type: ignore[method-assign]


def weights_of_another_layer() -> None:
    """Slots keep what came first."""
    from megatron_r3.balance.travel import Slots

    send = Slots.send

    def late(self: Slots, trip: Any) -> Any:
        full = [slots for slots in self._sets if slots.stay is not None]
        if len(full) < 2:
            return send(self, trip)
        full[1].stay = trip.stay
        return full[1]

    Slots.send = late  # type: ignore[method-assign]


def weights_of_the_step_before() -> None:
    """A layer sends the weights of the first step for ever."""
    from megatron_r3.seams.guests import GuestLayer

    weights, first = GuestLayer._all_weights, {}

    def old(self: GuestLayer) -> Any:
        if self not in first:
            first[self] = [[w.detach().clone() for w in expert] for expert in weights(self)]
        return first[self]

    depart = GuestLayer._trip_in

    def trip(self: GuestLayer, *given: Any) -> Any:
        made = depart(self, *given)
        return made and replace(made, weights=lambda: old(self))

    GuestLayer._trip_in = trip  # type: ignore[method-assign]


def a_bound_off_by_one() -> None:
    """Each place leaves out the last token that the plan gives it."""
    from megatron_r3.balance.places import LayerGuests

    on_device = LayerGuests.on_device

    def wrong(self: LayerGuests, device: torch.device) -> Any:
        expert_I, place_V, low_V, high_V = on_device(self, device)
        return expert_I, place_V, low_V, high_V - (high_V > low_V).long()

    LayerGuests.on_device = wrong  # type: ignore[method-assign]


FAULTS = {
    fault.__name__: fault
    for fault in (
        dropped,
        doubled,
        sent_to_the_wrong_home,
        weights_of_another_layer,
        weights_of_the_step_before,
        a_bound_off_by_one,
    )
}


@pytest.fixture(scope="module")
def without(patched: TreeWorker) -> Gradients:
    return patched.run(core, 2, {}, steps=2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["", "full recompute", "moe recompute"],
)
def test_in_float64(patched: TreeWorker, without: Gradients, options: dict[str, Any]) -> None:
    found = patched.run(core, 2, {**SLOTS, **options}, steps=2)
    assert furthest(found, without) < 1e-13
    assert not same(found, without)


def test_grouped_experts_in_float64(patched: TreeWorker) -> None:
    plain, found = (
        patched.run(core, 2, {"moe_grouped_gemm": True, **slots}, steps=2) for slots in ({}, SLOTS)
    )
    assert furthest(found, plain) < 1e-13
    assert not same(found, plain)


@pytest.mark.parametrize(
    "case",
    [
        {"trained": ("layers.2.mlp.router", "layers.3.mlp.experts")},
        {"trained": ("layers.1.self_attention",)},
        {"unknown": (0,), "steps": 3},
    ],
    ids=str,
)
def test_what_is_frozen_or_unknown(patched: TreeWorker, case: dict[str, Any]) -> None:
    plain, found = (patched.run(core, 2, options, **case) for options in ({}, SLOTS))
    assert plain[0].keys() == found[0].keys()
    assert furthest(found, plain) < 1e-13
    assert not same(found, plain)


def test_what_travels_is_waited_for(patched: TreeWorker) -> None:
    (weights, _), (_, gradients) = patched.run(late, 2)
    assert weights.tolist() == [[5.0] * 3]
    assert gradients.tolist() == [[7.0] * 3]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(patched: TreeWorker, without: Gradients, fault: str) -> None:
    found = patched.run(core, 2, SLOTS, fault=fault, steps=2)
    assert furthest(found, without) > 1e-8


def test_a_bound_off_by_one_is_named(patched: TreeWorker) -> None:
    """A dispatch has as many tokens as the plan says, whatever its map says."""
    options = {**SLOTS, "moe_router_replay_verify_plan": True}
    patched.run(core, 2, options)
    with pytest.raises(RankError, match="dispatch plan"):
        patched.run(core, 2, options, fault=a_bound_off_by_one.__name__)
