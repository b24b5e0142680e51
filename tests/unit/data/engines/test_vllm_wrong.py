"""vLLM responses made wrong on purpose: each is refused, by an error that names what and where."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.engines.vllm import decode_routes
from tests.unit.data.engines.test_vllm import QWEN, decode, load, npy, rows_of, with_routes


@pytest.fixture
def two() -> dict[str, Any]:
    """One prompt of 12 tokens, two samples of 10: 21 rows each."""
    return load(QWEN, "14_p12_g10_n2")


def change(rows: np.ndarray, row: int, layer: int, ids: list[int]) -> np.ndarray:
    rows = rows.astype(np.int64)
    rows[row, layer] = ids
    return rows


MESSAGES = [{"role": "user", "content": "hi"}]
WRONG_ROWS = {
    "20 rows of routes for 22 tokens; .*cached prefix": lambda r: r[:-1],
    "22 rows of routes for 22 tokens; .*cut off after they were sampled": lambda r: np.concatenate(
        [r, r[:1]]
    ),
    "0 rows of routes for 22 tokens": lambda r: r[:0],
    "top-3 routes; the model is top-4": lambda r: r[..., :3],
    "routes of 3 layers; the model has 4": lambda r: r[:, :3],
    "routes of 5 layers; the model has 4": lambda r: np.concatenate([r, r[:, :1]], 1),
    "outside 0..15 at MoE layer 2, token 5": lambda r: change(r, 5, 2, [1, 2, 3, 16]),
    "outside 0..15 at MoE layer 2, token 6": lambda r: change(r, 6, 2, [1, 2, 3, -1]),
    "twice in one row at MoE layer 1, token 20": lambda r: change(r, 20, 1, [1, 2, 2, 3]),
    "1 of 84 pairs of token and layer have zeros alone, the first at token 4, "
    "hidden layer 3": lambda r: change(r, 4, 3, [0, 0, 0, 0]),
    "84 of 84 pairs of token and layer have zeros": lambda r: r * 0,
    "got shape": lambda r: r.reshape(-1, 4),
    "ids must be integers; got float32": lambda r: r.astype(np.float32),
    "ids must be integers; got bool": lambda r: r.astype(bool),
}


@pytest.mark.parametrize("message", WRONG_ROWS)
def test_wrong_rows_are_refused(two, message):
    rows = WRONG_ROWS[message](rows_of(two, 1))
    for form in (npy(rows), rows.tolist()):
        if form == rows.tolist() and "float32" in message:
            continue  # JSON knows float64 only
        if form == rows.tolist() and message.startswith("0 rows"):
            continue  # [] has no layers and top-k: another error
        with pytest.raises(EngineError, match=f"request 7, choice 1.*{message}"):
            decode(with_routes(two, form, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda r: npy(r)[:-8],
        lambda r: npy(r)[:-3],
        lambda r: npy(r)[:60],
        lambda r: "",
        lambda r: "not base64!",
        lambda r: base64.b64encode(base64.b64decode(npy(r)) + b"\0\0").decode(),
        lambda r: npy(r.astype(object), pickle=True),
        lambda r: npy(np.zeros(3, [("a", "i4")])),
        lambda r: base64.b64encode(b"\x80\x04]\x94.").decode(),
        lambda r: base64.b64encode(b"PK\x03\x04").decode(),
        lambda r: r.astype(object),
        lambda r: [[[1, 2], [3]]],
        lambda r: [],
        lambda r: {"data": 1},
        lambda r: [[["a"]]],
        lambda r: [[[2**70]]],
        lambda r: None,
    ],
)
def test_what_is_no_array_is_refused(two, make):
    with pytest.raises(EngineError, match="request 7, choice 0"):
        decode(with_routes(two, make(rows_of(two))))


def test_one_expert_of_many_may_be_expert_zero(two):
    top1 = ModelShape(16, 1, (0, 1, 2, 3), 4)
    rows = rows_of(two)[..., :1].copy()
    rows[3] = 0
    choice = {"routed_experts": rows}
    assert decode_routes(choice, 22, top1).topk == 1
    with pytest.raises(EngineError, match="did not capture"):
        decode_routes({"routed_experts": rows * 0}, 22, top1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", None, "return_token_ids"),
        ("token_ids", [], "token_ids is empty: no token was sampled"),
        ("token_ids", [1, -2], "token ids must be a list"),
        ("token_ids", ["a"], "ids must be integers"),
        ("logprobs", None, "no log-probs; ask with logprobs 1 .chat: true, and top_logprobs 0"),
        ("logprobs", {"token_logprobs": [-1.0]}, "1 log-probs for 10 response tokens"),
        ("logprobs", {"token_logprobs": [None] * 10}, "has no log-prob"),
        ("logprobs", {"token_logprobs": [-1.0] * 9 + [float("nan")]}, "token 21 is .*not finite"),
        ("prompt_token_ids", [1, 2, 3], "not the prompt of the request"),
        ("index", 0, r"indices \[0, 0\]"),
        ("routed_experts", None, "--enable-return-routed-experts"),
    ],
)
def test_wrong_choices_are_refused(two, field, value, message):
    two["response"]["choices"][1][field] = value
    with pytest.raises(EngineError, match=message):
        decode(two)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "of next year"])
def test_parts_of_a_chat_that_are_no_text(kind):
    payload = load(QWEN, "19_chat_turn1")
    text = {"type": "text", "text": "what?"}
    texts = [text, {"text": "?"}, "?", {"type": "input_text", "text": "?"}]
    payload["request"]["messages"] = [*MESSAGES, {"role": "user", "content": texts}]
    assert decode(payload)
    # vLLM accepts each of these parts
    for part in ({"type": kind}, {kind: "http://a"}, {"text": "a", kind: "http://a"}):
        payload["request"]["messages"][1]["content"] = [text, part]
        with pytest.raises(EngineError, match=f"message 1, part 1 is of the type '{kind}': only"):
            decode(payload)


def test_the_form_of_021_is_refused(two):
    """In vLLM 0.21 rows of cached prefixes are zeros, and some models' layers are misplaced."""
    two["response"]["prompt_routed_experts"] = rows_of(two)[:12].tolist()
    with pytest.raises(EngineError, match=r"choice 0: .* form of vLLM 0\.21.*take 0\.22"):
        decode(two)


def test_swapped_prompts_are_refused():
    payload = load(QWEN, "15_batch3_lists")
    choices = payload["response"]["choices"]
    choices[0]["index"], choices[1]["index"] = 1, 0
    with pytest.raises(EngineError, match="choice 0: prompt_token_ids are not the prompt"):
        decode(payload)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"echo": True}, "echo"),
        ({"stream": True}, "streamed"),
        ({"n": 3}, "the request asks for 3"),
        ({"n": "2"}, "n must be a whole number"),
        ({"prompt": []}, "no prompt"),
    ],
)
def test_requests_that_cannot_be_read_are_refused(two, change, message):
    two["request"].update(change)
    with pytest.raises(EngineError, match=message):
        decode(two)
