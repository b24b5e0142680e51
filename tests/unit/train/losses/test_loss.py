"""Every loss, correction and average against the papers' equations, in float64; and controls.

`proof/fidelity/policy_loss.py` has the equations. No `.float()` lies in the way: the loss keeps the
dtype of its log-probs. (`terms_of`, which makes float32 of Megatron's output, and `agreement_sums`
are not part of it.)

Shape suffixes (docs/glossary.md): B, G, S.
"""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import CORRECTIONS, LOSSES, LaidOut, lay_out, responses

from megatron_r3.train.losses.aggregation import AGGREGATIONS
from megatron_r3.train.losses.correction import CorrectionOptions
from megatron_r3.train.losses.loss import LossOptions, policy_loss, update_of
from megatron_r3.train.losses.penalty import KL_ESTIMATORS, PLACES, PenaltyOptions
from megatron_r3.train.losses.policy_loss import Clip
from megatron_r3.train.losses.terms import LossTerms, Sequences
from proof.fidelity.policy_loss import Expected, Response, expected

TOLERANCE = 1e-6


def error(terms: LossTerms, options: LossOptions, laid: LaidOut, want: Expected) -> float:
    """The largest error of the loss and of its gradient, each relative to its size, or to 1."""
    average = update_of(replace(terms), options).average  # a copy has no graph of an earlier call
    (slope_BS,) = torch.autograd.grad(average.sum, terms.logprobs_BS)
    wanted = np.zeros(slope_BS.numel())
    for place, gradient in zip(laid.places, want.gradients, strict=True):
        wanted[place] = gradient
    # a loss that the two divide by different numbers differs too
    divisor, count = max(average.divisor().item(), 1), max(average.count.item(), 1)
    off = abs(average.sum.item() / count - want.loss) / max(1.0, want.positive)
    wanted /= max(want.divisor, 1)
    wrong = np.abs(slope_BS.numpy().ravel() / divisor - wanted).max(initial=0)
    return float(max(off, wrong / max(1.0, np.abs(wanted).max(initial=0))))


@st.composite
def loss_options(draw: st.DrawFn) -> LossOptions:
    low = draw(st.floats(0.0, 1.2))
    return LossOptions(
        draw(st.sampled_from([*LOSSES])),
        Clip(
            draw(st.floats(1e-4, 1.0)),
            draw(st.floats(1e-4, 2.0)),
            draw(st.none() | st.floats(1.01, 5.0)),
        ),
        draw(st.sampled_from(AGGREGATIONS)),
        draw(st.integers(1, 50)),
        CorrectionOptions(
            draw(st.sampled_from(["none", "tis", "icepop", "mask"])),
            draw(st.sampled_from(["token", "sequence"])),
            low,
            low + draw(st.floats(0.01, 3.0)),
        ),
        PenaltyOptions(
            draw(st.none() | st.floats(0.0, 2.0)),
            draw(st.sampled_from([*KL_ESTIMATORS])),
            draw(st.sampled_from(PLACES)),
        ),
    )


@settings(max_examples=400)
@given(
    options=loss_options(),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    moved=st.sampled_from([0.0, 1e-3, 0.3, 2.0]),
    off=st.sampled_from([0.0, 1e-2, 0.3, 1.0]),
    packed=st.booleans(),
)
def test_the_loss_and_its_gradient_are_those_of_the_papers(
    options: LossOptions, seed: int, lengths: list[int], moved: float, off: float, packed: bool
) -> None:
    rng = np.random.default_rng(seed)
    given = responses(rng, lengths, moved, off)
    laid = lay_out(given, rng, packed)
    assert error(laid.terms, options, laid, expected(given, options)) <= TOLERANCE


COMBINATIONS = [*itertools.product(LOSSES, AGGREGATIONS, CORRECTIONS)]


def combined(loss: str, aggregation: str, correction: str) -> LossOptions:
    return replace(
        LOSSES[loss], aggregation=aggregation, fixed_length=11, correction=CORRECTIONS[correction]
    )


def one_case(off: float = 0.3) -> tuple[list[Response], LaidOut]:
    """Six rollouts whose ratios and weights leave every range; their advantages differ."""
    rng = np.random.default_rng(3)
    made = responses(rng, [5, 1, 7, 3, 6, 4], off=off)
    signs = (1.5, -1.0, 0.7, -0.4, 0.0, -2.0)
    made = [replace(r, advantage=sign) for r, sign in zip(made, signs, strict=True)]
    return made, lay_out(made, rng)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize(("loss", "aggregation", "correction"), COMBINATIONS)
def test_what_megatron_divides_is_the_loss(loss, aggregation, correction, per_token):
    made, laid = one_case()
    options = combined(loss, aggregation, correction)
    want = expected(made, options)
    total, count, report, _ = policy_loss(laid.terms, torch.ones(6), options, per_token)
    assert count.dtype == torch.int32
    assert total.item() / count.item() == pytest.approx(want.loss, rel=TOLERANCE)
    value, number = report["policy loss"].tolist()
    assert value / number == pytest.approx(want.loss, rel=TOLERANCE)
    assert report["reward"].tolist() == [6.0, 6.0]


