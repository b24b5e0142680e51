"""The turns of the RL loop: their rows in batches and bins, their routes, what is refused.

Shape suffixes (docs/glossary.md): B, C, K, L, N, S, T.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loop_turns import SHAPE, read, rollout, routes_of

from megatron_r3.rl.turns import TurnRoutes
from proof.fidelity.rl_loop import sent


def routes(*rollouts: SimpleNamespace) -> TurnRoutes:
    return TurnRoutes(SHAPE, read(*rollouts))


# -- rows


def test_rows_of_samples_and_of_bins() -> None:
    """The example of the file: turns of 4 and 3 tokens."""
    turns = routes(rollout(4), rollout(3))
    assert turns.rows(0, 2, 5).tolist() == [[0, 1, 2, -1, -1], [3, 4, -1, -1, -1]]
    assert turns.rows_of_bin([0, 1], [0, 4, 7], 7).tolist() == [[0, 1, 2, -1, 3, 4, -1]]
    assert turns.rows_of_bin([1, 0], [0, 3, 7], 7).tolist() == [[3, 4, -1, 0, 1, 2, -1]]


def test_what_the_loop_cuts_off_at_the_end_of_a_turn_has_no_rows() -> None:
    """It takes tokens at the end that are the pad token for padding."""
    turns = routes(rollout(5), rollout(3))
    assert turns.rows_of_bin([0, 1], [0, 2, 5], 5).tolist() == [[0, 1, 4, 5, -1]]
    assert turns.rows_of_bin([1, 0], [0, 3, 5], 5).tolist() == [[4, 5, -1, 0, 1]]


def test_an_agent_that_hands_on_neither_routes_nor_epochs() -> None:
    one = rollout(4, routes=None)
    del one.policy_epoch
    turns = routes(one, rollout(3))
    assert [turn.name for turn in turns.without] == ["rollout 0 (group 0, environment toy), turn 0"]
    assert turns.recorded_T.tolist() == [False] * 3 + [True] * 2
    assert turns.rollout(0).policy_version == 0


def test_what_fills_up_has_no_rows() -> None:
    one = rollout(4)
    rows = [(one, 0), (None, -1), None]
    turns = TurnRoutes(SHAPE, read(one, rows=rows))
    assert turns.rows(1, 3, 4).tolist() == [[-1] * 4] * 2
    assert turns.rows(0, 1, 4).tolist() == [[0, 1, 2, -1]]
    assert turns.rows_of_bin([0, 1, 2], [0, 4, 5, 6], 7).tolist() == [[0, 1, 2, -1, -1, -1, -1]]
    assert turns.rows_of_bin([], [], 3).tolist() == [[-1] * 3]


def test_a_row_gives_the_route_of_its_token() -> None:
    turns = routes(rollout(4), rollout(3))
    ids_LTK, recorded_T = turns.routes(np.array([4, -1, 0]), [2, 0])
    assert recorded_T.tolist() == [True, False, True]
    assert ids_LTK.shape == (2, 3, 2)
    assert ids_LTK[0, 0].tolist() == routes_of(3, 3)[1, 2].tolist()
    assert ids_LTK[1, 2].tolist() == routes_of(4, 4)[0, 0].tolist()
    assert turns.locate(4) == (1, 1)
    assert turns.locate(2) == (0, 2)
    assert turns.first_of(np.array([0, 2, 3, 4, -1])).tolist() == [0, 0, 3, 3, 0]


def test_another_order_of_turns_is_found() -> None:
    """The loop and we must mean the same turn by the same index."""
    turns = routes(rollout(4), rollout(3, trajectory=[[7, 8, 9]]))
    rows_BS, tokens_BS = turns.rows(0, 2, 4), torch.tensor([[10, 11, 12, 13], [7, 8, 9, 1]])
    turns.check_tokens(rows_BS, tokens_BS)
    with pytest.raises(ValueError, match=r"^rollout 0 .*, turn 0, token 0: the loop has another"):
        turns.check_tokens(rows_BS, tokens_BS.flip(0))
    tokens_BS[1, 1] = 0
    with pytest.raises(ValueError, match=r"^rollout 1 .*, turn 0, token 1: "):
        turns.check_tokens(rows_BS, tokens_BS)


# -- routes


def test_turns_without_routes_are_not_recorded() -> None:
    turns = routes(rollout(4, routes=None), rollout(3), rollout(3, routes=[None]))
    assert turns.recorded_T.tolist() == [False] * 3 + [True] * 2 + [False] * 2
    assert [turn.name[:9] for turn in turns.without] == ["rollout 0", "rollout 2"]


def test_a_conversation_takes_each_request_from_where_it_sampled() -> None:
    """Requests of 4 and 7 tokens: rows 0 to 2 of the first, rows 3 to 5 of the second."""
    talk = rollout(4, 7, generation_mask=[[False] * 2 + [True] * 2, [False] * 5 + [True] * 2])
    talk.logprobs = [[-1.0, -2.0], [-3.0, -4.0]]
    talk.policy_epoch = [[(0, 3)], [(0, 4)]]
    (turn,) = read(talk, rows=[talk])
    ids_TLK = turn.routes(SHAPE).ids_LTK.swapaxes(0, 1)
    assert np.array_equal(ids_TLK[:3], routes_of(4, 4))
    assert np.array_equal(ids_TLK[3:], routes_of(7, 7)[3:])
    assert not np.array_equal(ids_TLK[:3], routes_of(7, 7)[:3])  # the control
    record = turn.record(SHAPE)
    assert record.response_N.tolist() == [False] * 2 + [True] * 2 + [False] + [True] * 2
    assert record.logprobs_N.tolist() == [0, 0, -1, -2, 0, -3, -4]
    assert record.versions_C2 is not None
    assert record.versions_C2.tolist() == [[2, 3], [5, 4]]
    record.check("it")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (sent(routes_of(5)), r"routes of \(tokens, layers, top-k\) \(4, 3, 2\); expected \(3, 3, "),
        (sent(routes_of(3)), r"\(2, 3, 2\); expected \(3, 3, 2\), a row for each of 4 tokens but"),
        (sent(routes_of(4)[:, :2]), r"\(3, 2, 2\); expected \(3, 3, 2\)"),
        (sent(routes_of(4)[..., :1]), r"\(3, 3, 1\); expected \(3, 3, 2\)"),
        (sent(routes_of(4) + 7), r"an expert id outside 0\.\.7 at MoE layer 0, token 0"),
        (sent(routes_of(4) - 9), r"an expert id outside 0\.\.7"),
        (sent(routes_of(4) * 0), r"an expert twice in one row"),
        (["ndarray", {"data": "AAA", "dtype": "int16", "shape": [3, 3, 2]}], "not whole base64"),
        (["tensors", {}], r"expected \[ndarray"),
        (7, "its routes"),
    ],
)
def test_wrong_routes_are_refused(wrong: Any, message: str) -> None:
    assert routes(rollout(4)).recorded_T.all()
    with pytest.raises(ValueError, match=message) as error:
        routes(rollout(3), rollout(4, routes=[wrong]))
    assert str(error.value).startswith("rollout 1 (group 0, environment toy), turn 0: ")
    assert "\n" not in str(error.value)


def test_text_is_refused() -> None:
    text = SimpleNamespace(trajectory=["a"], reward=1.0, env_id="toy", logprobs=None)
    with pytest.raises(ValueError, match=r"^rollout 1 .*its agent returns text.*TokenRollout"):
        read(rollout(3), text)


# -- records


def test_names_and_versions() -> None:
    moved = rollout(8, policy_epoch=[[(0, 3), (4, 5)]])
    turns = read(rollout(4, 5), rollout(3), moved)
    assert [(turn.group, turn.sample) for turn in turns] == [(10, 0), (10, 1), (10, 2), (11, 0)]
    # the forward pass of token 4 is the first one of version 5: it sampled token 5
    assert turns[3].version_N.tolist() == [-1, -1, 3, 3, 3, 5, 5, 5]
    record = turns[3].record(SHAPE)
    assert record.policy_version == 3
    assert record.versions_C2 is not None
    assert record.versions_C2.tolist() == [[2, 3], [5, 5]]
    assert turns[0].record(SHAPE).versions_C2 is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [[-1.0]]}, "1 log-probs for 2 sampled tokens"),
        ({"reward": [1.0, 2.0]}, "a store needs one number"),
    ],
)
def test_what_no_store_holds(change: dict[str, Any], message: str) -> None:
    (turn,) = read(rollout(4, **change))
    with pytest.raises(ValueError, match=message):
        turn.record(SHAPE)
