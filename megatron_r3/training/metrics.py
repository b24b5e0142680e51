"""Router mismatch through Megatron's own writers.

`training_log` asks for a report in every iteration. Counts stay on the device until then; they are
summed over all ranks, so a share is exact in every layout.

Shape suffixes: L decoder layers, M microbatches of a step, T tokens of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_r3.replay import MicrobatchRoutes


class StepMetrics:
    """What one step measured on this rank, and its reduction."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.microbatches: dict[int, list[MicrobatchRoutes]] = {}  # by model chunk
        self.dispatched = [0, 0]

    def add(self, chunk: int, microbatch: MicrobatchRoutes) -> None:
        """Keep a microbatch until the report; called in the order of the microbatches."""
        self.microbatches.setdefault(chunk, []).append(microbatch)

    def add_dispatched(self, matched: int, total: int) -> None:
        """Count (token, expert) pairs that reached their recorded expert, of all."""
        self.dispatched[0] += matched
        self.dispatched[1] += total

    def scalars(self) -> dict[str, float]:
        """Reduce over all ranks and forget; empty where nothing was measured.

        Every rank measures in the same iterations, also one without MoE layers.
        """
        if not self.microbatches:
            return {}
        scalars = {**self._by_layer(), **self._tokens()}
        matched, total = _sum_over_ranks(torch.tensor(self.dispatched)).tolist()
        if total:
            scalars["routes dispatched as recorded"] = matched / total
        self.microbatches, self.dispatched = {}, [0, 0]
        return scalars

    def _by_layer(self) -> dict[str, float]:
        counts_L2 = torch.zeros(self.num_layers, 2, dtype=torch.int64)
        counts_L2 = counts_L2.to(torch.cuda.current_device())
        for microbatch in (m for chunk in self.microbatches.values() for m in chunk):
            assert microbatch.counted_T is not None
            for number, mismatched in microbatch.mismatched.items():
                counts_L2[number - 1, 0] += mismatched
                counts_L2[number - 1, 1] += microbatch.counted_T.sum()
        counts = _sum_over_ranks(counts_L2).tolist()
        shares = {i: wrong / of for i, (wrong, of) in enumerate(counts) if of}
        if not shares:  # no router was asked: not measured is not 0
            return {}
        mean = sum(wrong for wrong, _ in counts) / sum(of for _, of in counts)
        by_layer = {f"router mismatch/layer {i + 1}": share for i, share in shares.items()}
        return {"router mismatch": mean, **by_layer}

    def _tokens(self) -> dict[str, float]:
        """Share of tokens that differ in any layer of any pipeline stage."""
        from megatron.core import mpu

        by_microbatch = list(zip(*self.microbatches.values(), strict=True))
        counted_MT = torch.stack([chunks[0].counted_T for chunks in by_microbatch])  # type: ignore[misc]
        any_MT = torch.zeros_like(counted_MT, dtype=torch.int32)
        measured = torch.zeros((), dtype=torch.int64)
        for index, chunks in enumerate(by_microbatch):
            for microbatch in chunks:
                if microbatch.mismatched_T is not None:
                    any_MT[index] |= microbatch.mismatched_T
                    measured += 1
        torch.distributed.all_reduce(
            any_MT, torch.distributed.ReduceOp.MAX, group=mpu.get_pipeline_model_parallel_group()
        )
        sums = torch.stack([any_MT.sum(), counted_MT.sum(), measured.to(any_MT.device)])
        wrong, of, measured_somewhere = _sum_over_ranks(sums).tolist()
        return {"token mismatch": wrong / of} if of and measured_somewhere else {}


def _sum_over_ranks(counts: Tensor) -> Tensor:
    counts = counts.to(torch.cuda.current_device())
    torch.distributed.all_reduce(counts)
    return counts


_installed: StepMetrics | None = None  # those of the training that runs in this process


def install_metrics(num_layers: int) -> StepMetrics:
    """New metrics, which `report` reads from now on."""
    global _installed
    _installed = StepMetrics(num_layers)
    return _installed


def report(iteration: int, writer: Any = None, wandb_writer: Any = None) -> str:
    """Write what the last step measured, and return it for Megatron's log line.

    Called by `training_log` on every rank.

    Args:
        writer, wandb_writer: Megatron's, or None on a rank that has none.
    """
    scalars = {} if _installed is None else _installed.scalars()
    for name, value in scalars.items() if writer is not None else ():
        writer.add_scalar(name, value, iteration)
    if wandb_writer is not None and scalars:
        wandb_writer.log(scalars, iteration)
    shown = {name: value for name, value in scalars.items() if "/" not in name}
    return "".join(f" {name}: {value:.4f} |" for name, value in shown.items())