def shifted_mask(terms: LossTerms, options: LossOptions) -> tuple[LossTerms, LossOptions]:
    return replace(terms, mask_BS=terms.mask_BS.roll(1, -1)), options


def shifted_tokens(terms: LossTerms, options: LossOptions) -> tuple[LossTerms, LossOptions]:
    old_BS, sampled_BS = terms.old_logprobs_BS.roll(1, -1), terms.sampled_logprobs_BS.roll(1, -1)
    return replace(terms, old_logprobs_BS=old_BS, sampled_logprobs_BS=sampled_BS), options


def swapped_policies(terms: LossTerms, options: LossOptions) -> tuple[LossTerms, LossOptions]:
    old_BS, sampled_BS = terms.old_logprobs_BS, terms.sampled_logprobs_BS
    return replace(terms, old_logprobs_BS=sampled_BS, sampled_logprobs_BS=old_BS), options


def mixed_sequences(terms: LossTerms, options: LossOptions) -> tuple[LossTerms, LossOptions]:
    index_BS, number = terms.sequences.index_BS, terms.sequences.num_rollouts
    position_S = torch.arange(index_BS.shape[1])
    mixed_BS = (index_BS + position_S % 2) % number  # every other token is taken for the next one's
    return replace(terms, sequences=Sequences(mixed_BS, number)), options


def wrong_divisor(terms: LossTerms, options: LossOptions) -> tuple[LossTerms, LossOptions]:
    after = AGGREGATIONS[(AGGREGATIONS.index(options.aggregation) + 1) % len(AGGREGATIONS)]
    return terms, replace(options, aggregation=after)


def other_advantages(terms: LossTerms, options: LossOptions) -> tuple[LossTerms, LossOptions]:
    return replace(terms, advantages_BS=terms.advantages_BS.roll(1, 0)), options


def whole_denominator(terms: LossTerms, options: LossOptions) -> tuple[LossTerms, LossOptions]:
    """Masked tokens have no weight, but stay in the average: icepop with the mask's bounds."""
    return terms, replace(options, correction=replace(options.correction, name="icepop"))


CONTROLS = {
    control.__name__: control
    for control in (
        *(shifted_mask, shifted_tokens, swapped_policies, mixed_sequences),
        *(wrong_divisor, other_advantages, whole_denominator),
    )
}


def would_show(loss: str, aggregation: str, correction: str, control: str) -> bool:
    """Whether a combination of names computes what the control spoils."""
    if control == "mixed_sequences":  # only where a sum over a rollout is taken
        return bool(
            {"gspo", "sequence"} & {*re.split("[ -]", f"{loss} {aggregation} {correction}")}
        )
    if control == "whole_denominator":  # only where a token leaves the average
        return correction.startswith("mask")
    return True


@pytest.mark.parametrize(
    ("loss", "aggregation", "correction", "control"),
    [
        (*names, control)
        for names in COMBINATIONS
        for control in CONTROLS
        if would_show(*names, control)
    ],
)
def test_what_is_wrong_shows(loss: str, aggregation: str, correction: str, control: str) -> None:
    made, laid = one_case()
    options = combined(loss, aggregation, correction)
    want = expected(made, options)
    assert error(laid.terms, options, laid, want) <= TOLERANCE
    assert error(*CONTROLS[control](laid.terms, options), laid, want) > 1e-3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_wrong_kl_shows(estimator: str, place: str) -> None:
    made, laid = one_case(off=1.0)
    penalty = PenaltyOptions(0.5, estimator, place)
    options = replace(LOSSES["grpo"], penalty=penalty)
    want = expected(made, options)
    assert error(laid.terms, options, laid, want) <= TOLERANCE
    # the metric is the sum of what a coefficient of 1 adds to the loss
    plain, added = (
        expected(made, replace(options, penalty=PenaltyOptions(kl, estimator))).sum
        for kl in (None, 1.0)
    )
    measured = update_of(laid.terms, options).reference_kl_BS.sum().item()
    assert measured == pytest.approx(added - plain, rel=TOLERANCE)
    shifted_BS = laid.terms.reference_logprobs_BS.roll(1, -1)
    assert error(replace(laid.terms, reference_logprobs_BS=shifted_BS), options, laid, want) > 1e-3
    for other in {*KL_ESTIMATORS} - {estimator}:
        wrong = replace(options, penalty=replace(penalty, kl_estimator=other))
        assert error(laid.terms, wrong, laid, want) > 1e-3
    (elsewhere,) = {*PLACES} - {place}
    wrong = replace(options, penalty=replace(penalty, kl_place=elsewhere))
    assert error(laid.terms, wrong, laid, want) > 1e-3


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_entropy_lowers_the_loss_as_other_terms_of_a_token_raise_it(aggregation: str) -> None:
    made, laid = one_case()
    options = replace(LOSSES["grpo"], aggregation=aggregation, fixed_length=11)
    entropy_BS = torch.rand_like(laid.terms.logprobs_BS).requires_grad_()
    terms = replace(laid.terms, entropy_BS=entropy_BS)
    with_entropy = replace(options, penalty=PenaltyOptions(entropy=0.3))
    total = update_of(terms, with_entropy).average.sum
    want, fall = expected(made, options), torch.zeros_like(entropy_BS)
    for place, share_G in zip(laid.places, want.shares, strict=True):
        fall.view(-1)[place] = torch.from_numpy(0.3 * share_G)
    assert total.item() == pytest.approx(want.sum - (fall * entropy_BS).sum().item(), rel=TOLERANCE)
    torch.testing.assert_close(torch.autograd.grad(total, entropy_BS)[0], -fall)


