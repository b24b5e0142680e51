"""How sure a median is: its interval holds what it promises, and noise alone does not tell."""

import random

import pytest

from proof.benchmarks.interval import CONFIDENCE, LOOKS, enough, median_of, turn


def test_interval_of_eight_ratios() -> None:
    """By hand: of 256 sign patterns one has the rank sum 0, one 1, one 2, two 3 and two 4."""
    values = [2.0 ** (2 * i) for i in range(8)]
    assert median_of(values).median == pytest.approx(2.0**7)
    bounds = {0.99: 0, 0.984: 1, 0.976: 2, 0.96: 3}  # 2, 4, 6, 10 of 256 are outside
    for confidence, rank in bounds.items():
        interval = median_of(values, confidence)
        # the means of pairs, in logs of 2: 0, 1, 2, 2, ... and from the other end 14, 13, 12, 12
        steps = [0, 1, 2, 2][rank]
        assert (interval.low, interval.high) == pytest.approx((2.0**steps, 2.0 ** (14 - steps)))


def test_too_few_values_have_no_interval() -> None:
    few = median_of([0.5] * 7)
    assert (few.low, few.high) == (float("-inf"), float("inf"))
    assert few.record()["low"] is None
    assert not few.tells
    assert median_of([0.5] * 8).tells


@pytest.mark.parametrize("count", [8, 9, 31, 64])
def test_the_true_ratio_is_inside_as_often_as_promised(count: int) -> None:
    draw = random.Random(count)
    # exponential times: a long tail
    tries, inside = 2000, 0
    for _ in range(tries):
        ratios = [draw.expovariate(1.0) / draw.expovariate(1.0) for _ in range(count)]
        interval = median_of(ratios)
        inside += interval.low <= 1 <= interval.high
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
    assert not enough([ratios, [draw.lognormvariate(0.0, 0.05) for _ in range(64)]], 128)
    assert enough([[1.0]], 1)


def test_a_turn_has_every_way_in_every_place() -> None:
    orders = [turn("abc", number) for number in range(6)]
    assert ["".join(order) for order in orders] == ["abc", "cba", "bca", "acb", "cab", "bac"]
    for place in range(8):
        assert {turn(range(8), number)[place] for number in range(16)} == {*range(8)}
