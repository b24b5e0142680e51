"""The clipped policy loss. B batch, S sequence."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOG_RATIO_BOUND", "bounded_log_ratio", "clipped_policy_loss"]

# exp(20) is 5e8: no ratio that training can use comes near it, and its products stay far from the
# largest float32
LOG_RATIO_BOUND = 20.0


def bounded_log_ratio(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log p_trainer - log p_sampler, between -20 and 20; 0 where the mask is 0.

    Without a bound a log-prob of -95 gives a ratio of infinity, and infinity times an advantage of
    0 is NaN, as is its gradient. Beyond the bound the gradient is 0. NaN stays NaN.

    Args:
        logprobs, sampled_logprobs, mask: of one shape; mask 1 on response tokens, else 0.
    """
    # outside the mask there is no sampled log-prob: keep what is there away from exp()
    log_ratio = torch.where(mask > 0, logprobs - sampled_logprobs, 0.0)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_policy_loss(
    logprobs_BS: Tensor,
    sampled_logprobs_BS: Tensor,
    advantages_BS: Tensor,
    mask_BS: Tensor,
    clip_eps: float,
) -> Tensor:
    """Sum over response tokens of -min(r A, clip(r, 1 - eps, 1 + eps) A), a scalar.

    r = exp(logprob - sampled logprob): the sampler is the old policy. GRPO, arXiv 2402.03300,
    equation 3, without the KL term. The logarithm of r is bounded (`bounded_log_ratio`), so the
    loss and its gradient are finite for all log-probs that a store can hold.

    Args:
        logprobs_BS: the trainer's, float32, with gradient.
        sampled_logprobs_BS, advantages_BS: float32.
        mask_BS: 1 on response tokens, else 0.
    """
    ratio_BS = bounded_log_ratio(logprobs_BS, sampled_logprobs_BS, mask_BS).exp()
    clipped_BS = ratio_BS.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    gain_BS = torch.minimum(ratio_BS * advantages_BS, clipped_BS * advantages_BS)
    return -(gain_BS * mask_BS).sum()
