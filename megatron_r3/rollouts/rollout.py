"""A decoded sample and its reward as a rollout of the store."""

from __future__ import annotations

from megatron_r3.engines.sample import Sample
from megatron_r3.engines.shape import EngineError
from megatron_r3.store import Rollout
from megatron_r3.values import wrong_logprob, wrong_token

__all__ = ["check_values", "to_rollout"]


def check_values(
    decoded: Sample, vocab_size: int | None, max_tokens: int | None, where: str
) -> None:
    """Refuse a sample that no such model can have drawn.

    Args:
        decoded: what the engine's decoder made of a response.
        vocab_size: of the model; None where it is not known.
        max_tokens: of a response; None: no limit.
        where: what errors call the response.

    Raises:
        EngineError: naming `where` and the token.
    """
    wrong = wrong_token(decoded.tokens_N, vocab_size)
    if wrong is not None:
        raise EngineError(f"{where}: token {wrong[0]} {wrong[1]}")
    if max_tokens is not None and decoded.response_length > max_tokens:
        raise EngineError(
            f"{where}: {decoded.response_length} response tokens; at most {max_tokens} were asked "
            "for"
        )
    wrong = wrong_logprob(decoded.logprobs_G)
    if wrong is not None:
        raise EngineError(f"{where}: the log-prob of response token {wrong[0]} {wrong[1]}")


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
