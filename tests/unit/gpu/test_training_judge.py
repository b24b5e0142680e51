"""Each judgement of the kit's trainings passes what it must, and fails what it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from proof.gpu import training_judge as judge
from proof.gpu.training_cases import beside, judged
from proof.gpu.training_rank import Seen, Step
from proof.gpu.training_runs import RunFailed

GRADIENTS = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])}
OTHER = {"a": torch.tensor([-1.0, 2.0]), "b": torch.tensor([0.5])}


def step(**fields: Any) -> Step:
    losses = {"policy loss": 0.25, "abs dlogp": 0.003}
    whole = {"losses": losses, "finite": True, "seconds": 1.0, "dispatched": (100, 100)}
    return Step(**{**whole, "gradients": GRADIENTS, **fields})


def seen(*steps: Step, **fields: Any) -> Seen:
    return Seen(steps=[*steps] or [step()], experts="TEGroupedMLP", **fields)


RIGHT = seen()
WRONG: dict[str, Seen] = {
    "one pair went elsewhere": seen(step(dispatched=(99, 100))),
    "one pair of an earlier step went elsewhere": seen(step(dispatched=(99, 100)), step()),
    "nothing was counted": seen(step(dispatched=None)),
    "a loss is NaN": seen(step(losses={"policy loss": float("nan"), "abs dlogp": 0.0})),
    "a gradient is not finite": seen(step(finite=False)),
    "no step": Seen(experts="TEGroupedMLP"),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_replayed_training_fails_where(why: str) -> None:
    assert judged(RIGHT, lambda one: judge.replayed(one, "TEGroupedMLP"))["ok"]
    assert not judged(WRONG[why], lambda one: judge.replayed(one, "TEGroupedMLP"))["ok"]


def test_a_replayed_training_fails_with_other_experts_or_weights() -> None:
    assert not judge.replayed(RIGHT, "SequentialMLP")["ok"]
    apart = seen(step(losses={"policy loss": 0.25, "abs dlogp": 1.2}))
    assert not judge.replayed(apart)["ok"]
    assert judge.replayed(apart, sampled=False)["ok"]


def test_a_live_training_must_differ_from_the_recorded_routes() -> None:
    assert judge.live(seen(step(dispatched=(99, 100))))["ok"]
    assert not judge.live(RIGHT)["ok"]
    assert not judge.live(seen(step(dispatched=None)))["ok"]


def test_record_and_replay_needs_equal_bits_and_a_control_that_differs() -> None:
    last_bit = {**GRADIENTS, "b": torch.nextafter(torch.tensor([0.5]), torch.tensor([1.0]))}
    changed = step(gradients=last_bit)
    assert judge.recorded(seen(step(), step(), changed))["ok"]
    assert not judge.recorded(seen(step(), changed, changed))["ok"]  # one bit of one gradient
    assert not judge.recorded(seen(step(), step(), step()))["ok"]  # the control shows nothing
    empty = step(gradients={})
    assert not judge.recorded(seen(empty, empty, changed))["ok"]
    other_loss = step(losses={"policy loss": 0.2500001, "abs dlogp": 0.003})
    assert not judge.recorded(seen(step(), other_loss, changed))["ok"]


def recomputed(one: Seen) -> bool:
    row = beside(one, RIGHT, lambda a, b: judge.recomputed(a, b, 2, True, "te_checkpoint"))
    return bool(row["ok"])


def test_a_recompute_needs_both_passes_the_same_bits_and_its_own_function() -> None:
    twice = step(dispatched=(200, 200))
    counts = {"te_checkpoint": 16}
    assert recomputed(seen(twice, counts=counts))
    assert not recomputed(seen(step(), counts=counts))  # the recompute was not counted
    assert not recomputed(seen(replace(twice, dispatched=(199, 200)), counts=counts))
    assert not recomputed(seen(twice, counts={"checkpoint": 16}))  # it went another way
    assert not recomputed(seen(replace(twice, gradients=OTHER), counts=counts))


def test_the_control_of_a_recompute_must_show_in_gradients_and_counts() -> None:
    assert judge.unbound(seen(step(gradients=OTHER)), RIGHT)["ok"]
    assert not judge.unbound(RIGHT, RIGHT)["ok"]
    both = seen(step(gradients=OTHER, dispatched=(200, 200)))
    assert not judge.unbound(both, RIGHT)["ok"]


BESIDE: dict[str, tuple[Callable[[Seen, Seen], dict[str, Any]], dict[str, Any]]] = {
    "fusion": (
        lambda a, b: judge.fused_wgrad(a, b, True),
        {"counts": {"stand_in": 4}, "fused_wgrad": 9},
    ),
    "graphs": (judge.graphed, {"counts": {"graphs": 4}}),
    "gate": (judge.gated, {"counts": {"gate": 16}}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_compared_must_be_near_and_must_have_happened(name: str) -> None:
    check, happened = BESIDE[name]
    assert check(seen(**happened), RIGHT)["ok"]
    assert not check(RIGHT, RIGHT)["ok"]  # it did not happen
    assert not check(seen(step(gradients=OTHER), **happened), RIGHT)["ok"]
    assert not check(seen(step(dispatched=(99, 100)), **happened), RIGHT)["ok"]
    far = {"policy loss": 0.26, "abs dlogp": 0.003}
    assert not check(seen(step(losses=far), **happened), RIGHT)["ok"]
    nothing = seen(step(gradients={}))
    assert not check(seen(step(gradients={}), **happened), nothing)["ok"]


def test_a_graph_that_computes_otherwise_than_the_eager_steps_is_found() -> None:
    far = step(losses={"policy loss": 0.26, "abs dlogp": 0.003})
    assert not judge.graphed(seen(far, step(), counts={"graphs": 4}), RIGHT)["ok"]


def test_times_compare_neighbours_after_the_warm_up() -> None:
    ways = ("live", "no plan", "given")
    warm = [step(seconds=50.0)] * 3 * judge.WARM_UP
    turn = [step(seconds=2.0), step(seconds=1.8), step(seconds=1.0)]
    row = judge.times(seen(*warm, *turn * 8), ways, 8)
    assert row["ok"]
    assert row["ratios"]["given / live"]["median"] == 0.5
    assert row["ratios"]["given / live"]["tells"]
    assert not judge.times(seen(*warm, *turn * 7), ways, 8)["ok"]  # it ended early


def test_a_failed_training_fails_its_row_and_those_compared_with_it() -> None:
    failed = RunFailed("base failed; the end of base.log:\nRuntimeError: no")
    assert not judged(failed, judge.replayed)["ok"]
    row = beside(RIGHT, failed, judge.compared)
    assert not row["ok"]
    assert "RuntimeError: no" in row["error"]
