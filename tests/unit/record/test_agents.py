"""`rollouts collect --agent`: an agent's session becomes the rollouts of a sample.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from chat_model import ComputedEngine, forward, tokenizer
from engine_server import engine

from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore

AGENTS = """
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


async def ask(client, messages, **more):
    answer = await client.chat.completions.create(model="any", messages=messages, **more)
    return [*messages, answer.choices[0].message.model_dump()]


async def three_turns(client, prompt):
    history = await ask(client, prompt["messages"], tools=TOOLS)
    for number in range(2):
        result = {"role": "tool", "tool_call_id": "1", "content": str(number)}
        history = await ask(client, [*history, result], tools=TOOLS)
    return prompt["worth"]


async def forks(client, prompt):
    history = await ask(client, prompt["messages"])
    for text in ("left", "right"):
        await ask(client, [*history, {"role": "user", "content": text}])


async def turns(client, prompt):
    await three_turns(client, prompt)
    return [1, 2, 3]


async def fails(client, prompt):
    if prompt["worth"]:
        raise RuntimeError("no tool")
    return await three_turns(client, prompt)


async def swallows(client, prompt):
    try:
        await ask(client, prompt["messages"])
    except Exception:
        pass
    return 0.0


async def lazy(client, prompt):
    return 1.0


async def cancels(client, prompt):
    import asyncio
    raise asyncio.CancelledError


async def never_returns(client, prompt):
    import asyncio
    await ask(client, prompt["messages"])
    await asyncio.sleep(1000)


async def exits(client, prompt):
    raise SystemExit(0)


def no_coroutine(client, prompt):
    return 1.0


def count(sample):
    return len(sample.fields["messages"]) + 10 * sample.fields["worth"]
