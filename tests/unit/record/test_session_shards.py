"""What is in the store once sessions were rewarded: each session once, in its group.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import asyncio

from megatron_r3.data.store import RolloutStore, StoreError

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


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

    one = asyncio.run(ask())
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

    asyncio.run(ask("a"))
    store = RolloutStore([asyncio.run(ask("b"))])
    assert len({*store.column("group").tolist()}) == 1


def test_a_second_recorder_goes_on_with_the_numbers(recording):
    async def ask(reward):
        async with recording() as one:
            for name in ("a", "b"):
                await one.ask([HI], name)
            await asyncio.gather(
                *(one.post(f"sessions/{name}/reward", {"reward": reward}) for name in ("a", "b"))
            )
        return one.store

    asyncio.run(ask(1))
    store = RolloutStore([asyncio.run(ask(2))])
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

    assert len(RolloutStore([asyncio.run(ask())])) == 1
