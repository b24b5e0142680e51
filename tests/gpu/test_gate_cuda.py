"""On a CUDA device: the gate kernel never makes the host wait, and goes into a CUDA graph.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gate_cases import Case, call, holds, make, worst

from megatron_r3.replay.gate import has_kernel, replayed_gate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def case() -> Case:
    """Everything at once, with the shape of DeepSeek-V3."""
    options = {"score_function": "sigmoid", "scaling_factor": 2.5, "bias": True}
    return make(5000, 256, 8, torch.bfloat16, live_T=0.1, counted_T=0.5, **options)


@pytest.fixture
def waiting_is_an_error(case: Case) -> Iterator[None]:
    case.run()  # compiling waits
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_public_function_runs_the_kernel(case: Case) -> None:
    assert has_kernel(case.logits.device)
    out = call(replayed_gate, case.logits, case.ids, **case.options)
    assert torch.equal(out.probs_TE, case.run()[0].probs_TE)


def test_many_rows_equal_the_reference(case: Case) -> None:
    assert holds(worst(case, case.run()))


def test_many_rows_twice_are_the_same_to_the_bit(case: Case) -> None:
    (first, gradient), (second, again) = case.run(), case.run()
    assert torch.equal(first.probs_TE, second.probs_TE)
    assert torch.equal(first.ids_TK, second.ids_TK)
    assert torch.equal(gradient, again)


def test_the_kernel_does_not_wait(case: Case, waiting_is_an_error: None) -> None:
    case.run()


def test_a_graph_replays_other_logits_and_ids(case: Case) -> None:
    for _ in range(3):
        case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradient = case.run()
    other = make(5000, 256, 8, torch.bfloat16, seed=1)
    case.logits.copy_(other.logits)
    case.ids.copy_(other.ids)
    graph.replay()
    torch.cuda.synchronize()
    want, want_gradient = case.run()
    assert torch.equal(out.probs_TE, want.probs_TE)
    assert torch.equal(gradient, want_gradient)
