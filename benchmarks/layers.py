"""`make bench-gpu`, second part: a step of MoE layers, live, replayed, planned, with a fused gate.

    python -m benchmarks.layers --megatron TREE --out build/bench/layers.json
    python -m benchmarks.layers --megatron TREE --out FILE --device cpu --rehearse

TREE is a patched Megatron-LM of 0.19. One process runs its layers on the local spec, with the layer
sizes of Qwen3-30B-A3B. The routes are those that the live routers of the same weights choose for
the same batch, so that all ways have the same load. Steps of all ways alternate in one run, and
each stands next to a step of the way that it is compared with; the way "live" is compared with live
steps, which says what two equal steps differ by. Without Transformer Engine attention is unfused
and the host launches every expert, so a step is longer than with it, and ratios are nearer to 1.
The benchmark needs torch, Triton, and what TREE imports (numpy, packaging). A rehearsal runs tiny
layers with the plain reference of the gate; its times say nothing. The exit status is 1 if the
gradient of a router is not that of live.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import layers_measure as measure
from benchmarks.layers_model import QWEN3_30B_A3B, TINY, WAYS, Sizes, Stack, start
from benchmarks.machine import device_of, machine_of, write_results
from benchmarks.waits import COPIES, WAITS
from megatron_r3.gate import replayed_gate_reference, substitute_gate

HEAD = (
    f"{'recompute':9} {'way':14} {'step ms':>8} {'10%':>8} {'90%':>8} {'beside':>11} {'ratio':>6} "
    f"{'10%-90%':>13} {'waits':>6} {'copies':>6} {'peak MB':>8} {'gradient':>8}"
)


def main(argv: list[str] | None = None) -> int:
    """Measure every way, without and with full recompute."""
    args = _arguments(argv)
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("error: no CUDA device here; --device cpu --rehearse runs it all", file=sys.stderr)
        return 2
    _import_tree(args.megatron.resolve(), cuda)
    sizes = replace(TINY if args.rehearse else QWEN3_30B_A3B, **_given(args))
    record = {**machine_of(), **device_of(args.device), "rehearsal": args.rehearse}
    start(cuda)
    stack = Stack(sizes, cuda)
    # on a CPU the routers see no kernel, and would not take the fused path
    with nullcontext() if cuda else substitute_gate(replayed_gate_reference):
        rows = measured(stack, args.rounds, cuda)
    record |= {"megatron_core": _version(), "rounds": args.rounds, **stack.described()}
    print(_about(stack))
    print(HEAD)
    for row in rows:
        print(_line(row))
    print(f"written: {write_results(args.out, 'layers', {**record, 'rows': rows})}")
    torch.distributed.destroy_process_group()
    wrong = [row for row in rows if not row["agrees"]]
    for row in wrong:
        print(f"error: {row['way']}: router gradients are not those of live", file=sys.stderr)
    return 1 if wrong else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="layers", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file or a folder to write to")
    parser.add_argument("--megatron", type=Path, required=True, help="a patched tree of 0.19")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny layers, to see that it runs")
    parser.add_argument(
        "--rounds", type=int, help="pairs of steps of each way (default: 10, or 3 in a rehearsal)"
    )
    for field in fields(Sizes):
        default = getattr(QWEN3_30B_A3B, field.name)
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, help=f"default {default}")
    args = parser.parse_args(argv)
    if args.device == "cpu" and not args.rehearse:
        parser.error("--device cpu: only with --rehearse, a CPU's times say nothing here")
    args.rounds = args.rounds or (3 if args.rehearse else 10)
    if args.rounds < 2:
        parser.error("--rounds: at least 2")
    return args


def _given(args: argparse.Namespace) -> dict[str, int]:
    given = {name: getattr(args, name) for name in asdict(TINY)}
    return {name: value for name, value in given.items() if value is not None}


def _import_tree(tree: Path, cuda: bool) -> None:
    """Import Megatron from the tree; on a CPU under `megatron_r3.cpu`, which lets it run there."""
    # must be set before CUDA starts: torch.use_deterministic_algorithms asks for it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.path.insert(0, str(tree))
    if not cuda:
        from megatron_r3.cpu import install

        torch.set_num_threads(1)
        install()
    import megatron.core

    core = Path(str(megatron.core.__file__)).resolve().parent
    if tree not in core.parents:
        raise SystemExit(f"error: {tree} has no megatron.core: it was imported from {core}")
    if "moe_router_replay" not in (core / "transformer" / "transformer_config.py").read_text():
        raise SystemExit(f"error: {tree} is not patched")


def _version() -> str:
    from megatron.core.package_info import MAJOR, MINOR, PATCH

    return f"{MAJOR}.{MINOR}.{PATCH}"


def measured(stack: Stack, rounds: int, cuda: bool) -> list[dict[str, Any]]:
    """A row for each way, without and with recompute."""
    # what rounding explains: bfloat16 has 8 bits, and the loss is a mean over many tokens
    tolerance, gradient_tolerance = (1e-3, 2e-2) if cuda else (1e-6, 1e-4)
    checked = measure.check(stack, tolerance)
    print("every way computes the loss of live; timing", file=sys.stderr, flush=True)
    times = measure.timed(stack, rounds, tolerance)
    print("timed; counting", file=sys.stderr, flush=True)
    memory = measure.peak_memory(stack) if cuda else {}
    waits = measure.count_waits(stack, cuda)
    rows = []
    for (name, recompute), time in times.items():
        case = (name, recompute)
        row = {"recompute": recompute, "way": name, "beside": WAYS[name].beside, **time}
        row |= {**waits[case], **memory.get(case, {"peak_mb": None, "step_mb": None})}
        row |= {**checked[case], "agrees": checked[case]["gradient_error"] <= gradient_tolerance}
        rows.append(row)
    return rows


def _about(stack: Stack) -> str:
    tokens = stack.sizes.sequence * stack.sizes.batch
    return (
        f"{stack.sizes.layers} layers, {tokens} tokens to {stack.sizes.topk} of "
        f"{stack.sizes.experts} experts; the routes of a microbatch take "
        f"{stack.route_bytes} bytes on the device\n"
        "ratio: time of the step by that of the step next to it, of the way named under `beside`; "
        "waits and copies to the host are those of one step"
    )


def _line(row: dict[str, Any]) -> str:
    peak = "-" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
    spread = f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}"
    return (
        f"{'full' if row['recompute'] else 'none':9} {row['way']:14} {row['step_ms']:>8.1f} "
        f"{row['low_ms']:>8.1f} {row['high_ms']:>8.1f} {row['beside']:>11} {row['ratio']:>6.3f} "
        f"{spread:>13} {row[WAITS]:>6} {row[COPIES]:>6} {peak:>8} {row['gradient_error']:>8.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
