"""A decoded sample and its reward as a rollout of the store."""

from __future__ import annotations

from megatron_r3.engines.sample import Sample
from megatron_r3.store import Rollout

__all__ = ["to_rollout"]


def to_rollout(
    decoded: Sample,
    reward: float,
    group: int,
    sample: int,
    policy_version: int,
    prompt_digest: int = 0,
) -> Rollout:
    """The rollout of a sample: (group, sample, policy_version) names it."""
    return Rollout(
        tokens_N=decoded.tokens_N,
        response_N=decoded.response_N,
        logprobs_N=decoded.logprobs_N,
        reward=reward,
        group=group,
        policy_version=policy_version,
        routes=decoded.routes,
        sample=sample,
        turns_U2=decoded.turns,
        prompt_digest=prompt_digest,
    )
