"""Each loss by itself: its ratio, what is clipped, and the table of losses.

Shape suffixes (docs/glossary.md): B, S.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron_r3.train.losses.policy_loss import (
    LOSSES,
    Clip,
    Gain,
    LossError,
    clipped_sums,
    gain_of,
    policy_loss_named,
)
from megatron_r3.train.losses.terms import LossTerms, Sequences


def terms_of(log_ratio: list[float], advantage: list[float]) -> LossTerms:
    """Tokens of one rollout, float64."""
    new_BS = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    zero_BS = torch.zeros_like(new_BS).detach()
    advantages_BS = torch.tensor([advantage], dtype=torch.float64)
    sequences = Sequences(torch.zeros(1, len(log_ratio), dtype=torch.int64), 1)
    return LossTerms(new_BS, zero_BS, zero_BS, advantages_BS, torch.ones_like(zero_BS), sequences)


def test_grpo_by_hand() -> None:
    ratios = [1.5, 1.5, 0.5, 0.5, 4.0, 1.1]
    terms = terms_of([math.log(r) for r in ratios], [1.0, -1.0, 1.0, -1.0, -1.0, 2.0])
    gain = LOSSES["grpo"](terms, Clip(0.2, 0.28, 3.0))
    assert gain.value_BS[0].tolist() == pytest.approx([1.28, -1.5, 0.5, -0.8, -3.0, 2.2])
    (slope_BS,) = torch.autograd.grad(gain.value_BS.sum(), terms.logprobs_BS)
    assert slope_BS[0].tolist() == pytest.approx([0, -1.5, 0.5, 0, 0, 2.2])
    assert gain.ratio_BS[0].tolist() == pytest.approx(ratios)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_has_the_gradient_of_the_ratio_of_the_whole_sequence(advantage: float) -> None:
    """GSPO's own equation 5, where autograd goes through the mean; ours is that of each token."""
    log_ratio = [0.1, 0.3, -0.2]
    terms = terms_of(log_ratio, [advantage] * 3)
    gain = LOSSES["gspo"](terms, Clip(0.2, 0.2))
    (slope_BS,) = torch.autograd.grad(gain.value_BS.mean(), terms.logprobs_BS)
    given_BS = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    whole = given_BS.mean().exp() * advantage
    whole.backward()
    assert gain.value_BS[0].tolist() == pytest.approx([whole.item()] * 3)
    assert slope_BS[0].tolist() == pytest.approx(given_BS.grad[0].tolist())


def test_without_a_lower_bound_cispo_keeps_the_smallest_weight() -> None:
    terms = terms_of([math.log(1e-6), math.log(3.0)], [1.0, 1.0])
    gain = LOSSES["cispo"](terms, Clip(1.0, 0.2))
    assert gain.value_BS[0].tolist() == pytest.approx([1e-6, 1.2])
    bounded = LOSSES["cispo"](terms, Clip(0.2, 0.2))
    assert bounded.value_BS[0].tolist() == pytest.approx([0.8, 1.2])
    shares = clipped_sums(gain, terms, Clip(1.0, 0.2))
    assert (shares["clip_low"], shares["clip_high"]) == (0, 1)


