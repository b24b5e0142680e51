"""Calls are timed in turn, as often as their ratios need."""

from __future__ import annotations

import time

import pytest

from benchmarks.timer import Timer, ratio, shown


def test_a_real_difference_stops_early_and_none_goes_on() -> None:
    timer = Timer("cpu", 16)
    calls = {"slow": lambda: time.sleep(0.004), "fast": lambda: time.sleep(0.001)}
    times = timer.in_turn(calls, [("fast", "slow")], 128)
    assert len(times["fast"]) == len(times["slow"]) < 128
    assert ratio(times, "fast", "slow").tells
    assert ratio(times, "fast", "slow").median < 1
    equal = timer.in_turn(calls, [("fast", "fast")], 20)  # 20 is no power of two
    assert len(equal["fast"]) == 20
    assert shown(ratio(equal, "fast", "fast").record()) == "1.000 cannot tell"


@pytest.mark.parametrize("most", [1, 8, 9])
def test_every_second_round_goes_backwards(most: int) -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    Timer("cpu", 16).in_turn(calls, [("a", "a")], most)
    assert "".join(order) == "aaabbb" + ("abba" * most)[: 2 * most]
