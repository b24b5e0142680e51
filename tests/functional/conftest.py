"""A tiny policy: trained by Megatron, exported, sampled by transformers, stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from once import Once
from training import Policy, export, train

from demo import task
from demo.model import arguments
from fidelity.rig.worker import TreeWorker
from megatron_r3.cli import main

PRETRAIN = ["--micro-batch-size", "32", "--global-batch-size", "32", "--train-iters", "60"]
PRETRAIN += ["--lr", "3e-3", "--save-interval", "1000"]


@pytest.fixture(scope="session")
def policy(patched: TreeWorker, once: Once) -> Policy:
    """The policy, made once for all workers of the session. Tests only read its files."""

    def make(folder: Path) -> None:
        made = _policy_in(folder)
        save = ["--save", str(made.checkpoint)]
        patched.run(train, 1, arguments(PRETRAIN, save), timeout_s=300)
        load = ["--micro-batch-size", "1", "--load", str(made.checkpoint)]
        patched.run(export, 1, arguments(load, ["--hf-export", str(made.hf)]), timeout_s=120)
        sample(made, folder)

    return _policy_in(once("policy", make))


def _policy_in(folder: Path) -> Policy:
    return Policy(folder / "checkpoint", folder / "hf", folder / "store")


def sample(policy: Policy, folder: Path) -> None:
    """32 rollouts in one shard, from transformers in bfloat16."""
    prompts = folder / "prompts.jsonl"
    task.write_prompts(prompts, 8, 10_000_000)
    argv = ["rollouts", "collect", "--engine", "transformers", "--model", str(policy.hf)]
    argv += ["--prompts", str(prompts), "--out", str(policy.store), "--n", "4", "--seed", "1"]
    argv += ["--max-tokens", str(task.MAX_ANSWER), "--reward", "demo.task:reward"]
    assert main(argv) == 0
