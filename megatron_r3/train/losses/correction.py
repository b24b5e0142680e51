"""Corrections for the difference between the old policy and the sampler.

A correction gives each token a weight, by which the gain of the policy loss is multiplied after its
clipping. The weight is computed from w = old / mu: a token's probability under the old policy
divided by its probability under the sampler. The current policy is not in w, so a token's weight
has no gradient, and is the same in all updates on a collection.

Shape suffixes (docs/glossary.md): B, M, S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_r3.train.losses.terms import LOG_RATIO_BOUND, LossTerms

LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class CorrectionOptions:
    """Which correction, at which level, and with which bounds.

    Attributes:
        name: none, tis, icepop or mask.
        level: "token": each token has its own w. "sequence": each token has the product of w over
            the response tokens of its rollout.
        low, high: the bounds of w. tis reads only `high`.
    """

    name: str = "none"
    level: str = "token"
    low: float = 0.5
    high: float = 2.0


@dataclass(frozen=True)
class Corrected:
    """What a correction returns for each token, without gradients.

    Attributes:
        weight_BS: what the gain is multiplied by.
        mask_BS: the response tokens that still count in the average, 1 or 0.
    """

    weight_BS: Tensor
    mask_BS: Tensor


def _none(terms: LossTerms, ratio_BS: Tensor, options: CorrectionOptions) -> Corrected:
    return Corrected(torch.ones_like(ratio_BS), terms.mask_BS)


def tis(terms: LossTerms, ratio_BS: Tensor, options: CorrectionOptions) -> Corrected:
    """min(w, high): truncated importance sampling.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025),
    https://fengyao.notion.site/off-policy-rl.
    """
    return Corrected(ratio_BS.clamp(max=options.high), terms.mask_BS)


def icepop(terms: LossTerms, ratio_BS: Tensor, options: CorrectionOptions) -> Corrected:
    """w where low <= w <= high, else 0; a token of weight 0 still counts in the average.

    IcePop of Ring-1T, arXiv 2510.18855, section 3.2.
    """
    return Corrected(ratio_BS * _within(ratio_BS, options), terms.mask_BS)


def mask(terms: LossTerms, ratio_BS: Tensor, options: CorrectionOptions) -> Corrected:
    """1 where low <= w <= high; other tokens count neither in the loss nor in the average.

    Masked importance sampling, as in slime, and as verl's "rejection sampling":
    https://richardli.xyz/rl-collapse.
    """
    kept_BS = terms.mask_BS * _within(ratio_BS, options)
    return Corrected(torch.ones_like(ratio_BS), kept_BS)


CORRECTIONS: dict[str, Callable[[LossTerms, Tensor, CorrectionOptions], Corrected]] = {
    "none": _none,
    "tis": tis,
    "icepop": icepop,
    "mask": mask,
}


def correct(terms: LossTerms, options: CorrectionOptions) -> Corrected:
    """The weight and the mask of each token of one micro-batch."""
    assert options.level in LEVELS, f"unknown level {options.level}"
    with torch.no_grad():
        log_weight_BS = terms.log_weight_BS
        if options.level == "sequence":
            sums_M = terms.sequences.sums(log_weight_BS)
            # The sum of a long response can exceed the bound of one token, so it is bounded too.
            bounded_M = sums_M.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            log_weight_BS = terms.sequences.each(bounded_M)
        return CORRECTIONS[options.name](terms, log_weight_BS.exp(), options)


def _within(ratio_BS: Tensor, options: CorrectionOptions) -> Tensor:
    # NaN counts as within the bounds, so that a NaN log-prob stays in the loss and is noticed.
    return (~((ratio_BS < options.low) | (ratio_BS > options.high))).to(ratio_BS.dtype)
