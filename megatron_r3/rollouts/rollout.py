"""A decoded sample and its reward as a rollout of the store."""

from __future__ import annotations

import numpy as np

from megatron_r3.engines.sample import Sample
from megatron_r3.store import Rollout

__all__ = ["to_rollout"]


def to_rollout(
    decoded: Sample, reward: float, group: int, sample: int, policy_version: int
) -> Rollout:
    """The rollout of a sample: (group, sample, policy_version) names it."""
    num_tokens, prompt = len(decoded.tokens_N), decoded.prompt_length
    logprobs_N = np.zeros(num_tokens, np.float32)
    logprobs_N[prompt:] = decoded.logprobs_G
    return Rollout(
        tokens_N=decoded.tokens_N,
        response_N=np.arange(num_tokens) >= prompt,
        logprobs_N=logprobs_N,
        reward=reward,
        group=group,
        policy_version=policy_version,
        routes=decoded.routes,
        sample=sample,
    )
