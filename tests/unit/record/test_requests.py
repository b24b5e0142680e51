"""What a client may ask, what it gets, and how its session is named.

Shape suffixes (docs/glossary.md): U.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from chat_model import END, tokenizer

from megatron_r3.data.store import RolloutStore

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
REFUSED_CHATS = [
    ({}, "messages must be a list of objects, and not be empty"),
    ({"messages": "hi"}, "messages must be a list of objects"),
    ({"messages": [{"content": "hi"}]}, "each message needs a role"),
    ({"messages": [IMAGE]}, "image_url"),
    ({"messages": [HI], "n": 129}, "n is 129; at most 128"),
    ({"messages": [HI], "n": 0}, "n must be a whole number from 1"),
    ({"messages": [HI], "temperature": 0.7}, "start the recorder with --temperature 0.7"),
    ({"messages": [HI], "top_p": 0.9}, "start the recorder with --top-p 0.9"),
    ({"messages": [HI], "min_p": 0.1}, "samples with 0: leave the field out"),
    ({"messages": [HI], "top_k": 5}, "start the recorder with --top-k 5"),
    ({"messages": [HI], "max_tokens": 257}, "start it with --max-tokens 257"),
    ({"messages": [HI], "stop_token_ids": [3]}, "stop_token_ids: the recorder does not take"),
    ({"messages": [HI], "add_generation_prompt": False}, "a response is always asked for"),
    ({"messages": [HI], "chat_template_kwargs": {"chat_template": "x"}}, "the template's own"),
    ({"messages": [HI], "logprobs": True}, "logprobs: the recorder does not take this field"),
    ({"messages": [HI], "response_format": {"type": "json_object"}}, "'response_format'"),
    ({"messages": [HI], "presence_penalty": 1}, "'presence_penalty'"),
    ({"messages": [HI], "stop": 3}, "stop must be a text or a list of texts"),
    ({"messages": [HI], "chat_template_kwargs": 3}, "the template's own"),
    ({"messages": [HI, {"role": "assistant", "tool_calls": 3}, HI]}, "are a list of objects"),
    ({"messages": [HI, {"role": "assistant", "tool_calls": [{}]}, HI]}, "a function with a name"),
]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_no_call_is_forced(choice, recording):
    async def ask():
        async with recording() as one:
            body = {"messages": [HI], "tools": [STRICT], "tool_choice": choice}
            return (await one.post("sessions/s/chat/completions", body))[0]

    assert asyncio.run(ask()) == 200


@pytest.mark.parametrize(("body", "message"), REFUSED_CHATS, ids=lambda value: str(value)[:40])
def test_a_chat_that_cannot_be_recorded_is_refused(body, message, recording):
    async def ask():
        async with recording() as one:
            status, answer = await one.post("sessions/s/chat/completions", body)
            assert not one.computed.answered
            assert (await one.post("sessions/s/reward", {"reward": 1}))[0] == 404
            return status, answer["error"]["message"]

    status, said = asyncio.run(ask())
    assert status == 400
    assert message in said


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"X-Session-ID": "a"}, "session a"),
        ({"Authorization": "Bearer session-1234"}, "session of the key with the digest"),
        ({}, ""),
        ({"Authorization": "Bearer EMPTY"}, ""),
        ({"X-Session-ID": "a" * 201}, ""),
    ],
)
def test_a_session_has_a_name_and_a_key_is_never_shown(headers, session, recording):
    async def ask():
        async with recording() as one:
            body = {"messages": [HI]}
            answer = await one.client.post("/v1/chat/completions", json=body, headers=headers)
            said = await answer.json()
            if not session:
                assert answer.status == 400
                assert "name the session" in said["error"]["message"]
            else:
                assert answer.status == 200
        return one.said

    said = asyncio.run(ask())
    assert len(said) == bool(session)
    assert session in "".join(said)
    assert "1234" not in "".join(said)


def test_more_sessions_than_may_be_open_wait(recording):
    async def ask():
        async with recording(most_sessions=1) as one:
            await one.ask([HI], "a")
            answer = await one.client.post(
                "/v1/sessions/b/chat/completions", json={"messages": [HI]}
            )
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
            assert (await one.post("sessions/a/reward", {"reward": 1}))[0] == 200
            await one.ask([HI], "b")

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(routed_experts=None), "no routed_experts"),
        (lambda c: c.update(token_ids=[*c["token_ids"], 999]), "999"),
        (lambda c: c.update(prompt_token_ids=[1, *c["prompt_token_ids"]]), "prompt"),
    ],
)
def test_a_wrong_response_is_not_recorded(change, message, recording):
    def wrong(body):
        change(body["choices"][0])
        return body

    async def ask():
        async with recording(wrong) as one:
            status, answer = await one.post("sessions/s/chat/completions", {"messages": [HI]})
            assert (await one.post("sessions/s/reward", {"reward": 1}))[0] == 404
            return status, answer["error"]["message"]

    status, said = asyncio.run(ask())
    assert status == 502
    assert message in said


def test_a_stream_has_the_whole_answer(recording):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    async def ask():
        async with recording() as one:
            one.computed.says = [f"so {call}{END}"]
            body = {"messages": [HI], "tools": [TOOL], "stream": True}
            body["stream_options"] = {"include_usage": True}
            answer = await one.client.post("/v1/sessions/s/chat/completions", json=body)
            return answer.content_type, await answer.text()

    kind, text = asyncio.run(ask())
    assert kind == "text/event-stream"
    *events, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    first, last, usage = (json.loads(event.removeprefix("data: ")) for event in events)
    delta = first["choices"][0]["delta"]
    assert delta["content"] == "so"
    assert delta["tool_calls"][0]["index"] == 0
    assert delta["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["completion_tokens"] == len(f"so {call}") + 1


@pytest.mark.parametrize("as_ids", [True, False])
def test_completions_continue_by_their_ids_or_their_text(as_ids, recording):
    def prompt(text):
        return tokenizer()(text)["input_ids"] if as_ids else text

    async def ask():
        async with recording() as one:
            one.computed.says = ["bcd"]
            for text in ("a", "abcde", "x"):
                body = {"prompt": prompt(text)}
                status, answer = await one.post("sessions/s/completions", body)
                assert status == 200
            assert isinstance(answer["choices"][0]["text"], str)
            assert (await one.post("sessions/s/reward", {"reward": 1}))[1]["stored"] == 2
        return one

    one = asyncio.run(ask())
    assert [len(p) for p, _ in one.computed.answered] == [1, 5, 1]
    assert RolloutStore([one.store]).rollout(0).spans_U2.tolist()[:1] == [[1, 4]]


def test_an_end_that_was_sampled_is_not_added_again(recording):
    async def ask(*texts, **fields):
        async with recording() as one:
            one.computed.says = [f"yes{END}", "b", "c"]
            for text in texts:
                await one.post("sessions/s/completions", {"prompt": text, **fields})
            return [one.computed.tokenizer.decode(prompt) for prompt, _ in one.computed.answered]

    assert asyncio.run(ask("a", f"ayes{END}more"))[1] == f"ayes{END}more"
    # after a stop text the engine's ids and the client's text differ: the next text is a branch
    assert asyncio.run(ask("a", "ayes more", stop=["x"]))[1] == "ayes more"
