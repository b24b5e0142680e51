"""A tiny policy: trained by Megatron, exported, sampled by transformers, stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from once import Once
from training import Policy, export, make_policy

from demo.model import arguments
from proof.fidelity.rig.worker import TreeWorker


@pytest.fixture(scope="session")
def policy(patched: TreeWorker, once: Once) -> Policy:
    """The policy, made once for all workers of the session. Tests only read its files."""
    return Policy.within(once("policy", lambda folder: make_policy(patched, folder)))


@pytest.fixture(scope="module")
def torch_checkpoint(
    patched: TreeWorker, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The policy in Megatron's older format, which is one file."""
    folder = tmp_path_factory.mktemp("torch") / "checkpoint"
    into = ["--micro-batch-size", "1", "--hf-import", str(policy.hf), "--save", str(folder)]
    into += ["--save-interval", "1", "--ckpt-format", "torch"]
    patched.run(export, 1, arguments(into), timeout_s=120)
    return folder
