"""Finds rows that the engine did not write: zeros, one row for all tokens, copies of other rows.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_r3.data.truth.alarms import Alarm, Finding
from megatron_r3.data.truth.compared import Compared, row_keys
from megatron_r3.replay.routes import repeated_rows

LEAST_RUN = 4  # rows


def not_captured(compared: Sequence[Compared]) -> Finding | None:
    """The finding that no router chose some rows, or None.

    Such a row has an expert twice. With top-1, all rows of a layer have expert 0, but not all live
    rows have it.
    """
    marks = []
    for one in compared:
        ids_LTK = one.rollout.routes.ids_LTK
        wrong_LT = repeated_rows(ids_LTK)
        if ids_LTK.shape[-1] == 1:
            empty_L = (ids_LTK == 0).all((1, 2)) & (one.live_LTK != 0).any((1, 2))
            wrong_LT = np.broadcast_to(empty_L[:, None], one.same_LT.shape)
        marks.append(wrong_LT.any(0) & one.recorded_T)
    rows = sum(int(mark_T.sum()) for mark_T in marks)
    num_rows = sum(int(one.recorded_T.sum()) for one in compared)
    if not rows:
        return None
    index = next(i for i, mark_T in enumerate(marks) if mark_T.any())
    token = int(marks[index].argmax())
    ids = compared[index].rollout.routes.ids_LTK[:, token].tolist()
    evidence = (
        f"{rows} of {num_rows} rows have an expert several times, or are of a layer with zeros "
        f"alone; the first is token {token} of {compared[index].name}: {ids[0]} in its first layer"
    )
    action = "the engine did not capture them: take another backend or version (docs/collect.md)"
    return Finding(Alarm("zeros", evidence, action), marks)


def stale(compared: Sequence[Compared]) -> Finding | None:
    """The finding that consecutive rows are copies of earlier rows, but live rows are not; or None.

    If all tokens have the same row, each row is a copy of the row before.
    """
    keys_T = np.concatenate([row_keys(one.codes_LT) for one in compared])
    live_LT = np.concatenate([one.live_codes_LT for one in compared], 1)
    recorded_T = np.concatenate([one.recorded_T for one in compared])
    same_T = np.concatenate([one.same_LT.mean(0) for one in compared])
    starts = np.cumsum([0, *[one.num_rows for one in compared]])
    least = _least_run(row_keys(live_LT))
    mark_T, runs = np.zeros(len(keys_T), bool), []
    for first, end, back in _copied_runs(keys_T, recorded_T, starts):
        alike = (live_LT[:, first:end] == live_LT[:, first - back : end - back]).mean()
        # Repeated text has equal rows live, too (`alike`), and its rows are right (`same_T`).
        if end - first >= least and alike < 0.5 and same_T[first:end].mean() < 0.5:
            mark_T[first:end] = True
            runs.append((first, end, back))
    if not runs:
        return None
    marks = np.split(mark_T, starts[1:-1])
    longest = max(runs, key=lambda run: run[1] - run[0])
    evidence = (
        f"{int(mark_T.sum())} rows in {sum(bool(m.any()) for m in marks)} of {len(compared)} "
        f"rollouts are copies; {_said_of_run(longest, starts, compared)}"
    )
    action = (
        "the engine returns rows that it did not write in this request (padding, preemption, one "
        "row for all tokens, a buffer of the batch before)"
    )
    cause = "one constant row" if longest[2] == 1 else "stale padded rows"
    return Finding(Alarm(cause, evidence, action), list(marks))


def _said_of_run(
    run: tuple[int, int, int], starts: np.ndarray, compared: Sequence[Compared]
) -> str:
    """Where a run of copied rows lies, and of which rows they are copies."""
    first, end, back = run
    index = int(np.searchsorted(starts, first, side="right")) - 1
    source = int(np.searchsorted(starts, first - back, side="right")) - 1
    where = "the same rollout" if source == index else compared[source].name
    at = first - back - int(starts[source])
    is_last = end == starts[index + 1]
    what = (
        f"all the same as row {at}" if back == 1 else f"copies of the rows from {at} on of {where}"
    )
    until = "on" if is_last else f"to {end - 1 - int(starts[index])}"
    return (
        f"in {compared[index].name} the rows from {first - int(starts[index])} {until} are {what}, "
        "and the live ones are not"
    )


def _least_run(live_keys_T: np.ndarray) -> int:
    """How many rows a run of copies must have, so that it is no accident.

    Two rows are equal by accident with a probability p, the sum of the squared shares of the
    different rows. So n rows are copies by accident with the probability p^n. A run may lie at T
    places and have T distances, so n must make T^2 p^n less than 1e-6. Example: 1,000 rows of 4
    equally frequent kinds: p = 1/4, so n = 20.
    """
    _, counts = np.unique(live_keys_T, return_counts=True)
    rows = len(live_keys_T)
    alike = min(float(((counts / rows) ** 2).sum()), 0.999)
    return max(LEAST_RUN, math.ceil((math.log(1e6) + 2 * math.log(rows)) / -math.log(alike)))


def _copied_runs(
    keys_T: np.ndarray, recorded_T: np.ndarray, starts: np.ndarray
) -> list[tuple[int, int, int]]:
    """First row, end and distance of each run of rows that occurred before in the same order.

    Runs of less than `LEAST_RUN` rows are left out. Example: the keys 5 6 7 8 9 6 7 8 9 have the
    run (5, 9, 4), since rows 5 to 8 repeat 1 to 4.
    """
    order = np.argsort(keys_T, kind="stable")
    back_T = np.zeros(len(keys_T), np.int64)  # to the last place of the same row; 0 for none
    again = keys_T[order][1:] == keys_T[order][:-1]
    back_T[order[1:][again]] = (order[1:] - order[:-1])[again]
    back_T[~recorded_T] = 0
    begins_T = np.ones(len(keys_T), bool)
    begins_T[1:] = back_T[1:] != back_T[:-1]
    begins_T[starts[:-1]] = True
    first = np.flatnonzero(begins_T)
    ends = np.append(first[1:], len(keys_T))
    return [
        (f, e, int(back_T[f]))
        for f, e in zip(first.tolist(), ends.tolist(), strict=True)
        if back_T[f] and e - f >= LEAST_RUN
    ]
