"""Calls are timed in turn, as often as their ratios need."""

from __future__ import annotations

import random

import pytest

import proof.benchmarks.timer
from proof.benchmarks.bench import ratios
from proof.benchmarks.interval import median_of
from proof.benchmarks.timer import Timer


def test_a_real_difference_stops_early_and_none_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that say themselves how long they took."""
    monkeypatch.setattr(proof.benchmarks.timer, "_host_us", lambda call: call())
    timer = Timer("cpu", 16)
    draw = random.Random(0)
    calls = {"slow": lambda: draw.uniform(3, 5), "fast": lambda: draw.uniform(1, 2)}
    times = timer.in_turn(calls, [("fast", "slow")], 128)
    assert len(times["fast"]) == len(times["slow"]) < 128
    ratio = median_of(ratios(times, "fast", "slow"))
    assert ratio.tells
    assert ratio.median < 1
    equal = timer.in_turn(calls, [("fast", "fast")], 20)  # 20 is no power of two
    assert len(equal["fast"]) == 20
    assert not median_of(ratios(equal, "fast", "fast")).tells


@pytest.mark.parametrize("most", [1, 8, 9])
def test_the_order_turns(most: int) -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    Timer("cpu", 16).in_turn(calls, [("a", "a")], most)
    assert "".join(order) == "aaabbb" + ("abbabaab" * 9)[: 2 * most]
