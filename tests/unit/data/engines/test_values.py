"""Impossible log-probs, wrong tokens, too many tokens and other models' responses are refused.

Each engine's body is taken whole, and one value of it changed.

Shape suffixes (docs/glossary.md): G, N.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine_bodies as made
import numpy as np
import pytest

from megatron_r3.data import engines
from megatron_r3.data.engines import EngineError, stitch
from megatron_r3.data.engines import body as common

IMPOSSIBLE = {
    5.0: "is 5: a probability above 1 (logits, not log-probs?)",
    1e-4: "is 0.0001: a probability above 1",
    -65.0: "is -65, below -64: the policy cannot have drawn the token",
    -1e30: "is -1e+30, below -64",
    -9999.0: "is -9999, which vLLM sends in place of -inf",
    float("nan"): "is nan, which is not finite",
    float("-inf"): "is -inf, which is not finite",
}
MOST = ("max_tokens", "max_new_tokens", "max_completion_tokens")


def shape_of(vocab_size: int | None = None) -> Any:
    return replace(made.SHAPE, vocab_size=vocab_size)


def decode(name: str, body: Any, request: dict[str, Any], vocab_size: int | None = None) -> Any:
    (one,) = engines.decode(made.ENGINES[name][0], body, request, shape_of(vocab_size), "request 7")
    return one


def with_logprob(name: str, value: float) -> tuple[Any, dict[str, Any]]:
    """The body whose third sampled token, token 8, has this log-prob."""
    before, made.LOGPROBS = made.LOGPROBS, [*made.LOGPROBS[:2], value, made.LOGPROBS[3]]
    try:
        return made.ENGINES[name][1](made.made_rows())
    finally:
        made.LOGPROBS = before


@pytest.mark.parametrize("name", made.ENGINES)
@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_impossible_logprobs_are_refused(name, value):
    with pytest.raises(EngineError) as caught:
        decode(name, *with_logprob(name, value))
    assert "request 7, choice 0: the log-prob of token 8 " in str(caught.value)
    assert IMPOSSIBLE[value] in str(caught.value)


@pytest.mark.parametrize("name", made.ENGINES)
@pytest.mark.parametrize("value", [0.0, 1e-6, -63.9])
def test_possible_ones_are_not(name, value):
    assert decode(name, *with_logprob(name, value)).logprobs_N[8] == np.float32(value)


@pytest.mark.parametrize("name", made.ENGINES)
@pytest.mark.parametrize(("vocab_size", "token"), [(24, 9), (16, 5)])
def test_tokens_outside_the_vocabulary_are_refused(name, vocab_size, token):
    """Token 9, the last one sampled, is id 24; token 5, the prompt's last, is id 16."""
    body, request = made.ENGINES[name][1](made.made_rows())
    decode(name, body, request, 25)
    decode(name, body, request, None)
    with pytest.raises(EngineError) as caught:
        decode(name, body, request, vocab_size)
    assert f"token {token} is id {vocab_size}; ids go from 0 to" in str(caught.value)


@pytest.mark.parametrize("name", made.ENGINES)
@pytest.mark.parametrize("option", MOST)
@pytest.mark.parametrize("nested", [False, True])
def test_more_tokens_than_asked_are_refused(name, option, nested):
    body, request = made.ENGINES[name][1](made.made_rows())
    params = {k: v for k, v in request.get("sampling_params", {}).items() if k not in MOST}
    request = {k: v for k, v in request.items() if k not in MOST}

    def asking(most: int) -> dict[str, Any]:
        if nested:
            return {**request, "sampling_params": {**params, option: most}}
        return {**request, "sampling_params": params, option: most}

    decode(name, body, asking(4))
    with pytest.raises(EngineError, match="4 response tokens; at most 3 were asked for"):
        decode(name, body, asking(3))
    with pytest.raises(EngineError, match=f"{option} must be a whole number"):
        decode(name, body, asking("4"))


def test_the_larger_of_two_limits_counts_and_each_prompt_has_its_own():
    assert common.most_tokens({"max_tokens": 3, "max_completion_tokens": 9}) == 9
    assert common.most_tokens({"sampling_params": [{"max_new_tokens": 3}, None]}) == 3
    assert common.most_tokens({"sampling_params": {}}) is None


@pytest.mark.parametrize("name", ["vllm", "sglang-openai", "megatron"])
def test_a_response_of_another_model_is_refused(name):
    body, request = made.ENGINES[name][1](made.made_rows())
    request["model"] = "tiny"
    decode(name, body, request)  # no model is named; Megatron's server calls every model "EMPTY"
    other = {**body, "model": "large\x1b"}
    decode(name, {**body, "model": "tiny"}, request)
    with pytest.raises(EngineError) as caught:
        decode(name, other, request)
    message = "request 7: the response names the model 'large\\x1b'; the request asked for 'tiny'"
    assert str(caught.value) == message
    del request["model"]
    decode(name, other, request)