@pytest.mark.parametrize(
    ("loss", "estimator"),
    [*((loss, None) for loss in LOSSES), *(("grpo", name) for name in KL_ESTIMATORS)],
)
def test_the_derivatives_of_the_papers_are_those_of_their_values(loss, estimator):
    """The reference's own check: a difference quotient, where no gradient is stopped."""
    made, _ = one_case()
    options = replace(LOSSES[loss], aggregation="sequence-mean")
    if estimator is not None:
        options = replace(options, penalty=PenaltyOptions(0.5, estimator))
    want = expected(made, options)
    for number, response in enumerate(made):
        for token in range(len(response.trainer)):
            step = np.zeros(len(response.trainer))
            step[token] = 1e-6
            sums = [
                expected([replace(response, trainer=response.trainer + s)], options).sum
                for s in (step, -step)
            ]
            slope = (sums[0] - sums[1]) / 2e-6
            if loss != "cispo":
                assert want.gradients[number][token] == pytest.approx(slope, abs=1e-6)
            elif response.advantage and not slope:  # clipped, and still it learns
                assert want.gradients[number][token] != 0


@pytest.mark.parametrize("sampled", [-64.0, -95.0, -9999.0, 1e-5])
@pytest.mark.parametrize("old", [-0.4, -80.0])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_loss_and_its_gradient_are_finite_for_every_log_prob(loss, correction, old, sampled):
    options = combined(loss, "sequence-mean", correction)
    options = replace(options, penalty=PenaltyOptions(0.1))
    for advantage in (-1.0, 0.0, 1.0, 30.0):
        logprobs_BS = torch.tensor([[-0.5, -200.0, -3e38]], requires_grad=True)
        terms = LossTerms(
            logprobs_BS,
            torch.tensor([[old, 0.0, old]]),
            torch.tensor([[sampled, 0.0, sampled]]),
            torch.full((1, 3), advantage),
            torch.ones(1, 3),
            Sequences(torch.zeros(1, 3, dtype=torch.int64), 1),
            torch.tensor([[sampled, 0.0, -sampled]]),
        )
        total, count, report, _ = policy_loss(terms, torch.ones(1), options, True)
        total.backward()
        assert count >= 0
        assert torch.isfinite(total)
        assert torch.isfinite(logprobs_BS.grad).all()
        assert all(
            math.isfinite(values[0]) for name, values in report.items() if name != "abs dlogp"
        )


def reads(correction: str, policy: str) -> bool:
    """Whether a loss with a correction computes with the log-probs of a policy.

    Without a correction the sampler's are read as the old policy's alone. A mask weighs no token,
    and a store has no log-prob that is NaN.
    """
    return policy != "sampled_logprobs_BS" or not correction.startswith(("none", "mask"))


@pytest.mark.parametrize(
    ("loss", "aggregation", "correction", "policy"),
    [
        (*names, policy)
        for names in COMBINATIONS
        for policy in ("logprobs_BS", "old_logprobs_BS", "sampled_logprobs_BS")
        if reads(names[2], policy)
    ],
)
def test_a_log_prob_that_is_nan_is_not_hidden(loss, aggregation, correction, policy):
    _, laid = one_case(off=0.0)  # all weights are 1, so that no correction drops a token
    broken_BS = getattr(laid.terms, policy).detach().clone()
    broken_BS.view(-1)[laid.places[2][1]] = math.nan
    terms = replace(laid.terms, **{policy: broken_BS})
    loss_value = update_of(terms, combined(loss, aggregation, correction)).average.sum
    assert torch.isnan(loss_value)


def test_a_collection_of_which_nothing_is_left_has_no_loss() -> None:
    made, laid = one_case()
    nothing = replace(CORRECTIONS["mask token"], low=50.0, high=60.0)
    for aggregation in AGGREGATIONS:
        options = LossOptions(aggregation=aggregation, fixed_length=11, correction=nothing)
        total, count, _, _ = policy_loss(replace(laid.terms), torch.ones(6), options, True)
        (slope_BS,) = torch.autograd.grad(total, laid.terms.logprobs_BS)
        assert (total.item(), count.item(), slope_BS.abs().sum().item()) == (0, 0, 0)
        assert expected(made, options).divisor == 0
