"""Text, finish reason, model and weight versions that the responses of each engine have."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import engine_bodies as made
import pytest

from megatron_r3.data import engines
from megatron_r3.data.engines.said import Said, read_said
from megatron_r3.data.engines.shape import EngineError

ROWS = made.made_rows()
BODIES = {"vllm": made.vllm, "sglang": made.sglang, "megatron": made.megatron}


def said(engine: str, choice: dict[str, Any]) -> Said:
    """The `Said` of a response with these fields in its choice."""
    body, request = BODIES[engine](ROWS)
    (body["choices"][0] if "choices" in body else body).update(choice)
    (increment,) = engines.decode_increments(engine, body, request, made.SHAPE, "request 7")
    return increment.said


def test_text_and_finish_reason() -> None:
    for engine in ("vllm", "megatron"):
        says = said(engine, {"text": "hi", "finish_reason": "length"})
        assert (says.message, says.finish_reason) == ({"content": "hi"}, "length")
    body, _ = made.sglang(ROWS)
    meta = {**body["meta_info"], "finish_reason": {"type": "stop", "matched": 2}}
    says = said("sglang", {"text": "hi", "meta_info": meta})
    assert (says.message, says.finish_reason) == ({"content": "hi"}, "stop")


def test_a_message_without_what_is_not_read() -> None:
    message = {"role": "assistant", "content": "hi", "reasoning": "so", "token_ids": [1]}
    assert read_said({}, {"message": message}).message == {"content": "hi", "reasoning": "so"}
    assert read_said({}, {}) == Said()
    assert read_said({"model": "m"}, {}).model == "m"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"message": {"content": "hi", "audio": {"id": "a"}}}, "the message has audio"),
        ({"message": "hi"}, "its message must be an object; got str"),
        ({"text": 3}, "its text must be a text; got int"),
        ({"finish_reason": 3}, "its finish reason must be a text; got int"),
        ({"finish_reason": "abort", "meta_info": {"finish_reason": "stop"}}, "half-way"),
        ({"weight_version": 2.5}, "the version of its weights must be a text; got float"),
        ({"weight_versions": [{"start": 0, "end": 2}]}, "its weights must be a text; got None"),
        ({"weight_versions": [3]}, "its weights must be a text; got None"),
        ({"weight_versions": 5}, "weight_versions must be a list of spans; got 5"),
    ],
)
def test_what_is_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_said({}, choice)


def test_spans_that_are_objects_of_vllm() -> None:
    spans = (SimpleNamespace(version="3", start=0, end=2), SimpleNamespace(version="4"))
    assert read_said({}, {"weight_versions": spans}).policies == ("3", "4")


@pytest.mark.parametrize("engine", BODIES)
def test_the_routes_of_a_response_are_not_kept_for_what_it_says(engine: str) -> None:
    """A loop keeps the `Said` of all turns, so it must not hold the response with its routes."""
    body, request = BODIES[engine](ROWS)
    choice = body["choices"][0] if "choices" in body else body
    choice["text"] = "hi"
    for fields in (body, choice, choice.get("meta_info", {})):
        fields["large"] = "0" * 100_000
    (increment,) = engines.decode_increments(engine, body, request, made.SHAPE, "request 7")
    assert increment.said.message == {"content": "hi"}
    assert len(pickle.dumps(increment.said)) < 2_000
    assert len(pickle.dumps(body)) > 100_000  # a control


@pytest.mark.parametrize(
    ("epochs", "versions"),
    [
        (None, ()),
        ([[0, 3]], ("3",)),
        ([[0, 3], [8, 4]], ("3", "4")),
        ([[0, 3], [4, 4]], ("4",)),  # new weights before the first token was sampled
        ([[0, 3], [9, 4]], ("3",)),  # new weights after the last token was sampled
    ],
)
def test_the_weights_that_megatron_counts(epochs: Any, versions: tuple[str, ...]) -> None:
    """Two versions are named if the weights changed between two sampled tokens."""
    assert said("megatron", {"policy_epoch": epochs}).policies == versions


def test_the_weights_that_servers_name() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    assert said("vllm", {"weight_versions": spans}).policies == ("3", "4")
    body, _ = made.sglang(ROWS)
    meta = {**body["meta_info"], "weight_version": "4", "weight_versions": spans}
    assert said("sglang", {"meta_info": meta}).policies == ("4", "3")
    assert said("vllm", {}).policies == ()
    body, request = made.sglang_openai(ROWS)
    body |= {"weight_version": "7"}  # beside the choices
    (increment,) = engines.decode_increments("sglang", body, request, made.SHAPE, "request 7")
    assert increment.said.policies == ("7",)
