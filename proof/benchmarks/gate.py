"""`make bench-gate`: the machine code of the gate's kernels; no GPU is needed.

    python -m proof.benchmarks.gate --out build/bench/gate.json [--only TEXT]

Each kernel is compiled for a Hopper GPU (sm_90) as it is compiled at run time, for the shapes of
models, and its machine code is read. For one SM of an H100 two durations are worked out: "issue",
in which the SM issues the instructions of a row, four a clock, and "memory", in which the SM's
share of the bandwidth moves the row's bytes. Where "issue / memory" is below 1, the bytes are the
limit. Nothing here is a measured time.

Of the bytes of a row, gathered logits count in whole sectors of 32 bytes: as many sectors as K
random experts are expected to touch. Ids, results and rows that are read whole count as they are.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_r3.replay.gate.gate_options import GateOptions
from proof.benchmarks.bench import Bench, Row, number, text

# What is assumed of an H100: 3.0 TB/s of memory (its data sheet has 3.35), which 132 SMs share, at
# 1.755 GHz.
BYTES_PER_CLOCK = 3.0e12 / 132 / 1.755e9
INSTRUCTIONS_PER_CLOCK = 4
SECTOR = 32
MEMORY = ("LDG", "STG", "ATOM", "ATOMG", "RED", "REDG")  # instructions that use global memory
MOST = 0.35  # the limit of "issue / memory"
# The limit for a pass that counts mismatches; a sigmoid router works out every score of a row.
MOST_COUNTED = {"softmax": 0.55, "sigmoid": 0.7}


class Case(NamedTuple):
    """A model's router: E, K, the dtypes of logits and ids, and the score function."""

    num_experts: int
    topk: int
    logits: str
    ids: str
    function: str


CASES = {
    "Qwen3-30B-A3B": Case(128, 8, "bf16", "u8", "softmax"),
    "Qwen3-30B-A3B, fp32": Case(128, 8, "fp32", "u8", "softmax"),
    "DeepSeek-V3": Case(256, 8, "fp32", "u8", "sigmoid"),
    "DeepSeek-V3, bf16": Case(256, 8, "bf16", "u8", "sigmoid"),
    "Kimi-K2": Case(384, 8, "bf16", "i16", "sigmoid"),
    "Nemotron-3, K 22": Case(512, 22, "bf16", "i16", "sigmoid"),
    "gpt-oss": Case(128, 4, "bf16", "u8", "softmax"),
    "Mixtral": Case(8, 2, "bf16", "u8", "softmax"),
    "Mixtral, fp32": Case(8, 2, "fp32", "u8", "softmax"),
}


class Code(NamedTuple):
    """A kernel's machine code.

    Attributes:
        rows: how many rows one program of the kernel, which is one warp, works on.
        registers: how many registers a thread has.
        stack: bytes of a thread that do not fit into registers.
        instructions: how many instructions a warp runs.
        accesses: how many instructions use global memory, by the instructions' names.
    """

    rows: int
    registers: int
    stack: int
    instructions: int
    accesses: dict[str, int]


def compiled(
    kernel: Any, case: Case, absent: tuple[str, ...] = (), **others: int
) -> tuple[Any, int]:
    """Compile a kernel for sm_90; return it, and the number of rows of one of its programs.

    Pointers are taken to be divisible by 16, as those of new tensors are.

    Args:
        absent: the names of pointers that are None.
        others: constants that replace those of the kernel's launch.
    """
    import triton

    from megatron_r3.replay.gate.triton import COMPILE_OPTIONS, launch_constants

    options = GateOptions(case.function)
    constants = launch_constants(case.num_experts, case.topk, options)._asdict()
    del constants["scale"]  # the kernels are not compiled for the scale
    types = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "bias_ptr": "*fp32"}
    types |= {name: "*u8" for name in types if name.endswith("_ptr") and name != "bias_ptr"}
    types |= dict.fromkeys(
        ("logits_ptr", "probs_ptr", "dprobs_ptr", "dlogits_ptr"), f"*{case.logits}"
    )
    types |= dict.fromkeys(("ids_ptr", "used_ptr"), f"*{case.ids}")
    constants |= dict.fromkeys(absent) | others
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={**COMPILE_OPTIONS, "num_warps": 1})
    return made, constants["BLOCK_T"]


