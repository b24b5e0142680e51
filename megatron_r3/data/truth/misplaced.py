"""Finds rows that belong to other tokens or to older weights.

docs/truth.md lists the faults.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron_r3.data.truth.alarms import Alarm, Finding
from megatron_r3.data.truth.compared import Compared, part_name
from megatron_r3.data.truth.limit import Share, percent, share_limit

MOST_SHIFT = 16  # tokens, in both directions
# A shift must raise the share of pairs that agree by this, plus 1/sqrt(rows) for chance. In a
# rollout without a fault, a shift lowers the share.
BETTER = 0.25


def shifted(compared: Sequence[Compared]) -> Finding | None:
    """The finding that the row of token t has the routes of token t + s, for some s; else None.

    Each part of the conversation is tried over all rollouts. If no part is shifted, each rollout is
    tried by itself.
    """
    parts = sorted({int(p) for one in compared for p in np.unique(one.part_T)})
    by_part = {
        part: best
        for part in parts
        if (best := _best_shift(compared, [one.part_T == part for one in compared]))
    }
    if by_part:
        marks = [np.isin(one.part_T, list(by_part)) for one in compared]
        first, words = next(iter(by_part.items()))
        right = [part_name(part) for part in parts if part not in by_part]
        where = "in all parts"
        if right:
            where = f"from {part_name(first)} on ({', '.join(right[:3])} fit)"
    else:
        single = {
            index: best
            for index, one in enumerate(compared)
            if (best := _best_shift([one], [np.ones(one.num_rows, bool)]))
        }
        if not single:
            return None
        marks = [np.full(one.num_rows, index in single) for index, one in enumerate(compared)]
        first, words = next(iter(single.items()))
        where = (
            f"in {len(single)} of {len(compared)} rollouts, the first is {compared[first].name},"
        )
    action = (
        "rows are dropped or added where responses, turns or prefix-cached prompts are joined "
        "(docs/engines.md)"
    )
    return Finding(Alarm("shifted rows", f"{where} {words}", action), marks)


def _best_shift(compared: Sequence[Compared], here: Sequence[np.ndarray]) -> str:
    """The shift with which these rows agree best, in words; empty if no shift is far better."""
    best, words = 0.0, ""
    for shift in (s for n in range(1, MOST_SHIFT + 1) for s in (-n, n)):
        own, other = [], []
        for one, here_T in zip(compared, here, strict=True):
            t = np.flatnonzero(here_T & one.recorded_T)
            t = t[(t + shift >= 0) & (t + shift < one.num_rows)]
            own.append(one.same_LT[:, t].mean(0))
            other.append((one.codes_LT[:, t] == one.live_codes_LT[:, t + shift]).mean(0))
        rows = sum(map(len, own))
        if not rows:
            continue
        without, agree = (float(np.concatenate(each).mean()) for each in (own, other))
        if agree > max(best, without + BETTER + 1 / math.sqrt(rows)):
            best = agree
            tokens = f"{abs(shift)} token{'s' if abs(shift) > 1 else ''}"
            words = (
                f"each row has the routes of another token, {tokens} "
                f"{'later' if shift > 0 else 'earlier'}: {percent(agree)} of the pairs agree so, "
                f"and {percent(without)} agree without a shift"
            )
    return words


def older_weights(compared: Sequence[Compared]) -> Finding | None:
    """The finding that weights from before the last update chose rows; else None.

    These rows are the rows of prompts, all other rows, or both. `Compared.before_LTK` has the
    choice of these weights.
    """
    if any(one.before_LTK is None for one in compared):
        return None

    def differing(of: Callable[[Compared], np.ndarray], is_prompt: bool) -> Share:
        found = [of(o)[:, o.recorded_T & ((o.part_T == 0) == is_prompt)] for o in compared]
        wrong_LT = ~np.concatenate(found, 1)
        return Share(float(wrong_LT.mean()) if wrong_LT.size else 0.0, wrong_LT.shape[1])

    pairs = [
        (differing(lambda o: o.same_LT, first), differing(lambda o: o.same_before_LT, first))
        for first in (True, False)
    ]
    prompts, others = (
        then.rows > 0 and share_limit(now.rows, then, "").refuses(now.share) for now, then in pairs
    )
    if not (prompts or others):
        return None
    now, then = pairs[0 if prompts else 1]
    where = "all rows" if prompts and others else "the rows of prompts" if prompts else "other rows"
    evidence = (
        f"{where} are those of the weights before the update: {percent(then.share)} of the routes "
        f"differ from the choice of these weights, and {percent(now.share)} differ from the choice "
        "of the new weights"
    )
    # Tokens behind an old prefix were computed with its keys and values, so the finding explains
    # all rows.
    marks = [np.ones(one.num_rows, bool) for one in compared]
    if prompts and not others:
        action = (
            "flush the engine's prefix cache with each update of the weights (SGLang: "
            "flush_cache, vLLM: /reset_prefix_cache)"
        )
        return Finding(Alarm("old KV after an update", evidence, action), marks)
    action = "the engine has not taken the update: look which weight version it reports"
    return Finding(Alarm("weights of another version", evidence, action), marks)
