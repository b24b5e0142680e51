"""Policy loss, advantages, and how far sampler and trainer agree."""

from megatron_r3.rl.advantages import group_normalised
from megatron_r3.rl.agreement import agreement_sums
from megatron_r3.rl.loss import clipped_policy_loss

__all__ = ["agreement_sums", "clipped_policy_loss", "group_normalised"]
