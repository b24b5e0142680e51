"""Agents that talk to a real vLLM and a real SGLang on the CPU, in float32, through the recorder.

What the recorder has stitched of several turns is compared with one forward pass of transformers
over the whole conversation, on the same weights.

It is run by hand, where MEGATRON_R3_ENGINES names a folder that has the engines: `build` after
`make demo SAMPLER=vllm` and `make demo SAMPLER=sglang`.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import forward, write_chat_model
from recording import recording

from demo import sglang_server, vllm_server
from demo.server_process import run_server
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.store import RolloutStore
from megatron_r3.record.branches import Session, Turn
from megatron_r3.replay.routes import Routes

# A vLLM on the CPU takes heads of 32; the other sizes make routers that are not close to a tie.
SIZES = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "moe_intermediate_size": 64}
TURNS = 5


@pytest.fixture(scope="module")
def build() -> Path:
    """The folder that has the engines."""
    folder = os.environ.get("MEGATRON_R3_ENGINES")
    if folder is None:
        pytest.skip("by hand: MEGATRON_R3_ENGINES names no folder with engines (docs/agents.md)")
    return Path(folder).resolve()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a model with a chat template, and the model."""
    directory = tmp_path_factory.mktemp("chat") / "hf"
    return directory, write_chat_model(directory, **SIZES)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request: Any, build: Path, model: tuple[Path, Any]) -> Iterator[tuple[str, str]]:
    """The kind of a server, and its address."""
    kind, (directory, _) = request.param, model
    module = {"vllm": vllm_server, "sglang": sglang_server}[kind]
    words, env = module.template(directory, build)
    words[words.index("--dtype") + 1] = "float32"
    values = {"model": str(directory), "version": "model"}
    with run_server(kind, words, values, env, directory.parent / f"{kind}.log") as url:
        yield kind, url


async def talk(run: Any, session: str, number: int) -> None:
    """An agent that gets a tool's answer after each of its turns, and is rewarded at the end."""
    history = [{"role": "user", "content": f"task {number}"}]
    for turn in range(TURNS):
        said = await run.ask(history, session, max_tokens=20, seed=100 * number + turn)
        answer = {"role": "tool", "tool_call_id": "1", "content": f"result {turn * number}"}
        history += [said, answer]
    status, answer = await run.post(f"sessions/{session}/reward", {"reward": float(number)})
    assert status == 200, answer


def test_stitched_rows_are_those_of_one_forward_pass(served, model, tmp_path):
    kind, url = served
    directory, whole = model

    async def run():
        async with recording(directory, url, tmp_path / "store", kind) as one:
            await asyncio.gather(*(talk(one, f"s{number}", number) for number in range(6)))

    asyncio.run(run())
    store = RolloutStore([tmp_path / "store"])
    assert len(store) == 6
    differ, shifted, other, pairs, worst = 0, 0, 0, 0, 0.0
    for index in range(6):
        rollout = store.rollout(index)
        assert len(rollout.spans_U2) == TURNS
        ids_LTK, logprobs_N = forward(whole, rollout.tokens_N.tolist())
        sampled_N = rollout.response_N
        difference = np.abs(rollout.logprobs_N - logprobs_N)[sampled_N]
        worst = max(worst, float(difference.max()))
        own = np.sort(rollout.routes.ids_LTK, -1)
        live = np.sort(ids_LTK[:, :-1], -1)
        wrong = store.rollout((index + 1) % 6).routes.ids_LTK
        rows = min(wrong.shape[1], own.shape[1])
        differ += int((own != live).any(-1).sum())
        shifted += int((own[:, 1:] != live[:, :-1]).any(-1).sum())
        other += int((np.sort(wrong, -1)[:, :rows] != live[:, :rows]).any(-1).sum())
        pairs += own.shape[0] * own.shape[1]
    print(
        f"{kind}: {differ} of {pairs} differ, shifted {shifted}, other session {other}; {worst:.1e}"
    )
    assert worst < 1e-4
    assert differ == 0
    assert min(shifted, other) > pairs / 2  # the controls: such a store would be seen


def test_a_start_that_is_off_by_one_is_refused(served, model, tmp_path):
    """The engine is asked for rows from one token too late: the row of a sampled token is lost."""
    kind, url = served
    directory, _ = model

    async def run() -> None:
        async with recording(directory, url, tmp_path / "store", kind) as one:
            first = await one.ask([{"role": "user", "content": "a"}], max_tokens=8)
            messages = [{"role": "user", "content": "a"}, first, {"role": "user", "content": "b"}]
            await one.ask(messages, max_tokens=8)
            session: Session = one.recorder.open["id:s"].session
            second: Turn = session.turns[1]
            rows = second.increment.routes
            late = Routes.from_array(rows.ids_LTK[:, 1:], rows.num_experts)
            increment = replace(second.increment, routes=late, start=second.increment.start + 1)
            session.turns[1] = replace(second, increment=increment)
            with pytest.raises(EngineError, match="no response brought the row of token"):
                session.rollouts("s")

    asyncio.run(run())
