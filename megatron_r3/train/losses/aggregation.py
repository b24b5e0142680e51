"""From the loss of tokens to one number: three averages, exact where ranks share a rollout.

Shape suffixes (docs/glossary.md): B, S, M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_r3.train.losses.terms import LossTerms

AGGREGATIONS = ("token-mean", "sequence-mean", "fixed-length")


@dataclass(frozen=True)
class Average:
    """A sum over this rank's tokens, and the divisor of the sum over the ranks of its CP group.

    Attributes:
        sum: a scalar, with gradient.
        count: a scalar, no gradient: this rank's part of the divisor. Over the ranks of a
            context-parallel group the parts add up to the divisor of the micro-batch.
        divisor: returns the divisor of the micro-batch, a scalar, the same on all ranks of the
            group. It may sum over the ranks, so all ranks of the group must call it, or none.
    """

    sum: Tensor
    count: Tensor
    divisor: Callable[[], Tensor]


def average(
    losses_BS: Tensor, counted: LossTerms, aggregation: str, fixed_length: int | None
) -> Average:
    """Average the loss of the tokens that count.

    token-mean: the sum over all tokens / their number (DAPO, arXiv 2503.14476, equation 8).
    sequence-mean: the mean of the rollouts' means (GRPO, arXiv 2402.03300, equation 3).
    fixed-length: the sum over all tokens / `fixed_length` / the number of rollouts (Dr.GRPO, arXiv
        2503.20783, section 3.2).

    A rollout in which no token counts is not in the number of rollouts.

    Args:
        losses_BS: with gradient.
        counted: the terms of the micro-batch; their mask is 1 on the tokens that count, else 0.
        fixed_length: a number of tokens; needed by fixed-length, not read otherwise.
    """
    mask_BS = counted.mask_BS
    if aggregation == "token-mean":
        total = (losses_BS * mask_BS).sum()
        return Average(total, mask_BS.sum(), lambda: counted.lengths_M.sum())
    num_rollouts = (counted.lengths_M > 0).sum().to(losses_BS.dtype)
    if aggregation == "sequence-mean":
        mask_BS = mask_BS / counted.sequences.each(counted.lengths_M.clamp(min=1))
    else:
        assert aggregation == "fixed-length", f"unknown aggregation {aggregation}"
        assert fixed_length is not None
        mask_BS = mask_BS / fixed_length
    # The first rank of the group counts the rollouts for all of them.
    group = counted.sequences.cp_group
    counts = group is None or torch.distributed.get_rank(group) == 0  # type: ignore[arg-type]
    return Average((losses_BS * mask_BS).sum(), num_rollouts * float(counts), lambda: num_rollouts)
