"""The gate kernel's rows: live, counted, padding; strides, sizes, bits; ids that are no expert.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

from typing import Any

import gate_cases
import pytest
import torch
from gate_cases import DEVICE, DTYPES, FUNCTIONS, INTERPRETED, Case, holds, kernel, make, worst

from megatron_r3.replay.gate import GateOutput, replayed_gate_reference

pytestmark = gate_cases.needs_a_way_to_run
BIASED = {"score_function": "sigmoid", "bias": True, "scaling_factor": 2.5}


def same_bits(left: tuple[GateOutput, torch.Tensor], right: tuple[GateOutput, Any]) -> bool:
    pairs = zip((*left[0], left[1]), (*right[0], right[1]), strict=True)
    return all(a is b is None or (a is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_live_rows_take_the_lowest_index_among_equals(dtype: torch.dtype) -> None:
    case = make(20, 40, 6, dtype, live_T=0.6, counted_T=0.8)
    case.logits.round_()  # a few values, many equal
    case.logits[0] = 0.0
    case.logits[0, ::2] *= -1.0  # a zero's sign makes no difference
    case.options["live_T"][0] = True
    out, _ = case.run()
    want, _ = case.run(replayed_gate_reference)
    assert torch.equal(out.ids_TK, want.ids_TK)
    assert torch.equal(out.differs_T, want.differs_T)
    reverse = Case(case.logits.flip(1), case.ids, case.upstream, case.options)
    assert not torch.equal(39 - reverse.run()[0].ids_TK, want.ids_TK)  # equals there were


def test_infinite_and_undefined_logits_are_chosen_as_topk_does() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 7] = torch.nan
    logits[1, 7] = -torch.nan
    logits[2, 7] = torch.inf
    logits[3, 1:] = -torch.inf  # fewer experts than K are left
    ids = torch.zeros(4, 3, dtype=torch.uint8, device=DEVICE)
    used_TK = kernel(logits, ids, live_T=torch.ones(4, dtype=torch.bool, device=DEVICE)).ids_TK
    assert used_TK[:3].tolist() == logits[:3].topk(3, dim=1).indices.tolist()
    assert used_TK[3].tolist() == [0, 1, 2]


def test_given_ids_are_not_changed() -> None:
    case = make(20, 40, 6, live_T=0.5)
    before = case.ids.clone()
    assert case.run()[0].ids_TK.dtype == case.ids.dtype
    assert torch.equal(case.ids, before)
    case.options.pop("live_T")
    assert case.run()[0].ids_TK is case.ids


def test_a_counted_row_differs_where_the_sets_do() -> None:
    case = make(40, 40, 6, counted_T=0.7)
    best_TK = case.logits.topk(6, dim=1).indices
    case.ids[::2] = best_TK[::2].flip(1).to(case.ids.dtype)  # the same set, in another order
    case.ids[4, 0] = case.logits[4].topk(7).indices[6]  # the last of the set is another
    differs_T = case.run()[0].differs_T
    sets = zip(case.ids.tolist(), best_TK.tolist(), strict=True)
    other_T = torch.tensor([set(given) != set(live) for given, live in sets], device=DEVICE)
    assert 0 < other_T.sum() < 40
    assert torch.equal(differs_T, other_T & case.options["counted_T"])


def test_experts_with_equal_scores_are_the_same_set() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0]] * 3, device=DEVICE)
    ids = torch.tensor([[0, 1], [0, 2], [0, 3]], device=DEVICE)
    counted = torch.ones(3, dtype=torch.bool, device=DEVICE)
    differs = kernel(logits, ids, counted_T=counted).differs_T
    assert differs.tolist() == [False, False, True]


each_function = pytest.mark.parametrize(
    "function", [*FUNCTIONS.values(), BIASED], ids=[*FUNCTIONS, "biased"]
)


@each_function
def test_what_top_k_takes_never_differs(function: dict[str, Any]) -> None:
    """A score has the same bits in a tile of whole rows and in one of the taken experts."""
    case = make(17 if INTERPRETED else 5000, 50, 5, live_T=1.0, counted_T=1.0, **function)
    out, _ = case.run()
    assert not out.differs_T.any()
    given = {**case.options, "live_T": None}
    assert not Case(case.logits, out.ids_TK, case.upstream, given).run()[0].differs_T.any()
    assert Case(case.logits, case.ids, case.upstream, given).run()[0].differs_T.all()


@each_function
def test_an_undefined_logit_shows_in_all_weights_of_its_row(function: dict[str, Any]) -> None:
    case = make(3, 40, 6, **function)
    case.logits[1, case.ids[1, 2]] = torch.nan
    out, _ = case.run()
    probs_TK = out.probs_TE.gather(1, case.ids.long())
    assert probs_TK.isnan().all(1).tolist() == [False, True, False]
    assert probs_TK.isnan().any(1).tolist() == [False, True, False]


@each_function
@pytest.mark.parametrize("shape", [(17, 128, 8), (257, 8, 2), (5, 512, 22)])  # three programs
def test_a_recompute_has_the_bits_of_its_forward_pass(function, shape):
    """The forward pass chooses and counts; its recompute is given what was chosen."""
    case = make(*shape, live_T=0.4, counted_T=0.5, **function)
    first = case.run()
    assert not torch.equal(first[0].ids_TK, case.ids)
    options = {**case.options, "live_T": None, "counted_T": None}
    again = Case(case.logits, first[0].ids_TK, case.upstream, options).run()
    assert same_bits((first[0]._replace(differs_T=None), first[1]), again)
    case.options["live_T"] = ~case.options["live_T"]
    assert not torch.equal(case.run()[0].probs_TE, again[0].probs_TE)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Padding rows, which share a program with real ones, change nothing; their gradient is 0."""
    case = make(37, 128, 8, **BIASED)
    case.upstream[30:] = 0
    out, gradient = case.run()
    alone = Case(case.logits[:30], case.ids[:30], case.upstream[:30], case.options).run()
    few = GateOutput(out.probs_TE[:30], out.routing_map_TE[:30], out.ids_TK[:30], None)
    assert same_bits((few, gradient[:30]), alone)
    assert not gradient[30:].any()


