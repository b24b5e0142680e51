"""What `benchmarks.layers` measures of a step: loss, gradients, time, memory, waits, copies."""

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
from megatron_r3.gate import GateInputs, GateOptions, GateOutput, gate_for, substitute_gate

Case = tuple[str, bool]  # a way's name, whether with full recompute
SYNCHRONISE = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TO_HOST = "Memcpy DtoH"


@contextmanager
def _counted_calls(counts: Counter[str], stack: Stack) -> Iterator[None]:
    """Until the block ends, count the passes of all routers, and the calls of the fused gate."""
    gate = gate_for(stack.routers[0].weight.device)

    def counted(inputs: GateInputs, options: GateOptions) -> GateOutput:
        counts["gate"] += 1
        return gate(inputs, options)

    def passed(*_: Any) -> None:
        counts["routers"] += 1

    hooks = [router.register_forward_pre_hook(passed) for router in stack.routers]
    try:
        with substitute_gate(counted):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def check(stack: Stack, tolerance: float) -> dict[Case, dict[str, Any]]:
    """Check that every way computes what live computes.

    Deterministic algorithms are on here, so that all sums are added in one order; they are off when
    steps are timed.

    Returns:
        For each case how far loss and router gradients are from those of live, as a share of those
        of live, and how many tokens live routers would have sent elsewhere ("mismatched", None for
        a way that does not count them).

    Raises:
        AssertionError: the loss of a way is not that of live (to the bit, or within `tolerance` for
            the fused gate), or a step did not run as its name says.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    stack.record()
    checked = {}
    for recompute in (False, True):
        loss, gradient = None, None  # those of live, which is the first way
        for name, way in WAYS.items():
            calls: Counter[str] = Counter()
            with _counted_calls(calls, stack):
                way_loss, microbatch = stack.step(way, recompute)
            passes = stack.sizes.layers * (1 + recompute)
            assert calls["routers"] == passes, f"{name}: {calls['routers']} passes, not {passes}"
            assert calls["gate"] == passes * way.fused, f"{name}: the gate was not fused"
            if loss is None or gradient is None:
                loss, gradient = way_loss, stack.gradient()
            error = ((way_loss - loss).abs() / loss.abs()).item()
            # an unfused way has no tolerance: tolerance * False is 0
            assert error <= tolerance * way.fused, f"{name}: loss {way_loss}, live {loss}"
            distance = torch.linalg.vector_norm(stack.gradient() - gradient)
            mismatched = None
            if microbatch is not None and way.counted:
                mismatched = sum(int(count) for count in microbatch.mismatched.values())
            checked[name, recompute] = {
                "loss_error": error,
                "gradient_error": (distance / torch.linalg.vector_norm(gradient)).item(),
                "mismatched": mismatched,
            }
    torch.use_deterministic_algorithms(False)
    return checked


def timed(stack: Stack, rounds: int, tolerance: float) -> dict[Case, dict[str, Any]]:
    """Step times of each case, each next to a step of the way that it is compared with.

    Every round takes all cases in turn. In odd rounds the case goes before its neighbour, in even
    rounds after it, so that a machine that slows down or speeds up favours neither. Two rounds
    before the `rounds` that count warm up.
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
    """Median, 10th and 90th percentile, of the steps' times and of their ratios to neighbours."""
    times_ms = [1e3 * step_s for step_s, _ in pairs]
    ratios = [step_s / neighbour_s for step_s, neighbour_s in pairs]
    time_deciles = statistics.quantiles(times_ms, n=10, method="inclusive")
    ratio_deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    return {
        "step_ms": statistics.median(times_ms),
        "low_ms": time_deciles[0],
        "high_ms": time_deciles[-1],
        "ratio": statistics.median(ratios),
        "ratio_low": ratio_deciles[0],
        "ratio_high": ratio_deciles[-1],
    }


def peak_memory(stack: Stack) -> dict[Case, dict[str, float]]:
    """The most memory that a step of each case allocates: in all, and above what it began with."""
    memory = {}
    for recompute in (False, True):
        for name, way in WAYS.items():
            stack.gpt.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            stack.step(way, recompute)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            memory[name, recompute] = {"peak_mb": peak / 2**20, "step_mb": (peak - before) / 2**20}
    return memory


def count_waits(stack: Stack, cuda: bool) -> dict[Case, dict[str, int]]:
    """Host waits and copies to the host of one step of each case.

    On CUDA these are what the profiler sees in the whole step. On a CPU they are what the code of
    MoE layers would do on CUDA (see `benchmarks.waits`). Call it last: torch stays instrumented.
    """
    if cuda:
        _profile(lambda: None)  # the first profile also has the start of the profiler's own parts
    counted = _profiled if cuda else _instrumented(stack)
    counts = {}
    for recompute in (False, True):
        for name, way in WAYS.items():

            def step(way: Any = way, recompute: bool = recompute) -> None:
                stack.step(way, recompute)

            counts[name, recompute] = counted(step)
    return counts


def _instrumented(stack: Stack) -> Callable[[Callable[[], None]], dict[str, int]]:
    counts: Counter[str] = Counter()
    instrument(counts)
    # `instrument` knows of a tensor whether it is on the host only if it saw how it was made, so
    # the plan is made again
    stack.plan()
    for layer in stack.layers:
        for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
            if hasattr(layer.token_dispatcher, name):
                # Megatron makes it on `permute_idx_device`: the CPU without moe_permute_fusion
                mark_host(getattr(layer.token_dispatcher, name))

    def counted(step: Callable[[], None]) -> dict[str, int]:
        counts.clear()
        step()
        return {WAITS: counts[WAITS], COPIES: counts[COPIES]}

    return counted


def _profiled(step: Callable[[], None]) -> dict[str, int]:
    """Waits and copies of a step, less those of an empty profile.

    First a profile of one read of one number checks the profiler: it must have at least one wait
    and exactly one copy more than an empty profile.
    """
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
