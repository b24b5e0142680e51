"""Time of a GPU, or of a CPU in a rehearsal, with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Time:
    """Microseconds: the median, the 10th and 90th percentile, and what the host spends on a call.

    Attributes:
        host_us: of a call that waits for nothing: what a GPU that is not behind would wait.
    """

    us: float
    low_us: float
    high_us: float
    host_us: float


class Timer:
    """Times calls, after a write of `flush_bytes` before each, which leaves nothing in the caches.

    The write also keeps the GPU busy while the host launches: what is measured is the GPU's time,
    the gaps between kernels with it, not the host's.
    """

    def __init__(self, device: str, repeats: int, flush_bytes: int) -> None:
        self.cuda = device == "cuda"
        self.repeats = repeats
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def measure(self, call: Callable[[], Any]) -> Time:
        """Warm up, then time it `repeats` times."""
        for _ in range(3):
            call()
        taken = sorted(self._on_gpu(call) if self.cuda else self._on_cpu(call))
        cuts = statistics.quantiles(taken, n=10, method="inclusive")
        return Time(statistics.median(taken), cuts[0], cuts[-1], self._of_host(call))

    def _on_gpu(self, call: Callable[[], Any]) -> list[float]:
        pairs = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def _on_cpu(self, call: Callable[[], Any]) -> list[float]:
        taken = []
        for _ in range(self.repeats):
            self.flush.zero_()
            start = time.perf_counter()
            call()
            taken.append(1e6 * (time.perf_counter() - start))
        return taken

    def _of_host(self, call: Callable[[], Any]) -> float:
        taken = []
        for _ in range(self.repeats):
            if self.cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            taken.append(1e6 * (time.perf_counter() - start))
        return statistics.median(taken)
