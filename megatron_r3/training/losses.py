"""The clipped policy loss. B batch, S sequence."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

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


# Policy loss, advantages, and how far sampler and trainer agree.


# Advantages of GRPO. M: rollouts.


def group_normalised(reward_M: np.ndarray, group_M: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """(reward - mean of its group) / (standard deviation of its group + eps), float32 `[M]`.

    GRPO, arXiv 2402.03300, section 4.1.2. A group with equal rewards gets zeros.
    """
    _, index_M = np.unique(group_M, return_inverse=True)
    count = np.bincount(index_M)
    reward_M = reward_M.astype(np.float64)
    centred_M = reward_M - (np.bincount(index_M, reward_M) / count)[index_M]
    std = np.sqrt(np.bincount(index_M, centred_M**2) / count)
    return (centred_M / (std[index_M] + eps)).astype(np.float32)


# How far the trainer's log-probs are from the sampler's, on what the sampler sampled.


def agreement_sums(
    logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, factor: float = 2.0
) -> dict[str, Tensor]:
    """Sums over response tokens; divide by their number for the means. Scalars, no gradient.

    With r = p_trainer / p_sampler of a token that the sampler drew:
        k3_kl: r - 1 - log r, the k3 estimator of KL(sampler || trainer).
        extreme: tokens with r > factor or r < 1 / factor (F(factor) of arXiv 2510.11370).
        abs_dlogp: |log r|.
        bounded_ratio: tokens whose log r is at the bound of the policy loss, or beyond it. In
            k3_kl log r is bounded as in that loss (`bounded_log_ratio`), so the sum is finite.

    Args:
        logprobs, sampled_logprobs: same shape, float32.
        mask: 1 on response tokens, else 0.
    """
    with torch.no_grad():
        log_ratio = bounded_log_ratio(logprobs.float(), sampled_logprobs.float(), mask)
        magnitude = torch.where(mask > 0, logprobs.float() - sampled_logprobs.float(), 0.0).abs()
        return {
            "k3_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
            "extreme": (magnitude > math.log(factor)).sum().float(),
            "abs_dlogp": magnitude.sum(),
            "bounded_ratio": (magnitude >= LOG_RATIO_BOUND).sum().float(),
        }
