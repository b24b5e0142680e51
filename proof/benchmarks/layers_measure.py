"""What layers.py measures of a step: loss, gradients, time, memory, waits, copies."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_r3.replay.gate import GateInputs, GateOptions, GateOutput, gate_for, substitute_gate
from proof.benchmarks.interval import LOOKS, enough, median_of
from proof.benchmarks.layers_model import Stack
from proof.benchmarks.waits import COPIES, WAITS, count_passes, instrument

Found = dict[str, dict[str, Any]]  # what was measured, by the name of the way
PER_LAYER, PAGEABLE = "host waits per layer", "pageable copies to the device"
SYNCHRONISE = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TO_HOST = "Memcpy DtoH"
# A copy from pageable memory. If the copy is larger than 64 KiB, CUDA may make the host wait in it
# without any of the calls above.
FROM_PAGEABLE = "Memcpy HtoD (Pageable"


@contextmanager
def _counted_calls(counts: Counter[str], stack: Stack) -> Iterator[None]:
    """Count the passes of all routers ("routers") and of the fused gate ("gate") in the block."""
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


def check(stack: Stack, recompute: bool, tolerances: tuple[float, float]) -> Found:
    """Compare the loss and the router gradients of each way with those of live.

    Torch's deterministic algorithms are on here, so that torch adds each sum in one order; they
    are off when steps are timed. A live step is taken twice. If the two live losses are bitwise
    equal, as they are without Transformer Engine, an unfused way must give the same loss, bitwise.

    Args:
        tolerances: the largest relative distances from live that are allowed: that of the loss (for
            a fused way, and for all ways if the two live losses differ), and that of the gradients.

    Returns:
        For each way the relative distances of loss and router gradients from live, the distance of
        two live losses ("repeat_error"), the number of (token, layer) pairs whose live experts
        differ ("mismatched", None for a way that does not count them), and "agrees".

    Raises:
        AssertionError: the routers or the fused gate ran more or less often than the way demands.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _check(stack, recompute, tolerances)
    finally:
        torch.use_deterministic_algorithms(False)


def _check(stack: Stack, recompute: bool, tolerances: tuple[float, float]) -> Found:
    first, gradient = _checked_step(stack, "live", recompute)[0], stack.gradient()
    repeat = _distance(_checked_step(stack, "live", recompute)[0], first)
    found = {}
    for name, way in stack.ways.items():
        loss, microbatch = _checked_step(stack, name, recompute)
        loss_error, gradient_error = _distance(loss, first), _distance(stack.gradient(), gradient)
        mismatched = None
        if microbatch is not None and microbatch.tally is not None:
            mismatched = sum(int(count) for count in microbatch.tally.mismatched.values())
        allowed = tolerances[0] if way.fused or repeat > 0 else 0.0
        found[name] = {
            "loss_error": loss_error,
            "repeat_error": repeat,
            "gradient_error": gradient_error,
            "mismatched": mismatched,
            "agrees": loss_error <= allowed and gradient_error <= tolerances[1],
        }
        if way.fused and not way.replays:
            # Among equal bfloat16 logits Transformer Engine's top-k may take other experts. Such
            # tokens are too few to change the loss much, so only the loss is compared.
            found[name]["agrees"] = loss_error <= 10 * tolerances[0]
    return found


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm
    return (norm(got - want) / norm(want)).item()


def _checked_step(stack: Stack, name: str, recompute: bool) -> tuple[torch.Tensor, Any]:
    """Take a step, and assert how often the routers and the fused gate ran in it."""
    calls: Counter[str] = Counter()
    way = stack.ways[name]
    with _counted_calls(calls, stack):
        loss, microbatch = stack.step(way, recompute)
    passes = stack.sizes.layers * (1 + recompute)
    gates = passes * (way.fused and way.replays)
    assert calls["routers"] == passes, f"{name}: {calls['routers']} passes, not {passes}"
    assert calls["gate"] == gates, f"{name}: {calls['gate']} fused gates, not {gates}"
    return loss, microbatch