"""


@pytest.fixture
def collect(chat_model, tmp_path, monkeypatch, capsys):
    """A function that runs the command; returns its status, output and errors."""
    directory, model = chat_model
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)
    (tmp_path / "my_agents.py").write_text(AGENTS)
    lines = [{"messages": [{"role": "user", "content": text}], "worth": i} for i, text in
             enumerate(["one", "two"])]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with engine(answer=ComputedEngine(model, tokenizer()).answer) as server:

        def run(agent, n=2, *more):
            words = ["rollouts", "collect", "--engine", "vllm", "--url", server.url, "--out", "out"]
            words += ["--model", str(directory), "--prompts", "prompts.jsonl", "--n", str(n)]
            status = main([*words, "--max-tokens", "9", "--agent", f"my_agents:{agent}", *more])
            return status, *capsys.readouterr()

        run.server = server
        yield run


def test_each_sample_is_a_session_whose_rows_are_those_of_one_pass(collect, whole_model):
    status, out, _ = collect("three_turns", 2, "--seed", "1")
    assert (status, out.split(":")[0]) == (0, "out has all 4 rollouts")
    store = RolloutStore(["out"])
    store.verify()
    named = [(one.group, one.sample, one.reward) for one in map(store.rollout, range(len(store)))]
    assert named == [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)]
    sampled = set()
    for rollout in map(store.rollout, range(len(store))):
        assert len(rollout.spans_U2) == 3
        ids_LTK, logprobs_N = forward(whole_model, rollout.tokens_N.tolist())
        assert np.array_equal(rollout.routes.ids_LTK, ids_LTK[:, :-1])
        assert not np.array_equal(rollout.routes.ids_LTK[:, 1:], ids_LTK[:, :-2])  # the control
        assert np.allclose(rollout.logprobs_N[rollout.response_N],
                           logprobs_N[rollout.response_N], atol=1e-5)  # fmt: skip
        sampled.add(tuple(rollout.tokens_N[rollout.response_N].tolist()))
    assert len(sampled) == 4  # each sample has seeds of its own
    asked = len(collect.server.bodies)
    assert collect("three_turns", 2, "--seed", "1")[0] == 0  # all is there
    assert len(collect.server.bodies) == asked
    assert collect("three_turns", 3, "--seed", "1")[0] == 0
    assert len(collect.server.bodies) == asked + 6
    assert len(RolloutStore(["out"])) == 6


def test_branches_and_turns_are_rollouts_of_their_own(collect):
    status, _, err = collect("forks", 1, "--reward", "my_agents:count")
    assert (status, err) == (0, "")
    store = RolloutStore(["out"])
    assert store.column("sample").tolist() == [0, 1 << 20] * 2
    assert store.column("reward").tolist() == [4, 4, 14, 14]
    assert collect("turns", 1, "--policy-version", "1", "--out", "by_turn")[0] == 0
    assert RolloutStore(["by_turn"]).column("reward").tolist() == [1, 2, 3] * 2


def test_an_agent_that_fails_is_named_and_the_others_are_stored(collect):
    status, _, err = collect("fails", 1)
    assert status == 1
    assert "prompts.jsonl, line 2, sample 0: the agent raised RuntimeError: no tool" in err
    assert RolloutStore(["out"]).column("group").tolist() == [0]


@pytest.mark.parametrize(
    ("agent", "more", "said"),
    [
        ("lazy", [], "line 1, sample 0: the agent asked for no response"),
        ("cancels", [], "line 1, sample 0: the agent cancelled itself"),
        ("never_returns", ["--session-timeout", "0.5"], "the agent sent no request for 0.5 s"),
        ("exits", [], "line 1, sample 0: the agent raised SystemExit: 0"),
        ("no_coroutine", [], "is no async function: write `async def solve(client, prompt)`"),
        ("forks", [], "no reward: give a number, or the option --reward"),
        ("lazy", ["--environment", "verifiers:x"], "--environment: give one of the two"),
        ("nobody", [], "--agent my_agents:nobody: AttributeError"),
        ("lazy", ["--engine", "transformers"], "agents ask a server: give --engine vllm"),
    ],
)  # fmt: skip
def test_what_makes_no_rollouts_is_said(collect, agent, more, said):
    status, _, err = collect(agent, 1, *more)
    assert status == 1
    assert said in err
    assert "Traceback" not in err


def test_an_agent_cannot_hide_that_the_engine_changed(collect):
    collect.server.pages = {**collect.server.pages}
    seen = []

    def answer(body, before=collect.server.answer):
        seen.append(body)
        collect.server.pages["/version"] = {"version": "0.31.0"}
        return before(body)

    collect.server.answer = answer
    status, _, err = collect("swallows", 1)
    assert status == 1
    assert "its version was '0.30.0' at the start and is '0.31.0'" in err
    assert seen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other:x"], "--environment other:x: give it as verifiers:NAME"),
        (["verifiers:x"], "--environment verifiers:x: pip install 'verifiers>=0.1.10,<0.4'"),
        (["verifiers:x", "--prompts", "p"], "prompts of its own: leave --prompts out"),
    ],
)
def test_an_environment_that_cannot_run_says_why(chat_model, words, said, tmp_path, capsys):
    command = ["rollouts", "collect", "--engine", "vllm", "--url", "http://127.0.0.1:9", "--n", "1"]
    command += ["--out", str(tmp_path / "out"), "--model", str(chat_model[0])]
    assert main([*command, "--environment", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_command_without_prompts_or_reward_says_what_to_give(capsys, tmp_path):
    words = ["rollouts", "collect", "--engine", "vllm", "--url", "http://127.0.0.1:9", "--n", "1"]
    words += ["--out", str(tmp_path / "out"), "--model", str(tmp_path)]
    assert main(words) == 1
    assert "collect needs --prompts FILE, the prompts as JSON lines" in capsys.readouterr().err
    (tmp_path / "p").write_text('{"prompt": [1]}')
    assert main([*words, "--prompts", str(tmp_path / "p")]) == 1
    assert "collect needs --reward MODULE:FUNCTION" in capsys.readouterr().err