def code_of(made: Any, rows: int) -> Code:
    """The machine code of a compiled kernel, read by NVIDIA's tools, which come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _said(tools / "cuobjdump", "-res-usage", file.name)
        listing = _said(tools / "nvdisasm", "-c", file.name)
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)", listing, re.M)
    # the code ends with padding: a branch to itself, and NOPs
    names = [name for name in lines if not name.startswith(("NOP", "BRA"))]
    return Code(
        rows,
        int(re.findall(r"REG:(\d+)", usage)[0]),
        sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        len(names),
        dict(sorted(Counter(n for n in names if n.split(".")[0] in MEMORY).items())),
    )


def _said(*argv: str | Path) -> str:
    return subprocess.run([*map(str, argv)], capture_output=True, text=True, check=True).stdout


def row_bytes(case: Case, kernel: str) -> float:
    """How many bytes a kernel moves for a row, as this file's docstring says."""
    size, ids = {"bf16": 2, "fp32": 4}[case.logits], case.topk * {"u8": 1, "i16": 2}[case.ids]
    row = case.num_experts * size
    sectors = row / SECTOR
    # Each of K experts misses a sector with a chance of 1 - 1 / sectors.
    touched = row if sectors <= 1 else SECTOR * sectors * (1 - (1 - 1 / sectors) ** case.topk)
    if kernel == "choose":
        return row + ids + 2  # and two bytes: whether the row counts, and whether it differs
    written = row + case.num_experts if kernel == "forward" else row + touched
    return touched + ids + written


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each kernel of each case.

    The ratio of "counted" is that of this kernel and the forward kernel together.
    """
    from megatron_r3.replay.gate.triton_kernels import gate_backward, gate_choose, gate_forward

    for name, case in args.cases.items():
        codes = {
            "forward": code_of(*compiled(gate_forward, case)),
            "backward": code_of(*compiled(gate_backward, case)),
            "choose": code_of(*compiled(gate_choose, case, _UNLESS_LIVE[case.function])),
        }
        clocks = {
            kernel: (
                code.instructions / code.rows / INSTRUCTIONS_PER_CLOCK,
                row_bytes(case, kernel) / BYTES_PER_CLOCK,
            )
            for kernel, code in codes.items()
        }
        both = zip(clocks["choose"], clocks["forward"], strict=True)
        clocks["counted"] = tuple(map(sum, both))  # type: ignore[assignment]
        for kernel, code in codes.items():
            shown = "counted" if kernel == "choose" else kernel
            yield {
                "model": name,
                "kernel": shown,
                **code._asdict(),
                "row_bytes": row_bytes(case, kernel),
                "most": MOST_COUNTED[case.function] if kernel == "choose" else MOST,
                "issue_of_memory": clocks[shown][0] / clocks[shown][1],
            }


# The pointers that are None in the counting kernel: no row routes live, and a softmax has no bias.
_UNLESS_LIVE = {
    "softmax": ("live_ptr", "used_ptr", "bias_ptr"),
    "sigmoid": ("live_ptr", "used_ptr"),
}


def wrong(row: Row) -> str:
    """What is wrong with a kernel, in words; empty if nothing is."""
    if row["stack"]:
        return f"{row['stack']} bytes of stack: the kernel's values do not fit into registers"
    if not any("128" in name for name in row["accesses"]):
        return "no load or store moves 16 bytes at once"
    if row["issue_of_memory"] > row["most"]:
        return f"issue / memory is {row['issue_of_memory']:.2f}; the limit is {row['most']}"
    return ""


def _widths(row: Row) -> str:
    """The loads and stores as COUNTxBYTES, by width, for example "2x1 2x2 6x16"."""
    bytes_of = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    counts: dict[int, int] = {}
    for name, count in row["accesses"].items():
        width = next((bytes_of[part] for part in name.split(".") if part in bytes_of), 4)
        counts[width] = counts.get(width, 0) + count
    return " ".join(f"{counts[width]}x{width}" for width in sorted(counts))


BENCH = Bench(
    "gate",
    __doc__,
    {
        "model": text("model"),
        "kernel": text("kernel"),
        "rows": text("rows"),
        "registers": text("registers"),
        "instructions/row": lambda row: f"{row['instructions'] / row['rows']:.0f}",
        "accesses x bytes": _widths,
        "bytes/row": number("row_bytes", ".0f"),
        "issue / memory": number("issue_of_memory", ".2f"),
    },
    measure,
    wrong=wrong,
    cases=CASES,
    about="compiled for sm_90; no time was measured",
)


if __name__ == "__main__":
    sys.exit(BENCH.main())
