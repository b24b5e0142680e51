"""Tune the tiles of the gate kernels: which size of a program is fastest, for each shape.

    python -m proof.benchmarks.tiles --out RESULTS
    python -m proof.benchmarks.tiles --out RESULTS --device cpu --rehearse

RESULTS is a folder. For each model, and for the forward and the backward kernel apart, it times
programs of different sizes (megatron_r3/replay/gate/tile_table.py) in turn with the size that the
rule gives, with cold caches. Each candidate must first compute what the plain reference computes.
The fastest is proposed if its time differs from that of the rule at the most tokens by more than
the interval of the ratio is wide, and if the rule is nowhere told to be faster; else the rule's own
size is. The proposal is RESULTS/tiles.json. MEGATRON_R3_TILES=RESULTS/tiles.json makes the kernels
use it at once; a copy of it as megatron_r3/replay/gate/tile_table.json makes it ours.

A rehearsal runs two small candidates in Triton's interpreter; its times say nothing, and its
proposal is for a GPU named "cpu", which no kernel on a GPU asks for. The exit status is 1 if a
candidate is wrong, and 77 if there is no Triton.

Shape suffixes (docs/glossary.md): E, T.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_r3.replay.gate import substitute_gate
from megatron_r3.replay.gate.tile_table import (
    KERNELS,
    Shape,
    Tile,
    gpu_name,
    rule,
    use_table,
    words_of,
)
from proof.benchmarks.interval import LOOKS
from proof.benchmarks.kernel_ways import MODELS, Inputs, agree, kernel_of, unfused_of
from proof.benchmarks.machine import device_of, machine_of, write_results
from proof.benchmarks.timer import Timer, cell, ratio

PROPOSAL = "tiles.json"
TOKENS = (4096, 65536)  # the time of fewer tokens is that of the launch
LOGITS = (512, 1024, 2048, 4096)  # of one program
LANE = (8, 64)  # fewest and most logits of one lane: fewer idle, more do not fit into registers
RULE = "rule"


def main(argv: list[str] | None = None) -> int:
    """Tune where there is a GPU, or in a rehearsal; say what is missing elsewhere."""
    args = _arguments(argv)
    if find_spec("triton") is None:
        print("skipped: Triton is not installed")
        return 77
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device here; --device cpu --rehearse runs it all", file=sys.stderr)
        return 2
    if args.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return _interpreted(sys.argv[1:] if argv is None else argv)
    from megatron_r3.replay.gate.triton import replayed_gate_triton

    args.out.mkdir(parents=True, exist_ok=True)
    # on a CPU the plain reference would run, and not the kernels in the interpreter
    with substitute_gate(replayed_gate_triton):
        return _tune(args)


def _tune(args: argparse.Namespace) -> int:
    """Tune every model; write record and proposal after each of them."""
    most, flush, tokens = (LOOKS[-1], 1 << 30, TOKENS) if args.device == "cuda" else (2, 1024, (9,))
    timer = Timer(args.device, flush)
    rows: list[dict[str, Any]] = []
    proposal: list[dict[str, Any]] = []
    record = {**machine_of(), **device_of(args.device), "rehearsal": args.rehearse}
    record |= {"most rounds": most, "rows": rows, "proposal": proposal}
    for name in args.models or MODELS:
        found = _tuned(name, tokens, timer, args, most)
        rows += found
        proposal += (
            [] if any(not row["agrees"] for row in found) else _proposed(found, args, record)
        )
        (args.out / PROPOSAL).write_text(json.dumps(proposal, indent=1) + "\n")
        print(f"written: {write_results(args.out, 'tiles', record)}", flush=True)
    print(f"written: {args.out / PROPOSAL}, {len(proposal)} entries")
    wrong = [row for row in rows if not row["agrees"]]
    for row in wrong:
        what = f"{row['rows']} rows by {row['num_warps']} warps"
        print(f"error: {row['model']}, {what}: not what the reference computes", file=sys.stderr)
    return 1 if wrong else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tiles", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder to write to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all")
    args = parser.parse_args(argv)
    if (args.device == "cpu") != args.rehearse:
        parser.error("--device cpu goes with --rehearse: a CPU's times say nothing here")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: a folder, and {args.out} is a file")
    return args


def _interpreted(argv: list[str]) -> int:
    """Run in a process of its own: Triton asks for the interpreter when it is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "proof.benchmarks.tiles", *argv], env=env
    ).returncode


