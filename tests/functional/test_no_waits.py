"""Between two logged steps one copy goes to the host: that of the check before the update.

On a CPU a read costs nothing, so it is counted: every call by which Python gets a tensor's values,
made by our code while a training step runs. Values on the host are read through numpy, which
refuses a tensor on a device.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from slow import slow_except
from torch.utils._python_dispatch import TorchDispatchMode
from training import train

READS = ["item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"]
QUIET = ["--train-iters", "6", "--log-interval", "6", "--moe-router-replay-log-mismatch-interval"]


def caller_is_ours(depth: int = 2) -> bool:
    """Whether the innermost frame outside of torch is of megatron_r3 (the CPU layer is not).

    The lookahead thread does not count: a step does not wait for it. It reads back the positions of
    each length of a packed document once (`RankLayout`), when the length first comes.
    """
    if threading.current_thread().name == "megatron_r3 lookahead":
        return False
    frame = sys._getframe(depth)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch", "megatron_r3.cpu")) and name != __name__:
            return name.startswith("megatron_r3")
        frame = frame.f_back
    return False


class Scalars(TorchDispatchMode):
    """Counts what C++ reads for itself: an index that is a tensor without dimensions, say."""

    def __init__(self, counts: Counter[tuple[int, str]]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from megatron.training import get_args

        if func is torch.ops.aten._local_scalar_dense.default and caller_is_ours():
            self.counts[get_args().curr_iteration, "scalar"] += 1
        return func(*args, **(kwargs or {}))


def counting(counts: Counter[tuple[int, str]]) -> None:
    """Count reads by (iteration, call)."""
    from megatron.training import get_args

    for name in READS:
        original = getattr(torch.Tensor, name)

        def read(
            self: Any, *args: Any, original: Any = original, name: str = name, **kw: Any
        ) -> Any:
            if caller_is_ours():
                counts[get_args().curr_iteration, name] += 1
            return original(self, *args, **kw)

        setattr(torch.Tensor, name, read)


def trained_and_counted(rank: int, argv: list[str]) -> dict[int, dict[str, int]]:
    """The reads of each iteration, by the call that made them."""
    from megatron.training import training

    counts: Counter[tuple[int, str]] = Counter()
    step, started = training.train_step, []

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        if not started:
            started.append(True)
            counting(counts)
        with Scalars(counts):
            return step(*args, **kwargs)

    training.train_step = counted_step
    train(rank, argv)
    reads: dict[int, dict[str, int]] = {}
    for (iteration, name), count in counts.items():
        reads.setdefault(iteration, {})[name] = count
    return reads


LAYOUTS = {
    "EP2": (2, "--expert-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 8".split()),
    "CP2 in packs, recomputed": (
        2,
        "--context-parallel-size 2 --rollouts-pack --micro-batch-size 1 --seq-length 64 "
        "--global-batch-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
    ),
}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "EP2"))
def test_a_replayed_step_reads_back_once_before_its_update(patched, policy, layout):
    ranks, more = LAYOUTS[layout]
    argv = [a for a in policy.arguments(*more, *QUIET, "6") if "verify-dispatch" not in a]
    argv += ["--max-position-embeddings", "64"]
    for reads in patched.run(trained_and_counted, ranks, argv, timeout_s=240):
        assert [reads[iteration] for iteration in (1, 2, 3, 4)] == [{"cpu": 1}] * 4
        assert sum(reads[5].values()) > 1, "the report of the last step was not counted"
