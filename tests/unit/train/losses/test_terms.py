"""Sums over rollouts, the bounded ratio, and averages, by hand.

What context parallelism makes of the sums is shown in tests/functional/test_policy_update.py.

Shape suffixes (docs/glossary.md): B, S, M.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_cases import lay_out, responses

from megatron_r3.train.losses.aggregation import average
from megatron_r3.train.losses.terms import LOG_RATIO_BOUND, LossTerms, Sequences, bounded_log_ratio

# Two samples with room for two rollouts each; the second one of the second sample is padding.
INDEX_BS = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 3]])
SEQUENCES = Sequences(INDEX_BS, 4)
VALUES_BS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 0.0]], requires_grad=True)


def test_sums_are_those_of_whole_rollouts_and_have_no_gradient() -> None:
    sums_M = SEQUENCES.sums(VALUES_BS)
    assert sums_M.tolist() == [3.0, 7.0, 18.0, 0.0]
    assert not sums_M.requires_grad
    assert SEQUENCES.each(sums_M).tolist() == [[3, 3, 7, 7], [18, 18, 18, 0]]


def test_a_mean_counts_response_tokens_alone() -> None:
    terms = lay_out(responses(np.random.default_rng(0), [3, 0, 2]), np.random.default_rng(1)).terms
    terms = replace(terms, advantages_BS=torch.full_like(terms.mask_BS, 4.0))
    mean_BS = terms.sequence_mean(terms.advantages_BS)
    assert terms.lengths_M.tolist() == [3, 0, 2]
    assert mean_BS[:, 0].tolist() == [4, 0, 4]  # of no tokens it is 0


@pytest.mark.parametrize(
    ("aggregation", "total", "count"),
    [
        ("token-mean", 1 + 3 + 4 + 6, 4),
        ("sequence-mean", 1 / 1 + (3 + 4) / 2 + 6 / 1, 3),
        ("fixed-length", (1 + 3 + 4 + 6) / 10, 3),
    ],
)
def test_averages_by_hand(aggregation: str, total: float, count: int) -> None:
    mask_BS = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    nan_BS = torch.full_like(mask_BS, math.nan)  # what an average does not read
    counted = LossTerms(nan_BS, nan_BS, nan_BS, nan_BS, mask_BS, SEQUENCES)
    got = average(VALUES_BS * mask_BS, counted, aggregation, 10)
    assert got.sum.item() == pytest.approx(total)
    assert got.count.item() == got.divisor().item() == count
    assert not got.count.requires_grad


def test_the_bound_of_the_ratio_and_of_its_gradient() -> None:
    assert LOG_RATIO_BOUND == 20
    new = torch.tensor([19.9, 20.1, -19.9, -20.1, 5.0], requires_grad=True)
    got = bounded_log_ratio(new, torch.zeros(5), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert got.tolist() == pytest.approx([19.9, 20.0, -19.9, -20.0, 0.0])
    got.sum().backward()
    assert new.grad.tolist() == [1, 0, 1, 0, 0]
