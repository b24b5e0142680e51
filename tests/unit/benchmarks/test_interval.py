"""How sure a median is: its interval holds what it promises, and noise alone does not tell."""

import random

import pytest

from proof.benchmarks.interval import CONFIDENCE, LOOKS, enough, median_of, shown, turn


def test_interval_of_ten_values() -> None:
    """The example of the module: rank 2 of 10 at 97.9 %, and rank 1 (99.8 %) at 99 %."""
    values = [float(i) for i in range(10)]
    assert (median_of(values, 0.97).low, median_of(values, 0.97).high) == (1.0, 8.0)
    assert (median_of(values).low, median_of(values).high) == (0.0, 9.0)


def test_too_few_values_have_no_interval() -> None:
    few = median_of([0.5] * 7)
    assert (few.low, few.high) == (float("-inf"), float("inf"))
    assert few.record()["low"] is None
    assert not few.tells
    assert median_of([0.5] * 8).tells


@pytest.mark.parametrize("count", [8, 9, 31, 64])
def test_the_true_median_is_inside_as_often_as_promised(count: int) -> None:
    draw = random.Random(count)
    # exponential times: a long tail; the true median is log 2
    tries, inside = 2000, 0
    for _ in range(tries):
        interval = median_of([draw.expovariate(1.0) for _ in range(count)])
        inside += interval.low <= 0.6931471805599453 <= interval.high
    assert inside / tries >= CONFIDENCE - 0.01


def test_noise_alone_hardly_ever_tells() -> None:
    """The control of `tells`: equal ways, steps that spread by 30 %, all looks of a benchmark."""
    draw = random.Random(1)
    fooled = 0
    for _ in range(300):
        ratios = [draw.lognormvariate(0.0, 0.3) for _ in range(LOOKS[-1])]
        fooled += any(median_of(ratios[:count]).tells for count in LOOKS)
    assert fooled <= 300 * 5 * (1 - CONFIDENCE)


def test_a_real_difference_tells_and_stops() -> None:
    draw = random.Random(2)
    ratios = [0.9 * draw.lognormvariate(0.0, 0.05) for _ in range(64)]
    assert not enough([ratios[:9]], 128)  # nobody looks at 9
    assert enough([ratios], 128)
    assert not enough([ratios, [1.0 + 0.1 * (i % 2) for i in range(64)]], 128)
    assert enough([[1.0]], 1)


def test_a_ratio_is_shown_only_if_it_tells() -> None:
    tells = median_of([0.93 + 0.001 * (i % 3) for i in range(16)]).record()
    assert shown(tells) == "0.931 (0.930 to 0.932)"
    assert shown(median_of([0.97, 1.03] * 8).record()) == "cannot tell (0.970 to 1.030)"
    assert shown(median_of([0.5] * 3).record()) == "cannot tell (3 values)"
    assert shown(median_of([0.5]).record()) == "cannot tell (1 value)"
    assert shown(median_of([31.4] * 8).record()) == "31 (31 to 31)"


def test_a_turn_has_every_way_in_every_place() -> None:
    orders = [turn("abc", number) for number in range(6)]
    assert ["".join(order) for order in orders] == ["abc", "cba", "bca", "acb", "cab", "bac"]
    for place in range(8):
        assert {turn(range(8), number)[place] for number in range(16)} == {*range(8)}
