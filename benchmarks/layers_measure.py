"""What `benchmarks.layers` measures of a step: that it is the same step, time, waits, memory."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.layers_model import WAYS, Stack
from benchmarks.waits import COPIES, WAITS, instrument, mark_host

Case = tuple[str, bool]  # a way's name, whether with full recompute
SYNCHRONISE = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TO_HOST = "Memcpy DtoH"


@contextmanager
def reference_gate(wanted: bool) -> Iterator[None]:
    """For a rehearsal: inside, the seam finds a kernel on the CPU, its plain reference."""
    from megatron_r3.seams import router as router_seam

    before = router_seam.has_kernel
    if wanted:
        router_seam.has_kernel = lambda device: True
    try:
        yield
    finally:
        router_seam.has_kernel = before


@contextmanager
def _counted_calls(counts: Counter[str], stack: Stack) -> Iterator[None]:
    """Inside, count the passes of all routers, and the calls of the fused gate."""
    from megatron_r3.seams import router as router_seam

    gate = router_seam.replayed_gate

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["gate"] += 1
        return gate(*args, **kwargs)

    def passed(*_: Any) -> None:
        counts["routers"] += 1

    router_seam.replayed_gate = counted
    hooks = [router.register_forward_pre_hook(passed) for router in stack.routers]
    try:
        yield
    finally:
        router_seam.replayed_gate = gate
        for hook in hooks:
            hook.remove()


def check(stack: Stack, tolerance: float) -> dict[Case, dict[str, Any]]:
    """That every way computes what live does: all sums in one order, as they are not when timed.

    Returns:
        For each case how far loss and router gradients are from those of live, as a share of these,
        and how many tokens would have been routed otherwise (None: not counted).

    Raises:
        AssertionError: a loss that is not live's (of the fused gate: not within `tolerance`), or a
            step that did not run as its name says.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    stack.record()
    found = {}
    for recompute in (False, True):
        loss, gradient = None, None
        for name, way in WAYS.items():
            calls: Counter[str] = Counter()
            with _counted_calls(calls, stack):
                its_loss, microbatch = stack.step(way, recompute)
            passes = stack.sizes.layers * (1 + recompute)
            assert calls["routers"] == passes, f"{name}: {calls['routers']} passes, not {passes}"
            assert calls["gate"] == passes * way.fused, f"{name}: the gate was not fused"
            if loss is None or gradient is None:
                loss, gradient = its_loss, stack.gradient()
            error = ((its_loss - loss).abs() / loss.abs()).item()
            assert error <= tolerance * way.fused, f"{name}: loss {its_loss}, live {loss}"
            apart = torch.linalg.vector_norm(stack.gradient() - gradient)
            mismatched = None
            if microbatch is not None and way.counted:
                mismatched = sum(int(count) for count in microbatch.mismatched.values())
            found[name, recompute] = {
                "loss_error": error,
                "gradient_error": (apart / torch.linalg.vector_norm(gradient)).item(),
                "mismatched": mismatched,
            }
    torch.use_deterministic_algorithms(False)
    return found


def timed(stack: Stack, rounds: int, tolerance: float) -> dict[Case, dict[str, Any]]:
    """Step times of each case, each next to a step of the way it is compared with.

    In turn: `rounds` of all cases; in every second one the neighbour goes first. Two more before,
    to warm up.
    """
    steps: dict[Case, list[tuple[float, float]]] = {}
    losses = []
    for number in range(rounds + 2):
        for recompute in (False, True):
            for name, way in WAYS.items():
                seconds = [0.0, 0.0]
                for place in (0, 1) if number % 2 else (1, 0):
                    chosen = WAYS[(name, way.beside)[place]]
                    seconds[place], loss = _timed_step(stack, chosen, recompute)
                    losses.append(loss)
                if number >= 2:
                    steps.setdefault((name, recompute), []).append((seconds[0], seconds[1]))
    values = torch.stack(losses).tolist()
    spread = (max(values) - min(values)) / values[0]
    assert spread <= 2 * tolerance, f"losses of the timed steps are {spread:.1e} apart"
    return {case: _summary(pairs) for case, pairs in steps.items()}


def _timed_step(stack: Stack, way: Any, recompute: bool) -> tuple[float, torch.Tensor]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    loss, _ = stack.step(way, recompute)
    torch.cuda.synchronize()
    return time.perf_counter() - begin, loss


def _summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Medians, 10th and 90th percentiles, of the steps and of the ratios of neighbours."""
    taken = [1e3 * mine for mine, _ in pairs]
    ratios = [mine / other for mine, other in pairs]
    cuts, of_cuts = (statistics.quantiles(v, n=10, method="inclusive") for v in (taken, ratios))
    return {
        "step_ms": statistics.median(taken),
        "low_ms": cuts[0],
        "high_ms": cuts[-1],
        "ratio": statistics.median(ratios),
        "ratio_low": of_cuts[0],
        "ratio_high": of_cuts[-1],
    }


def peak_memory(stack: Stack) -> dict[Case, dict[str, float]]:
    """The most that a step of each case has allocated, in all and above what it began with."""
    found = {}
    for recompute in (False, True):
        for name, way in WAYS.items():
            stack.gpt.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            stack.step(way, recompute)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            found[name, recompute] = {"peak_mb": peak / 2**20, "step_mb": (peak - before) / 2**20}
    return found


def count_waits(stack: Stack, cuda: bool) -> dict[Case, dict[str, int]]:
    """Host waits and copies to the host of one step of each case; the last thing to be done.

    On CUDA those that the profiler sees, in the whole step; on a CPU those that code of MoE layers
    would make on CUDA (see `benchmarks.waits`), which stays instrumented.
    """
    if cuda:
        _profile(lambda: None)  # the first one starts the profiler's own parts
    counted = _profiled if cuda else _instrumented(stack)
    found = {}
    for recompute in (False, True):
        for name, way in WAYS.items():

            def step(way: Any = way, recompute: bool = recompute) -> None:
                stack.step(way, recompute)

            found[name, recompute] = counted(step)
    return found


def _instrumented(stack: Stack) -> Callable[[Callable[[], None]], dict[str, int]]:
    counts: Counter[str] = Counter()
    instrument(counts)
    stack.plan()  # again: what is on the host is known from here on
    for layer in stack.layers:
        for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
            if hasattr(layer.token_dispatcher, name):  # its permute_idx_device
                mark_host(getattr(layer.token_dispatcher, name))

    def counted(step: Callable[[], None]) -> dict[str, int]:
        counts.clear()
        step()
        return {WAITS: counts[WAITS], COPIES: counts[COPIES]}

    return counted


def _profiled(step: Callable[[], None]) -> dict[str, int]:
    """Less what a profile of nothing has; a profile of one read must have one more of both."""
    one = torch.ones(1, device="cuda")
    nothing = _profile(lambda: None)
    read = _profile(lambda: one.item()) - nothing
    assert read[WAITS] >= 1, "the profiler does not see what the host waits for"
    assert read[COPIES] == 1, "the profiler does not see copies to the host"
    seen = _profile(step)
    seen.subtract(nothing)
    return dict(seen)


def _profile(step: Callable[[], Any]) -> Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    counts = Counter({WAITS: 0, COPIES: 0} | dict.fromkeys(SYNCHRONISE, 0))
    for event in profiled.events():
        if event.name in SYNCHRONISE:
            counts.update((WAITS, event.name))
        elif event.name.startswith(TO_HOST):
            counts.update((COPIES,))
    return counts
