"""`make bench-gpu`: weights and map of replayed experts, as one kernel and in other ways.

    python -m benchmarks.gate --out build/bench/gate.json [--megatron DIR]
    python -m benchmarks.gate --out build/bench/gate.json --device cpu --rehearse

Forward and backward of the kernel, of (a) the chain of torch calls that Megatron-LM runs under
replay (--megatron: its own function), of (b) that chain under torch.compile, of (c) Transformer
Engine's fused gate, where it is installed (its top-k is live), beside (d) copies of the same bytes.
One run, caches flushed before each call. Needs torch and Triton alone. A rehearsal runs the plain
reference on tiny shapes, and says nothing about time. Exit status 1: two ways do not agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gate_time import Time, Timer
from benchmarks.gate_ways import MODELS, Inputs, floor, ways
from benchmarks.machine import device_of, machine_of, write_results

TOKENS = (1024, 4096, 16384, 65536)
FLOOR = "(d) copies"
UNFUSED = "(a) unfused"
HEAD = (
    f"{'model':14} {'dtype':8} {'tokens':>6} {'pass':8} {'':13} {'us':>9} {'10%':>9} {'90%':>9} "
    f"{'of (a)':>7} {'of copies':>9} {'host us':>8}"
)


def main(argv: list[str] | None = None) -> int:
    """Time every model, number of tokens, way and pass."""
    args = _arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device here; --device cpu --rehearse runs it all", file=sys.stderr)
        return 2
    repeats, flush, tokens = (3, 1 << 10, (8, 33)) if args.rehearse else (50, 1 << 30, TOKENS)
    timer = Timer(args.device, repeats, flush)
    rows: list[dict[str, Any]] = []
    print(HEAD, flush=True)
    for name in args.models or MODELS:
        for num_tokens in tokens:
            inputs = Inputs(MODELS[name], num_tokens, args.device)
            for row in timed(inputs, timer, args):
                rows.append({"model": name, "tokens": num_tokens, **row})
                print(_line(rows[-1]), flush=True)
    found = {
        **machine_of(),
        **device_of(args.device),
        "rehearsal": args.rehearse,
        "repeats": repeats,
    }
    print(f"written: {write_results(args.out, 'gate', {**found, 'rows': rows})}")
    wrong = [row for row in rows if not row["agrees"]]
    for row in wrong:
        print(f"error: {row['model']}, {row['way']}: not what (a) computes", file=sys.stderr)
    return 1 if wrong else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gate", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file or a folder")
    parser.add_argument("--megatron", type=Path, help="a tree of Megatron-LM whose path (a) is")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes: does it run?")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all")
    args = parser.parse_args(argv)
    if args.device == "cpu" and not args.rehearse:
        parser.error("--device cpu: only with --rehearse, there is no kernel on a CPU")
    return args


def timed(inputs: Inputs, timer: Timer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way and pass, with its ratios."""
    compiler = "aot_eager" if args.rehearse else "inductor"
    times: dict[tuple[str, str], Time] = {
        (FLOOR, which): timer.measure(call) for which, call in floor(inputs).items()
    }
    outputs = {}
    for name, gate in ways(inputs, args.megatron, compiler).items():
        probs_TE, map_TE = gate(inputs.logits_TE)

        def backward(probs_TE: torch.Tensor = probs_TE) -> torch.Tensor:
            (gradient_TE,) = torch.autograd.grad(
                probs_TE, inputs.logits_TE, inputs.upstream_TE, retain_graph=True
            )
            return gradient_TE

        def forward(gate: Any = gate) -> Any:
            return gate(inputs.logits_TE)

        outputs[name] = (probs_TE.detach(), backward(), map_TE)
        times[name, "forward"] = timer.measure(forward)
        times[name, "backward"] = timer.measure(backward)
    rows = []
    for (name, which), taken in times.items():
        row = {"dtype": str(inputs.model.dtype).removeprefix("torch."), "pass": which, "way": name}
        row |= dataclasses.asdict(taken)
        row["of_unfused"] = taken.us / times[UNFUSED, which].us
        row["of_copies"] = times[FLOOR, which].us / taken.us
        live = name not in outputs or "live" in name  # has other experts
        row["agrees"] = live or _agree(outputs[name], outputs[UNFUSED], inputs.upstream_TE)
        rows.append(row)
    return rows


def _agree(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], upstream_TE: torch.Tensor
) -> bool:
    """The same map; weights and gradients but for roundings in float32 and one to the dtype."""
    if not torch.equal(got[2], want[2]):
        return False
    largest = want[0].abs().max().float()
    sizes = (largest, largest * upstream_TE.abs().max())
    for mine, theirs, size in zip(got[:2], want[:2], sizes, strict=True):
        room = 64 * torch.finfo(torch.float32).eps * size
        room = room + 2 * torch.finfo(mine.dtype).eps * theirs.float().abs()
        if not bool(((mine.float() - theirs.float()).abs() <= room).all()):
            return False
    return True


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:14} {row['dtype']:8} {row['tokens']:>6} {row['pass']:8} {row['way']:13} "
        f"{row['us']:>9.1f} {row['low_us']:>9.1f} {row['high_us']:>9.1f} "
        f"{row['of_unfused']:>7.3f} {row['of_copies']:>9.2f} {row['host_us']:>8.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
