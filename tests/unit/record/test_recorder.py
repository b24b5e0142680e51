"""What the recorder refuses, stores, forgets and says; and what a client gets.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import numpy as np
import pytest
from chat_model import END, TEMPLATE, tokenizer
from engine_server import engine
from recording import recording as record

from megatron_r3.collect.engine import EngineChanged
from megatron_r3.collect.prompt_plan import Sampling, read_model
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.server import Server
from megatron_r3.data.engines.conversation import Increment
from megatron_r3.data.store import RolloutStore, StoreError
from megatron_r3.record.branches import Turn
from megatron_r3.record.chat_template import ChatTemplate
from megatron_r3.replay.routes import Routes

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
    ({"messages": [HI], "tools": [STRICT]}, "'tools'"),
    ({"messages": [HI], "stop": 3}, "stop must be a text or a list of texts"),
    ({"messages": [HI], "chat_template_kwargs": 3}, "the template's own"),
    ({"messages": [HI, {"role": "assistant", "tool_calls": 3}, HI]}, "are a list of objects"),
    ({"messages": [HI, {"role": "assistant", "tool_calls": [{}]}, HI]}, "a function with a name"),
]


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize(("body", "message"), REFUSED_CHATS, ids=lambda value: str(value)[:40])
def test_a_chat_that_cannot_be_recorded_is_refused(body, message, recording):
    async def ask():
        async with recording() as one:
            status, answer = await one.post("sessions/s/chat/completions", body)
            assert not one.computed.answered
            assert (await one.post("sessions/s/reward", {"reward": 1}))[0] == 404
            return status, answer["error"]["message"]

    status, said = run(ask())
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
            said = await answer.get_json()
            if not session:
                assert answer.status_code == 400
                assert "name the session" in said["error"]["message"]
            else:
                assert answer.status_code == 200
        return one.said

    said = run(ask())
    assert len(said) == bool(session)
    assert session in "".join(said)
    assert "1234" not in "".join(said)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("x", "a reward is"),
        (float("nan"), "not JSON"),
        ([1.0], "1 rewards for 2 turns"),
        ([1.0, None], "a reward is"),
        (None, "give a number"),
    ],
)
def test_a_reward_that_cannot_be_stored_leaves_the_session_open(reward, message, recording):
    async def ask():
        async with recording() as one:
            await one.ask([HI, await one.ask([HI]), MORE])
            status, answer = await one.post("sessions/s/reward", {"reward": reward})
            assert status == 400
            assert message in answer["error"]["message"] or message == "not JSON"
            assert (await one.post("sessions/s/reward", {"reward": 2}))[0] == 200
        return one

    store = RolloutStore([run(ask()).store])
    assert store.column("reward").tolist() == [2]


def test_rewards_by_turn_make_a_rollout_of_each_turn(recording):
    async def ask():
        async with recording() as one:
            await one.ask([HI, await one.ask([HI]), MORE])
            assert (await one.post("sessions/s/reward", {"reward": [1, 2]}))[0] == 200
            await one.ask([HI], "t")
            await one.ask([MORE], "t")
            status, answer = await one.post("sessions/t/reward", {"reward": [1, 2]})
            assert status == 400
            assert "has 2 branches" in answer["error"]["message"]
            assert (await one.post("sessions/t/discard", {})) == (200, {"stored": 0})
        return one

    one = run(ask())
    store = RolloutStore([one.store])
    (first, sampled), (second, again), *_ = one.computed.answered
    assert store.column("reward").tolist() == [1, 2]
    assert store.rollout(0).tokens_N.tolist() == [*first, *sampled]
    assert store.rollout(1).tokens_N.tolist() == [*second, *again]
    assert store.rollout(0).spans_U2.tolist() == [[len(first), len(first) + len(sampled)]]
    assert store.rollout(1).spans_U2.tolist() == [[len(second), len(second) + len(again)]]
    assert not one.said


def test_a_reward_function_sees_all_messages(recording):
    seen = []

    def reward(sample):
        seen.append(sample)
        return len(sample.fields["messages"])

    async def ask():
        async with recording(reward=reward) as one:
            first = await one.ask([HI], max_tokens=2)
            await one.ask([HI, first, MORE])
            await one.ask([HI, first, HI])
            return await one.post("sessions/s/reward", {})

    status, answer = run(ask())
    assert (status, answer["rewards"]) == (200, [4, 4])
    assert [m["role"] for m in seen[0].fields["messages"]] == ["user", "assistant"] * 2
    assert seen[0].fields["finish_reasons"] == ["length", "length"]
    assert seen[1].fields["messages"][2] == HI


def test_a_reward_whose_client_went_away_is_stored_once(recording, monkeypatch):
    async def ask():
        async with recording() as one:
            await one.ask([HI])
            lost = asyncio.ensure_future(one.recorder.end("id:s", 1.0))
            await asyncio.sleep(0.05)
            lost.cancel()
            await asyncio.sleep(0)
            for path in ("chat/completions", "discard"):  # nothing joins a session that ends
                assert (await one.post(f"sessions/s/{path}", {"messages": [HI]}))[0] == 429
            assert await one.recorder.end("id:s", 1.0) == (1, [1.0])
            assert (await one.post("sessions/s/reward", {"reward": 1}))[0] == 404
            await one.ask([MORE])  # the name is free for another session
            await one.post("sessions/s/reward", {"reward": 2})
        return one

    one = run(ask())
    assert RolloutStore([one.store]).column("reward").tolist() == [1, 2]
    assert not one.said


def test_the_group_is_that_of_the_first_request_whichever_is_answered_first(recording):
    async def ask(session):
        async with recording() as one:
            first = asyncio.ensure_future(one.ask([HI], session))
            await asyncio.sleep(0)
            turns = one.recorder.open
            await asyncio.gather(first, one.ask([MORE], session))
            # as if the second request had been answered first, in one of the two sessions alone
            turns[f"id:{session}"].session.turns.sort(
                key=lambda turn: turn.increment.tokens_N.tolist(), reverse=session == "b"
            )
            await one.post(f"sessions/{session}/reward", {"reward": 1})
        return one.store

    run(ask("a"))
    store = RolloutStore([run(ask("b"))])
    assert len({*store.column("group").tolist()}) == 1


def test_rows_that_came_before_are_left_out(chat_model):
    """Megatron's server returns all rows, and their second time may be of another rounding."""
    ids_LTK = np.stack([np.arange(6)[:, None] + np.arange(3)] * 3)

    class AllRows(Server):
        def _decode(self, *arguments):
            routes = Routes.from_array(ids_LTK, 8)
            return Increment(np.arange(7, dtype=np.int32), 5, np.zeros(2, np.float32), routes)

    class Answers:
        async def post(self, *arguments):
            return {}

    server = AllRows("megatron", Answers(), read_model(chat_model[0]).shape, Sampling(4))
    got = run(server.ask(Prompt("p", 0, [0, 1, 2, 3, 4], {}), None, "p", start=4))
    assert got.start == 4
    assert np.array_equal(got.routes.ids_LTK, ids_LTK[:, 4:])


