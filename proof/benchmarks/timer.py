"""Times calls on a GPU with cold caches, in turn, until their ratios can be told from 1."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from proof.benchmarks.bench import ratios
from proof.benchmarks.interval import LOOKS, enough, turn

Call = Callable[[], Any]
Times = dict[str, list[float]]  # microseconds of each round, by the name of the call


class Timer:
    """Times calls with cold caches, on a GPU or, in a rehearsal, on a CPU.

    Before each call the timer writes `flush_bytes` bytes, which drive the call's data out of the
    caches. The write also keeps the GPU busy while the host launches the call. So the time of the
    GPU is measured, with the gaps between kernels, and not the time of the host.
    """

    def __init__(self, device: str, flush_bytes: int) -> None:
        self.cuda = device == "cuda"
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def in_turn(
        self, calls: Mapping[str, Call], compared: Sequence[tuple[str, str]], most: int
    ) -> Times:
        """Time all calls in turn, round after round.

        The calls of one round are neighbours, so that their ratio is taken under equal conditions.
        The order of the calls changes from round to round (`turn`), so that a GPU that slows down
        favours no call.

        Args:
            calls: what to time, by name. Before the rounds each call runs three times to warm up.
            compared: pairs of names. The timing stops early when the ratio of the times of each
                pair can be told from 1.
            most: the number of rounds after which the timing stops in any case.

        Returns:
            The microseconds of each round, by name.
        """
        for call in calls.values():
            for _ in range(3):
                call()
        times: Times = {name: [] for name in calls}
        rounds = 0
        for look in [*(look for look in LOOKS if look < most), most]:
            self._rounds(calls, times, range(rounds, look))
            rounds = look
            if enough([ratios(times, *pair) for pair in compared], most):
                break
        return times

    def _rounds(self, calls: Mapping[str, Call], times: Times, rounds: range) -> None:
        spans: list[tuple[str, Any, Any]] = []
        for number in rounds:
            for name in turn(list(calls), number):
                self.flush.zero_()
                if not self.cuda:
                    times[name].append(_host_us(calls[name]))
                    continue
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                calls[name]()
                end.record()
                spans.append((name, start, end))
        if spans:
            torch.cuda.synchronize()  # once, at the end: the host must stay ahead of the GPU
        for name, start, end in spans:
            times[name].append(1e3 * start.elapsed_time(end))

    def on_host(self, call: Call, repeats: int) -> float:
        """Microseconds that the host spends on a call, without waiting for the call's kernels."""
        times_us = []
        for _ in range(repeats):
            if self.cuda:
                torch.cuda.synchronize()  # it empties the queue, so that no launch waits for room
            times_us.append(_host_us(call))
        return statistics.median(times_us)


def _host_us(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)
