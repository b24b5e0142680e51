"""Times the replayed gate: the weights and the routing map of given experts.

    python -m proof.benchmarks.kernel --out build/bench/kernel.json [--megatron DIR]
    python -m proof.benchmarks.kernel --out build/bench/kernel.json --rehearse

The kernel is timed, forward and backward, beside four other ways: (a) the chain of torch calls that
Megatron-LM runs under replay (with --megatron: Megatron's own function); (b) that chain under
torch.compile; (c) if Transformer Engine is installed, its fused gate with a live top-k over all
experts, and for a model with groups of experts a second time with these groups; (d) copies of the
same bytes. All ways are timed in turn in one run, with the caches flushed before each call, until
the kernel's ratios to (a), (c) and (d) can be told from 1, or to the largest number of rounds. A
ratio is the Hodges-Lehmann median over rounds, with its interval at 99 % (interval.py). If the
interval is wider than the ratio's distance from 1, the table says "cannot tell". The benchmark
needs torch, numpy and Triton alone. A rehearsal runs the plain reference on tiny shapes; its times
say nothing. The exit status is 1 if two ways do not agree, and 2 without a GPU.

Shape suffixes (docs/glossary.md): T, E.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from proof.benchmarks.bench import line, number, ratio, ratios, table, text
from proof.benchmarks.interval import LOOKS, median_of
from proof.benchmarks.kernel_ways import (
    FLOOR,
    KERNEL,
    MODELS,
    OF_OTHERS,
    TE,
    UNFUSED,
    Inputs,
    agree,
    floor,
    replay_of,
    ways,
)
from proof.benchmarks.machine import device_of, machine_of, write_results
from proof.benchmarks.timer import Timer, Times

TOKENS = (1024, 4096, 16384, 65536)
# for each ratio, the way whose time is the divisor
RATIOS = {"of_unfused": UNFUSED, "of_te": TE, "of_copies": FLOOR}
COLUMNS = {
    **{name: text(name) for name in ("model", "dtype", "tokens", "pass", "way")},
    "us": number("us", ".1f"),
    "10%": number("low_us", ".1f"),
    "90%": number("high_us", ".1f"),
    "host us": number("host_us", ".1f"),
    "of (a)": ratio("of_unfused"),
    "of (c)": ratio("of_te"),
    "of copies": ratio("of_copies"),
    "skipped": text("skipped"),
}


def main(argv: list[str] | None = None) -> int:
    """Time each way and pass, by model and number of tokens; return the exit status.

    The record is written after each number of tokens.
    """
    args = _arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device here; try this with --rehearse", file=sys.stderr)
        return 2
    # 1 GiB is many times the cache of any GPU
    most, flush, tokens = (3, 1 << 10, (8, 33)) if args.rehearse else (LOOKS[-1], 1 << 30, TOKENS)
    timer = Timer(args.device, flush)
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"rehearsal": args.rehearse, "most rounds": most, "rows": rows}
    record = {**machine_of(), **device_of(args.device), **settings}
    print(table(COLUMNS, []), flush=True)
    for name in args.models or MODELS:
        for num_tokens in tokens:
            inputs = Inputs(MODELS[name], num_tokens, args.device)
            for row in timed(inputs, timer, args, most):
                rows.append({"model": name, "tokens": num_tokens, **row})
                print(line(cell(rows[-1]) for cell in COLUMNS.values()), flush=True)
            written = write_results(args.out, "kernel", record)
    print(f"written: {written}")
    for way, reason in sorted({(r["way"], r["skipped"]) for r in rows if "skipped" in r}):
        print(f"skipped: {way}: {reason}")
    wrong = [row for row in rows if not row.get("agrees", True)]
    for row in wrong:
        what = (
            "the kernel computes other weights for the experts of this way"
            if row["way"] in OF_OTHERS
            else "the results of this way are not those of (a)"
        )
        print(f"error: {row['model']}, {row['way']}: {what}", file=sys.stderr)
    return 1 if wrong else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernel", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file or a folder to write to")
    parser.add_argument("--megatron", type=Path, help="a Megatron-LM tree: (a) calls its code")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all")
    args = parser.parse_args(argv)
    args.device = "cpu" if args.rehearse else "cuda"  # there is no kernel on a CPU
    return args


def timed(
    inputs: Inputs, timer: Timer, args: argparse.Namespace, most: int
) -> list[dict[str, Any]]:
    """A row with ratios for each way and pass, and a row for each way that cannot run."""
    compiler = "aot_eager" if args.rehearse else "inductor"
    calls: dict[str, dict[str, Any]] = {
        direction: {FLOOR: call} for direction, call in floor(inputs).items()
    }
    outputs, rows = {}, []
    for name, gate in ways(inputs, args.megatron, compiler).items():
        try:
            if isinstance(gate, str):
                raise RuntimeError(gate)
            outputs[name] = _outputs(gate, inputs, calls, name)
        except Exception as error:  # what Transformer Engine refuses is not known in advance
            if name not in OF_OTHERS:
                raise
            rows.append({"way": name, "skipped": " ".join(str(error).split())})
    for direction, of_pass in calls.items():
        others = [other for other in (UNFUSED, FLOOR, TE) if other in of_pass]
        compared = [(KERNEL, other) for other in others]
        times = timer.in_turn(of_pass, compared, most)
        for name, times_us in times.items():
            found = {key: _found(times, name, of) for key, of in RATIOS.items()}
            host_us = timer.on_host(of_pass[name], 3 if args.rehearse else 50)
            agrees = name == FLOOR or _checked(name, outputs, inputs)
            row: dict[str, Any] = {
                "pass": direction,
                "way": name,
                **_spread(times_us),
                "host_us": host_us,
            }
            rows.append({**row, **found, "agrees": agrees})
    dtype = str(inputs.model.dtype).removeprefix("torch.")
    return [{"dtype": dtype, **row} for row in rows]


def _outputs(
    gate: Any, inputs: Inputs, calls: dict[str, dict[str, Any]], name: str
) -> tuple[torch.Tensor, ...]:
    """Run both passes once, and add them to `calls`; return probabilities, gradient and map."""
    probs_TE, map_TE = gate(inputs.logits_TE)

    def backward() -> torch.Tensor:
        (gradient_TE,) = torch.autograd.grad(
            probs_TE, inputs.logits_TE, inputs.upstream_TE, retain_graph=True
        )
        return gradient_TE

    gradient_TE = backward()
    calls["forward"][name] = lambda: gate(inputs.logits_TE)
    calls["backward"][name] = backward
    return probs_TE.detach(), gradient_TE, map_TE


def _found(times: Times, name: str, of: str) -> dict[str, Any] | None:
    return median_of(ratios(times, name, of)).record() if of in times else None


def _spread(times_us: list[float]) -> dict[str, float]:
    """The median, the 10th and the 90th percentile of microseconds."""
    deciles = statistics.quantiles(times_us, n=10, method="inclusive")
    return {"us": statistics.median(times_us), "low_us": deciles[0], "high_us": deciles[-1]}


def _checked(name: str, outputs: dict[str, tuple[torch.Tensor, ...]], inputs: Inputs) -> bool:
    """Whether a way computes what (a) computes.

    Transformer Engine's top-k is live and takes other experts than the recorded ones. So for a way
    of Transformer Engine the kernel replays the way's experts, and must compute the same weights.
    """
    if name not in OF_OTHERS:
        return agree(outputs[name], outputs[UNFUSED], inputs.upstream_TE)
    return agree(replay_of(outputs[name][2], inputs), outputs[name], inputs.upstream_TE)


if __name__ == "__main__":
    sys.exit(main())
