"""`make bench-gpu`, first part: weights and map of replayed experts, as one kernel and otherwise.

    python -m benchmarks.kernel --out build/bench/kernel.json [--megatron DIR]
    python -m benchmarks.kernel --out build/bench/kernel.json --device cpu --rehearse

It times, forward and backward, the kernel and four ways to compare it with: (a) the chain of torch
calls that Megatron-LM runs under replay (with --megatron Megatron's own function); (b) that chain
under torch.compile; (c) Transformer Engine's fused gate, where it is installed (its top-k is live);
(d) copies of the same bytes. All are timed in one run, and the caches are flushed before each call.
The benchmark needs torch and Triton alone. A rehearsal runs the plain reference on tiny shapes; its
times say nothing. The exit status is 1 if two ways do not agree.

Shape suffixes (docs/glossary.md): T, E.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_ways import MODELS, Inputs, floor, ways
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
    # 1 GiB is many times the cache of any GPU
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
    settings = {"rehearsal": args.rehearse, "repeats": repeats}
    record = {**machine_of(), **device_of(args.device), **settings, "rows": rows}
    print(f"written: {write_results(args.out, 'kernel', record)}")
    wrong = [row for row in rows if not row["agrees"]]
    for row in wrong:
        print(f"error: {row['model']}, {row['way']}: not what (a) computes", file=sys.stderr)
    return 1 if wrong else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernel", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file or a folder to write to")
    parser.add_argument("--megatron", type=Path, help="a Megatron-LM tree whose function (a) calls")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all")
    args = parser.parse_args(argv)
    if args.device == "cpu" and not args.rehearse:
        parser.error("--device cpu: only with --rehearse, there is no kernel on a CPU")
    return args


@dataclasses.dataclass(frozen=True)
class Time:
    """Microseconds of a call.

    Attributes:
        us: the median; `low_us` and `high_us` are the 10th and 90th percentile.
        host_us: what the host spends on a call whose kernels it does not wait for. A GPU that has
            nothing else queued is idle for that long.
    """

    us: float
    low_us: float
    high_us: float
    host_us: float


class Timer:
    """Times calls with cold caches, on a GPU or, in a rehearsal, on a CPU.

    Before each call it writes `flush_bytes`, which leaves nothing of the call's data in the caches.
    The write also keeps the GPU busy while the host launches the call, so that what is measured is
    the time of the GPU, with the gaps between kernels, and not the time of the host.
    """

    def __init__(self, device: str, repeats: int, flush_bytes: int) -> None:
        self.cuda = device == "cuda"
        self.repeats = repeats
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def measure(self, call: Callable[[], Any]) -> Time:
        """Warm up with three calls, then time `repeats` calls."""
        for _ in range(3):
            call()
        times_us = sorted(self._on_gpu(call) if self.cuda else self._on_cpu(call))
        deciles = statistics.quantiles(times_us, n=10, method="inclusive")
        return Time(statistics.median(times_us), deciles[0], deciles[-1], self._on_host(call))

    def _on_gpu(self, call: Callable[[], Any]) -> list[float]:
        pairs = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()  # once, at the end: the host must stay ahead of the GPU
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def _on_cpu(self, call: Callable[[], Any]) -> list[float]:
        times_us = []
        for _ in range(self.repeats):
            self.flush.zero_()
            times_us.append(_host_us(call))
        return times_us

    def _on_host(self, call: Callable[[], Any]) -> float:
        times_us = []
        for _ in range(self.repeats):
            if self.cuda:
                torch.cuda.synchronize()  # an empty queue, so that no launch waits for room in it
            times_us.append(_host_us(call))
        return statistics.median(times_us)


def _host_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def timed(inputs: Inputs, timer: Timer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way and pass, with its ratios."""
    compiler = "aot_eager" if args.rehearse else "inductor"
    times: dict[tuple[str, str], Time] = {
        (FLOOR, direction): timer.measure(call) for direction, call in floor(inputs).items()
    }
    outputs = {}
    for name, gate in ways(inputs, args.megatron, compiler).items():
        probs_TE, map_TE = gate(inputs.logits_TE)

        # defaults bind this way's values: a closure would see those of the last way
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
    dtype = str(inputs.model.dtype).removeprefix("torch.")
    for (name, direction), taken in times.items():
        row = {"dtype": dtype, "pass": direction, "way": name, **dataclasses.asdict(taken)}
        row["of_unfused"] = taken.us / times[UNFUSED, direction].us
        row["of_copies"] = times[FLOOR, direction].us / taken.us
        # copies have no output, and a way with a live top-k has other experts
        comparable = name in outputs and "live" not in name
        row["agrees"] = not comparable or _agree(
            outputs[name], outputs[UNFUSED], inputs.upstream_TE
        )
        rows.append(row)
    return rows


def _agree(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], upstream_TE: torch.Tensor
) -> bool:
    """Whether map, probabilities and gradient are the same, but for rounding.

    Allowed are 64 roundings of float32 arithmetic on numbers as large as the largest, and two
    roundings to the dtype of the result.
    """
    (*got_values, got_map_TE), (*want_values, want_map_TE) = got, want
    if not torch.equal(got_map_TE, want_map_TE):
        return False
    largest = want_values[0].abs().max().float()
    sizes = (largest, largest * upstream_TE.abs().max())
    for got_TE, want_TE, size in zip(got_values, want_values, sizes, strict=True):
        room_TE = 64 * torch.finfo(torch.float32).eps * size
        room_TE = room_TE + 2 * torch.finfo(got_TE.dtype).eps * want_TE.float().abs()
        if not bool(((got_TE.float() - want_TE.float()).abs() <= room_TE).all()):
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
