"""The replayed gate without a GPU: the kernel in Triton's interpreter, the reference, arguments.

What the kernel must do is in tests/gpu/test_gate_kernel*.py, which run natively on a CUDA device.

Shape suffixes (docs/glossary.md): E, T.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_cases import call

from megatron_r3.replay.gate import (
    GateInputs,
    GateOptions,
    GateOutput,
    gate_for,
    has_kernel,
    replayed_gate,
    replayed_gate_reference,
    substitute_gate,
)

BODIES = sorted((Path(__file__).parents[3] / "gpu").glob("test_gate_kernel*.py"))
FUNCTIONS: list[dict[str, Any]] = [
    {},
    {"use_pre_softmax": True},
    {"score_function": "sigmoid"},
    {"score_function": "sqrtsoftplus"},
]
T, E, K = 3, 6, 2
LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IDS = torch.tensor([[0, 1], [5, 2], [3, 0]])
ROWS = torch.tensor([True, False, True])


LONG = "most_experts"  # a third of the time


@pytest.mark.parametrize("which", [f"not ({LONG})", pytest.param(LONG, marks=pytest.mark.slow)])
def test_the_kernel_in_the_interpreter(which: str) -> None:
    """In a process of its own: Triton asks for the interpreter when it is imported."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore::RuntimeWarning", "-k", which]
    argv += map(str, BODIES)
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed
    assert int(passed[1]) > 0
    assert "skipped" not in run.stdout


def test_importing_the_package_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from megatron_r3.replay.gate import GateInputs, GateOptions, replayed_gate\n"
        "inputs = GateInputs(torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.uint8))\n"
        "print(replayed_gate(inputs, GateOptions()).probs_TE.sum())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "tensor(2.)", run.stderr


@pytest.mark.parametrize("options", FUNCTIONS, ids=str)
def test_the_reference_against_finite_differences(options: dict[str, Any]) -> None:
    def probs(logits: torch.Tensor) -> torch.Tensor:
        more = {"scaling_factor": 2.5, "live_T": ROWS}
        return call(replayed_gate, logits, IDS, **options, **more).probs_TE

    assert torch.autograd.gradcheck(probs, LOGITS.clone().requires_grad_())


def test_the_reference_is_the_equation_of_the_paper() -> None:
    """Equation 5 of arXiv 2510.11370: g_i = I_i exp(s_i) / sum_j I_j exp(s_j)."""
    out = call(replayed_gate_reference, LOGITS, IDS)
    chosen = torch.tensor([[e in ids for e in range(E)] for ids in IDS.tolist()])
    exponentials = LOGITS.exp() * chosen
    torch.testing.assert_close(out.probs_TE, exponentials / exponentials.sum(1, keepdim=True))
    assert torch.equal(out.routing_map_TE, chosen)


SIGMOID = {"score_function": "sigmoid"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "function": ({"score_function": "relu"}, "score_function: one of softmax, sigmoid, sqrtsoft"),
    "softmax with bias": (
        {"expert_bias_E": torch.zeros(E)},
        "expert_bias_E: must be None for softmax",
    ),
    "bias of another size": (
        {**SIGMOID, "expert_bias_E": torch.zeros(E + 1)},
        r"expert_bias_E: floating-point \[6\], not float32 \[7\]",
    ),
    "bias of integers": (
        {**SIGMOID, "expert_bias_E": torch.zeros(E, dtype=torch.int32)},
        r"expert_bias_E: floating-point \[6\], not int32 \[6\]",
    ),
    "a tensor as factor": ({"scaling_factor": torch.ones(())}, "scaling_factor: a number or None"),
    "logits in 1-d": ({"logits_TE": torch.zeros(6)}, r"logits_TE: .*\[T, E\], not float32 \[6\]"),
    "integer logits": ({"logits_TE": torch.zeros(3, 6).int()}, "logits_TE: .* not int32"),
    "too many experts": ({"logits_TE": torch.zeros(3, 1025)}, "logits_TE: 1 to 1024 .* not 1025"),
    "no experts": ({"logits_TE": torch.zeros(3, 0)}, "logits_TE: 1 to 1024 experts, not 0"),
    "float ids": ({"ids_TK": torch.zeros(3, 2)}, r"ids_TK: \[3, K\] of uint8, .* not float32"),
    "rows of ids": ({"ids_TK": IDS[:2]}, r"ids_TK: \[3, K\] of .*, not int64 \[2, 2\]"),
    "no ids": ({"ids_TK": IDS[:, :0]}, "ids_TK: 1 to 6 ids in each row .of 6 experts., not 0"),
    "K above E": (
        {"ids_TK": torch.zeros(3, 7).int()},
        "ids_TK: 1 to 6 ids in each row .of 6 experts., not 7",
    ),
    "K above 64": (
        {"ids_TK": torch.zeros(3, 65).int(), "logits_TE": torch.zeros(3, 128)},
        "ids_TK: 1 to 64 ids in each row .of 128 experts., not 65",
    ),
    "narrow ids": (
        {"ids_TK": torch.zeros(3, 2).byte(), "logits_TE": torch.zeros(3, 257)},
        "ids_TK: torch.uint8 cannot name all of 257 experts",
    ),
    "live of bytes": ({"live_T": torch.zeros(3).byte()}, r"live_T: bool \[3\], not uint8 \[3\]"),
    "rows of counted": ({"counted_T": ROWS[:2]}, r"counted_T: bool \[3\], not bool \[2\]"),
    "another device": (
        {"ids_TK": IDS.to("meta")},
        "ids_TK: must be on cpu like logits_TE, not on meta",
    ),
}


@pytest.mark.parametrize("gate", ["reference", "kernel"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str, gate: str) -> None:
    change, said = WRONG[name]
    function = replayed_gate_reference
    if gate == "kernel":
        function = pytest.importorskip("megatron_r3.replay.gate.triton").replayed_gate_triton
    given = {"logits_TE": LOGITS.float(), "ids_TK": IDS, **change}
    with pytest.raises(ValueError, match=f"^{said}"):
        call(function, given.pop("logits_TE"), given.pop("ids_TK"), **given)


def test_a_factor_of_zero_is_none_as_in_megatron() -> None:
    inputs = GateInputs(LOGITS, IDS)
    zero, none = (replayed_gate(inputs, GateOptions(scaling_factor=f)) for f in (0.0, None))
    assert torch.equal(zero.probs_TE, none.probs_TE)


def test_a_substitute_is_called_on_every_device_until_its_block_ends() -> None:
    inputs, devices = GateInputs(LOGITS, IDS), (torch.device("cpu"), torch.device("cuda"))
    calls: list[GateInputs] = []

    def counted(inputs: GateInputs, options: GateOptions) -> GateOutput:
        calls.append(inputs)
        return replayed_gate_reference(inputs, options)

    before = [has_kernel(device) for device in devices]
    with substitute_gate(counted):
        assert [gate_for(device) for device in devices] == [counted, counted]
        assert all(has_kernel(device) for device in devices)
        replayed_gate(inputs, GateOptions())
    with pytest.raises(ValueError, match="score_function"), substitute_gate(counted):
        GateOptions("relu")
    assert [has_kernel(device) for device in devices] == before
    replayed_gate(inputs, GateOptions())
    assert calls == [inputs]