def test_a_session_of_many_turns_is_no_recursion():
    increment = Increment(np.arange(3, dtype=np.int32), 2, np.zeros(1, np.float32), None)
    turn = None
    for _ in range(5000):
        turn = Turn(turn, increment, "x", {}, "stop")
    assert len(turn.branch) == 5000


@pytest.mark.parametrize("rewarded", [True, False])
def test_an_idle_session_is_rewarded_or_named(rewarded, recording):
    async def ask():
        reward = (lambda sample: 3.0) if rewarded else None
        async with recording(reward=reward, idle_s=0.2) as one:
            await one.ask([HI], "old")
            for _ in range(100):
                await asyncio.sleep(0.1)
                if "id:old" not in one.recorder.open:
                    break
            return one

    one = run(ask())
    if rewarded:
        assert RolloutStore([one.store]).column("reward").tolist() == [3]
        assert not one.said
    else:
        assert "session old" in one.said[0]
        assert "neither a request nor a reward for 0.2 s" in one.said[0]


def test_more_sessions_than_may_be_open_wait(recording):
    async def ask():
        async with recording(most_sessions=1) as one:
            await one.ask([HI], "a")
            answer = await one.client.post(
                "/v1/sessions/b/chat/completions", json={"messages": [HI]}
            )
            assert answer.status_code == 429
            assert answer.headers["Retry-After"] == "1"
            assert (await one.post("sessions/a/reward", {"reward": 1}))[0] == 200
            await one.ask([HI], "b")

    run(ask())


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

    status, said = run(ask())
    assert status == 502
    assert message in said


def test_the_recorder_fails_once_the_engine_has_other_weights(chat_model, tmp_path):
    from chat_model import ComputedEngine

    directory, model = chat_model
    computed = ComputedEngine(model, tokenizer())

    async def ask():
        with engine(answer=computed.answer) as server:
            server.pages = {**server.pages, "/weight_info": {"weight_version": "1"}}
            async with record(directory, server.url, tmp_path / "store") as one:
                await one.ask([HI])
                server.pages = {**server.pages, "/weight_info": {"weight_version": "2"}}
                body = {"messages": [HI]}
                assert (await one.post("sessions/t/chat/completions", body))[0] == 503
                with pytest.raises(EngineChanged, match="policy was '1' at the start"):
                    one.recorder.failed.result()

    run(ask())


