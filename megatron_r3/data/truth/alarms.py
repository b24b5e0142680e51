"""Alarms that shares of mismatch raise by themselves: which rows differ more than they may.

Training has these shares only; where the routes are at hand, `unwritten.py` and `misplaced.py` say
more. An alarm that comes without a fault is soon ignored: each share has the limit of `limit.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_r3.data.truth.limit import MOST_ROUTES, percent, share_limit
from megatron_r3.data.truth.mismatch_tables import Tables, position_name, turn_name


@dataclass(frozen=True)
class Alarm:
    """Something is wrong with rows.

    Attributes:
        cause: the likely cause, one of those of docs/truth.md.
        evidence: what was seen, in numbers.
        action: what to do.
    """

    cause: str
    evidence: str
    action: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}; {self.action}"


Marks = list[np.ndarray]  # for each rollout, which rows a fault explains, bool


class Finding(NamedTuple):
    """A fault that was found, and the rows that it explains."""

    alarm: Alarm
    explains: Marks


def table_alarms(
    found: Tables,
    floor: Tables | None = None,
    *,
    most: float = MOST_ROUTES,
    model: str = "the trainer",
    names: Sequence[str] = (),
) -> list[Alarm]:
    """What is wrong, as far as shares alone tell.

    Args:
        found: what was measured.
        floor: what is normal for this model and engine; None where nobody knows.
        most: the highest share where no floor is known.
        model: what messages call the live side.
        names: what messages call the rollouts of `found`.
    """
    normal = floor or Tables()
    raised = [
        alarm for alarm in (_prompts(found, normal), _versions(found, model)) if alarm is not None
    ]
    if raised:
        return raised
    wrong = _too_high(found, normal, most, model, names)
    return [wrong] if wrong else []


def _prompts(found: Tables, floor: Tables) -> Alarm | None:
    """Rows of prompts differ more than others: a prefix cache may keep those of older weights."""
    usual = max(found.responses, floor.prompts)  # compares the shares
    limit = share_limit(found.prompts.rows, usual, "the share of sampled tokens, or of the floor")
    if not found.responses.rows or not limit.refuses(found.prompts.share):
        return None
    return Alarm(
        "rows of prompts",
        f"{percent(found.prompts.share)} of the rows of prompts differ, {limit.words(percent)}",
        "prompts come from a prefill or a prefix cache: flush the cache with each update of the "
        "weights (SGLang: flush_cache, vLLM: /reset_prefix_cache), or sample some rollouts with "
        "the cache off and compare",
    )


def _versions(found: Tables, model: str) -> Alarm | None:
    """Rollouts of older policies differ more and more. It must not be the newest that differs."""
    if not found.versions:
        return None
    newest = max(found.versions)
    share = found.versions[newest]
    for version, other in sorted(found.versions.items()):
        limit = share_limit(share.rows, other, f"the share of version {version}")
        if version != newest and limit.refuses(share.share):
            return Alarm(
                "weights of another version",
                f"{percent(share.share)} differ at policy version {newest}, the newest, "
                f"{limit.words(percent)}",
                f"the engine sampled {newest} with other weights than it said, or {model} has "
                "older ones",
            )
    return None


def _too_high(
    found: Tables, floor: Tables, most: float, model: str, names: Sequence[str]
) -> Alarm | None:
    """Each cell of each table against its floor or, where there is none, against `most`."""
    rollouts = dict.fromkeys(found.rollouts, floor.all_rows)
    high: list[str] = []
    for name, cells, usual in (
        ("layer {}".format, found.layers, floor.layers),
        (lambda number: f"positions {position_name(number)}", found.positions, floor.positions),
        (lambda number: f"turn {turn_name(number)}", found.turns, floor.turns),
        (lambda number: names[number], found.rollouts, rollouts),
    ):
        wrong: list[str] = []
        for number, share in sorted(cells.items()):
            limit = share_limit(share.rows, usual.get(number), "the floor", most)
            if limit.refuses(share.share):
                said = f"{percent(share.share)} in {name(number)}"
                wrong.append(said if wrong else f"{said} ({limit.words(percent)})")
        if len(wrong) > 3:
            wrong = [*wrong[:2], f"{len(wrong) - 2} more"]
        high += wrong
    if not high:
        return None
    numbers = ", ".join(high)
    if found.abs_dlogp is not None:
        beside = f" (floor {floor.abs_dlogp:.4f})" if floor.abs_dlogp is not None else ""
        numbers += f"; mean |dlogp| {found.abs_dlogp:.4f}{beside}"
    return Alarm(
        "the engine computes another model",
        f"too many routes differ: {numbers}",
        f"where all rows differ, the engine has other weights than {model}, returns physical ids "
        "of experts that it moved (EPLB), or has a wrong kernel (try another backend, and "
        "float32); where some rollouts do, requests were mixed up; where rows from a place on do, "
        "rows were padded, lost or joined wrongly (docs/truth.md)",
    )
