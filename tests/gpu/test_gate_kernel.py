"""The gate kernel against the float64 reference: every option, forward and backward.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

from typing import Any

import gate_cases
import pytest
import torch
from gate_cases import (
    DEVICE,
    DTYPES,
    FUNCTIONS,
    INTERPRETED,
    Case,
    call,
    holds,
    kernel,
    make,
    worst,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_r3.replay.gate import replayed_gate_reference

pytestmark = gate_cases.needs_a_way_to_run
ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def all_of(name: str) -> dict[str, Any]:
    """Options of a score function with everything that can be added to it."""
    bias = {"bias": True} if name.startswith("s") and name != "softmax" else {}
    return {**FUNCTIONS[name], **bias, "scaling_factor": 2.5, "live_T": 0.3, "counted_T": 0.7}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(33, 50, 5), (257, 8, 2)])  # each in three programs
def test_equals_the_reference(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    case = make(*shape, dtype, **all_of(name))
    result = worst(case, case.run())
    assert holds(result), result


@settings(
    max_examples=40 if INTERPRETED else 15,  # natively each shape is compiled
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_equals_the_reference_for_any_shape(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 140), label="E")
    name = data.draw(st.sampled_from(sorted(FUNCTIONS)), label="function")
    more = {
        key: value
        for key, value in all_of(name).items()
        if key in FUNCTIONS[name] or data.draw(st.booleans(), label=key)
    }
    case = make(
        data.draw(st.integers(0, 20), label="T"),
        num_experts,
        data.draw(st.integers(1, min(num_experts, 9)), label="K"),
        data.draw(st.sampled_from(DTYPES), label="dtype"),
        data.draw(st.sampled_from(ID_DTYPES), label="ids"),
        data.draw(st.sampled_from((0.1, 3.0, 8.0)), label="spread"),
        data.draw(st.integers(0, 1000), label="seed"),
        **more,
    )
    result = worst(case, case.run())
    assert holds(result), result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_most_experts(name: str) -> None:
    case = make(3, 1024, 64, **all_of(name))
    result = worst(case, case.run())
    assert holds(result), result


@pytest.mark.parametrize("wrong", ["id", "rows", "scale", "gradient", "live", "bias in weights"])
def test_the_comparison_can_fail(wrong: str) -> None:
    case = make(17, 50, 5, **all_of("sigmoid"))
    out, gradient = case.run()
    options = dict(case.options)
    if wrong == "id":
        ids = case.ids.clone()
        row = int((~options["live_T"]).nonzero()[0])
        ids[row, 0] = next(e for e in range(50) if e not in ids[row].tolist())
        got = Case(case.logits, ids, case.upstream, options).run()
    elif wrong == "rows":
        swapped = [1, 0, *range(2, 17)]
        got = (out._replace(probs_TE=out.probs_TE[swapped]), gradient)
    elif wrong == "scale":
        options["scaling_factor"] = None
        got = Case(case.logits, case.ids, case.upstream, options).run()
    elif wrong == "gradient":
        got = (out, gradient * (1 + 1e-4))
    elif wrong == "live":
        options["live_T"] = None
        got = Case(case.logits, case.ids, case.upstream, options).run()
    else:
        got = Case(case.logits + options["expert_bias_E"], case.ids, case.upstream, options).run()
    assert not holds(worst(case, got))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_is_the_slope_of_the_reference(name: str) -> None:
    case = make(2, 7, 3, spread=1.0, **FUNCTIONS[name], scaling_factor=2.5)
    _, gradient = case.run()
    logits, step = case.logits.double(), 1e-6

    def loss(moved: torch.Tensor) -> float:
        probs = call(replayed_gate_reference, moved, case.ids, **case.options).probs_TE
        return (probs * case.upstream.double()).sum().item()

    for row in range(2):
        for expert in range(7):
            moved = torch.zeros_like(logits)
            moved[row, expert] = step
            slope = (loss(logits + moved) - loss(logits - moved)) / (2 * step)
            # float64 rounding by the step, and float32's of the kernel
            assert gradient[row, expert].item() == pytest.approx(slope, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_experts_that_topk_would_drop_get_weight_and_gradient(name: str) -> None:
    case = make(8, 64, 4, **FUNCTIONS[name])
    ids = case.logits.argsort(dim=1)[:, :4]  # the worst
    ids[0, 0] = 5
    ids[0, 1:] = torch.tensor([1, 2, 3], device=DEVICE)
    case.logits[0, 5] = -40.0  # e^-40 of a weight
    case = Case(case.logits, ids.to(torch.uint8), case.upstream, case.options)
    out, gradient = case.run()
    assert out.probs_TE.gather(1, ids).min() > 0
    assert gradient.gather(1, ids).abs().min() > 0
    assert holds(worst(case, (out, gradient)))


def test_far_below_zero_the_gradient_of_sqrtsoftplus_is_finite() -> None:
    case = make(4, 8, 2, **FUNCTIONS["sqrtsoftplus"])
    case = Case(case.logits - 150, case.ids, case.upstream, case.options)
    assert torch.isfinite(case.run()[1]).all()
    assert not torch.isfinite(case.run(replayed_gate_reference)[1]).all()


def test_nothing_but_the_logits_and_ids_is_kept() -> None:
    case = make(8, 64, 4, **all_of("sigmoid"))
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    logits = case.logits.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = kernel(logits, case.ids, **case.options)
    assert set(kept) == {logits.data_ptr(), out.ids_TK.data_ptr()}
