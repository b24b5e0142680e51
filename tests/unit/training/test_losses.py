"""Policy loss, advantages and agreement against what their formulas say."""

import math

import numpy as np
import pytest
import torch

from megatron_r3.training.losses import agreement_sums, clipped_policy_loss, group_normalised


def test_advantages_are_normalised_inside_each_group():
    reward = np.array([1.0, 5.0, 0.0, 7.0, 1.0, 2.0])
    group = np.array([3, 9, 3, 9, 3, 4])
    advantage = group_normalised(reward, group)
    for g in (3, 9):
        inside = reward[group == g]
        want = (inside - inside.mean()) / inside.std()
        assert advantage[group == g] == pytest.approx(want, rel=1e-4)
    assert advantage[group == 4] == 0
    assert advantage.dtype == np.float32


def test_equal_rewards_give_no_advantage():
    assert (group_normalised(np.full(4, 0.3), np.zeros(4)) == 0).all()


def naive_loss(logprobs, sampled, advantages, mask, eps):
    total = 0.0
    columns = (field.tolist() for field in (logprobs, sampled, advantages, mask))
    for lp, s, a, m in zip(*columns, strict=True):
        if m:
            ratio = math.exp(lp - s)
            total -= min(ratio * a, min(max(ratio, 1 - eps), 1 + eps) * a)
    return total


def test_loss_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    lp, sampled, advantage = (torch.randn(40, generator=generator).double() for _ in range(3))
    mask = (torch.arange(40) % 3 > 0).double()
    lp.requires_grad_()
    loss = clipped_policy_loss(lp, sampled, advantage, mask, 0.2)
    assert loss.item() == pytest.approx(naive_loss(lp, sampled, advantage, mask, 0.2))
    loss.backward()
    for i in range(40):
        above, below = lp.detach().clone(), lp.detach().clone()
        above[i] += 1e-6
        below[i] -= 1e-6
        slope = (
            naive_loss(above, sampled, advantage, mask, 0.2)
            - naive_loss(below, sampled, advantage, mask, 0.2)
        ) / 2e-6
        assert lp.grad[i].item() == pytest.approx(slope, abs=1e-5)
    assert (lp.grad[mask == 0] == 0).all()


def test_tokens_outside_the_mask_cannot_poison_the_loss():
    lp = torch.tensor([-0.5, -200.0], requires_grad=True)
    sampled, mask = torch.tensor([-0.4, 900.0]), torch.tensor([1.0, 0.0])
    loss = clipped_policy_loss(lp, sampled, torch.tensor([1.0, 0.0]), mask, 0.2)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(lp.grad).all()


def test_agreement():
    sampled = torch.tensor([-1.0, -1.0, -2.0, -0.1, 5.0])
    trainer = torch.tensor([-1.0, -0.2, -1.2, -0.9, -9.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    sums = agreement_sums(trainer, sampled, mask)
    log_ratio = [0.0, 0.8, 0.8, -0.8]
    assert sums["abs_dlogp"].item() == pytest.approx(2.4)
    assert sums["k3_kl"].item() == pytest.approx(sum(math.exp(r) - 1 - r for r in log_ratio))
    assert sums["extreme"].item() == 3  # 0.8 > log 2, on both sides
    assert agreement_sums(trainer, sampled, mask, factor=3.0)["extreme"].item() == 0


def test_direction_matters():
    a, b, mask = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.ones(1)
    assert agreement_sums(a, b, mask)["k3_kl"] != agreement_sums(b, a, mask)["k3_kl"]


@pytest.mark.parametrize("sampled", [-64.0, -95.0, -9999.0, 1e-5])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0, 30.0])
def test_the_loss_and_its_gradient_are_finite_for_every_log_prob(sampled, advantage):
    lp = torch.tensor([-0.5, -200.0, -3e38], requires_grad=True)
    given = torch.tensor([sampled, 0.0, sampled])
    loss = clipped_policy_loss(lp, given, torch.full((3,), advantage), torch.ones(3), 0.2)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(lp.grad).all()
    sums = agreement_sums(lp.detach()[:2], given[:2], torch.ones(2))
    assert all(math.isfinite(value) for value in sums.values())


def test_an_unbounded_ratio_is_not_finite():
    lp = torch.tensor([-0.5], requires_grad=True)
    loss = ((lp + 9999.0).exp() * 0.0).sum()  # what the bound keeps away
    loss.backward()
    assert torch.isnan(loss)
    assert torch.isnan(lp.grad).all()


def test_the_bound_moves_no_ratio_that_training_can_use_and_counts_the_others():
    lp, given = torch.tensor([-1.0, -1.0, -60.0]), torch.tensor([-1.5, -20.9, -1.0])
    mask = torch.ones(3)
    sums = agreement_sums(lp, given, mask)
    assert sums["bounded_ratio"].item() == 1  # 59 is beyond 20, 19.9 is not
    assert sums["abs_dlogp"].item() == pytest.approx(0.5 + 19.9 + 59.0)
    loss = clipped_policy_loss(lp[:2], given[:2], -mask[:2], mask[:2], 0.2)
    assert loss.item() == pytest.approx(math.exp(0.5) + math.exp(19.9), rel=1e-5)


def test_a_trainer_that_computes_nan_is_not_hidden():
    lp = torch.tensor([-0.5, float("nan")])
    given, mask = torch.tensor([-0.5, -0.5]), torch.ones(2)
    assert torch.isnan(clipped_policy_loss(lp, given, mask, mask, 0.2))