def test_strides_change_nothing() -> None:
    case = make(20, 40, 6, live_T=0.3, counted_T=0.7, **BIASED)

    def spaced(tensor: torch.Tensor) -> torch.Tensor:
        """Every second element of every third row, transposed in memory."""
        room = tensor.new_zeros(2 * tensor.shape[1], 3 * tensor.shape[0]).t()[::3, ::2]
        room.copy_(tensor)
        assert not room.is_contiguous()
        return room

    options = dict(case.options)
    for name in ("live_T", "counted_T", "expert_bias_E"):
        options[name] = options[name].repeat_interleave(2)[::2]
    other = Case(spaced(case.logits), spaced(case.ids), spaced(case.upstream), options)
    assert same_bits(case.run(), other.run())


def test_a_gradient_without_strides() -> None:
    case = make(20, 40, 6, **BIASED)
    one = torch.ones((), device=DEVICE)
    expanded = Case(case.logits, case.ids, one.expand(20, 40), case.options)
    full = Case(case.logits, case.ids, torch.ones(20, 40, device=DEVICE), case.options)
    assert same_bits(expanded.run(), full.run())


def test_no_tokens() -> None:
    case = make(0, 40, 6, live_T=0.5, counted_T=0.5, **BIASED)
    out, gradient = case.run()
    assert out.probs_TE.shape == (0, 40)
    assert gradient.shape == (0, 40)
    assert out.ids_TK.shape == (0, 6)
    assert out.differs_T.shape == (0,)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_twice_is_the_same_to_the_bit(name: str) -> None:
    case = make(17, 64, 8, live_T=0.3, counted_T=0.7, **FUNCTIONS[name])
    first = case.run()
    assert same_bits(first, case.run())
    moved = case.logits.clone()
    moved[0, first[0].ids_TK[0, 0].long()] *= 1 + 1e-5
    assert not same_bits(first, Case(moved, case.ids, case.upstream, case.options).run())


@pytest.mark.parametrize("wrong", [-1, -(2**40), 40, 45, 63, 64, 2**31, 2**40])
def test_ids_that_are_no_expert_touch_nothing_else(wrong: int) -> None:
    case = make(20, 40, 6, ids_dtype=torch.int64, **BIASED)
    right_out, right_gradient = case.run()
    case.ids[7, 2] = wrong
    out, gradient = case.run()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(out.probs_TE[others], right_out.probs_TE[others])
    assert torch.equal(gradient[others], right_gradient[others])
    assert torch.equal(out.routing_map_TE[others], right_out.routing_map_TE[others])
    assert out.routing_map_TE[7].sum() == 5


def test_without_a_gradient_for_the_probabilities() -> None:
    case = make(5, 8, 2)
    logits = case.logits.requires_grad_()
    (kernel(logits, case.ids).probs_TE.detach().sum() + logits.sum()).backward()
    assert torch.equal(logits.grad, torch.ones_like(logits))
    with torch.no_grad():
        assert not kernel(logits, case.ids).probs_TE.requires_grad


def test_logits_of_float64_are_refused() -> None:
    case = make(5, 8, 2, torch.float64)
    with pytest.raises(ValueError, match="logits_TE: bfloat16, float16 or float32"):
        kernel(case.logits, case.ids)
    assert holds(worst(case, case.run(replayed_gate_reference)))
