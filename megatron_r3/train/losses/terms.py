"""The inputs of a policy loss: log-probs of policies, advantages, each token's rollout.

Three policies give each response token a log-prob: the sampler (mu), the old policy (old), from
which the update starts, and the trainer as it is now (pi). The ratio of the policy loss is
pi / old; a correction uses old / mu. A KL term brings a fourth one, the reference (ref).

Shape suffixes (docs/glossary.md): B, S, M.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# exp(20) is 5e8: no useful ratio is as large, and products with it stay far below the largest
# float32
LOG_RATIO_BOUND = 20.0


def bounded_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log p - log p_old, between -20 and 20; 0 where the mask is 0.

    Without a bound an old log-prob of -95 can give a ratio of infinity, and infinity times an
    advantage of 0 is NaN, as is its gradient. Beyond the bound the gradient is 0. NaN stays NaN.

    Args:
        logprobs, old_logprobs, mask: of one shape; mask 1 on response tokens, else 0.
    """
    # outside the mask there are no log-probs to compare, and the difference may be anything
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


class Sequences:
    """Which rollout of a micro-batch each token belongs to; sums over whole rollouts.

    Context parallelism splits a rollout over the ranks of a group. `sums` then adds up over these
    ranks too, so that each rank has the sums over whole rollouts.

    Args:
        index_BS: int64, the number of each token's rollout inside the micro-batch, from 0 on; at
            padding any number below `num_rollouts`.
        num_rollouts: M, of the micro-batch.
        cp_group: the ranks that share the rollouts; None for one rank.
    """

    def __init__(self, index_BS: Tensor, num_rollouts: int, cp_group: object | None = None) -> None:
        self.index_BS, self.num_rollouts, self.cp_group = index_BS, num_rollouts, cp_group

    def sums(self, values_BS: Tensor) -> Tensor:
        """Sums over each whole rollout, `[M]`, without a gradient; padding must hold zeros."""
        sums_M = values_BS.new_zeros(self.num_rollouts)
        sums_M.index_add_(0, self.index_BS.reshape(-1), values_BS.detach().reshape(-1))
        if self.cp_group is not None:
            torch.distributed.all_reduce(sums_M, group=self.cp_group)
        return sums_M

    def each(self, values_M: Tensor) -> Tensor:
        """For each token the value of its rollout, `[B, S]`."""
        return values_M[self.index_BS]


@dataclass(frozen=True)
class LossTerms:
    """What a loss and a correction see of one micro-batch; tensors are `[B, S]` and float32.

    Attributes:
        logprobs_BS: log-probs of the trainer, with gradient.
        old_logprobs_BS: log-probs of the policy from which the update starts, without gradient.
        sampled_logprobs_BS: log-probs of the sampler.
        advantages_BS: one value for all response tokens of a rollout, minus the KL term of the
            token with `kl_place` "advantage"; 0 outside of responses.
        mask_BS: 1 on the response tokens that the loss counts, else 0.
        sequences: which rollout each token belongs to.
        reference_logprobs_BS: log-probs of the reference, without gradient; None without a KL term.
        entropy_BS: the entropy of the trainer's distribution, with gradient; None without an
            entropy term.
    """

    logprobs_BS: Tensor
    old_logprobs_BS: Tensor
    sampled_logprobs_BS: Tensor
    advantages_BS: Tensor
    mask_BS: Tensor
    sequences: Sequences
    reference_logprobs_BS: Tensor | None = None
    entropy_BS: Tensor | None = None

    @cached_property
    def log_ratio_BS(self) -> Tensor:
        """log(pi / old) of each response token, bounded, with gradient; 0 elsewhere."""
        return bounded_log_ratio(self.logprobs_BS, self.old_logprobs_BS, self.mask_BS)

    @cached_property
    def log_weight_BS(self) -> Tensor:
        """log(old / mu) of each response token, bounded, without gradient; 0 elsewhere."""
        with torch.no_grad():
            return bounded_log_ratio(self.old_logprobs_BS, self.sampled_logprobs_BS, self.mask_BS)

    @cached_property
    def lengths_M(self) -> Tensor:
        """How many response tokens each whole rollout has, float32."""
        return self.sequences.sums(self.mask_BS)

    def sequence_mean(self, values_BS: Tensor) -> Tensor:
        """For each token the mean over its whole rollout's response, `[B, S]`, no gradient."""
        sums_M = self.sequences.sums(values_BS * self.mask_BS)
        return self.sequences.each(sums_M / self.lengths_M.clamp(min=1))
