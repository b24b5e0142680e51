"""Alarms that shares of mismatch raise by themselves: which part of the rows is worse than another.

Training has these shares only; where the routes are at hand, `unwritten.py` and `misplaced.py` say
more. An alarm that comes without a fault is soon ignored. So a share must be above another one by a
factor and by a margin, and by more than chance makes of so few rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_r3.data.truth.mismatch_tables import NONE, Share, Tables, position_name, turn_name


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


@dataclass(frozen=True)
class Limits:
    """When a share is too high.

    Attributes:
        mismatch: the highest share of a layer where no floor is known. A bfloat16 engine has 0.2 or
            less (docs/truth.md).
        factor, margin: a share must be above both `factor` times, and `margin` more than, the share
            that it is compared with.
        floor_margin: in the place of `margin` where a floor is known.
        chance: a share is not above another one if rows without a fault look so more often than
            once in exp(chance) times; 12 is once in 160,000.
    """

    mismatch: float = 0.5
    factor: float = 2.0
    margin: float = 0.1
    floor_margin: float = 0.05
    chance: float = 12.0

    def above(self, found: Share, base: Share, margin: float | None = None) -> bool:
        """Whether `found` is higher than `base` by more than factor, margin and chance allow.

        Args:
            margin: None for that of this object.

        The mean of n independent values from 0 to 1 whose mean is q is p or more with a probability
        of at most exp(-n KL(p, q)) (Chernoff). A row's share of layers is such a value. For two
        samples n is their harmonic mean over two.
        """
        if not found.rows or not base.rows:
            return False
        p, q = found.share, max(base.share, 0.02)
        if p <= max(self.factor * q, q + (self.margin if margin is None else margin)):
            return False
        rows = 1 / (1 / found.rows + 1 / base.rows)
        return rows * _divergence(p, q) > self.chance

    def can_be_beaten(self, agreement: Share) -> bool:
        """Whether any agreement would be above this one; if not, nobody has to look for it."""
        return self.above(Share(1.0, agreement.rows), agreement)

    def too_high(self, found: Share) -> bool:
        """Whether a share is above `mismatch`, and above half of it by more than chance."""
        half = self.mismatch / 2
        return (
            found.share > self.mismatch
            and found.rows * _divergence(found.share, half) > self.chance
        )


def _divergence(p: float, q: float) -> float:
    """KL(p, q) of two coins."""
    q = min(q, 1 - 1e-9)
    tail = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return (p * math.log(p / q) if p > 0 else 0.0) + tail


def table_alarms(
    found: Tables,
    limits: Limits,
    floor: Tables | None = None,
    *,
    first_version: int | None = None,
    model: str = "the trainer",
) -> list[Alarm]:
    """What is wrong, as far as shares alone tell.

    Args:
        found: what was measured.
        floor: what is normal for this model and engine; None where nobody knows.
        first_version: the oldest policy version that is known of; None where nobody knows.
        model: what messages call the live side.
    """
    version = max(found.versions, default=0)
    updated = version > (version if first_version is None else first_version)
    alarms = [
        _prompts(found, limits, floor, version if updated else None),
        *_borders(found, limits, floor),
        _positions(found, limits, floor),
        _versions(found, limits, model),
    ]
    raised = [alarm for alarm in alarms if alarm is not None]
    if raised:
        return raised
    wrong = _engine(found, limits, floor, model)
    return [wrong] if wrong else []


def percent(share: float) -> str:
    """Example: 12.3 %."""
    return f"{100 * share:.1f} %"


def _worse(found: Share, base: Share, floor: Share | None, limits: Limits) -> bool:
    """Whether one part of the rows is worse than another, and worse than its floor."""
    if floor is None or not floor.rows:
        return limits.above(found, base)
    return limits.above(found, floor, limits.floor_margin) and limits.above(found, base, 0.0)


def _prompts(
    found: Tables, limits: Limits, floor: Tables | None, version: int | None
) -> Alarm | None:
    """Rows of prompts are worse than others. A prefix cache has them from an earlier request.

    Rows behind old keys and values are wrong too, the more so the deeper the layer. In the first
    MoE layer they are hardly so, and there the prompts stand out.
    """
    for names, words in (
        (("prompts", "responses"), "of sampled tokens"),
        (("first_prompts", "first_others"), "behind them, in the first MoE layer"),
    ):
        prompts, others = (getattr(found, name) for name in names)
        normal = getattr(floor, names[0], None)
        if not _worse(prompts, others, normal, limits):
            continue
        numbers = (
            f"{percent(prompts.share)} of the rows of prompts differ, and {percent(others.share)} "
            f"of those {words}"
        )
        if version is None:
            return Alarm(
                "rows of prompts",
                numbers,
                "prompts come from a prefill or a prefix cache: sample some rollouts with the "
                "cache off, and compare",
            )
        return Alarm(
            "old KV after an update",
            f"{numbers}, at policy version {version}",
            "the engine's prefix cache is from before the update: flush the cache with each "
            "update of the weights (SGLang: flush_cache, vLLM: /reset_prefix_cache)",
        )
    return None


def _borders(found: Tables, limits: Limits, floor: Tables | None) -> list[Alarm]:
    alarms = []
    for name, words in (
        ("last_of_prompt", "the last row of each prompt, where a prefill ends"),
        ("last_of_turn", "the row of each turn's last token, which the next prefill makes"),
    ):
        one: Share = getattr(found, name)
        if _worse(one, found.all_rows, getattr(floor, name, None), limits):
            alarms.append(
                Alarm(
                    "turn border",
                    f"{percent(one.share)} of {words}, differ, and {percent(found.all_rows.share)} "
                    f"of all rows ({one.rows:.0f} such rows)",
                    "ask for rows from the token before each border on, and compare where turns "
                    "are joined (docs/engines.md)",
                )
            )
    first = found.turns.get(0, NONE)
    for number, share in sorted(found.turns.items()):
        normal = floor.turns.get(number) if floor else None
        if number and _worse(share, first, normal, limits):
            return [
                *alarms,
                Alarm(
                    "turn border",
                    f"{percent(share.share)} differ in turn {turn_name(number)}, and "
                    f"{percent(first.share)} in turn 1",
                    "rows are lost or added between turns: compare where turns are joined "
                    "(docs/engines.md)",
                ),
            ]
    return alarms


def _positions(found: Tables, limits: Limits, floor: Tables | None) -> Alarm | None:
    """The first bin that is worse than all bins before it together."""
    before = NONE
    for number, share in sorted(found.positions.items()):
        normal = floor.positions.get(number) if floor else None
        if _worse(share, before, normal, limits):
            return Alarm(
                "rows from a position on",
                f"{percent(share.share)} differ at positions {position_name(number)}, and "
                f"{percent(before.share)} before",
                "stale or padded rows, or an engine that is wrong on long texts (rope scaling, "
                "sliding window, chunked prefill): megatron-r3 rollouts inspect says which",
            )
        rows = before.rows + share.rows
        wrong = before.share * before.rows + share.share * share.rows
        before = Share(wrong / rows if rows else 0.0, rows)
    return None


def _versions(found: Tables, limits: Limits, model: str) -> Alarm | None:
    """Rollouts of older policies differ more and more. It must not be the newest that differs."""
    if len(found.versions) < 2:
        return None
    newest = max(found.versions)
    share = found.versions[newest]
    for version, other in sorted(found.versions.items()):
        if version != newest and limits.above(share, other):
            return Alarm(
                "weights of another version",
                f"{percent(share.share)} differ at policy version {newest}, the newest, and "
                f"{percent(other.share)} at {version}",
                f"the engine sampled {newest} with other weights than it said, or {model} has "
                "older ones",
            )
    return None


def _engine(found: Tables, limits: Limits, floor: Tables | None, model: str) -> Alarm | None:
    """Layers above the floor or, where there is none, above `limits.mismatch`."""
    high: dict[int, str] = {}
    for layer, share in found.layers.items():
        normal = floor.layers.get(layer) if floor else None
        if normal is None:
            is_high = limits.too_high(share)
        else:
            is_high = limits.above(share, normal, limits.floor_margin)
        if is_high:
            beside = f" (floor {percent(normal.share)})" if normal else ""
            high[layer] = f"{percent(share.share)} in layer {layer}{beside}"
    if not high:
        return None
    shown = list(high.values())
    numbers = ", ".join(shown[:4]) + (f" and {len(shown) - 4} other layers" if shown[4:] else "")
    if found.abs_dlogp is not None:
        beside = f", floor {floor.abs_dlogp:.4f}" if floor and floor.abs_dlogp is not None else ""
        numbers += f"; mean |dlogp| {found.abs_dlogp:.4f}{beside}"
    return Alarm(
        "the engine computes another model",
        f"{len(high)} of {len(found.layers)} layers are too high: {numbers}",
        f"other weights than those of {model}, or a kernel that is wrong (attention, rotary, "
        "router): try another backend of the engine, and float32",
    )
