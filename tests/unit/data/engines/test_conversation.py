"""`stitch` joins real and made-up conversations, and refuses increments that do not fit.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import dataclasses
import random

import engine_bodies as made
import numpy as np
import pytest

from megatron_r3.data import engines
from megatron_r3.data.engines.conversation import Increment, stitch
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.replay.routes import Routes
from tests.unit.data.engines.test_vllm import (
    ALL,
    DENSE0,
    QWEN,
    QWEN_DENSE0,
    decode_increments,
    load,
)

TOKENS = np.arange(100, 130, dtype=np.int32)
IDS = np.random.default_rng(0).random((3, 29, 16)).argsort(-1)[..., :4]


def turn(prompt: int, end: int, start: int = 0, name: str = "", ids: np.ndarray = IDS) -> Increment:
    """A response to the first `prompt` tokens of a made-up conversation; it ends before `end`."""
    return Increment(
        TOKENS[:end],
        prompt,
        -np.arange(prompt, end, dtype=np.float32),
        Routes.from_array(ids[:, start : end - 1], 16),
        start,
        3,
        name or f"turn of {prompt}",
    )


def check_whole(sample, turns):
    end = turns[-1][1]
    assert sample.routes.num_rows == len(sample.tokens_N) - 1 == end - 1
    assert (sample.routes.ids_LTK == IDS[:, : end - 1]).all()
    assert sample.routes.recorded_T.all()
    assert sample.turns_U2.tolist() == turns
    assert sample.turns_U2.dtype == np.int32
    assert sample.prompt_length == turns[0][0]
    assert sample.group == 3
    sampled = [token for start, stop in turns for token in range(start, stop)]
    assert np.flatnonzero(sample.response_N).tolist() == sampled
    assert made.logprobs_of(sample).tolist() == [-token for token in sampled]


@pytest.mark.parametrize(
    ("folder", "shape"), [(QWEN, ALL), (QWEN_DENSE0, DENSE0)], ids=["qwen", "dense0"]
)
def test_three_real_turns(folder, shape):
    """Each turn asks for routes from the last token of the turn before; prefixes are cached."""
    names = ("16_mt_turn1", "17_mt_turn2_start", "18_mt_turn3_start")
    payloads = [load(folder, name) for name in names]
    turns = [decode_increments(payload, shape)[0] for payload in payloads]
    assert [one.start for one in turns] == [0, 179, 234]
    sample = stitch(turns, "conversation")
    assert sample.routes.num_rows == len(sample.tokens_N) - 1 == 256
    assert sample.turns_U2.tolist() == [[150, 180], [205, 235], [245, 257]]
    for one, payload in zip(turns, payloads, strict=True):
        rows = slice(one.start, one.start + one.routes.num_rows)
        assert (sample.routes.ids_LTK[:, rows] == one.routes.ids_LTK).all()
        span = slice(one.prompt_length, len(one.tokens_N))
        choice = payload["response"]["choices"][0]
        assert sample.tokens_N[span].tolist() == choice["token_ids"]
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        assert (sample.logprobs_N[span] == logprobs).all()
    with pytest.raises(EngineError, match=r"row of token 179 \(55 of 256"):
        stitch([turns[0], turns[2]], "conversation")  # no second turn
    assert stitch([turns[0], turns[2]], "conversation", holes="missing").turns_U2.tolist() == [
        [150, 180],
        [245, 257],
    ]


def test_real_text_that_was_tokenized_again_is_refused():
    """A chat is sent as text, so the second prompt has other tokens than the first response."""
    turns = [decode_increments(load(QWEN, name))[0] for name in ("19_chat_turn1", "20_chat_turn2")]
    with pytest.raises(EngineError, match=r"request 7, choice 0: token \d+ is .* tokenized again"):
        stitch(turns, "conversation")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_made_up_turns_in_any_order(order):
    turns = [turn(5, 9), turn(13, 20, 8), turn(24, 30, 19)]
    check_whole(stitch([turns[i] for i in order], "here"), [[5, 9], [13, 20], [24, 30]])


def test_one_turn_is_its_whole():
    check_whole(turn(5, 9).whole(), [[5, 9]])
    check_whole(stitch([turn(5, 9)], "here"), [[5, 9]])
    with pytest.raises(EngineError, match="turn of 5: routes start at token 3: stitch"):
        turn(5, 9, 3).whole()


def test_the_boundary_row_must_arrive():
    """If a turn starts behind the last token of the turn before, this token has no row."""
    with pytest.raises(EngineError, match=r"here: no response brought the row of token 8 .1 of 19"):
        stitch([turn(5, 9), turn(13, 20, 9)], "here")
    sample = stitch([turn(5, 9), turn(13, 20, 9)], "here", holes="missing")
    assert np.flatnonzero(~sample.routes.recorded_T).tolist() == [8]
    assert not sample.routes.ids_LTK[:, 8].any()
    assert (sample.routes.ids_LTK[:, 9:] == IDS[:, 9:19]).all()


def test_a_retry_that_agrees():
    retry = turn(13, 20, 6, "retry")
    turns = [turn(5, 9), turn(13, 20, 8), retry, turn(24, 30, 0)]
    check_whole(stitch(turns, "here"), [[5, 9], [13, 20], [24, 30]])
    order = IDS.copy()
    order[:, 8:19] = order[:, 8:19, ::-1]  # other order, same sets
    turns[2] = turn(13, 20, 6, "retry", order)
    check_whole(stitch(turns, "here"), [[5, 9], [13, 20], [24, 30]])


def test_a_retry_that_differs_is_refused():
    other = IDS.copy()
    other[1, 11] = (IDS[1, 11] + 1) % 16
    turns = [turn(5, 9), turn(13, 20, 8), turn(13, 20, 8, "retry", other)]
    with pytest.raises(
        EngineError, match=r"retry: the row of token 11 .* at MoE layer 1: .*differ: 1"
    ):
        stitch(turns, "here")
    for token in (15, 4):
        wrong = TOKENS[:20].copy()
        wrong[token] = 7
        retry = dataclasses.replace(turn(13, 20, 8, "retry"), tokens_N=wrong)
        with pytest.raises(
            EngineError, match=f"token {token} is id {100 + token}, but id 7 in retry"
        ):
            stitch([turn(5, 9), turn(13, 20, 8), retry], "here")


def test_a_response_that_was_cut_off_and_went_on():
    """The same prompt is sent again, or a prompt that ends with sampled tokens."""
    check_whole(stitch([turn(5, 9), turn(5, 14, 0)], "here"), [[5, 14]])
    check_whole(stitch([turn(5, 9), turn(9, 14, 8)], "here"), [[5, 9], [9, 14]])
    check_whole(stitch([turn(5, 9), turn(7, 14, 6)], "here"), [[5, 9], [9, 14]])


def test_parts_of_different_conversations():
    few = Routes.from_array(IDS[:2, 8:19], 16)
    with pytest.raises(EngineError, match="layers, experts or top-k are other than in"):
        stitch([turn(5, 9), dataclasses.replace(turn(13, 20, 8), routes=few)], "here")
    with pytest.raises(EngineError, match="no responses"):
        stitch([], "here")
    with pytest.raises(EngineError, match="holes must be"):
        stitch([turn(5, 9)], "here", holes="fill")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 6}, "start at token 6; expected a start from 0 to 5"),
        ({"start": -1}, "start at token -1"),
        ({"start": 1}, "8 rows of routes for 9 tokens; expected 7, from token 1 on"),
        ({"prompt_length": 6}, "4 log-probs for 3 response tokens"),
        ({"logprobs_G": np.array([0, np.inf, 0, 0])}, "token 6 is .*not finite"),
    ],
)
def test_parts_that_do_not_belong_together(change, message):
    wrong = dataclasses.replace(turn(5, 9), **change)
    with pytest.raises(EngineError, match=f"turn of 5: .*{message}"):
        stitch([wrong, turn(13, 20, 8)], "here")


def test_turns_with_something_wrong_are_stitched_whole_or_refused():
    rows = made.made_rows(29)
    tokens = np.arange(30, dtype=np.int32)
    spans = [(5, 9, 0), (13, 20, 8), (24, 30, 19)]
    rng = random.Random("increments")
    stitched = 0
    for round_ in range(3000):
        turns = []
        for prompt, end, start in spans:
            start = max(0, start + rng.choice((0, 0, 0, -3, 1)))
            ids = rows[start : end - 1 + rng.choice((0,) * 9 + (1,))].copy()
            if rng.random() < 0.1 and len(ids):
                ids[rng.randrange(len(ids)), 1] = [1, 2, 3, 4]
            said = tokens[:end].copy()
            if rng.random() < 0.1:
                said[rng.randrange(end)] = 99
            sequence = {
                "token_ids": said[prompt:],
                "logprobs": [-1.0] * (end - prompt),
                "routes": ids,
            }
            asked = {"prompt": said[:prompt], "start": start}
            turns.append((sequence, asked))
        rng.shuffle(turns)
        try:
            read = [engines.decode_increments("own", *each, made.SHAPE, "own") for each in turns]
            found = [one for (one,) in read][: rng.choice((2, 3, 3))]
            sample = stitch(found, "own")
        except EngineError:
            continue
        stitched += 1
        assert sample.routes.num_rows == len(sample.tokens_N) - 1, round_
        assert sample.routes.recorded_T.all(), round_
        for one in found:
            here = slice(one.start, one.start + one.routes.num_rows)
            assert (sample.routes.ids_LTK[:, here] == one.routes.ids_LTK).all(), round_
            assert (sample.tokens_N[: len(one.tokens_N)] == one.tokens_N).all(), round_
    assert 20 < stitched < 3000
