"""The policy loss of one micro-batch, as Megatron's schedules expect it from a loss function.

This module imports Megatron, for the context-parallel group; no other module of this folder does.

Shape suffixes (docs/glossary.md): B, S.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_r3.train.losses.aggregation import Average, average
from megatron_r3.train.losses.agreement import agreement_sums
from megatron_r3.train.losses.correction import Corrected, CorrectionOptions, correct
from megatron_r3.train.losses.penalty import (
    PenaltyOptions,
    lower_advantages,
    penalty,
    reference_kl,
)
from megatron_r3.train.losses.policy_loss import Clip, Gain, gain_of
from megatron_r3.train.losses.terms import LossTerms, Sequences


@dataclass(frozen=True)
class LossOptions:
    """Which policy loss, with its settings.

    Attributes:
        name: a name of `LOSSES`.
        clip: the bounds of the policy ratio.
        aggregation: a name of `AGGREGATIONS`.
        fixed_length: the number of tokens by which the aggregation "fixed-length" divides; other
            aggregations do not read it.
        correction: for the difference between the old policy and the sampler.
        penalty: a KL term and an entropy term.
    """

    name: str = "grpo"
    clip: Clip = field(default_factory=Clip)
    aggregation: str = "token-mean"
    fixed_length: int | None = None
    correction: CorrectionOptions = field(default_factory=CorrectionOptions)
    penalty: PenaltyOptions = field(default_factory=PenaltyOptions)


@dataclass(frozen=True)
class Update:
    """What the loss of one micro-batch was computed from, for the metrics.

    Attributes:
        agreement: how far trainer and sampler agree (`agreement_sums`).
        reference_kl_BS: the KL of each token from the trainer to the reference, no gradient; None
            without a reference.
    """

    terms: LossTerms
    gain: Gain
    corrected: Corrected
    average: Average
    agreement: dict[str, Tensor]
    reference_kl_BS: Tensor | None = None


def update_of(terms: LossTerms, options: LossOptions) -> Update:
    """The policy loss of one micro-batch on this rank, and what it was computed from."""
    terms = lower_advantages(terms, options.penalty)
    gain = gain_of(options.name, terms, options.clip)
    corrected = correct(terms, options.correction)
    # Outside the mask a loss may be anything, NaN too: keep it, and its gradient, out of the sum.
    counted_BS = corrected.mask_BS > 0
    losses_BS = -gain.value_BS * corrected.weight_BS + penalty(terms, options.penalty)
    losses_BS = torch.where(counted_BS, losses_BS, 0.0)
    counted = terms  # with its cached lengths, which may have been summed over the ranks already
    if corrected.mask_BS is not terms.mask_BS:
        counted = replace(terms, mask_BS=corrected.mask_BS)
    result = average(losses_BS, counted, options.aggregation, options.fixed_length)
    agreement = agreement_sums(terms.logprobs_BS, terms.sampled_logprobs_BS, terms.mask_BS)
    kl_BS = None
    if terms.reference_logprobs_BS is not None:
        kl_BS = reference_kl(terms, terms.logprobs_BS.detach(), options.penalty.kl_estimator)
    return Update(terms, gain, corrected, result, agreement, kl_BS)


def terms_of(
    batch: dict[str, Tensor],
    output_BS: Tensor,
    old_BS: Tensor | None,
    reference_BS: Tensor | None = None,
    entropy_BS: Tensor | None = None,
) -> LossTerms:
    """The terms of one micro-batch.

    Args:
        batch: the fields of `megatron_r3.train.dataset`, on the device.
        output_BS: the model's output on the last pipeline stage: Megatron's loss of each token,
            -log p(label), float32.
        old_BS: log-probs of the old policy. None: the trainer is its own old policy in this step,
            so the ratio is 1.
        reference_BS, entropy_BS: see `LossTerms`.
    """
    logprobs_BS = -output_BS.float()
    rewards = batch["reward"]  # [B, rollouts of a sample]
    per_sample = rewards.shape[-1] if rewards.dim() > 1 else 1
    first_B1 = torch.arange(len(logprobs_BS), device=rewards.device)[:, None] * per_sample
    index_BS = first_B1 + batch["document"].clamp(0, per_sample - 1)
    return LossTerms(
        logprobs_BS,
        logprobs_BS.detach() if old_BS is None else old_BS,
        batch["sampled_logprobs"],
        batch["advantages"],
        batch["loss_mask"],
        Sequences(index_BS, rewards.numel(), _context_parallel_group()),
        reference_BS,
        entropy_BS,
    )


def policy_loss(
    terms: LossTerms, rewards: Tensor, options: LossOptions, per_token: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor], Update]:
    """The policy loss of one micro-batch.

    Args:
        rewards: of the micro-batch's rollouts.
        per_token: whether --calculate-per-token-loss is on. Megatron then divides the sum of a
            step's losses by the sum of their divisors. Otherwise it averages the micro-batches'
            quotients of loss and divisor.

    Returns:
        The summed loss, its divisor (int32), the sums to report (each with the number by which
        Megatron divides that sum), and what the loss was computed from.
    """
    update = update_of(terms, options)
    num_tokens = terms.mask_BS.sum()
    mean = update.average
    report = {
        name.replace("_", " "): torch.stack([value, num_tokens])
        for name, value in update.agreement.items()
    }
    # A correction may leave no token in a step. The clamp has the mean reported as 0, not as NaN.
    report["policy loss"] = torch.stack([mean.sum.detach(), mean.count.clamp(min=1e-9)])
    report["reward"] = torch.stack([rewards.sum(), torch.ones_like(rewards).sum()])
    if per_token:
        return mean.sum, mean.count.int(), report, update
    # Megatron divides each rank's loss by the rank's own count and averages over context-parallel
    # ranks, which is wrong if the ranks have different numbers of response tokens. So every rank
    # returns the divisor of the whole micro-batch, and its sum times the number of ranks. Example:
    # two ranks with sums 3 and 1 and a divisor of 8: (3 * 2 / 8 + 1 * 2 / 8) / 2 = (3 + 1) / 8.
    group = terms.sequences.cp_group
    size = 1 if group is None else torch.distributed.get_world_size(group)  # type: ignore[arg-type]
    return mean.sum * size, mean.divisor().int(), report, update


def _context_parallel_group() -> object | None:
    from megatron.core import mpu

    group = mpu.get_context_parallel_group()
    return group if torch.distributed.get_world_size(group) > 1 else None
