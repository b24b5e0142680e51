"""What the driver of a GPU is given when a gate kernel is launched; Triton compiles for Hopper.

Only the driver is a stand-in, which keeps what it is given. Triton and the launches are the real
ones.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron_r3.replay.gate import GateInputs, GateOptions, GateOutput
from megatron_r3.replay.gate import triton as gate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its driver is not put aside")

E, K = 16, 2
OPTIONS = GateOptions("sigmoid", scaling_factor=2.5)
# Where these stand in what Triton calls a launcher with.
GRID, FUNCTION, HOOKS, FIRST_ARGUMENT = slice(0, 3), 4, 6, 9


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What the driver was given, a tuple for each launch."""
    given: list[tuple[Any, ...]] = []
    loaded: list[str] = []

    def load(name: str, *_: Any) -> tuple[int, int, int, int, int]:
        loaded.append(name)
        return 1, len(loaded), 0, 0, 1024  # the function's handle is its number

    utils = SimpleNamespace(
        load_binary=load,
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 2**20},
    )
    gpu = SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: lambda *arguments: given.append(arguments),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(gate, "_compiled", {})
    monkeypatch.setattr(driver, "_active", gpu)
    for kernel in (gate.gate_choose, gate.gate_forward, gate.gate_backward):
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    yield given
    gate._compiled.clear()  # a kernel that goes asks the driver to unload it
    for kernel in (gate.gate_choose, gate.gate_forward, gate.gate_backward):
        kernel.device_caches.clear()


def inputs(num_tokens: int, shift: int = 0, **others: Tensor) -> GateInputs:
    """Logits that begin at a multiple of 16 bytes, plus `shift` elements."""
    room = torch.randn(num_tokens * E + 8)
    logits_TE = room[shift : shift + num_tokens * E].view(num_tokens, E).requires_grad_()
    ids_TK = torch.zeros(num_tokens, K, dtype=torch.uint8)
    return GateInputs(logits_TE, ids_TK, **others)


def run(given: GateInputs, options: GateOptions = OPTIONS) -> GateOutput:
    out = gate.replayed_gate_triton(given, options)
    out.probs_TE.sum().backward()
    return out


def described(launch: tuple[Any, ...]) -> list[Any]:
    """A launch without its hooks, and with the kind of each tensor in the tensor's place."""
    arguments = (*launch[:HOOKS], *launch[FIRST_ARGUMENT:])
    return [
        (x.dtype, x.shape, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in arguments
    ]


def test_a_later_launch_gives_the_driver_what_the_first_one_did(launches: list[Any]) -> None:
    mask_T, bias_E = torch.ones(5, dtype=torch.bool), torch.zeros(E)
    kinds = [
        {},
        {"live_T": mask_T},
        {"live_T": mask_T, "counted_T": mask_T, "expert_bias_E": bias_E},
    ]
    for kind in kinds:
        launches.clear()
        given = inputs(5, **kind)
        run(given)
        first = [*launches]
        run(given)
        assert len(first) == (3 if kind else 2)  # choose, forward, backward
        assert [*map(described, launches[len(first) :])] == [*map(described, first)]
        for before, after in zip(first, launches[len(first) :], strict=True):
            assert after[FIRST_ARGUMENT].data_ptr() == given.logits_TE.data_ptr()
            assert before[FIRST_ARGUMENT].data_ptr() == given.logits_TE.data_ptr()
    assert len(gate._compiled) == 2 + 1 + 1  # the forward and the backward kernel are shared


def test_what_a_kernel_is_compiled_for_is_compiled_anew(launches: list[Any]) -> None:
    given = inputs(5)
    elsewhere = [torch.empty_like(t.detach(), device="meta") for t in given[:2]]
    elsewhere[0].requires_grad_()
    softmax, half = GateOptions("softmax"), given.logits_TE.detach().half().requires_grad_()
    kinds = [  # each with the functions that it launches
        (given, OPTIONS, [1, 2]),
        (inputs(129), OPTIONS, [1, 2]),  # another number of tokens is another grid
        (inputs(5, shift=1), OPTIONS, [3, 4]),
        (given, softmax, [5, 6]),
        (given._replace(ids_TK=given.ids_TK[:, :1].contiguous()), OPTIONS, [7, 8]),
        (given._replace(ids_TK=given.ids_TK.short()), OPTIONS, [9, 10]),
        (given._replace(logits_TE=half), OPTIONS, [11, 12]),
    ]
    for kind, options, functions in kinds:
        run(kind, options)
        launches.clear()
        run(kind, options)
        assert [launch[FUNCTION] for launch in launches] == functions
        num_programs = 3 if len(kind.logits_TE) == 129 else 1
        assert [launch[GRID] for launch in launches] == [(num_programs, 1, 1)] * 2
    assert len(gate._compiled) == 12
    run(GateInputs(*elsewhere))
    assert len(gate._compiled) == 14  # another device


def test_logits_with_strides_are_copied(launches: list[Any]) -> None:
    room = torch.randn(5, 2 * E)
    logits_TE, ids_TK = room[:, ::2].requires_grad_(), torch.zeros(K, 5, dtype=torch.uint8).t()
    out = run(GateInputs(logits_TE, ids_TK))
    forward, backward = launches
    for launch in (forward, backward):
        given_TE, given_ids_TK = launch[FIRST_ARGUMENT : FIRST_ARGUMENT + 2]
        assert given_TE.is_contiguous()
        assert torch.equal(given_TE, logits_TE)
        assert given_ids_TK.is_contiguous()
    assert out.ids_TK is ids_TK
    expanded_TE = backward[FIRST_ARGUMENT + 2]  # the gradient of a sum: its strides are 0
    assert expanded_TE.is_contiguous()
    assert torch.equal(expanded_TE, torch.ones(5, E))


def test_a_second_derivative_is_refused(launches: list[Any]) -> None:
    given = inputs(5)
    probs_TE = gate.replayed_gate_triton(given, OPTIONS).probs_TE
    (dlogits_TE,) = torch.autograd.grad((probs_TE**2).sum(), given.logits_TE, create_graph=True)
    assert len(launches) == 2  # the gradient itself is computed
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (dlogits_TE + given.logits_TE).sum().backward()
