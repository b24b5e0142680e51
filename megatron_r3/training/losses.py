"""The policy loss, the advantages, and how far sampler and trainer agree.

All of it is plain torch and numpy. Only `policy_loss`, which knows how Megatron averages a loss,
asks Megatron for its context-parallel group.

Shape suffixes (docs/glossary.md): B, S, M.
"""

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


def policy_loss(
    batch: dict[str, Tensor], clip_eps: float, per_token: bool, output_BS: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The policy loss of one micro-batch, as a loss function of Megatron's schedules returns it.

    Args:
        batch: the fields of `megatron_r3.training.dataset`, on the device.
        per_token: --calculate-per-token-loss, with which Megatron divides the summed loss of a step
            by its tokens. Without it Megatron averages the means of the micro-batches.
        output_BS: the model's output on the last pipeline stage: Megatron's loss of each token,
            -log p(label), float32.

    Returns:
        The summed loss, the number of response tokens (int32), and the sums to report, each with
        the number by which Megatron divides it.
    """
    mask_BS = batch["loss_mask"]
    logprobs_BS = -output_BS.float()
    sampled_BS = batch["sampled_logprobs"]
    loss = clipped_policy_loss(logprobs_BS, sampled_BS, batch["advantages"], mask_BS, clip_eps)
    num_tokens = mask_BS.sum()
    agreement = agreement_sums(logprobs_BS, sampled_BS, mask_BS)
    sums = {"policy loss": loss.detach(), **agreement}
    report = {
        name.replace("_", " "): torch.stack([value, num_tokens]) for name, value in sums.items()
    }
    reward = batch["reward"]
    report["reward"] = torch.stack([reward.sum(), torch.ones_like(reward).sum()])
    if not per_token:
        loss = loss * _share_of_cp_group(num_tokens)
    return loss, num_tokens.int(), report


def _share_of_cp_group(num_tokens: Tensor) -> Tensor:
    """By what a rank's loss is multiplied, so that Megatron's average is the sequence's mean.

    Megatron divides each rank's loss by the rank's own tokens and averages over context-parallel
    ranks, while a response lies unevenly on the ranks. Example: rank 0 has 6 response tokens, rank
    1 has 2. The factors are 6 * 2 / 8 = 1.5 and 2 * 2 / 8 = 0.5, and the average is
    (loss0 / 6 * 1.5 + loss1 / 2 * 0.5) / 2 = (loss0 + loss1) / 8.
    """
    from megatron.core import mpu

    size = mpu.get_context_parallel_world_size()
    if size == 1:
        return torch.ones_like(num_tokens)
    total = num_tokens.clone()
    torch.distributed.all_reduce(total, group=mpu.get_context_parallel_group())
    return num_tokens * size / total.clamp(min=1)
