"""A tiny policy: trained by Megatron, exported, sampled by transformers, stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import Policy, export, to_rollout, train

from demo import hf_sampler, task
from demo.model import arguments
from megatron_r3.cpu.worker import TreeWorker
from megatron_r3.hf import router_fingerprint
from megatron_r3.store import StoreInfo, write_shard

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
    prompts = folder / "prompts.jsonl"
    task.write_prompts(prompts, 8, 10_000_000)
    out = folder / "samples.npz"
    status = hf_sampler.main(
        ["--model", str(policy.hf), "--prompts", str(prompts), "--n", "4", "--seed", "1"]
        + ["--max-new-tokens", str(task.MAX_ANSWER), "--out", str(out)]
    )
    assert status in (0, None)
    source = hf_sampler.read_source(out) if hasattr(hf_sampler, "read_source") else None
    samples = hf_sampler.read_samples(out)
    layers = source.moe_layers if source else tuple(range(4))
    info = StoreInfo(
        16, 4, layers, "transformers", "test", "tiny", router_fingerprint(policy.hf, layers)
    )
    write_shard(policy.store, info, [to_rollout(s) for s in samples])
