"""Rows that are true of something else: another token, layer, rollout, numbering, or older weights.

Each function looks for one fault, in rows that disagree with the live routes. docs/truth.md has a
table of the faults.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_r3.data.truth.alarms import Alarm, Finding, Limits, Marks, percent
from megatron_r3.data.truth.compared import Compared, part_name
from megatron_r3.data.truth.mismatch_tables import Share

MOST_SHIFT = 16  # tokens, in both directions
LEAST_ROWS = 4
MOST_ROWS = 4096  # that the layers of are compared with each other
FEW = 64  # rows of a rollout that are compared with other rollouts


def layer_order(
    compared: Sequence[Compared], layers: Sequence[int], limits: Limits
) -> Finding | None:
    """Recorded layers that hold the routes of other layers."""
    codes_LT, live_LT = (part[:, :MOST_ROWS] for part in _wrong_rows(compared))
    rows = codes_LT.shape[1]
    if rows < LEAST_ROWS or len(layers) < 2:
        return None
    moved: dict[int, tuple[int, Share, Share]] = {}
    for i, own_T in enumerate(codes_LT):
        own = Share(float((own_T == live_LT[i]).mean()), rows)
        if not limits.can_be_beaten(own):
            continue
        agreement_L = (own_T == live_LT).mean(1)
        best = int(agreement_L.argmax())
        theirs = Share(float(agreement_L[best]), rows)
        if limits.above(theirs, own):
            moved[i] = best, own, theirs
    if not moved:
        return None
    i, (j, own, theirs) = next(iter(moved.items()))
    pairs = [(layers[a], layers[b]) for a, (b, _, _) in moved.items()]
    shown = ", ".join(f"{a} has those of {b}" for a, b in pairs[:8])
    evidence = (
        f"recorded layer {shown}{', ...' if len(moved) > 8 else ''} (layer {layers[i]} agrees with "
        f"its own live routes in {percent(own.share)}, with those of layer {layers[j]} in "
        f"{percent(theirs.share)})"
    )
    action = (
        "which layers are MoE layers is read otherwise by the engine than by the config, or the "
        "axes of the routes are in another order (docs/engines.md)"
    )
    return Finding(Alarm("wrong layer order", evidence, action), _everything(compared))


def renumbered(
    compared: Sequence[Compared], layers: Sequence[int], limits: Limits
) -> Finding | None:
    """Experts that have other numbers, the same in all rows: physical ids of a balanced engine."""
    found = {}
    taken = [one.recorded_T for one in compared]
    for i, layer in enumerate(layers):
        same_T = np.concatenate([one.same_LT[i, t] for one, t in zip(compared, taken, strict=True)])
        if not len(same_T) or not limits.can_be_beaten(Share(float(same_T.mean()), len(same_T))):
            continue
        pairs = [
            (one.rollout.routes.ids_LTK[i, t], one.live_LTK[i, t])
            for one, t in zip(compared, taken, strict=True)
        ]
        recorded, live = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        # learnt from one half of the rows, and tested on the other
        number_E = _numbering(recorded[::2], live[::2], compared[0].rollout.routes.num_experts)
        if number_E is None or not len(live[1::2]):
            continue
        there_TK, here = np.sort(recorded[1::2], -1), live[1::2]
        share, own = (
            Share(float((np.sort(ids, -1) == there_TK).all(-1).mean()), len(here))
            for ids in (number_E[here], here)
        )
        if limits.above(share, own):
            found[layer] = share.share
    if not found:
        return None
    layer, share_of_rows = next(iter(found.items()))
    evidence = (
        f"with one new number for each expert {percent(share_of_rows)} of the rows of layer "
        f"{layer} are right ({len(found)} of {len(layers)} layers)"
    )
    action = (
        "the engine returns physical ids of experts that it has moved (EPLB): turn that off, or "
        "take a version that returns logical ids (docs/engines.md)"
    )
    return Finding(Alarm("renumbered experts", evidence, action), _everything(compared))


def _numbering(recorded: np.ndarray, live: np.ndarray, experts: int) -> np.ndarray | None:
    """The recorded number of each live expert, by majority; None if two would have one number."""
    if not len(live):
        return None
    counts = np.zeros((experts, experts), np.int64)
    np.add.at(counts, (live[:, :, None], recorded[:, None, :]), 1)
    seen = counts.sum(1) > 0
    number_E = np.where(seen, counts.argmax(1), -1)
    taken = number_E[seen]
    return number_E if len(np.unique(taken)) == len(taken) else None


def shifted(compared: Sequence[Compared], layers: Sequence[int], limits: Limits) -> Finding | None:
    """Rows of a neighbour: the row of token t is that of token t + s, in a part of the rows.

    Rows of all rollouts are looked at by the part of the conversation; then, if no part is shifted
    as a whole, rollout by rollout.
    """
    parts = sorted({int(p) for one in compared for p in np.unique(one.part_T)})
    by_part = {
        p: best
        for p in parts
        if (best := _best_shift(compared, [o.part_T == p for o in compared], limits))
    }
    if by_part:
        marks = [np.isin(one.part_T, list(by_part)) for one in compared]
        part, (shift, own, other) = next(iter(by_part.items()))
        right = [p for p in parts if p not in by_part]
        where = (
            "in all parts"
            if not right
            else f"from {part_name(part)} on"
            if part
            else "in the prompts"
        )
        evidence = f"{where} {_shift_words(shift, own, other)}"
        is_border = bool(right) and right[0] < part
        if is_border:
            evidence += f", and {part_name(right[0])} fit"
        cause = "turn border" if is_border else "shifted rows"
    else:
        single = {}
        for index, one in enumerate(compared):
            if best := _best_shift([one], [np.ones(one.num_rows, bool)], limits):
                single[index] = best
        if not single:
            return None
        marks = [np.full(one.num_rows, i in single) for i, one in enumerate(compared)]
        index, best = next(iter(single.items()))
        cause = "shifted rows"
        evidence = (
            f"in {len(single)} of {len(compared)} rollouts, the first is {compared[index].name}, "
            f"{_shift_words(*best)}"
        )
    action = (
        "rows are dropped or added where responses, turns or prefix-cached prompts are joined "
        "(docs/engines.md)"
    )
    return Finding(Alarm(cause, evidence, action), marks)


def _shift_words(shift: int, own: Share, other: Share) -> str:
    tokens = f"{abs(shift)} token{'s' if abs(shift) > 1 else ''}"
    return (
        f"each row is that of another token, {tokens} {'later' if shift > 0 else 'earlier'}: "
        f"{percent(other.share)} of the pairs agree so, {percent(own.share)} without a shift"
    )


def _best_shift(
    compared: Sequence[Compared], here: Sequence[np.ndarray], limits: Limits
) -> tuple[int, Share, Share] | None:
    """The shift with which these rows agree better than without one, and both agreements."""
    best = None
    same_LT = np.concatenate(
        [one.same_LT[:, t & one.recorded_T] for one, t in zip(compared, here, strict=True)], 1
    )
    if not same_LT.size or not limits.can_be_beaten(Share(float(same_LT.mean()), same_LT.shape[1])):
        return None
    for shift in (s for n in range(1, MOST_SHIFT + 1) for s in (-n, n)):
        own, other, rows = 0.0, 0.0, 0
        for one, here_T in zip(compared, here, strict=True):
            t = np.flatnonzero(here_T & one.recorded_T)
            t = t[(t + shift >= 0) & (t + shift < one.num_rows)]
            own += float(one.same_LT[:, t].mean(0).sum())
            other += float((one.codes_LT[:, t] == one.live_codes_LT[:, t + shift]).mean(0).sum())
            rows += len(t)
        if not rows:
            continue
        pair = Share(own / rows, rows), Share(other / rows, rows)
        if limits.above(pair[1], pair[0]) and (best is None or other > best[0]):
            best = (other, shift, *pair)
    return None if best is None else best[1:]


def other_rollout(
    compared: Sequence[Compared], layers: Sequence[int], limits: Limits
) -> Finding | None:
    """Rollouts whose rows are those of another rollout at the same places."""
    found, marks = {}, _everything(compared, False)
    for index, one in enumerate(compared):
        if not one.recorded_T.any() or one.same_LT[:, one.recorded_T].mean() > 0.5:
            continue
        for other, two in enumerate(compared):
            rows = min(one.num_rows, two.num_rows)
            # rows that differ live; prompts may be shared
            differ_T = (one.live_codes_LT[:, :rows] != two.live_codes_LT[:, :rows]).any(0)
            t = np.flatnonzero(differ_T & one.recorded_T[:rows])[:FEW]
            if not len(t):
                continue
            own = Share(float(one.same_LT[:, t].mean()), len(t))
            theirs = Share(float((one.codes_LT[:, t] == two.live_codes_LT[:, t]).mean()), len(t))
            if limits.above(theirs, own):
                found[index] = other, own, theirs
                marks[index][:] = True
                break
    if not found:
        return None
    index, (other, own, theirs) = next(iter(found.items()))
    evidence = (
        f"in {len(found)} of {len(compared)} rollouts; the rows of {compared[index].name} agree "
        f"with {compared[other].name} in {percent(theirs.share)}, with its own tokens in "
        f"{percent(own.share)}"
    )
    action = "the engine, or what collects, mixes up the requests of a batch"
    return Finding(Alarm("rows of another rollout", evidence, action), marks)


def older_weights(
    compared: Sequence[Compared], layers: Sequence[int], limits: Limits
) -> Finding | None:
    """Rows that the weights before the last update made: of the prompts, or of all tokens."""
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
    prompts, others = (limits.above(now, then, limits.floor_margin) for now, then in pairs)
    if not (prompts or others):
        return None
    now, then = pairs[0 if prompts else 1]
    where = "all rows" if prompts and others else "the rows of prompts" if prompts else "other rows"
    evidence = (
        f"{where} are those of the weights before the update: {percent(then.share)} differ from "
        f"those, {percent(now.share)} from the new ones"
    )
    if prompts and not others:
        action = (
            "flush the engine's prefix cache with each update of the weights (SGLang: "
            "flush_cache, vLLM: /reset_prefix_cache)"
        )
        # What follows an old prefix was computed with its keys and values.
        return Finding(Alarm("old KV after an update", evidence, action), _everything(compared))
    action = "the engine has not taken the update: compare what it says of its weights"
    return Finding(Alarm("weights of another version", evidence, action), _everything(compared))


def _wrong_rows(compared: Sequence[Compared]) -> tuple[np.ndarray, np.ndarray]:
    """Codes, recorded and live, of all recorded rows that differ in some layer."""
    taken = [one.recorded_T & ~one.same_LT.all(0) for one in compared]
    pairs = [
        (one.codes_LT[:, t], one.live_codes_LT[:, t])
        for one, t in zip(compared, taken, strict=True)
    ]
    recorded, live = zip(*pairs, strict=True)
    return np.concatenate(recorded, 1), np.concatenate(live, 1)


def _everything(compared: Sequence[Compared], value: bool = True) -> Marks:
    return [np.full(one.num_rows, value) for one in compared]
