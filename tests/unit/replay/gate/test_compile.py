"""What Triton makes of the gate kernels for a Hopper GPU, which compiling does not need."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
# name -> E, K, dtype of logits, dtype of ids, function, live and counted rows
MODELS: dict[str, tuple[int, int, str, str, str, bool]] = {
    "Qwen3-30B-A3B": (128, 8, "bf16", "u8", "softmax", False),
    "DeepSeek-V3, everything": (256, 8, "fp32", "u8", "sigmoid", True),
    "Kimi-K2, everything": (384, 8, "bf16", "i16", "sigmoid", True),
    "largest": (1024, 64, "fp32", "i16", "sqrtsoftplus", True),
    "largest, no rows": (1024, 64, "fp32", "i16", "sigmoid", False),
}


# bytes of stack, by Triton's version and the model; everything else has none (docs/limits.md)
STACK = {("3.7.1", "largest, no rows"): 480}


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 1, **more: int
) -> Any:
    """For sm_90, pointers and `*_stride_t` divisible by 16 as those of contiguous tensors are."""
    from megatron_r3.replay.gate.triton import COMPILE_OPTIONS

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name == "logits_stride_t"
    }
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {**COMPILE_OPTIONS, "num_warps": num_warps, **more}
    return triton.compile(source, target=target, options=options)


def both(model: tuple[int, int, str, str, str, bool]) -> list[Any]:
    """Forward and backward."""
    from megatron_r3.replay.gate.gate_options import GateOptions
    from megatron_r3.replay.gate.triton import launch_constants
    from megatron_r3.replay.gate.triton_kernels import gate_backward, gate_forward

    num_experts, topk, dtype, ids_dtype, function, rows = model
    _, constants = launch_constants((1000, num_experts), topk, GateOptions(function))
    types = dict.fromkeys(gate_forward.arg_names + gate_backward.arg_names, "i32")
    types |= {name: "*u8" for name in types if name.endswith("_ptr")}
    types |= dict.fromkeys(("logits_ptr", "probs_ptr", "dprobs_ptr", "dlogits_ptr"), f"*{dtype}")
    types |= {"ids_ptr": f"*{ids_dtype}", "used_ptr": f"*{ids_dtype}"}
    types |= {"bias_ptr": "*fp32", "scale": "fp32"}
    last = {"logits_stride_e": 1, "ids_stride_k": 1}
    none = [] if rows else ["live_ptr", "counted_ptr", "used_ptr", "differs_ptr"]
    none += [] if rows and function != "softmax" else ["bias_ptr"]
    block_k = triton.next_power_of_2(topk)
    forward = {**constants, **last, "BLOCK_K": block_k, **dict.fromkeys(none)}
    backward = {**constants, **last, "dprobs_stride_e": 1}
    pairs = ((gate_forward, forward), (gate_backward, backward))
    return [compiled(kernel, types, these) for kernel, these in pairs]


def stack_bytes(kernel: Any, folder: Path) -> int:
    """What did not fit into registers, as ptxas says."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    argv = [str(tool), "-res-usage", str(cubin)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", said))


@pytest.mark.parametrize("name", MODELS)
def test_compiles_for_hopper(name: str, tmp_path: Path) -> None:
    kernels = both(MODELS[name])
    stack = sum(stack_bytes(kernel, tmp_path) for kernel in kernels)
    assert stack == STACK.get((triton.__version__, name), 0)
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert "ld.global.v4.b32" in ptx  # a row, 16 bytes for each lane
        assert not re.search(r"\b(atom|red)\.", ptx)


def test_the_check_for_spills_can_fail(tmp_path: Path) -> None:
    from megatron_r3.replay.gate.triton_kernels import gate_backward

    sizes = {"E": 1024, "K": 64, "BLOCK_T": 2, "W": 32, "FUNCTION": "sigmoid"}
    strides = {"logits_stride_e": 1, "ids_stride_k": 1, "dprobs_stride_e": 1}
    types = dict.fromkeys(gate_backward.arg_names, "i32") | {"scale": "fp32", "ids_ptr": "*i16"}
    types |= dict.fromkeys(("logits_ptr", "dprobs_ptr", "dlogits_ptr"), "*fp32")
    assert stack_bytes(compiled(gate_backward, types, sizes | strides), tmp_path) > 0
