"""What Triton makes of the gate kernels for a Hopper GPU, which compiling does not need."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("triton")

from proof.benchmarks.gate import CASES, Case, code_of, compiled, measure, wrong

LARGEST = Case(1024, 64, "fp32", "i16", "sqrtsoftplus")


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3"])  # all: make bench-gate
def test_the_bytes_are_the_limit_of_a_gpu_and_no_number_leaves_the_registers(name: str) -> None:
    rows = [*measure(Namespace(cases={name: CASES[name]}))]
    assert [row["kernel"] for row in rows] == ["forward", "backward", "counted"]
    assert [wrong(row) for row in rows] == [""] * 3
    for row in rows:
        assert {access.split(".")[0] for access in row["accesses"]} == {"LDG", "STG"}  # no atomics


def test_the_largest_router_compiles_without_spills() -> None:
    from megatron_r3.replay.gate.triton_kernels import gate_backward, gate_choose, gate_forward

    for kernel in (gate_choose, gate_forward, gate_backward):
        assert code_of(*compiled(kernel, LARGEST)).stack == 0


def test_the_check_can_fail() -> None:
    from megatron_r3.replay.gate.triton_kernels import gate_choose

    code = code_of(*compiled(gate_choose, LARGEST, BLOCK_T=4))
    assert code.stack > 0
    row = {**code._asdict(), "most": 1.15}
    row["issue_of_memory"] = 0.1
    assert (
        wrong(row) == f"{code.stack} bytes of stack: the kernel's values do not fit into registers"
    )
    row |= {"stack": 0, "issue_of_memory": 2.0}
    assert wrong(row) == "issue / memory is 2.00; the limit is 1.15"
    row["accesses"] = {"LDG.E": 3}
    assert wrong(row) == "no load or store moves 16 bytes at once"
