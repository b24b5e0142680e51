"""Alarms from shares of mismatch alone: more rows of some kind differ than the limit allows.

Training knows only these shares. `unwritten.py` and `misplaced.py` find more faults, but need the
routes. `limit.py` has the limits. They are wide, because users ignore alarms that are often false.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_r3.data.truth.limit import percent, share_limit
from megatron_r3.data.truth.mismatch_tables import Tables, position_name, turn_name


@dataclass(frozen=True)
class Alarm:
    """A fault of recorded rows, as far as the truth test can tell.

    Attributes:
        cause: the name of the likely cause in docs/truth.md.
        evidence: what was seen, in numbers.
        action: what to do.
    """

    cause: str
    evidence: str
    action: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}; {self.action}"


class Finding(NamedTuple):
    """A fault that was found.

    Attributes:
        explains: for each rollout, the rows that the fault explains, bool.
    """

    alarm: Alarm
    explains: list[np.ndarray]


def table_alarms(
    found: Tables, *, model: str = "the trainer", names: Sequence[str] = ()
) -> list[Alarm]:
    """The alarms that shares of mismatch raise.

    Args:
        found: what was measured.
        model: what messages call the model that chose the live routes.
        names: what messages call the rollouts of `found`, in the order of their numbers.
    """
    raised = [alarm for alarm in (_prompts(found), _versions(found, model)) if alarm is not None]
    if raised:
        return raised
    wrong = _too_high(found, model, names)
    return [wrong] if wrong else []


def _prompts(found: Tables) -> Alarm | None:
    """The alarm that rows of prompts differ more than rows of sampled tokens, or None."""
    limit = share_limit(found.prompts.rows, found.responses, "the share of sampled tokens")
    if not found.responses.rows or not limit.refuses(found.prompts.share):
        return None
    return Alarm(
        "rows of prompts",
        f"{percent(found.prompts.share)} of the routes of prompts differ; allowed are "
        f"{limit.words(percent)}",
        "prompts come from a prefill or a prefix cache: flush the cache with each update of the "
        "weights (SGLang: flush_cache, vLLM: /reset_prefix_cache), or sample some rollouts with "
        "the cache off and compare",
    )


def _versions(found: Tables, model: str) -> Alarm | None:
    """The alarm that rows of the newest policy version differ more than older rows, or None."""
    if not found.versions:
        return None
    newest = max(found.versions)
    share = found.versions[newest]
    for version, other in sorted(found.versions.items()):
        limit = share_limit(share.rows, other, f"the share of version {version}")
        if version != newest and limit.refuses(share.share):
            return Alarm(
                "weights of another version",
                f"{percent(share.share)} of the routes differ at policy version {newest}, the "
                f"newest; allowed are {limit.words(percent)}",
                f"the engine sampled version {newest} with other weights than it said, or {model} "
                "has older weights",
            )
    return None


def _too_high(found: Tables, model: str, names: Sequence[str]) -> Alarm | None:
    """The alarm that in a layer, a range of positions, a turn or a rollout most routes differ."""
    high: list[str] = []
    for name, cells in (
        ("layer {}".format, found.layers),
        (lambda number: f"positions {position_name(number)}", found.positions),
        (lambda number: f"turn {turn_name(number)}", found.turns),
        (lambda number: names[number], found.rollouts),
    ):
        wrong: list[str] = []
        for number, share in sorted(cells.items()):
            limit = share_limit(share.rows, None, "")
            if limit.refuses(share.share):
                said = f"{percent(share.share)} in {name(number)}"
                wrong.append(said if wrong else f"{said} (at most {percent(limit.most)})")
        if len(wrong) > 3:
            wrong = [*wrong[:2], f"{len(wrong) - 2} more"]
        high += wrong
    if not high:
        return None
    return Alarm(
        "the engine computes another model",
        f"too many routes differ: {', '.join(high)}",
        f"if all rows differ, the engine has other weights than {model}, returns physical ids "
        "of experts that it moved (EPLB), or has a wrong kernel (try another backend, and "
        "float32); if some rollouts differ, requests were mixed up; if rows from a position on "
        "differ, rows were padded, lost or joined wrongly (docs/truth.md)",
    )
