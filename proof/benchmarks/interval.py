"""How sure a median is, and when a comparison may stop: used by every benchmark of times.

Times on a shared machine have long tails, so nothing here assumes a distribution. The interval of
a median comes from order statistics: of n values that are drawn independently, the number below
the true median is binomial (n, 1/2), whatever the distribution is. For n = 10 the chance that the
true median lies outside of the second smallest and the second largest value is 2 * 11 / 1024 = 2.1
%, so these two are an interval at 97.9 %.

A benchmark that looks after every step whether it has seen enough would be fooled more often than
its confidence says, since each look is a new chance. So it looks only when the number of values has
doubled (`LOOKS`), and the confidence is 99 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any, TypeVar

Way = TypeVar("Way")
CONFIDENCE = 0.99
# after how many values a benchmark looks whether it can tell a difference; 8 is the smallest number
# whose extremes are an interval at 99 % (2 / 2**8 = 0.8 %)
LOOKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Median:
    """The median of some values, and the interval in which the true one lies.

    Attributes:
        median: of the values.
        low, high: the bounds of the interval at `CONFIDENCE`. With fewer than 8 values there is no
            such interval; then low is -inf and high is inf.
        count: how many values there were.
    """

    median: float
    low: float
    high: float
    count: int

    @property
    def tells(self) -> bool:
        """Whether a ratio is known to differ from 1: the interval is narrower than the difference.

        Example: 0.93 with (0.91, 0.95) tells, because 0.04 < 0.07. 0.97 with (0.93, 1.02) does not.
        The interval then lies on one side of 1, since it contains the median.
        """
        return self.high - self.low < abs(self.median - 1.0)

    def record(self) -> dict[str, Any]:
        """What a record holds: the fields, and `tells`; a bound that does not exist is None."""
        bounds = {"low": self.low, "high": self.high}
        finite = {
            name: value if abs(value) != float("inf") else None for name, value in bounds.items()
        }
        return {**asdict(self), **finite, "tells": self.tells}


def median_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Median:
    """The median and its interval, from order statistics.

    Args:
        values: at least one, drawn independently; for steps of a benchmark, ratios of neighbours.
        confidence: the interval has the true median in it with at least this chance.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no value, so no median")
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    # The interval from the value of rank r to the one of rank n - 1 - r misses the true median with
    # the chance 2 * P(binomial(n, 1/2) <= r). Take the largest r for which that is small enough.
    for r in range(n // 2):
        outside += 2 * comb(n, r) / 2**n
        if outside > 1 - confidence:
            break
        rank = r + 1
    median = statistics.median(ordered)
    if rank == 0:
        return Median(median, float("-inf"), float("inf"), n)
    return Median(median, ordered[rank - 1], ordered[n - rank], n)


def enough(comparisons: Sequence[Sequence[float]], most: int) -> bool:
    """Whether a benchmark of ratios may stop.

    Args:
        comparisons: the ratios of each comparison so far; all have the same number of values.
        most: at this number of values it stops, although it cannot tell.

    Returns:
        True at `most`, and at one of `LOOKS` if every comparison tells.
    """
    count = len(comparisons[0])
    if count >= most:
        return True
    return count in LOOKS and all(median_of(ratios).tells for ratios in comparisons)


def shown(record: Mapping[str, Any]) -> str:
    """The cell of a table for a ratio: the number with its interval, or that nobody can tell.

    Args:
        record: what `Median.record` made, also after a detour through JSON.

    Returns:
        For example "0.930 (0.911 to 0.952)", "cannot tell (0.970 to 1.030)", or "cannot tell (3
        values)" where there are fewer than an interval needs.
    """
    if record["low"] is None or record["high"] is None:
        return f"cannot tell ({record['count']} value{'s' * (record['count'] != 1)})"
    # three decimals near 1, where two would say 1.00 for what is known to be 0.996
    median = record["median"]
    decimals = 0 if median >= 10 else 3 if 0.5 < median < 2 else 2
    interval = f"({record['low']:.{decimals}f} to {record['high']:.{decimals}f})"
    return f"{median:.{decimals}f} {interval}" if record["tells"] else f"cannot tell {interval}"


def turn(ways: Sequence[Way], number: int) -> list[Way]:
    """The order of the ways in a round: turned by one place in every second round, else mirrored.

    Every way is in every place equally often, and before a neighbour as often as behind it. Three
    ways a, b, c have all six orders in six rounds: abc cba bca acb cab bac.

    Args:
        ways: what is measured.
        number: of the round, from 0.
    """
    start = number // 2 % len(ways)
    turned = [*ways[start:], *ways[:start]]
    return turned[::-1] if number % 2 else turned
