"""Mismatch by layer, position, turn, version and rollout; the bins that tables and metrics share.

Shape suffixes (docs/glossary.md): L, T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_r3.data.truth.compared import NO_TURN, Compared
from megatron_r3.data.truth.limit import NONE, Share, percent

# Positions are counted in bins that begin at 0, 8, 16, 32, 64, ...
_EDGES = 8 << np.arange(40, dtype=np.int64)
MOST_POSITIONS = len(_EDGES) + 1
MOST_TURNS = 5  # turn 1, 2, 3 and 4, and all later turns together
MOST_CELLS = 12  # numbers in a line of text


def position_bins(position_T: np.ndarray) -> np.ndarray:
    """The bin of each position in a rollout, int64; bins and positions count from 0."""
    return np.searchsorted(_EDGES, position_T, side="right").astype(np.int64)


def position_name(number: int) -> str:
    """What a bin of positions is called, for example "16 to 31"."""
    return f"{int(_EDGES[number - 1]) if number else 0} to {int(_EDGES[number]) - 1}"


def turn_bins(turn_T: np.ndarray) -> np.ndarray:
    """The bin of each turn, from 0 on; `NO_TURN` stays."""
    return np.minimum(turn_T, MOST_TURNS - 1)


def turn_name(number: int) -> str:
    """What a bin of turns is called: "1", "2", "3", "4" or "5 or more"."""
    return f"{number + 1} or more" if number == MOST_TURNS - 1 else f"{number + 1}"


@dataclass(frozen=True)
class Tables:
    """Router mismatch: shares of (row, layer) pairs in which recorded and live experts differ.

    Attributes:
        layers: by the number of the layer, as the caller counts it.
        positions, turns: by bin (`position_name`, `turn_name`).
        versions: by policy version.
        rollouts: by the number of the rollout; empty in training, which sums over rollouts.
        prompts, responses: rows that predict a token that was not sampled, and all other rows.
    """

    layers: dict[int, Share] = field(default_factory=dict)
    positions: dict[int, Share] = field(default_factory=dict)
    turns: dict[int, Share] = field(default_factory=dict)
    versions: dict[int, Share] = field(default_factory=dict)
    rollouts: dict[int, Share] = field(default_factory=dict)
    prompts: Share = NONE
    responses: Share = NONE

    @property
    def all_rows(self) -> Share:
        """The share over all rows."""
        rows = self.prompts.rows + self.responses.rows
        wrong = sum(part.share * part.rows for part in (self.prompts, self.responses))
        return Share(wrong / rows if rows else 0.0, rows)


def tables_of(
    compared: Sequence[Compared],
    layers: Sequence[int],
    left_out: Sequence[np.ndarray] | None = None,
) -> Tables:
    """The tables of some rollouts. Only recorded rows count.

    Args:
        layers: what the MoE layers are called, in the order of the routes.
        left_out: for each rollout, the rows that do not count, bool `[T]`; None if all count.
    """
    counted = [one.recorded_T.copy() for one in compared]
    for kept_T, out_T in zip(counted, left_out or (), strict=bool(left_out)):
        kept_T &= ~out_T
    same = [one.same_LT[:, t] for one, t in zip(compared, counted, strict=True)]
    wrong_LT = ~np.concatenate(same, 1)
    wrong_T = wrong_LT.mean(0)

    def taken(of: Callable[[Compared], np.ndarray]) -> np.ndarray:
        return np.concatenate([of(one)[t] for one, t in zip(compared, counted, strict=True)])

    def table(label_T: np.ndarray) -> dict[int, Share]:
        return {int(n): _of(wrong_T, label_T == n) for n in np.unique(label_T) if n != NO_TURN}

    turn_T = taken(lambda one: one.turn_T)
    return Tables(
        layers={
            n: Share(float(w.mean()) if w.size else 0.0, w.size)
            for n, w in zip(layers, wrong_LT, strict=True)
        },
        positions=table(position_bins(taken(lambda one: np.arange(one.num_rows)))),
        turns=table(turn_bins(turn_T)),
        versions=table(taken(lambda one: one.version_T)),
        rollouts=table(np.repeat(np.arange(len(compared)), [t.sum() for t in counted])),
        prompts=_of(wrong_T, turn_T == NO_TURN),
        responses=_of(wrong_T, turn_T != NO_TURN),
    )


def _of(wrong_T: np.ndarray, here_T: np.ndarray) -> Share:
    rows = int(here_T.sum())
    return Share(float(wrong_T[here_T].mean()) if rows else 0.0, rows)


def mismatch_text(tables: Tables) -> str:
    """A line for each table: the shares of (row, layer) pairs that differ."""
    rows = tables.all_rows
    return "\n".join(
        [
            f"all layers      {percent(rows.share)} of the pairs of {rows.rows:.0f} rows",
            _line("layer", tables.layers, str),
            _line("position", tables.positions, position_name),
            _line("prompts", {0: tables.prompts}, lambda _: "not sampled"),
            _line("turn", tables.turns, turn_name),
            _line("policy version", tables.versions, str),
        ]
    )


def _line(name: str, found: Mapping[int, Share], words: Callable[[Any], str]) -> str:
    cells = [f"{words(key)}: {percent(share.share)}" for key, share in sorted(found.items())]
    if len(cells) > MOST_CELLS:  # the first ones, and the worst of the others
        others = sorted(found.items())[MOST_CELLS:]
        key, share = max(others, key=lambda item: item[1].share)
        most = f"{percent(share.share)} ({words(key)})"
        cells = [*cells[:MOST_CELLS], f"{len(others)} more, at most {most}"]
    return f"{name:<14}  {', '.join(cells)}"
