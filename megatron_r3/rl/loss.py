"""The clipped policy loss. B batch, S sequence."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clipped_policy_loss"]


def clipped_policy_loss(
    logprobs_BS: Tensor,
    sampled_logprobs_BS: Tensor,
    advantages_BS: Tensor,
    mask_BS: Tensor,
    clip_eps: float,
) -> Tensor:
    """Sum over response tokens of -min(r A, clip(r, 1 - eps, 1 + eps) A), a scalar.

    r = exp(logprob - sampled logprob): the sampler is the old policy. GRPO, arXiv 2402.03300,
    equation 3, without the KL term.

    Args:
        logprobs_BS: the trainer's, float32, with gradient.
        sampled_logprobs_BS, advantages_BS: float32.
        mask_BS: 1 on response tokens, else 0.
    """
    # outside the mask there is no sampled log-prob: keep exp() away from it
    log_ratio_BS = torch.where(mask_BS > 0, logprobs_BS - sampled_logprobs_BS, 0.0)
    ratio_BS = log_ratio_BS.exp()
    clipped_BS = ratio_BS.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    gain_BS = torch.minimum(ratio_BS * advantages_BS, clipped_BS * advantages_BS)
    return -(gain_BS * mask_BS).sum()
