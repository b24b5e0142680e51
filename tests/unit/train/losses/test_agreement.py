"""Agreement of two policies against what its formulas say."""

import math

import pytest
import torch

from megatron_r3.train.losses.agreement import agreement_sums


def test_agreement() -> None:
    sampled = torch.tensor([-1.0, -1.0, -2.0, -0.1, 5.0])
    trainer = torch.tensor([-1.0, -0.2, -1.4, -0.9, -9.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    sums = agreement_sums(trainer, sampled, mask)
    log_ratio = [0.0, 0.8, 0.6, -0.8]
    assert sums["abs_dlogp"].item() == pytest.approx(2.2)
    assert sums["k3_kl"].item() == pytest.approx(sum(math.exp(r) - 1 - r for r in log_ratio))
    assert sums["extreme"].item() == 2  # 0.8 > log 2 > 0.6, on both sides


def test_direction_matters() -> None:
    a, b, mask = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.ones(1)
    assert agreement_sums(a, b, mask)["k3_kl"] != agreement_sums(b, a, mask)["k3_kl"]


def test_ratios_at_the_bound_are_counted() -> None:
    trainer, sampled = torch.tensor([-1.0, -1.0, -60.0]), torch.tensor([-1.5, -20.9, -1.0])
    sums = agreement_sums(trainer, sampled, torch.ones(3))
    assert sums["bounded_ratio"].item() == 1  # 59 is beyond 20, 19.9 is not
    assert sums["abs_dlogp"].item() == pytest.approx(0.5 + 19.9 + 59.0)


@pytest.mark.parametrize("sampled", [-64.0, -95.0, -9999.0, 1e-5])
def test_sums_are_finite_for_every_log_prob_of_a_store(sampled: float) -> None:
    trainer = torch.tensor([-0.5, -200.0])
    sums = agreement_sums(trainer, torch.tensor([sampled, 0.0]), torch.ones(2))
    assert all(math.isfinite(value) for value in sums.values())
