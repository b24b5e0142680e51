"""A tiny policy: trained by Megatron, exported, sampled by transformers, stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import Policy, export, train

from demo import hf_sampler, task
from demo.model import arguments
from demo.stages import write_store
from fidelity.rig.worker import TreeWorker

PRETRAIN = ["--micro-batch-size", "32", "--global-batch-size", "32", "--train-iters", "60"]
PRETRAIN += ["--lr", "3e-3", "--save-interval", "1000"]


@pytest.fixture(scope="session")
def policy(patched: TreeWorker, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("policy")
    made = Policy(folder / "checkpoint", folder / "hf", folder / "store")
    save = ["--save", str(made.checkpoint)]
    patched.run(train, 1, arguments(PRETRAIN, save), timeout_s=300)
    load = ["--micro-batch-size", "1", "--load", str(made.checkpoint)]
    patched.run(export, 1, arguments(load, ["--hf-export", str(made.hf)]), timeout_s=120)
    sample(made, folder)
    return made


def sample(policy: Policy, folder: Path) -> None:
    """32 rollouts, from transformers in bfloat16."""
    prompts, out = folder / "prompts.jsonl", folder / "samples.npz"
    task.write_prompts(prompts, 8, 10_000_000)
    argv = ["--model", str(policy.hf), "--prompts", str(prompts), "--out", str(out)]
    argv += ["--n", "4", "--seed", "1", "--max-new-tokens", str(task.MAX_ANSWER)]
    assert hf_sampler.main(argv) == 0
    write_store(out, policy.store, policy.hf)
