"""Mismatch by layer, position, turn and version, counted by hand.

Shape suffixes (docs/glossary.md): C, K, L, N, T.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_r3.data.rollout import Rollout
from megatron_r3.data.truth import Compared
from megatron_r3.data.truth.compared import row_keys, set_codes
from megatron_r3.data.truth.limit import Share
from megatron_r3.data.truth.mismatch_tables import (
    Tables,
    mismatch_text,
    position_bins,
    position_name,
    tables_of,
    turn_bins,
    turn_name,
)
from megatron_r3.replay.routes import Routes

EXPERTS = 8


def made(
    response: str, wrong: dict[int, list[int]], versions: list[list[int]] | None = None
) -> Compared:
    """A rollout of two layers and top-2; the response "--ss-s" has the sampled tokens 2, 3 and 5.

    Args:
        wrong: for each layer the rows that differ.
        versions: first token and version of each span.
    """
    response_N = np.array([letter == "s" for letter in response])
    rows = len(response) - 1
    rng = np.random.default_rng(len(response))
    live_LTK = rng.random((2, rows, EXPERTS)).argsort(-1)[..., :2]
    ids_LTK = live_LTK[..., ::-1].copy()  # the same sets, in another order
    for layer, at in wrong.items():
        ids_LTK[layer, at] = (ids_LTK[layer, at] + 1) % EXPERTS
    rollout = Rollout(
        np.arange(len(response), dtype=np.int32),
        response_N,
        np.where(response_N, -0.5, 0).astype(np.float32),
        0.0,
        0,
        3,
        Routes.from_array(ids_LTK, EXPERTS),
        versions_C2=None if versions is None else np.array(versions),
    )
    return Compared(rollout, live_LTK)


def test_a_row_counts_where_the_token_that_it_predicts_does() -> None:
    one = made("---ss--sss", {0: [2, 3, 4]}, [[3, 3], [8, 5]])
    #     predicted token   1  2  3  4  5  6  7  8  9
    assert one.turn_T.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, 1]
    assert one.part_T.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert one.version_T.tolist() == [3, 3, 3, 3, 3, 3, 3, 5, 5]
    tables = tables_of([one], [4, 7])
    assert tables.layers == {4: Share(3 / 9, 9), 7: Share(0, 9)}
    assert tables.positions == {0: Share(3 / 16, 8), 1: Share(0, 1)}
    assert tables.turns == {0: Share(0.5, 2), 1: Share(0, 3)}
    assert tables.versions == {3: Share(3 / 14, 7), 5: Share(0, 2)}
    assert (tables.prompts, tables.responses) == (Share(1 / 8, 4), Share(2 / 10, 5))
    assert tables.all_rows == Share(pytest.approx(3 / 18), 9)
    assert tables.rollouts == {0: Share(3 / 18, 9)}
    left_out = tables_of([one], [4, 7], [np.arange(9) >= 3])
    assert left_out.layers[4] == Share(1 / 3, 3)


def test_missing_rows_do_not_count() -> None:
    one = made("--sss", {1: [0, 1]})
    routes = replace(one.rollout.routes, recorded_T=np.array([False, True, True, True]))
    tables = tables_of([replace(one, rollout=replace(one.rollout, routes=routes))], [0, 1])
    assert tables.layers[1] == Share(1 / 3, 3)
    assert tables.prompts.rows == 0


def test_bins_and_their_names() -> None:
    positions = np.array([0, 7, 8, 15, 16, 31, 32, 100_000])
    assert position_bins(positions).tolist() == [0, 0, 1, 1, 2, 2, 3, 14]
    assert [position_name(n) for n in (0, 1, 2, 14)] == [
        "0 to 7",
        "8 to 15",
        "16 to 31",
        "65536 to 131071",
    ]
    assert turn_bins(np.array([-1, 0, 3, 4, 9])).tolist() == [-1, 0, 3, 4, 4]
    assert [turn_name(n) for n in range(5)] == ["1", "2", "3", "4", "5 or more"]


def test_codes_are_those_of_sets() -> None:
    ids = np.array([[[1, 2], [2, 1], [1, 1], [0, 3]]], np.uint8)
    ((a, b, c, d),) = set_codes(ids).tolist()
    assert a == b
    assert len({a, c, d}) == 3
    assert set_codes(ids.astype(np.int64)).tolist() == [[a, b, c, d]]
    two = np.concatenate([set_codes(ids), set_codes(ids[:, ::-1])])
    assert len(set(row_keys(two).tolist())) == 4  # swapped layers give other keys


def test_the_tables_as_text() -> None:
    tables = tables_of([made("---ss--sss" + "s" * n, {0: [2]}) for n in range(6)], [4, 7])
    lines = mismatch_text(tables).splitlines()
    rows = sum(9 + n for n in range(6))
    share = 600 / rows
    assert lines[0] == f"all layers      {share / 2:.1f} % of the pairs of {rows} rows"
    assert lines[1] == f"layer           4: {share:.1f} %, 7: 0.0 %"
    assert lines[2].startswith("position        0 to 7: ")
    assert lines[3].startswith("prompts         not sampled: ")
    assert lines[4].startswith("turn            1: 25.0 %, 2: ")
    cells = {n: Share(n / 100, 9) for n in range(40)}
    _, layers, positions, *_ = mismatch_text(Tables(cells, cells)).splitlines()
    assert layers.endswith("11: 11.0 %, 28 more, at most 39.0 % (39)")
    assert positions.endswith(f"28 more, at most 39.0 % ({position_name(39)})")