def test_a_second_recorder_goes_on_with_the_numbers(recording):
    async def ask(reward):
        async with recording() as one:
            for name in ("a", "b"):
                await one.ask([HI], name)
            await asyncio.gather(
                *(one.post(f"sessions/{name}/reward", {"reward": reward}) for name in ("a", "b"))
            )
        return one.store

    run(ask(1))
    store = RolloutStore([run(ask(2))])
    assert len(store.shards) == 2  # two sessions that end together share a shard
    assert store.column("sample").tolist() == [0, 1, 2, 3]
    assert store.column("reward").tolist() == [1, 1, 2, 2]
    assert len({*store.column("group").tolist(), *store.column("prompt_digest").tolist()}) == 1


def test_a_store_that_cannot_be_written_keeps_the_session(recording, monkeypatch):
    def full(*arguments):
        raise StoreError("the disk is full")

    async def ask():
        async with recording() as one:
            await one.ask([HI])
            with monkeypatch.context() as patch:
                patch.setattr("megatron_r3.record.session_shards.write_shard", full)
                status, answer = await one.post("sessions/s/reward", {"reward": 1})
                assert (status, answer["error"]["message"]) == (507, "the disk is full")
            assert (await one.post("sessions/s/reward", {"reward": 1}))[0] == 200
        return one.store

    assert len(RolloutStore([run(ask())])) == 1


def test_a_stream_has_the_whole_answer(recording):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    async def ask():
        async with recording() as one:
            one.computed.says = [f"so {call}{END}"]
            body = {"messages": [HI], "tools": [TOOL], "stream": True}
            body["stream_options"] = {"include_usage": True}
            answer = await one.client.post("/v1/sessions/s/chat/completions", json=body)
            return answer.content_type, (await answer.get_data()).decode()

    kind, text = run(ask())
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

    one = run(ask())
    assert [len(p) for p, _ in one.computed.answered] == [1, 5, 1]
    assert RolloutStore([one.store]).rollout(0).spans_U2.tolist()[:1] == [[1, 4]]


LAST = "{% for m in messages %}{{ m.content }}{{ '!' if loop.last else '?' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "last", "expected"),
    [
        (TEMPLATE, END, f"\n<|start|>user\nmore{END}\n<|start|>assistant\n"),
        (TEMPLATE, "x", f"{END}\n<|start|>user\nmore{END}\n<|start|>assistant\n"),
        (LAST, "x", None),  # what ends a message changes with what follows it
    ],
)
def test_only_what_is_new_is_rendered(template, last, expected, tmp_path):
    made = tokenizer(template)
    made.save_pretrained(tmp_path)
    loaded = ChatTemplate(tmp_path)
    (last_id,) = made(last)["input_ids"]
    ids = loaded.new_part([HI, {"role": "assistant", "content": "yes"}, MORE], 1, {}, last_id)
    assert (None if ids is None else made.decode(ids)) == expected


@pytest.mark.parametrize(
    ("template", "fits"),
    [
        (TEMPLATE, True),
        (LAST, False),
        (TEMPLATE.replace("| tojson }}</tool_call>", "}}</tool_call>"), False),  # no JSON
    ],
)
def test_tools_need_a_template_whose_calls_are_read(template, fits, tmp_path):
    tokenizer(template).save_pretrained(tmp_path)
    with nullcontext() if fits else pytest.raises(ValueError, match="does not write calls as JSON"):
        ChatTemplate(tmp_path).check_tools([TOOL])


def test_an_end_that_was_sampled_is_not_added_again(recording):
    async def ask(*texts, **fields):
        async with recording() as one:
            one.computed.says = [f"yes{END}", "b", "c"]
            for text in texts:
                await one.post("sessions/s/completions", {"prompt": text, **fields})
            return [one.computed.tokenizer.decode(prompt) for prompt, _ in one.computed.answered]

    assert run(ask("a", f"ayes{END}more"))[1] == f"ayes{END}more"
    # after a stop text the engine's ids and the client's text differ: the next text is a branch
    assert run(ask("a", "ayes more", stop=["x"]))[1] == "ayes more"


def test_a_model_without_a_tokenizer_takes_ids_alone(tmp_path):
    template = ChatTemplate(tmp_path)
    assert template.text_of([1]) == ""
    for ask in (lambda: template.whole([HI], {}), lambda: template.ids_of("a")):
        with pytest.raises(
            ValueError, match="has no tokenizer: ask /v1/completions with token ids"
        ):
            ask()


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", "<tool_call>{}</tool_call>", "plain"])
def test_a_call_that_cannot_be_read_stays_text(text, chat_model):
    message = ChatTemplate(chat_model[0]).message(text, [TOOL])
    assert message == {"role": "assistant", "content": text}
