"""Bodies of SGLang 0.5.10 to 0.5.23 (/generate, OpenAI's endpoints) are decoded, or refused.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

import base64
import copy

import engine_bodies as made
import numpy as np
import pytest

from megatron_r3.data import engines
from megatron_r3.data.engines.shape import EngineError


def decode(body, request, shape=made.SHAPE, **options):
    return engines.decode("sglang", body, request, shape, "request 7", **options)


def with_text(body, text):
    body = copy.deepcopy(body)
    (body.get("sglext") or body["meta_info"])["routed_experts"] = text
    return body


@pytest.mark.parametrize("make", [made.sglang, made.sglang_openai])
def test_both_routes_decode(make):
    rows = made.made_rows()
    body, request = make(rows)
    for response in (body, [body]) if make is made.sglang else (body,):
        (sample,) = decode(response, request)
        assert sample.tokens_N.tolist() == made.PROMPT + made.RESPONSE
        assert sample.spans_U2.tolist() == [[6, 10]]
        assert made.logprobs_of(sample).tolist() == made.LOGPROBS
        assert sample.routes.ids_LTK.dtype == np.uint8
        assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()


def test_two_prompts_of_two_samples_each():
    rows = [made.made_rows(seed=i) for i in range(4)]
    request = {
        "input_ids": [made.PROMPT, made.PROMPT[::-1]],
        "sampling_params": {"n": 2},
        "return_routed_experts": True,
    }
    body = made.sent([made.sglang_item(each) for each in rows])
    samples = decode(body, request)
    assert [sample.group for sample in samples] == [0, 0, 1, 1]
    for sample, each in zip(samples, rows, strict=True):
        assert (sample.routes.ids_LTK == made.moe_ids(each)).all()
    request["sampling_params"] = [{"n": 2}, {"n": 2}]
    assert len(decode(body, request)) == 4
    request["sampling_params"][1]["n"] = 1
    with pytest.raises(EngineError, match="n differs"):
        decode(body, request)
    with pytest.raises(EngineError, match="3 samples; the request asks for 4"):
        decode(body[:3], {**request, "sampling_params": {"n": 2}})


@pytest.mark.parametrize("honoured", [True, False])
@pytest.mark.parametrize("start", [0, 1, 5, 6])
def test_a_start_is_honoured_or_ignored(start, honoured):
    """0.5.12 and later send rows from the start on, 0.5.8 to 0.5.11 send all rows."""
    rows = made.made_rows()
    body, request = made.sglang(rows)
    body = with_text(body, made.int32_text(rows[start:] if honoured else rows))
    request["routed_experts_start_len"] = start
    (increment,) = engines.decode_increments("sglang", body, request, made.SHAPE, "request 7")
    assert increment.start == start
    assert (increment.routes.ids_LTK == made.moe_ids(rows)[:, start:]).all()
    if start:
        with pytest.raises(EngineError, match=f"start at token {start}: stitch"):
            decode(body, request)


def test_rows_that_fit_neither_start_are_refused():
    rows = made.made_rows()
    body, request = made.sglang(rows)
    request["routed_experts_start_len"] = 4
    for wrong, cause in (
        (rows[3:], "cached prefix"),
        (rows[5:], "cached prefix"),
        (rows[:0], "cached prefix"),
        (np.concatenate([rows, rows[:1]]), "cut off after they were sampled"),
    ):
        expected = "5 rows from token 4 on, or 9 rows from token 0 on"
        expected = f"{len(wrong)} rows of .* 10 tokens have {expected}"
        with pytest.raises(EngineError, match=f"{expected}.*{cause}"):
            decode(with_text(body, made.int32_text(wrong)), request)
    with pytest.raises(EngineError, match="expected a start from 0 to 6"):
        decode(
            with_text(body, made.int32_text(rows[7:])), {**request, "routed_experts_start_len": 7}
        )


@pytest.mark.parametrize("make", [made.sglang, made.sglang_openai])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: made.int32_text(rows)[:-1], "not whole base64"),
        (lambda rows: made.int32_text(rows)[:-4], "no whole number of <i4"),
        (lambda rows: made.int32_text(rows[:, :3]), "no whole number of rows"),
        (lambda rows: base64.b64encode(rows.astype("<i8").tobytes()).decode(), "18 rows of"),
        (
            lambda rows: base64.b64encode(rows.astype("u1").tobytes()).decode(),
            "no whole number of rows",
        ),
        (lambda rows: base64.b64encode(rows.astype(">i4").tobytes()).decode(), "outside 0..15"),
        # bytes have no axes: only the zeros of dense layers tell that layers and tokens are swapped
        (lambda rows: made.int32_text(rows.transpose(1, 0, 2)), "which is dense"),
        (lambda rows: rows.tolist(), "base64 text; got list"),
        (lambda rows: None, "no routed_experts"),
    ],
)
def test_wrong_routes_are_refused(make, change, message):
    rows = made.made_rows()
    body, request = make(rows)
    with pytest.raises(EngineError, match=f"request 7, choice 0: .*{message}"):
        decode(with_text(body, change(rows)), request)


@pytest.mark.parametrize(
    ("row", "layer", "ids", "message"),
    [
        (4, 2, [1, 2, -1, 3], r"outside 0\.\.15 at MoE layer 1, token 4"),
        (5, 4, [0, 0, 0, 0], "did not capture routes: 1 of 27 pairs.* token 5, hidden layer 4"),
        (2, 3, [1, 2, 3, 4], "hidden layer 3, which is dense"),
    ],
)
def test_wrong_ids_are_refused(row, layer, ids, message):
    rows = made.made_rows()
    rows[row, layer] = ids
    with pytest.raises(EngineError, match=message):
        decode(*made.sglang(rows))
    body, request = made.sglang(rows)  # with a later start the error names the same token
    body = with_text(body, made.int32_text(rows[2:]))
    with pytest.raises(EngineError, match=message.replace("of 27", "of 21")):
        decode(body, {**request, "routed_experts_start_len": 2})


def test_openai_routes_hold_the_first_choice_only():
    body, request = made.sglang_openai(made.made_rows())
    second = {**body["choices"][0], "index": 1}
    two = {**body, "choices": [*body["choices"], second]}
    with pytest.raises(EngineError, match="only the first of 2 choices has routes"):
        decode(two, {**request, "n": 2})
    for i, choice in enumerate(two["choices"]):  # return_meta_info, from 0.5.18
        choice["meta_info"] = made.sglang_item(made.made_rows(seed=i))["meta_info"]
    samples = decode(two, {**request, "n": 2})
    for i, sample in enumerate(samples):
        assert (sample.routes.ids_LTK == made.moe_ids(made.made_rows(seed=i))).all()


def test_a_chat_has_its_ids_in_the_choice():
    body, _ = made.sglang_openai(made.made_rows())
    choice = body["choices"][0]
    choice["response_token_ids"] = choice.pop("token_ids")
    choice["logprobs"] = {"content": [{"logprob": value} for value in made.LOGPROBS]}
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    assert decode(body, chat)[0].tokens_N.tolist() == made.PROMPT + made.RESPONSE
    del choice["response_token_ids"]
    with pytest.raises(EngineError, match="no output_ids; ask with return_token_ids"):
        decode(body, chat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": {"type": "abort", "message": "start too high"}}, "start too high"),
        ({"num_retractions": 2}, "retracted the request 2 times"),
        ({"prompt_tokens": 7}, "7 prompt tokens; 6 were sent"),
        ({"output_token_logprobs": [[-1.0, 21, None]]}, "name other ids than output_ids"),
        ({"output_token_logprobs": []}, "no token was sampled; .*max_new_tokens"),
        ({"output_token_logprobs": [None] * 4}, "must be a list of .log-prob, token id, text"),
        ({"output_token_logprobs": [["a", 21, None]] * 4}, "a flat list of numbers; got str"),
        (
            {"output_token_logprobs": [[None, t, None] for t in made.RESPONSE]},
            "a response token has no log-prob",
        ),
    ],
)
def test_unusable_samples_are_refused(change, message):
    body, request = made.sglang(made.made_rows())
    body["meta_info"].update(change)
    with pytest.raises(EngineError, match=f"request 7, choice 0: .*{message}"):
        decode(body, request)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("data: {}", "streamed"),
        ({"error": {"message": "no such model"}}, "no such model"),
        ({"object": "error", "message": "bad start", "code": 400}, "bad start"),
        ({}, "no choices"),
        ([{}], "meta_info"),
        ([3], "meta_info"),
        (None, "NoneType samples"),
        ([], "0 samples"),
    ],
)
def test_bodies_that_are_none(body, message):
    request = made.sglang(made.made_rows())[1]
    with pytest.raises(EngineError, match=f"request 7.*{message}"):
        decode(body, request)