@pytest.mark.parametrize(("loss", "low", "high"), [("grpo", 1, 1), ("cispo", 2, 3)])
def test_which_tokens_count_as_clipped(loss: str, low: int, high: int) -> None:
    """For grpo those without a gradient, for cispo every clipped weight."""
    ratios = [1.5, 1.5, 0.5, 0.5, 1.0, 1.5]
    terms = terms_of([math.log(r) for r in ratios], [1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    clip = Clip(0.2, 0.28)
    shares = clipped_sums(LOSSES[loss](terms, clip), terms, clip)
    found = {name: share.item() for name, share in shares.items()}
    assert found == {"clip_low": low, "clip_high": high, "clippable": 6}
    terms.mask_BS[0, 0] = 0.0
    shares = clipped_sums(LOSSES[loss](terms, clip), terms, clip)
    assert (shares["clip_high"], shares["clippable"]) == (high - 1, 5)


def test_a_loss_that_does_not_tell_what_it_clips_has_no_clip_fractions() -> None:
    terms = terms_of([1.0], [1.0])
    ratio_BS = terms.log_ratio_BS.exp()
    assert clipped_sums(Gain(ratio_BS, ratio_BS), terms, Clip()) == {}
    assert clipped_sums(Gain(ratio_BS, ratio_BS, "weight"), terms, Clip())["clip_high"] == 1


def test_a_loss_of_the_users_own_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_r3.train.losses.policy_loss.LOSSES", table := dict(LOSSES))

    @policy_loss_named("reinforce")
    def reinforce(terms: LossTerms, clip: Clip) -> Gain:
        return Gain(terms.advantages_BS * terms.logprobs_BS, terms.log_ratio_BS.exp())

    assert table["reinforce"] is reinforce
    policy_loss_named("reinforce")(reinforce)  # the same function again is no second loss


@pytest.mark.parametrize("name", LOSSES)
def test_two_losses_of_one_name_are_refused(name: str) -> None:
    before = LOSSES[name]
    with pytest.raises(ValueError, match=f"two policy losses are named '{name}': give yours"):
        policy_loss_named(name)(lambda terms, clip: Gain(terms.mask_BS, terms.mask_BS))
    assert LOSSES[name] is before


def of_one_token(terms: LossTerms) -> Gain:
    return Gain(terms.advantages_BS[:, :1] * terms.logprobs_BS[:, :1], terms.log_ratio_BS)


def raising(terms: LossTerms) -> Gain:
    raise KeyError("x")


WRONG: dict[str, tuple[Callable[[LossTerms], object], str]] = {
    "nothing": (lambda terms: None, "it must return a Gain of megatron_r3: it returned NoneType"),
    "tensor": (lambda terms: terms.logprobs_BS, "it returned Tensor"),
    "number": (lambda terms: Gain(0.0, terms.log_ratio_BS), "its value_BS is float, not a tensor"),
    "column": (
        of_one_token,
        r"its value_BS has the shape \[1, 1\], not \[1, 3\], the shape of terms",
    ),
    "row": (
        lambda terms: Gain(terms.logprobs_BS.sum(0), terms.log_ratio_BS),
        r"its value_BS has the shape \[3\], not \[1, 3\]",
    ),
    "ratio": (
        lambda terms: Gain(terms.logprobs_BS, terms.log_ratio_BS.mean()),
        r"its ratio_BS has the shape \[\], not \[1, 3\]",
    ),
    "detached": (
        lambda terms: Gain(terms.logprobs_BS.detach(), terms.log_ratio_BS),
        r"its value_BS has no gradient, .*without detach\(\)",
    ),
    "raising": (raising, r"KeyError in .*test_policy_loss.py, line \d+: 'x'"),
    "broken": (
        lambda terms: Gain(terms.logprobs_BS[:, ::2] + terms.logprobs_BS, terms.log_ratio_BS),
        r"RuntimeError in .*test_policy_loss.py, line \d+: The size of tensor a",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_of_the_users_own_that_cannot_be_trained_with(monkeypatch, name):
    loss, message = WRONG[name]
    terms = terms_of([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])
    monkeypatch.setitem(LOSSES, name, lambda terms, clip: loss(terms))  # type: ignore[return-value]
    with pytest.raises(LossError, match=f"--rollouts-loss {name} of the module .*: {message}"):
        gain_of(name, terms, Clip())


def test_the_gain_of_a_loss_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = terms_of([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])
    gains = [Gain(terms.logprobs_BS, terms.log_ratio_BS), of_one_token(terms)]
    monkeypatch.setitem(LOSSES, "once", lambda terms, clip: gains[0])
    assert gain_of("once", terms, Clip()) is gains.pop(0)
    assert gain_of("once", terms, Clip()) is gains[0]
    with torch.no_grad():  # what has no gradient to give is no mistake of the loss
        monkeypatch.setitem(LOSSES, "still", lambda terms, clip: LOSSES["grpo"](terms, clip))
        given = replace(terms, logprobs_BS=terms.logprobs_BS.detach())
        assert not gain_of("still", given, Clip()).value_BS.requires_grad
