"""What an agent does with its history decides which rollouts its session becomes.

Each script is an agent. The expected branches name the engine's responses by their number, in the
order of the responses; a response in brackets is in the branch and is not trained there.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from chat_model import END, forward

from megatron_r3.data.store import RolloutStore

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def result(call, text):
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


async def three_turns(run):
    history = [HI]
    for _ in range(3):
        history += [await run.ask(history), MORE]


async def edited(run):
    first = await run.ask([HI])
    await run.ask([HI, {**first, "content": "another text"}, MORE])


async def thought_stripped(run):
    run.computed.says = [f"<think>hm</think>yes{END}"]
    first = await run.ask([HI])
    await run.ask([HI, {**first, "content": "yes"}, MORE])


async def compacted(run):
    first = await run.ask([HI])
    second = await run.ask([HI, first, MORE])
    await run.ask([{"role": "user", "content": "summary"}, second, MORE])


async def fork(run):
    first = await run.ask([HI])
    await run.ask([HI, first, MORE])
    await run.ask([HI, first, {"role": "user", "content": "other"}])


async def retry(run):
    first = await run.ask([HI])
    await run.ask([HI, first, MORE], seed=1)
    second = await run.ask([HI, first, MORE], seed=2)
    await run.ask([HI, first, MORE, second, MORE])


async def parallel_tools(run):
    run.computed.says = [f"{CALL}{CALL}{END}"]
    first = await run.ask([HI], tools=TOOLS)
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["add", "add"]
    answers = [result(call, str(i)) for i, call in enumerate(first["tool_calls"])]
    await run.ask([HI, first, *answers], tools=TOOLS)


async def truncated(run):
    first = await run.ask([HI], max_tokens=2)
    await run.ask([HI, first, MORE])


async def empty(run):
    run.computed.says = [END]
    first = await run.ask([HI])
    assert not first["content"]
    await run.ask([HI, first, MORE])


async def three_choices(run):
    first, second, third = await run.ask([HI], n=3, seed=1)
    texts = [message["content"] for message in (first, second, third)]
    decode = run.computed.tokenizer.decode
    # the engine may have answered the three requests in another order
    run.computed.answered.sort(key=lambda one: texts.index(decode(one[1])))
    await run.ask([HI, first, MORE])
    await run.ask([HI, second, MORE])


async def other_system(run):
    await run.ask([{"role": "system", "content": "a"}, HI])
    await run.ask([{"role": "system", "content": "b"}, HI])


async def same_prefix_twice(run):
    await run.ask([HI], seed=1)
    await run.ask([HI], seed=2)


async def other_tools(run):
    first = await run.ask([HI])
    await run.ask([HI, first, MORE], tools=TOOLS)


async def client_rewrites_the_form(run):
    run.computed.says = [f" yes {CALL}{END}"]
    first = await run.ask([HI], tools=TOOLS)
    (call,) = first["tool_calls"]
    arguments = '{ "a" : 1 }'
    again = {
        "role": "assistant",
        "content": [{"type": "text", "text": "yes"}],
        "refusal": None,
        "tool_calls": [{**call, "function": {"name": "add", "arguments": arguments}}],
    }
    await run.ask([HI, again, result(call, "2")], tools=TOOLS)


SCRIPTS = {
    three_turns: ["0 1 2"],
    edited: ["0", "1"],
    thought_stripped: ["0", "1"],
    compacted: ["0 1", "2"],
    fork: ["0 1", "(0) 2"],
    retry: ["0 1", "(0) 2 3"],
    parallel_tools: ["0 1"],
    truncated: ["0 1"],
    empty: ["0 1"],
    three_choices: ["2", "0 3", "1 4"],
    other_system: ["0", "1"],
    same_prefix_twice: ["0", "1"],
    other_tools: ["0", "1"],
    client_rewrites_the_form: ["0 1"],
}


def read(branch):
    """The numbers of all responses of a branch, and of those that it trains."""
    words = branch.split()
    return [int(word.strip("()")) for word in words], [int(w) for w in words if "(" not in w]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("shared", ["once", "all"])
def test_rollouts_are_those_of_the_expected_branches(script, shared, recording, whole_model):
    async def run():
        async with recording(all_turns=shared == "all") as one:
            await script(one)
            status, answer = await one.post("sessions/s/reward", {"reward": 0.5})
            rewards = [0.5] * len(expected)
            responses = len(one.computed.answered)
            stored = {"responses": responses, "stored": len(expected), "rewards": rewards}
            assert (status, answer) == (200, stored)
            return one

    expected = [read(branch) for branch in SCRIPTS[script]]
    one = asyncio.run(run())
    store = RolloutStore([one.store])
    answered = one.computed.answered
    assert len(store) == len(expected)
    for i, (all_of_it, trained) in enumerate(expected):
        rollout = store.rollout(i)
        whole = [*answered[all_of_it[-1]][0], *answered[all_of_it[-1]][1]]
        assert rollout.tokens_N.tolist() == whole
        spans = [
            [len(answered[number][0]), len(answered[number][0]) + len(answered[number][1])]
            for number in (all_of_it if shared == "all" else trained)
        ]
        assert rollout.spans_U2.tolist() == spans
        ids_LTK, logprobs_N = forward(whole_model, whole)
        assert np.array_equal(rollout.routes.ids_LTK, ids_LTK[:, :-1])
        sampled_N = rollout.response_N
        assert np.allclose(rollout.logprobs_N[sampled_N], logprobs_N[sampled_N], atol=1e-4)
        assert not rollout.logprobs_N[~sampled_N].any()
    if shared == "once":
        all_trained = [number for _, trained in expected for number in trained]
        assert sorted(all_trained) == list(range(len(answered)))
    assert len({*store.column("group").tolist()}) == 1
