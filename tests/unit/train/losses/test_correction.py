"""Corrections: their weights by hand, and that no gradient goes through them.

Shape suffixes (docs/glossary.md): B, S.
"""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import CORRECTIONS

from megatron_r3.train.losses.correction import CorrectionOptions, correct
from megatron_r3.train.losses.loss import LossOptions, update_of
from megatron_r3.train.losses.terms import LossTerms, Sequences


def terms_of(ratios: list[float], mask: list[int], index: list[int]) -> LossTerms:
    """Tokens whose old / mu is given; pi is old."""
    old_BS = torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64)
    index_BS = torch.tensor([index])
    one_BS = torch.ones_like(old_BS)
    return LossTerms(
        old_BS.clone().requires_grad_(),
        old_BS,
        torch.zeros_like(old_BS),
        one_BS,
        torch.tensor([mask], dtype=torch.float64),
        Sequences(index_BS, max(index) + 1),
    )


# Two rollouts: tokens 0 to 2, of which the second is a prompt token, and tokens 3 and 4.
TERMS = terms_of([3.0, 99.0, 0.5, 0.2, 1.0], [1, 0, 1, 1, 1], [0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "level", "weights", "kept"),
    [
        ("none", "token", [1, None, 1, 1, 1], [1, 0, 1, 1, 1]),
        ("tis", "token", [2, None, 0.5, 0.2, 1], [1, 0, 1, 1, 1]),
        ("tis", "sequence", [1.5, None, 1.5, 0.2, 0.2], [1, 0, 1, 1, 1]),
        ("icepop", "token", [0, None, 0.5, 0, 1], [1, 0, 1, 1, 1]),
        ("icepop", "sequence", [1.5, None, 1.5, 0, 0], [1, 0, 1, 1, 1]),
        ("mask", "token", [1, None, 1, 1, 1], [0, 0, 1, 0, 1]),
        ("mask", "sequence", [1, None, 1, 1, 1], [1, 0, 1, 0, 0]),
    ],
)
def test_by_hand(name: str, level: str, weights: list[float | None], kept: list[int]) -> None:
    got = correct(TERMS, CorrectionOptions(name, level, 0.4, 2.0))
    for weight, want in zip(got.weight_BS[0].tolist(), weights, strict=True):
        assert want is None or weight == pytest.approx(want)
    assert got.mask_BS[0].tolist() == kept


def test_bounds_belong_to_the_range() -> None:
    terms = terms_of([1.0, 1.0], [1, 1], [0, 0])
    for low, high in ((1.0, 2.0), (0.5, 1.0)):
        assert correct(terms, CorrectionOptions("mask", "token", low, high)).mask_BS.all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_gradient_goes_through_a_weight(name: str) -> None:
    old_BS = TERMS.old_logprobs_BS.clone().requires_grad_()
    sampled_BS = TERMS.sampled_logprobs_BS.clone().requires_grad_()
    terms = replace(
        TERMS,
        logprobs_BS=TERMS.logprobs_BS.detach().clone().requires_grad_(),
        old_logprobs_BS=old_BS,
        sampled_logprobs_BS=sampled_BS,
    )
    options = replace(CORRECTIONS[name], low=0.1, high=5.0)
    corrected = correct(terms, options)
    for tensor in (corrected.weight_BS, corrected.mask_BS):
        assert not tensor.requires_grad
    update_of(terms, LossOptions(correction=options)).average.sum.backward()
    assert sampled_BS.grad is None
    assert terms.logprobs_BS.grad.abs().sum() > 0


def test_the_product_of_a_long_response_is_finite() -> None:
    for ratio in (1e3, 1e-3):
        terms = terms_of([ratio] * 500, [1] * 500, [0] * 500)
        for name in ("tis", "icepop", "mask"):
            got = correct(terms, CorrectionOptions(name, "sequence", 0.0, 1e30))
            assert torch.isfinite(got.weight_BS).all()
            assert (got.weight_BS > 0).all()


def test_a_weight_that_is_nan_stays_and_its_token_too() -> None:
    terms = replace(TERMS, old_logprobs_BS=TERMS.old_logprobs_BS.clone())
    terms.old_logprobs_BS[0, 3] = math.nan
    assert correct(terms, CorrectionOptions("mask", "token", 0.4, 2.0)).mask_BS[0, 3] == 1
    for name in ("tis", "icepop"):
        weight_BS = correct(terms, CorrectionOptions(name, "token", 0.4, 2.0)).weight_BS
        assert torch.isnan(weight_BS[0, 3])
