"""How sure a ratio is, and when a comparison may stop: for the benchmarks that compare times.

Times on a shared machine have long tails, so nothing here assumes a normal distribution. A
benchmark runs two ways of doing the same by turns, and each turn gives a ratio of two times. The
ratio that is reported is the estimate of Hodges and Lehmann (Estimates of location based on rank
tests, 1963). To find it, the logs of every two ratios are averaged, also those of a ratio and
itself. The median of these means is the log of the estimate. As the ways take turns, the logs lie
alike on both sides of the true log. So the number of means below the true log is distributed as
Wilcoxon's signed-rank statistic, however times are distributed. That gives the interval. Example:
for n = 8 the chance that the true ratio lies outside of the smallest and the largest value is
2 / 2**8 = 0.8 %, so these two are an interval at 99.2 %. For many normal logs such intervals are
sqrt(2 / 3) as wide as those of a median: a fifth narrower.

A benchmark that looks after every step whether it has seen enough would be fooled more often than
its confidence says, since each look is a new chance. So a benchmark looks only when the number of
values has doubled (`LOOKS`), and the confidence is 99 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

Way = TypeVar("Way")
CONFIDENCE = 0.99
# The numbers of values after which a benchmark looks whether it can tell a difference. With 8
# values, and not with fewer, the smallest and the largest are an interval at 99 %.
LOOKS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Median:
    """The Hodges-Lehmann median of some ratios, and the interval in which the true ratio lies.

    Attributes:
        median: the median of the geometric means of all pairs of ratios.
        low, high: the bounds of the interval at the confidence that was asked for. If there are
            too few values for an interval (fewer than 8 at 99 %), low is -inf and high is inf.
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
        The interval of a ratio that tells lies on one side of 1, since it contains the median.
        """
        return self.high - self.low < abs(self.median - 1.0)

    def record(self) -> dict[str, Any]:
        """The fields and `tells`, as a dict for JSON; an infinite bound becomes None."""
        bounds = {"low": self.low, "high": self.high}
        finite = {
            name: value if abs(value) != float("inf") else None for name, value in bounds.items()
        }
        return {**asdict(self), **finite, "tells": self.tells}


def median_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Median:
    """The ratio that Hodges and Lehmann take from some ratios, and its interval.

    Args:
        values: ratios above 0, at least one; for steps of a benchmark, ratios of neighbours.
        confidence: the interval contains the true ratio with at least this chance.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no value, so no median")
    logs, n = np.log(values), len(values)
    first, second = np.triu_indices(n)
    means = np.sort(np.exp((logs[first] + logs[second]) / 2))
    # The interval from the r-th smallest mean to the r-th largest mean misses the true ratio with
    # the chance 2 * P(signed rank < r). Take the largest r for which this chance is small enough.
    rank = int(np.searchsorted(2 * _chance_of_rank(n), 1 - confidence, side="right"))
    median = float(np.median(means))
    if rank == 0:
        return Median(median, float("-inf"), float("inf"), n)
    return Median(median, float(means[rank - 1]), float(means[len(means) - rank]), n)


@cache
def _chance_of_rank(n: int) -> np.ndarray:
    """The chance that Wilcoxon's signed-rank statistic of n values is at most 0, 1, 2, ...

    The statistic is the sum of the ranks of the positive values; each rank from 1 to n is in the
    sum with a chance of a half. Example: for n = 2 the sums 0, 1, 2, 3 have a chance of 1/4 each.
    """
    chance = np.zeros(n * (n + 1) // 2 + 1)
    chance[0] = 1.0
    for rank in range(1, n + 1):
        chance[rank:] += chance[:-rank].copy()
        chance /= 2
    return chance.cumsum()


def enough(comparisons: Sequence[Sequence[float]], most: int) -> bool:
    """Whether a benchmark of ratios may stop.

    Args:
        comparisons: the ratios of each comparison so far; all have the same number of values.
        most: the number of values at which the benchmark stops even if it cannot tell.

    Returns:
        True at `most`, and at one of `LOOKS` if every comparison tells.
    """
    count = len(comparisons[0])
    if count >= most:
        return True
    return count in LOOKS and all(median_of(ratios).tells for ratios in comparisons)


def shown(record: Mapping[str, Any]) -> str:
    """The cell of a table for a ratio: the number with its interval, or "cannot tell".

    Args:
        record: what `Median.record` returned, or the same read from JSON.

    Returns:
        For example "0.930 (0.911 to 0.952)", "cannot tell (0.970 to 1.030)", or "cannot tell (3
        values)" if an interval needs more values.
    """
    if record["low"] is None or record["high"] is None:
        return f"cannot tell ({record['count']} value{'s' * (record['count'] != 1)})"
    # three decimals near 1, where two would say 1.00 for what is known to be 0.996
    median = record["median"]
    decimals = 0 if median >= 10 else 3 if 0.5 < median < 2 else 2
    interval = f"({record['low']:.{decimals}f} to {record['high']:.{decimals}f})"
    return f"{median:.{decimals}f} {interval}" if record["tells"] else f"cannot tell {interval}"


def turn(ways: Sequence[Way], number: int) -> list[Way]:
    """The order of the ways in a round.

    Each even round begins one way later than the even round before it, and each odd round is the
    mirror image of the even round before it. So every way comes at every position equally often,
    and before another way as often as after it. Example: in six rounds the ways a, b, c have the
    orders abc cba bca acb cab bac.

    Args:
        ways: what is measured.
        number: the number of the round, from 0.
    """
    start = number // 2 % len(ways)
    turned = [*ways[start:], *ways[:start]]
    return turned[::-1] if number % 2 else turned
