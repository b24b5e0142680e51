"""From the loss of tokens to one number: three averages, exact where ranks share a rollout.

Shape suffixes (docs/glossary.md): B, S, M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_r3.training.losses.terms import Sequences

AGGREGATIONS = ("token-mean", "sequence-mean", "fixed-length")


@dataclass(frozen=True)
class Average:
    """A sum over this rank's tokens, and what the sum over all ranks is divided by.

    Attributes:
        sum: a scalar, with gradient.
        count: a scalar, no gradient: this rank's part of the divisor. Over the ranks of a
            context-parallel group the parts add up to the divisor of the micro-batch.
        divisor: a scalar: the divisor of the micro-batch, the same on all ranks of the group.
    """

    sum: Tensor
    count: Tensor
    divisor: Tensor


def average(
    losses_BS: Tensor,
    mask_BS: Tensor,
    sequences: Sequences,
    aggregation: str,
    fixed_length: int,
) -> Average:
    """Average the loss of the tokens that the mask counts.

    token-mean: the sum over all tokens, by their number (DAPO, arXiv 2503.14476, equation 8).
    sequence-mean: the mean of each rollout's mean (GRPO, arXiv 2402.03300, equation 3).
    fixed-length: the sum over all tokens, by `fixed_length` and by the number of rollouts
        (Dr.GRPO, arXiv 2503.20783, section 3.2).

    A rollout of which the mask counts no token does not count as a rollout.

    Args:
        losses_BS: with gradient.
        mask_BS: 1 on the tokens that count, else 0.
        fixed_length: tokens; read by fixed-length alone.
    """
    lengths_M = sequences.sums(mask_BS)
    num_rollouts = (lengths_M > 0).sum().to(losses_BS.dtype)
    if aggregation == "token-mean":
        return Average((losses_BS * mask_BS).sum(), mask_BS.sum(), lengths_M.sum())
    if aggregation == "sequence-mean":
        mask_BS = mask_BS / sequences.each(lengths_M.clamp(min=1))
    else:
        mask_BS = mask_BS / fixed_length
    # The first rank of the group counts the rollouts for all of them.
    group = sequences.cp_group
    counts = group is None or torch.distributed.get_rank(group) == 0  # type: ignore[arg-type]
    return Average((losses_BS * mask_BS).sum(), num_rollouts * float(counts), num_rollouts)
