"""What to collect: prompts, how to sample, what rewards, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.rollouts.dialects import Sampling, build_request
from megatron_r3.rollouts.model import Model
from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.rollouts.reward import RewardFunction
from megatron_r3.rollouts.server import Identity
from megatron_r3.store import StoreInfo

__all__ = ["Plan"]

BIAS = (
    "the policy loss takes all log-probs at temperature 1 over the whole vocabulary, so its ratio "
    "would compare two distributions and its gradient would be biased"
)


@dataclass(frozen=True)
class Plan:
    """What to collect.

    Attributes:
        prompts, n: so many samples of each prompt.
        sampling: how.
        reward: of each response.
        model: that the server runs.
        out: the store; what it has of this policy version is not sampled again.
        policy_version: which policy samples.
        shard_size: rollouts of a shard, or more, so that groups stay whole; a kill loses those that
            wait for theirs to be full.
        refused_retries: how often a sample is asked for again after a response that cannot be used.
        biased_sampling: take sampling that the policy loss does not know.
    """

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    reward: RewardFunction
    model: Model
    out: Path
    policy_version: int = 0
    shard_size: int = 128
    refused_retries: int = 2
    biased_sampling: bool = False

    def check(self, engine: str) -> None:
        """Refuse what no server needs to be asked about.

        Raises:
            ValueError: sampling that the loss does not know, or a prompt that cannot be asked.
        """
        unknown = self.sampling.settings.unknown_to_the_loss()
        if unknown and not self.biased_sampling:
            raise ValueError(
                f"{', '.join(unknown)}: {BIAS}; --biased-sampling collects all the same"
            )
        for prompt in self.prompts:
            build_request(engine, prompt, self.sampling, None, "")
            prompt.check_vocabulary(self.model.vocab_size)
            prompt.check_json()

    def store_info(self, engine: str, server: Identity) -> StoreInfo:
        """What the store says of all its rollouts."""
        model = self.model
        return StoreInfo(
            num_experts=model.shape.num_experts,
            topk=model.shape.topk,
            moe_layers=model.shape.moe_layers,
            engine=engine,
            engine_version=server.version or "unknown",
            model=model.name,
            router_fingerprint=model.router_fingerprint,
            policy_stamp=model.policy_stamp,
            engine_policy=server.policy,
            vocab_size=model.vocab_size or 0,
            sampling=self.sampling.settings,
        )
