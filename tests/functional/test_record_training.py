"""What an agent's sessions became is trained, with the recorded experts, in each kind of layout.

Shape suffixes (docs/glossary.md): K, L, T, U.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import ComputedEngine
from engine_server import engine
from recording import recording
from training import Policy, changed_store, train

from demo import task
from demo.report import measured
from megatron_r3.collect.generate import load_model
from megatron_r3.data.store import RolloutStore
from proof.fidelity.rig.worker import TreeWorker

LAYOUTS = {
    "1": (1, []),
    "EP2": (2, ["--expert-model-parallel-size", "2"]),
    "PP2": (2, ["--pipeline-model-parallel-size", "2"]),
    "CP2": (2, ["--context-parallel-size", "2"]),
    "packs": (1, ["--rollouts-pack", "--micro-batch-size", "1"]),
}


async def play(run: Any, session: str, prompt: list[int], seed: int) -> None:
    """An agent of three responses: after the first one its session has two branches."""

    async def sampled(ids: list[int]) -> list[int]:
        before = len(run.computed.answered)
        status, answer = await run.post(
            f"sessions/{session}/completions", {"prompt": ids, "max_tokens": 4, "seed": seed}
        )
        assert status == 200, answer
        found = [one for one in run.computed.answered[before:] if one[0] == ids]
        return [*ids, *found[-1][1]]

    first = await sampled(prompt)
    for digit in (0, 1):
        await sampled([*first, task.FIRST_DIGIT + digit, task.EQUALS])
    assert (await run.post(f"sessions/{session}/reward", {"reward": seed % 2}))[0] == 200


@pytest.fixture(scope="module")
def sessions(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 16 sessions of 4 prompts, recorded in front of an engine that has the policy."""
    computed = ComputedEngine(load_model(policy.hf).float(), None)
    store = tmp_path_factory.mktemp("sessions") / "store"

    async def run() -> None:
        with engine(answer=computed.answer) as server:
            async with recording(policy.hf, server.url, store) as one:
                one.computed = computed
                for number in range(16):
                    await play(one, f"s{number}", task.problem(number % 4)[0], number)

    asyncio.run(run())
    return store


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sessions_are_trained_as_recorded(
    patched: TreeWorker, policy: Policy, sessions: Path, tmp_path: Path, layout: str
) -> None:
    ranks, options = LAYOUTS[layout]
    argv = [*policy.arguments(store=sessions), *options, "--tensorboard-dir", str(tmp_path)]
    patched.run(train, ranks, argv, timeout_s=240)
    got = measured(tmp_path)
    assert got["routes_dispatched_as_recorded"] == 1.0
    # the engine has the policy in bfloat16, the trainer in float32
    assert got["mean_abs_dlogp"] < 0.01
    assert got["router_mismatch"] < 0.05


def test_rows_of_the_token_before_are_noticed(
    patched: TreeWorker, policy: Policy, sessions: Path, tmp_path: Path
) -> None:
    def shifted(routes: list[np.ndarray]) -> list[np.ndarray]:
        return [np.roll(ids_LTK, 1, axis=1) for ids_LTK in routes]

    store = changed_store(sessions, tmp_path / "wrong", shifted)
    argv = [*policy.arguments(store=store), "--tensorboard-dir", str(tmp_path / "events")]
    patched.run(train, 1, argv, timeout_s=240)
    got = measured(tmp_path / "events")
    assert got["mean_abs_dlogp"] > 0.03
    assert got["router_mismatch"] > 0.3


def test_each_sampled_token_is_trained_once(sessions: Path) -> None:
    store = RolloutStore([sessions])
    assert len(store) == 32
    assert sorted({len(store.rollout(i).spans_U2) for i in range(32)}) == [1, 2]
