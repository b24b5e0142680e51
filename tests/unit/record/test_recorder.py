"""How sessions are answered, rewarded and ended.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from chat_model import tokenizer
from engine_server import engine
from recording import recording as record

from megatron_r3.collect.engine import EngineChanged
from megatron_r3.collect.prompt_plan import Sampling, read_model
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.server import Server
from megatron_r3.data.engines.conversation import Increment
from megatron_r3.data.store import RolloutStore
from megatron_r3.record.branches import Turn
from megatron_r3.replay.routes import Routes

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


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

    store = RolloutStore([asyncio.run(ask()).store])
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

    one = asyncio.run(ask())
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

    status, answer = asyncio.run(ask())
    assert (status, answer["rewards"]) == (200, [4, 4])
    assert [m["role"] for m in seen[0].fields["messages"]] == ["user", "assistant"] * 2
    assert seen[0].fields["finish_reasons"] == ["length", "length"]
    assert seen[1].fields["messages"][2] == HI


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

    one = asyncio.run(ask())
    if rewarded:
        assert RolloutStore([one.store]).column("reward").tolist() == [3]
        assert not one.said
    else:
        assert "session old" in one.said[0]
        assert "neither a request nor a reward for 0.2 s" in one.said[0]


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

    asyncio.run(ask())


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
    got = asyncio.run(server.ask(Prompt("p", 0, [0, 1, 2, 3, 4], {}), None, "p", start=4))
    assert got.start == 4
    assert np.array_equal(got.routes.ids_LTK, ids_LTK[:, 4:])


def test_a_session_of_many_turns_is_no_recursion():
    increment = Increment(np.arange(3, dtype=np.int32), 2, np.zeros(1, np.float32), None)
    turn = None
    for _ in range(5000):
        turn = Turn(turn, increment, "x", {}, "stop")
    assert len(turn.branch) == 5000