def timed(
    stack: Stack, recompute: bool, most: int, seconds: float, keep: Callable[[Found], None]
) -> None:
    """Time steps of each way, each next to a step of the way `beside` that it is compared with.

    A round takes all ways in turn. In odd rounds a step of the way goes before that of `beside`, in
    even rounds after it, so that a machine that slows down or speeds up favours neither way. The
    first two rounds warm up and do not count. The timing stops when every ratio but that of live to
    itself can be told from 1; after `most` rounds; or when one more round would end later than
    `seconds` after the start.

    Args:
        keep: gets what was found so far, after some numbers of rounds (`LOOKS`) and at the end.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in stack.ways}
    began = time.perf_counter()
    for number in range(most + 2):
        for name, way in stack.ways.items():
            span_s = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                chosen = stack.ways[(name, way.beside)[place]]
                span_s[place] = _timed_step(stack, chosen, recompute)
            if number >= 2:
                pairs[name].append((span_s[0], span_s[1]))
        done, spent = number - 1, time.perf_counter() - began
        late = spent * (done + 3) / (done + 2) > seconds  # when one more round would end
        told = [[a / b for a, b in of_way] for name, of_way in pairs.items() if name != "live"]
        stop = done >= 1 and (late or enough(told, most))
        if stop or done in LOOKS:
            keep({name: _summary(of_way) for name, of_way in pairs.items()})
        if stop:
            return


def _timed_step(stack: Stack, way: Any, recompute: bool) -> float:
    begin = time.perf_counter()
    stack.step(way, recompute)
    if stack.cuda:
        torch.cuda.synchronize()  # so that the next step begins with an empty queue
    return time.perf_counter() - begin


def _summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """The median time of a way's steps, and the median ratio to the steps beside them."""
    times_ms = sorted(1e3 * step_s for step_s, _ in pairs)
    ratio = median_of([step_s / neighbour_s for step_s, neighbour_s in pairs])
    spread = {"low_ms": times_ms[0], "high_ms": times_ms[-1]}  # the fastest and the slowest
    return {"step_ms": statistics.median(times_ms), **spread, "ratio": ratio.record()}


def peak_memory(stack: Stack, recompute: bool) -> Found:
    """The peak of allocated memory in a step of each way, in MiB.

    Returns:
        "peak_mb": the peak; "step_mb": the peak less what was allocated when the step began.
    """
    memory = {}
    for name, way in stack.ways.items():
        stack.gpt.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stack.step(way, recompute)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        memory[name] = {"peak_mb": peak / 2**20, "step_mb": (peak - before) / 2**20}
    return memory


class Waits:
    """Counts the host waits and the copies to the host in single steps.

    On CUDA the counts are what the profiler sees in the whole step. On a CPU the counts are what
    the code of MoE layers would do on CUDA (see `proof.benchmarks.waits`); torch then stays
    instrumented.

    Attributes:
        broken: what the profiler misses, which makes its counts void; None if it misses nothing.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.broken = _broken_profiler() if stack.cuda else None
        self._count = _profiled if stack.cuda else _instrumented(stack)

    def count(self, recompute: bool) -> Found:
        """The counts of a step of each way, and the waits divided by the passes of MoE layers.

        All numbers are None if the profiler is broken.
        """
        if self.broken:
            none = dict.fromkeys((WAITS, PER_LAYER, COPIES, PAGEABLE))
            return {name: dict(none) for name in self.stack.ways}
        counts: Found = {}
        for name, way in self.stack.ways.items():

            def step(way: Any = way) -> None:
                self.stack.step(way, recompute)

            counts[name] = self._count(step)
            passes = self.stack.sizes.layers * (1 + recompute)
            counts[name][PER_LAYER] = counts[name][WAITS] / passes
        return counts


def _instrumented(stack: Stack) -> Callable[[Callable[[], None]], dict[str, int]]:
    counts: Counter[str] = Counter()
    instrument(counts)
    # A tensor that was made before `instrument` is not marked as one on the host. So the plan is
    # made again.
    stack.plan()
    count_passes([stack.gpt], counts)

    def counted(step: Callable[[], None]) -> dict[str, int]:
        counts.clear()
        step()
        return {WAITS: counts[WAITS], COPIES: counts[COPIES]}

    return counted


def _broken_profiler() -> str | None:
    """Read one number under the profiler; return what it misses, None if it sees wait and copy."""
    one = torch.ones(1, device="cuda")
    _profile(lambda: None)  # the first profile also contains the profiler's own start
    read = _profile(lambda: one.item())
    read.subtract(_profile(lambda: None))
    if read[WAITS] >= 1 and read[COPIES] == 1:
        return None
    return f"the profiler sees {read[WAITS]} waits and {read[COPIES]} copies when a number is read"


def _profiled(step: Callable[[], None]) -> dict[str, int]:
    """Waits and copies of a step, less those of an empty profile."""
    nothing = _profile(lambda: None)
    seen = _profile(step)
    seen.subtract(nothing)
    return dict(seen)


def _profile(step: Callable[[], Any]) -> Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    counts = Counter({WAITS: 0, COPIES: 0, PAGEABLE: 0} | dict.fromkeys(SYNCHRONISE, 0))
    for event in profiled.events():
        if event.name in SYNCHRONISE:
            counts.update((WAITS, event.name))
        elif event.name.startswith(TO_HOST):
            counts.update((COPIES,))
        elif event.name.startswith(FROM_PAGEABLE):
            counts.update((PAGEABLE,))
    return counts
