"""vLLM's Python objects, and streams of /inference/v1/generate.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import engine_bodies as made
import pytest

from megatron_r3.data.engines import EngineError, ModelShape, decode, decode_increments
from tests.unit.data.engines.test_vllm import DENSE0, QWEN_DENSE0, REJECT, load


def test_python_outputs():
    rows = made.made_rows()
    response, request = made.vllm_python(rows)
    (sample,) = decode("vllm", response, request, made.SHAPE, "request 7")
    assert sample.tokens_N.tolist() == made.PROMPT + made.RESPONSE
    assert made.logprobs_of(sample).tolist() == made.LOGPROBS
    assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()
    response.outputs[0].routed_experts = rows[4:]
    (one,) = decode_increments(
        "vllm", response, {"routed_experts_prompt_start": 4}, made.SHAPE, "request 7"
    )
    assert (one.routes.ids_LTK == made.moe_ids(rows)[:, 4:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, "no routed_experts"),
        ({"logprobs": None}, r"SamplingParams\(logprobs=1\)"),
        ({"logprobs": [{}] * 4}, "has no log-prob"),
        ({"logprobs": [{}] * 3}, "3 log-probs for 4"),
        ({"token_ids": [[1]] * 4}, "is no id"),
        ({"index": None}, "index"),
    ],
)
def test_wrong_python_outputs_are_refused(change, message):
    response, request = made.vllm_python(made.made_rows())
    vars(response.outputs[0]).update(change)
    with pytest.raises(EngineError, match=f"request 7.*{message}"):
        decode("vllm", response, request, made.SHAPE, "request 7")


def test_physical_ids_of_vllm_014():
    response, request = made.vllm_python(made.made_rows())
    for version in (None, "0.14.1"):
        with pytest.raises(EngineError, match=r"with EPLB vLLM .* physical"):
            decode("vllm", response, request, made.SHAPE, "request 7", eplb=True, version=version)
    for options in ({"eplb": True, "version": "0.15.0"}, {"version": "0.14.0"}):
        assert decode("vllm", response, request, made.SHAPE, "request 7", **options)
    response.finished = False
    with pytest.raises(EngineError, match="not finished"):
        decode("vllm", response, request, made.SHAPE, "request 7")
    with pytest.raises(EngineError, match="outputs and prompt_token_ids"):
        decode("vllm", SimpleNamespace(), request, made.SHAPE, "request 7")


def test_a_real_stream_with_routes_decodes():
    payload = load(QWEN_DENSE0, "24_generate_tito_stream")
    for body in (payload["response"], payload["response"]["_raw_text"]):
        (sample,) = decode("vllm", body, payload["request"], DENSE0, "request 7")
        assert sample.tokens_N.tolist()[:21] == payload["request"]["token_ids"]
        assert (len(sample.tokens_N), sample.routes.num_rows) == (24, 23)
        assert (made.logprobs_of(sample) < 0).all()
    payload = load(REJECT, "24_generate_tito_stream")
    shape = ModelShape(16, 4, (0, 1, 2, 3), 4)
    with pytest.raises(EngineError, match="did not capture routes"):
        decode("vllm", payload["response"], payload["request"], shape, "request 7")


def events(text):
    return [line for line in text.split("\n\n") if line]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "was cut off"),
        (lambda lines: [], "was cut off"),
        (lambda lines: [*lines[:3], lines[-1]], "ends before the choice does"),
        (lambda lines: [*lines[:4], lines[3], lines[-1]], "goes on after the choice's end"),
        (lambda lines: ["data: {", *lines], "event 0: not JSON"),
        (lambda lines: ["data: " + "[" * 100000, *lines], "more than 64 brackets"),
        (lambda lines: ["data: 3", *lines], "no JSON object"),
        (lambda lines: ["data: {}", *lines], "has no choices"),
        (lambda lines: ['data: {"choices": [{"index": 0}]}', *lines], "has no token_ids"),
        (lambda lines: ['data: {"error": {"message": "out of memory"}}', *lines], "out of memory"),
        (lambda lines: lines[1:], "9 rows of routes for 9 tokens"),
        (lambda lines: [lines[0], *lines], "9 rows of routes for 11 tokens"),
        (
            lambda lines: [lines[0].replace("null", '"AAAA"', 2), *lines[1:]],
            "after the choice's end|twice",
        ),
    ],
)
def test_broken_streams_are_refused(change, message):
    text, request = made.vllm_stream(made.made_rows())
    assert decode("vllm", text, request, made.SHAPE, "request 7")
    with pytest.raises(EngineError, match=f"request 7.*({message})"):
        decode("vllm", "\n\n".join(change(events(text))), request, made.SHAPE, "request 7")


def test_a_stream_of_two_choices():
    rows = [made.made_rows(seed=i) for i in range(2)]
    lines = [events(made.vllm_stream(each)[0]) for each in rows]
    second = []
    for line in lines[1][:-1]:
        event = json.loads(line[6:])
        event["choices"][0]["index"] = 1
        second.append("data: " + json.dumps(event))
    mixed = [line for pair in zip(lines[0][:-1], second, strict=True) for line in pair]
    request = made.vllm_stream(rows[0])[1]
    request["sampling_params"]["n"] = 2
    text = "\n\n".join([*mixed, "data: [DONE]"])
    for sample, each in zip(
        decode("vllm", text, request, made.SHAPE, "request 7"), rows, strict=True
    ):
        assert (sample.routes.ids_LTK == made.moe_ids(each)).all()
