"""A tiny policy: trained by Megatron, exported, sampled by transformers, stored."""

from __future__ import annotations

import pytest
from once import Once
from training import Policy, make_policy

from fidelity.rig.worker import TreeWorker


@pytest.fixture(scope="session")
def policy(patched: TreeWorker, once: Once) -> Policy:
    """The policy, made once for all workers of the session. Tests only read its files."""
    return Policy.within(once("policy", lambda folder: make_policy(patched, folder)))
