"""The tables of the truth test as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_r3.data.truth.examine import Report
from megatron_r3.data.truth.floor import Floor
from megatron_r3.data.truth.limit import Share, percent
from megatron_r3.data.truth.mismatch_tables import Tables, position_name, turn_name

MOST_CELLS = 12  # that a line of text has


def mismatch_text(report: Report, floor: Floor | None) -> str:
    """A line for each table: the shares of (row, layer) pairs that differ, the floor in brackets.

    Args:
        floor: what the report was compared with; None if there was none.
    """
    normal = floor.tables if floor else Tables()
    tables = report.tables
    lines = [
        _line("layer", tables.layers, normal.layers, str),
        _line("position", tables.positions, normal.positions, position_name),
        _line("prompts", {0: tables.prompts}, {0: normal.prompts}, lambda _: "not sampled"),
        _line("turn", tables.turns, normal.turns, turn_name),
        _line("policy version", tables.versions, {}, str),
    ]
    rows = tables.all_rows
    total = f"{percent(rows.share)} of the pairs of {rows.rows:.0f} rows"
    some = f"{percent(tables.tokens.share)} of the rows in some layer"
    return "\n".join([f"all layers      {total}; {some}", *lines])


def _line(
    name: str, found: Mapping[int, Share], floor: Mapping[int, Share], words: Callable[[Any], str]
) -> str:
    cells = [
        f"{words(key)}: {percent(share.share)}"
        + (f" ({percent(floor[key].share)})" if key in floor else "")
        for key, share in sorted(found.items())
    ]
    if len(cells) > MOST_CELLS:  # the first ones, and the worst of the others
        others = sorted(found.items())[MOST_CELLS:]
        key, share = max(others, key=lambda item: item[1].share)
        cells = [*cells[:MOST_CELLS], f"{len(others)} more, at most {percent(share.share)} ({key})"]
    return f"{name:<14}  {', '.join(cells)}"
