"""Times steps of MoE layers: live, replayed, with a dispatch plan, with the fused gate.

    python -m proof.benchmarks.layers --megatron TREE --out build/bench/layers.json
    python -m proof.benchmarks.layers --megatron TREE --out RESULTS --model DeepSeek-V3 --spec te
    python -m proof.benchmarks.layers --megatron TREE --out FILE --rehearse

TREE is a patched Megatron-LM of 0.19. One process runs a few layers of a model in its real sizes,
with a small vocabulary. The routes are those that the live routers of the same weights choose for
the same batch, so that all ways have the same load. Steps of all ways alternate in one run, and
each stands next to a step of the way that it is compared with. The way "live" is compared with live
steps, which shows how much two equal steps differ. A ratio is a Hodges-Lehmann median with its
interval at 99 % (interval.py). If the interval is wider than the ratio's distance from 1, the table
says "cannot tell".

With `--spec local` attention is unfused and the host launches each expert, so a step is longer
than with Transformer Engine (`--spec te`), and ratios are nearer to 1. The benchmark needs torch,
Triton, and what TREE imports (numpy, packaging). A rehearsal runs tiny layers, whatever sizes are
asked for, with the plain reference of the gate; its times say nothing. The record is written after
each measurement; its name has model, spec and sequence: "layers Qwen3-30B-A3B te 8192". The exit
status is 1 if loss or router gradients of a way are not those of live, 2 without a GPU, and 77 if
there is no Transformer Engine for `--spec te`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_r3.replay.gate import replayed_gate_reference, substitute_gate
from proof.benchmarks import layers_measure as measure
from proof.benchmarks.bench import number, ratio, recomputed, table, text
from proof.benchmarks.layers_measure import PAGEABLE, PER_LAYER
from proof.benchmarks.layers_model import MODELS, SPECS, Sizes, Stack, start
from proof.benchmarks.machine import device_of, machine_of, no_transformer_engine, write_results
from proof.benchmarks.waits import COPIES, WAITS

COLUMNS = {
    "recompute": recomputed,
    "way": text("way"),
    "step ms": number("step_ms", ".1f"),
    "beside": text("beside"),
    "ratio": ratio("ratio"),
    "waits": number(WAITS, "g"),
    "of a layer": number(PER_LAYER, "g"),
    "copies": number(COPIES, "g"),
    "pageable": number(PAGEABLE, "g"),
    "peak MB": number("peak_mb"),
    "gradient": number("gradient_error", ".1e"),
    "skipped": text("skipped"),
}


def main(argv: list[str] | None = None) -> int:
    """Measure each way, without and with full recompute; return the exit status."""
    args = _arguments(argv)
    cuda = args.device == "cuda"
    missing = no_transformer_engine() if args.spec == "te" else None
    if missing:
        print(f"skipped: {missing}")
        return 77
    if cuda and not torch.cuda.is_available():
        print("error: no CUDA device here; try this with --rehearse", file=sys.stderr)
        return 2
    _import_tree(args.megatron.resolve(), cuda)
    model = MODELS[args.model]
    sizes = model.tiny if args.rehearse else replace(model.sizes, **_given(args))
    start(cuda)
    stack = Stack(model, sizes, args.spec, cuda)
    name = _name(args)
    # on a CPU there is no kernel, and routers would not take the fused path
    with nullcontext() if cuda else substitute_gate(replayed_gate_reference):
        stack.record()
        record = {**machine_of(), **device_of(args.device), "rehearsal": args.rehearse}
        record |= {"megatron_core": _version(), "most rounds": args.rounds, "model": args.model}

        def keep(rows: list[dict[str, Any]]) -> Path:
            return write_results(args.out, name, {**record, **stack.described(), "rows": rows})

        rows = measured(stack, args, keep)
    cells = ([cell(row) for cell in COLUMNS.values()] for row in rows)
    print(f"{name}: {stack.described()['routes']}\n{table(COLUMNS, cells)}")
    print(f"written: {keep(rows)}")
    torch.distributed.destroy_process_group()
    _print_skipped(stack, rows)
    wrong = [row for row in rows if not row.get("agrees", True)]
    for row in wrong:
        print(
            f"error: {row['way']}: loss or router gradients are not those of live", file=sys.stderr
        )
    return 1 if wrong else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="layers", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file or a folder to write to")
    parser.add_argument("--megatron", type=Path, required=True, help="a patched tree of 0.19")
    parser.add_argument("--rehearse", action="store_true", help="tiny layers, on the CPU")
    parser.add_argument("--model", choices=MODELS, default=next(iter(MODELS)))
    parser.add_argument("--spec", choices=SPECS, default="local", help="te: Transformer Engine")
    parser.add_argument(
        "--rounds", type=int, help="the most pairs of steps (default: 64; rehearsal: 3)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=180.0,
        help="the most seconds of timing without recompute, and as many with it (default: 180)",
    )
    for field in fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, help="default: that of the model")
    args = parser.parse_args(argv)
    args.device = "cpu" if args.rehearse else "cuda"
    args.rounds = args.rounds or (3 if args.rehearse else 64)
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: must be at least 2")
    return args


def _given(args: argparse.Namespace) -> dict[str, int]:
    given = {field.name: getattr(args, field.name) for field in fields(Sizes)}
    return {name: value for name, value in given.items() if value is not None}


def _name(args: argparse.Namespace) -> str:
    """The name of the record: "layers Qwen3-30B-A3B te 8192", and sizes that differ from usual."""
    usual = asdict(MODELS[args.model].sizes)
    name = f"layers {args.model} {args.spec} {args.sequence or usual['sequence']}"
    other = {n: v for n, v in _given(args).items() if n != "sequence" and v != usual[n]}
    return name + "".join(f", {field} {value}" for field, value in other.items())


def _import_tree(tree: Path, cuda: bool) -> None:
    """Import Megatron from the tree; without CUDA, run `megatron_r3.cpu.install` first."""
    # torch.use_deterministic_algorithms needs this variable; it must be set before CUDA starts
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Each expert gets a different number of tokens, so blocks of many sizes are freed. Without this
    # variable the freed memory would be too fragmented for the next step.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.path.insert(0, str(tree))
    if not cuda:
        from megatron_r3.cpu import install

        torch.set_num_threads(1)
        install()
    import megatron.core

    core = Path(str(megatron.core.__file__)).resolve().parent
    if tree not in core.parents:
        raise SystemExit(
            f"error: --megatron {tree} has no megatron.core, and {core} was imported instead: give "
            "the root of a patched Megatron-LM"
        )
    if "moe_router_replay" not in (core / "transformer" / "transformer_config.py").read_text():
        raise SystemExit(f"error: {tree} is not patched: make apply MEGATRON={tree}")


def _version() -> str:
    from megatron.core.package_info import MAJOR, MINOR, PATCH

    return f"{MAJOR}.{MINOR}.{PATCH}"


def measured(
    stack: Stack, args: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], Any]
) -> list[dict[str, Any]]:
    """A row for each way, without and with recompute; `keep` gets all rows whenever one changes."""
    waits = measure.Waits(stack)
    if waits.broken:
        stack.skipped["host waits"] = waits.broken
    rows: dict[tuple[str, bool], dict[str, Any]] = {}

    def add(recompute: bool, found: measure.Found) -> None:
        for name, values in found.items():
            about = {"recompute": recompute, "way": name, "beside": stack.ways[name].beside}
            rows.setdefault((name, recompute), about).update(values)
        keep(list(rows.values()))

    for recompute in (False, True):
        add_here = partial(add, recompute)
        too_large = _out_of_memory(partial(_parts, stack, recompute, args, waits, add_here))
        if too_large:
            add_here({name: {"skipped": too_large} for name in stack.ways})
    return list(rows.values())


def _parts(
    stack: Stack,
    recompute: bool,
    args: argparse.Namespace,
    waits: measure.Waits,
    add: Callable[[measure.Found], None],
) -> None:
    """Measure without recompute, or with it; `add` gets the values of each measurement."""
    # Tolerances of loss and gradients that rounding explains: bfloat16 has 8 bits, and the loss is
    # a mean over many tokens.
    add(measure.check(stack, recompute, (1e-3, 2e-2) if stack.cuda else (1e-6, 1e-4)))
    add(waits.count(recompute))
    if stack.cuda:
        add(measure.peak_memory(stack, recompute))
    label = "full recompute" if recompute else "no recompute"
    print(f"{label}: checked and counted; timing", file=sys.stderr, flush=True)
    measure.timed(stack, recompute, args.rounds, args.seconds, add)


def _out_of_memory(part: Callable[[], None]) -> str | None:
    """Run `part`; if memory runs out, return a text with the GiB of tensors, else None."""
    try:
        part()
        return None
    except torch.OutOfMemoryError:
        used = torch.cuda.max_memory_allocated() / 2**30
        reason = f"out of memory, with {used:.1f} GiB of tensors"
    # outside of `except`, because the error's traceback holds the graph of the step
    gc.collect()
    torch.cuda.empty_cache()
    return reason


def _print_skipped(stack: Stack, rows: list[dict[str, Any]]) -> None:
    for way, reason in stack.skipped.items():
        print(f"skipped: {way}: {reason}")
    if not stack.cuda:
        print("skipped: peak memory: no CUDA device")
    for row in rows:
        if "skipped" in row:
            print(f"skipped: {row['way']}, recompute {recomputed(row)}: {row['skipped']}")


if __name__ == "__main__":
    sys.exit(main())
