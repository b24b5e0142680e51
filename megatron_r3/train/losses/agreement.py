"""How far two policies agree: sums over response tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_r3.train.losses.terms import LOG_RATIO_BOUND, bounded_log_ratio

_EXTREME = 2.0  # a token is extreme if its ratio is above this number, or below 1 / this number


def agreement_sums(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over response tokens; divide by their number for the means. Scalars, no gradient.

    With r = p_trainer / p_sampler of a token that the sampler drew:
        k3_kl: r - 1 - log r, the k3 estimator of KL(sampler || trainer).
        extreme: tokens with r > 2 or r < 1 / 2 (F(2) of arXiv 2510.11370).
        abs_dlogp: |log r|.
        bounded_ratio: tokens with |log r| of at least LOG_RATIO_BOUND.

    k3_kl is computed from the bounded log r (`bounded_log_ratio`), so no token makes it infinite.

    Args:
        logprobs: log-probs of the trainer, float32.
        sampled_logprobs: log-probs of the sampler, of the same shape.
        mask: 1 on response tokens, else 0.

    Returns:
        The sums by name, always float32, which is enough for metrics.
    """
    with torch.no_grad():
        log_ratio = bounded_log_ratio(logprobs.float(), sampled_logprobs.float(), mask)
        magnitude = torch.where(mask > 0, logprobs.float() - sampled_logprobs.float(), 0.0).abs()
        return {
            "k3_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
            "extreme": (magnitude > math.log(_EXTREME)).sum().float(),
            "abs_dlogp": magnitude.sum(),
            "bounded_ratio": (magnitude >= LOG_RATIO_BOUND).sum().float(),
        }
