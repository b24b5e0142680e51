"""How far a sampler may be from the trainer: three times the usual distance, plus a margin (room).

Two kinds of numbers have such a limit: the shares of routes that differ (`alarms.py`,
docs/truth.md), and what is measured after a push of weights (`megatron_r3/loop/push_floor.py`,
docs/online.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

# Without a fault, pushes and collections of a model in bfloat16 reach up to twice their median.
FACTOR = 3.0
# Shares of a MoE layer's routes. With a right engine in bfloat16, up to 0.2 of the routes differ
# from the choice of transformers (docs/truth.md); with a wrong rotary kernel 0.88 to 0.97 differ.
MOST_ROUTES, ROOM_ROUTES = 0.5, 0.05


class Share(NamedTuple):
    """Which share of (token, layer) pairs differs, and over how many rows that was measured."""

    share: float
    rows: float


NONE = Share(0.0, 0)


class Limit(NamedTuple):
    """The most that a number may be.

    Example: usually 0.02 of a layer's routes differ, and the room is 0.05. Then 3 * 0.02 + 0.05 =
    0.11 of them may differ.

    Attributes:
        usual: the number without a fault; None if it is not known yet.
        room: the margin that is added to three times `usual`.
        first: the limit while `usual` is not known.
        source: what messages call the number in `usual`.
    """

    usual: float | None
    room: float
    first: float
    source: str

    @property
    def most(self) -> float:
        """The largest value without a fault."""
        return self.first if self.usual is None else FACTOR * self.usual + self.room

    def refuses(self, value: float) -> bool:
        """Whether a value is too large; NaN counts as too large."""
        return not value <= self.most

    def words(self, number: Callable[[float], str] = "{:.3g}".format) -> str:
        """The limit and its rule, for a message; `number` makes a text of a number."""
        if self.usual is None:
            return f"at most {number(self.first)}, since {self.source} is not known yet"
        return (
            f"at most {number(self.most)}, which is {FACTOR:g} times {self.source}, "
            f"{number(self.usual)}, plus {number(self.room)}"
        )


def share_limit(rows: float, usual: Share | None, source: str) -> Limit:
    """The limit of a share that is measured over `rows` rows.

    For chance, 1 / sqrt(n) is added, where n is the smaller of `rows` and `usual.rows`: the
    standard deviation of a share of n rows is at most half of that. Example: of 100 rows 0.1 more
    may differ, of 10,000 rows 0.01 more.

    Args:
        usual: the share without a fault; None, or a share of 0 rows, if it is not known.
        source: what messages call the share in `usual`.
    """
    known = usual if usual and usual.rows else None
    chance = 1 / math.sqrt(max(1.0, min(rows, known.rows if known else rows)))
    return Limit(known.share if known else None, ROOM_ROUTES + chance, MOST_ROUTES + chance, source)


def percent(share: float) -> str:
    """A share as text, for example "12.3 %"."""
    return f"{100 * share:.1f} %"