def candidates(words: int, rehearse: bool) -> dict[str, Tile]:
    """The tiles to time, by name; the rule's is the first, and its name is "rule".

    Example: for 8 words (256 experts) 2 to 16 rows, of which 16 rows are 4096 logits: 2, 4 or 8
    warps have 64, 32 or 16 of them for each lane.
    """
    named = {RULE: rule(words)}
    for logits in LOGITS[:1] if rehearse else LOGITS:
        rows = max(1, logits // (32 * words))
        for num_warps in (1, 2, 4, 8):
            lane, tile = 32 * words * rows / (32 * num_warps), Tile(rows, num_warps)
            if LANE[0] <= lane <= LANE[1] and tile not in named.values():
                named[f"{rows} x {num_warps}"] = tile
    return dict(list(named.items())[:2]) if rehearse else named


def _tuned(
    name: str, tokens: tuple[int, ...], timer: Timer, args: argparse.Namespace, most: int
) -> list[dict[str, Any]]:
    """A row for each number of tokens, kernel and candidate of a model."""
    model = MODELS[name]
    rows = []
    for num_tokens in tokens:
        inputs = Inputs(model, num_tokens, args.device)
        words = words_of(model.num_experts)
        tiles = candidates(words, args.rehearse)
        agrees = {which: _agrees(inputs, tile) for which, tile in tiles.items()}
        for kernel in KERNELS:
            calls = {which: _call(inputs, tile, kernel) for which, tile in tiles.items()}
            compared = [(which, RULE) for which in tiles if which != RULE]
            times = timer.in_turn(calls, compared, most)
            for which, tile in tiles.items():
                found = ratio(times, which, RULE).record()
                us = sorted(times[which])[len(times[which]) // 2]
                row = {"model": name, "tokens": num_tokens, "kernel": kernel, **tile._asdict()}
                row |= {"words": words, "topk": model.topk, "dtype": _dtype(model.dtype)}
                rows.append({**row, "us": us, "of_rule": found, "agrees": agrees[which]})
                print(_line(rows[-1]), flush=True)
    return rows


def _table(inputs: Inputs, tile: Tile) -> dict[tuple[str, Shape], Tile]:
    """A table that has this tile for both kernels on these inputs."""
    model, gpu = inputs.model, gpu_name(inputs.logits_TE.device)
    words, dtype = words_of(model.num_experts), _dtype(model.dtype)
    return {(gpu, Shape(kernel, words, model.topk, dtype)): tile for kernel in KERNELS}


def _outputs(gate: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    probs_TE, map_TE = gate(inputs.logits_TE)
    (gradient_TE,) = torch.autograd.grad(probs_TE, inputs.logits_TE, inputs.upstream_TE)
    return probs_TE.detach(), gradient_TE, map_TE


def _agrees(inputs: Inputs, tile: Tile) -> bool:
    """Whether both kernels with this tile compute what the chain of torch calls computes."""
    with use_table(_table(inputs, tile)):
        got = _outputs(kernel_of(inputs), inputs)
    return agree(got, _outputs(unfused_of(inputs), inputs), inputs.upstream_TE)


def _call(inputs: Inputs, tile: Tile, kernel: str) -> Any:
    """A call of one kernel with this tile."""
    table, gate = _table(inputs, tile), kernel_of(inputs)
    probs_TE, _ = gate(inputs.logits_TE)  # once, so that there is something to go backward from

    def forward() -> None:
        with use_table(table):
            gate(inputs.logits_TE)

    def backward() -> None:
        with use_table(table):
            torch.autograd.grad(probs_TE, inputs.logits_TE, inputs.upstream_TE, retain_graph=True)

    return forward if kernel == "forward" else backward


def _proposed(
    rows: list[dict[str, Any]], args: argparse.Namespace, record: dict[str, Any]
) -> list[dict[str, Any]]:
    """An entry of the table for each kernel, from the rows of one model."""
    entries = []
    for kernel in KERNELS:
        of_kernel = [row for row in rows if row["kernel"] == kernel]
        by_tile: dict[Tile, list[dict[str, Any]]] = {}
        for row in of_kernel:
            by_tile.setdefault(Tile(row["rows"], row["num_warps"]), []).append(row)
        tile = best(by_tile)
        first = by_tile[tile][0]
        measured = {
            "date": str(datetime.date.today()),
            **{name: record[name] for name in ("torch", "triton", "rehearsal")},
            "of_rule": {str(row["tokens"]): row["of_rule"] for row in by_tile[tile]},
        }
        shape = {name: first[name] for name in Shape._fields}
        gpu = gpu_name(torch.device(args.device))
        entries.append({"gpu": gpu, **shape, **tile._asdict(), "measured": measured})
    return entries


def best(by_tile: dict[Tile, list[dict[str, Any]]]) -> Tile:
    """The fastest tile that is told to be faster than the rule's, else the rule's own.

    Args:
        by_tile: the rows of each tile, fewest tokens first; the rule's tile is the first.
    """
    chosen, least = next(iter(by_tile)), 1.0
    for tile, rows in by_tile.items():
        found = [row["of_rule"] for row in rows]
        slower = any(of_rule["tells"] and of_rule["median"] > 1 for of_rule in found)
        faster = found[-1]["tells"] and found[-1]["median"] < 1
        mean = prod(of_rule["median"] for of_rule in found) ** (1 / len(found))
        if faster and not slower and mean < least:
            chosen, least = tile, mean
    return chosen


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:14} {row['tokens']:>6} {row['kernel']:8} {row['rows']:>3} rows "
        f"{row['num_warps']} warps {row['us']:>9.1f} us, of rule {cell(row['of_rule'])}"
        f"{'' if row['agrees'] else '  WRONG'}"
    )


if __name__ == "__main__":
    sys.exit(main())
