"""Responses of Megatron-LM's inference server, 0.17 to 0.19, are decoded or refused.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

import engine_bodies as made
import numpy as np
import pytest

from megatron_r3.data import engines
from megatron_r3.data.engines.shape import EngineError, ModelShape


def decode(body, request, **options):
    return engines.decode("megatron", body, request, made.SHAPE, "request 7", **options)


@pytest.mark.parametrize("dtype", ["int16", "int32", None])
def test_every_form_decodes(dtype):
    rows = made.made_rows()
    (sample,) = decode(*made.megatron(rows, dtype))
    assert sample.tokens_N.tolist() == made.PROMPT + made.RESPONSE
    assert made.logprobs_of(sample).tolist() == made.LOGPROBS
    assert sample.spans_U2.tolist() == [[6, 10]]
    assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()
    assert sample.routes.ids_LTK.dtype == np.uint8


@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_the_bytes_of_a_patched_server(dtype):
    rows = made.made_rows()
    whole = rows[:, list(made.SHAPE.moe_layers)].astype(dtype)
    (sample,) = decode(*routed(lambda pair: made.as_bytes(whole)))
    assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()


def sent(change):
    """Rows as bytes, whose dtype or shape in the body is changed."""

    def give(pair):
        tag, content = made.as_bytes(np.array(pair[1]["data"], dtype="int16"))
        return [tag, {**content, **change(content)}]

    return give


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: {"shape": [9, 3]}, r"got 108 ids for the shape \[9, 3\]"),
        (lambda said: {"shape": [9, 3, 5]}, "got 108 ids for the shape"),
        (lambda said: {"shape": [-9, -3, 4]}, "got 108 ids for the shape"),
        (lambda said: {"shape": [True, 27, 4]}, "got 108 ids for the shape"),
        (lambda said: {"shape": "9"}, "got 108 ids for the shape '9'"),
        (lambda said: {"shape": [3, 9, 4]}, "9 layers; the model has 3"),
        (lambda said: {"shape": [0, 2**40, 2**40], "data": ""}, "no array can have its shape"),
        (lambda said: {"data": said["data"][:-4]}, "no whole number of int16|got 106|got 107"),
        (lambda said: {"data": "?" + said["data"][1:]}, "not whole base64"),
        (lambda said: {"data": [1]}, "expected base64 text; got list"),
        (lambda said: {"dtype": "int32"}, "got 54 ids for the shape"),
        (lambda said: {"more": 1}, "got 'ndarray'"),
    ],
)
def test_wrong_bytes_are_refused(change, message):
    with pytest.raises(EngineError, match=f"request 7, choice 0.*({message})"):
        decode(*routed(sent(change)))


@pytest.mark.parametrize("both", [True, False])
def test_chat_says_its_tokens_in_the_message(both):
    """In a chat, 0.17 has tokens in the choice and in its message, 0.19 in the message only."""
    rows = made.made_rows()
    body, _ = made.megatron(rows)
    choice = body["choices"][0]
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "num_evictions")
    choice["message"] = {name: choice[name] for name in names}
    if not both:
        for name in names:
            del choice[name]
    request = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    second = {**choice, "index": 1}
    samples = decode({"choices": [second, choice]}, request)
    assert [sample.group for sample in samples] == [0, 0]
    assert (samples[0].routes.ids_LTK == made.moe_ids(rows)).all()
    del choice["message"]["generation_token_ids"]
    choice.pop("generation_token_ids", None)
    with pytest.raises(EngineError, match="choice 0: no generation_token_ids"):
        decode({"choices": [choice]}, {**request, "n": 1})


def test_layers_of_multi_token_prediction_come_last_and_are_dropped():
    rows, mtp = made.made_rows(), made.made_rows(seed=1)[:, 1:3]
    body, request = made.megatron(rows, mtp=mtp)
    (sample,) = decode(body, request, num_mtp_layers=2)
    assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()
    # 3 MoE layers and 2 MTP layers are as many as the hidden layers, and are not taken for them
    for wrong in (0, 1, 3):
        with pytest.raises(EngineError, match=f"5 layers; the model has 3 MoE layers and {wrong}"):
            decode(body, request, num_mtp_layers=wrong)


def routed(change):
    body, request = made.megatron(made.made_rows())
    choice = body["choices"][0]
    choice["moe_topk_indices"] = change(choice["moe_topk_indices"])
    return body, request


def tagged(dtype):
    return lambda pair: ["ndarray", {"data": pair[1]["data"], "dtype": dtype}]


def data(change):
    return lambda pair: ["ndarray", {"data": change(pair[1]["data"]), "dtype": "int16"}]


def put(value):
    def change(rows):
        rows[4][1][2] = value
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pair: None, "start the server with --moe-enable-routing-replay"),
        (lambda pair: pair[:1], "got str|shape"),
        (lambda pair: ["tensorish", pair[1]], "got 'tensorish'"),
        (lambda pair: ["ndarray", pair[1]["data"]], "got 'ndarray'"),
        (tagged("float32"), "ids must be integers"),
        (tagged("object"), "ids must be integers"),
        (tagged(["int16"]), "ids must be integers"),
        (tagged("|V99999999"), "ids must be integers"),
        (data(lambda rows: rows[:-1]), "8 rows of routes for 10 tokens"),
        (data(lambda rows: np.transpose(rows, (1, 0, 2)).tolist()), "9 layers; the model has 3"),
        (data(lambda rows: np.array(rows, float).tolist()), "ids must be integers; got float"),
        (data(lambda rows: [rows]), "got shape"),
        (data(put(-1)), r"outside 0\.\.15 at MoE layer 1, token 4"),
        (data(put(40000)), "does not fit int16"),
        (data(put("3")), "ids must be integers; got int, str"),
        (data(put(None)), "ids must be integers"),
        (data(put([1])), "not an even table"),
        (data(lambda rows: [[[0] * 4] * 3] * 9), "did not capture routes: 27 of 27"),
    ],
)
def test_wrong_routes_are_refused(change, message):
    with pytest.raises(EngineError, match=f"request 7, choice 0.*({message})"):
        decode(*routed(change))


def test_evicted_requests_without_routes_are_refused():
    """A patched server keeps the routes of an evicted request; an unpatched server loses them."""
    body, request = made.megatron(made.made_rows())
    body["choices"][0]["num_evictions"] = 1
    assert len(decode(body, request)) == 1
    body["choices"][0]["moe_topk_indices"] = None
    with pytest.raises(EngineError, match=r"the server evicted .* 1 times"):
        decode(body, request)
    for lacking in (None, []):
        body, request = made.megatron(made.made_rows())
        body["choices"][0]["generation_log_probs"] = lacking
        with pytest.raises(EngineError, match="choice 0: no log-probs; ask with logprobs 1"):
            decode(body, request)


@pytest.mark.parametrize("body", ["Inference request(s) failed: Request 0", None, [], {}, 3])
def test_bodies_that_are_none(body):
    with pytest.raises(EngineError, match="request 7: "):
        decode(body, {"prompt": made.PROMPT})


def test_a_stream_and_another_models_shape_are_refused():
    body, request = made.megatron(made.made_rows())
    with pytest.raises(EngineError, match="stream"):
        decode(body, {**request, "stream": True})
    with pytest.raises(EngineError, match="3 layers; the model has 4 MoE layers"):
        engines.decode("megatron", body, request, ModelShape(16, 4, (0, 1, 2, 4), 5), "request 7")