def named(names: list[Any], chat: bool = False) -> tuple[Any, dict[str, Any]]:
    """A response whose log-probs name these tokens."""
    body, request = made.vllm(made.made_rows())
    pairs = zip(names, made.LOGPROBS, strict=False)
    body["choices"][0]["logprobs"] = (
        {"content": [{"token": name, "logprob": value} for name, value in pairs]}
        if chat
        else {"tokens": names, "token_logprobs": made.LOGPROBS}
    )
    return body, request


RIGHT = [f"token_id:{token}" for token in [*made.RESPONSE, 25]]
OTHER = "the log-prob of token {} belongs to id {}; the response has id {} there"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (RIGHT[:4], ""),
        (["a", "token", "", None], ""),  # names that are texts are not compared
        ([*RIGHT[:2], RIGHT[3], RIGHT[2]], OTHER.format(8, 24, 23)),
        ([RIGHT[0], "token_id:7", "a", "b"], OTHER.format(7, 7, 22)),
        (RIGHT[:3], "log-probs of 3 tokens; the response has 4"),
        (RIGHT, "log-probs of 5 tokens; the response has 4"),
    ],
)
def test_logprobs_of_other_tokens_are_refused(chat, names, message):
    chat = chat and len(names) == 4  # a chat has a name beside each log-prob
    if not message:
        decode("vllm", *named(names, chat))
        return
    with pytest.raises(EngineError) as caught:
        decode("vllm", *named(names, chat))
    assert str(caught.value) == f"request 7, choice 0: {message}"


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("name", ["vllm", "vllm-python", "sglang", "megatron"])
def test_what_an_engine_gave_up_is_refused(name, reason):
    body, request = made.ENGINES[name][1](made.made_rows())
    if name == "vllm-python":
        body.outputs[0].finish_reason = reason
    elif name == "sglang":
        body["meta_info"]["finish_reason"] = {"type": reason, "message": "no\x1b[2J\nroom"}
    else:
        body["choices"][0]["finish_reason"] = reason
    with pytest.raises(EngineError) as caught:
        decode(name, body, request)
    told = ": no\\x1b[2J room" if name == "sglang" else ""
    message = f"request 7, choice 0: the engine ended the response with {reason!r}, half-way{told}"
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "\x1b[31mred\nand more" + "!" * 9000}},
        {"error": ["\x1b", 10**4000]},
        {"detail": "\x1b[31mred"},
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "megatron"])
def test_what_a_server_says_is_one_short_line(engine, error):
    with pytest.raises(EngineError) as caught:
        engines.decode(engine, error, {"prompt": [1]}, made.SHAPE, "request 7")
    message = str(caught.value)
    assert message.startswith("request 7: the server refused the request: ")
    assert message.isprintable()
    assert len(message) < 600


def test_values_of_any_size_are_named_in_a_short_line():
    """Python refuses to print a whole number of 5000 digits; the error must not be about that."""
    body, request = made.vllm(made.made_rows())
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (10**5000, -(10**5000), deep, "\x1b" * 10**6, {"a": deep}):
        for wrong in ({"n": value}, {"max_tokens": value}, {"routed_experts_prompt_start": value}):
            with pytest.raises(EngineError) as caught:
                engines.decode("vllm", body, {**request, **wrong}, made.SHAPE, "request 7")
            assert len(str(caught.value)) < 300
            assert str(caught.value).isprintable()


def test_stitched_increments_and_samples_are_checked_again():
    body, request = made.vllm(made.made_rows())
    (one,) = engines.decode_increments("vllm", body, request, made.SHAPE, "turn 1")
    wrong = replace(one, logprobs_G=np.array([-1, -1, -9999, -1], np.float32))
    with pytest.raises(EngineError, match="turn 1, choice 0: the log-prob of token 8 is -9999"):
        stitch([wrong], "conversation")
    with pytest.raises(EngineError, match="conversation: token 0 is id -1"):
        stitch([replace(one, tokens_N=one.tokens_N * 0 - 1)], "conversation")
    whole = one.whole()
    assert whole.wrong_parts() is None
    wrong = replace(whole, logprobs_N=np.where(whole.response_N, 5, 0).astype(np.float32))
    assert str(wrong.wrong_parts()).startswith("token 6: its log-prob is 5: a probability above 1")
    wrong = replace(whole, tokens_N=whole.tokens_N * 0 - 1)
    assert str(wrong.wrong_parts()).startswith("token 0 is id -1")
