"""Report how often the live router would have chosen otherwise, with Megatron's own writers.

`training_log` asks for a report in every iteration. The counts stay on the device until then. They
are summed over all ranks, so a share is exact in every layout. docs/metrics.md has the formulas.

Shape suffixes (docs/glossary.md): Y, J, T.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_r3.training.update_metrics import UpdateMetrics

if TYPE_CHECKING:
    from megatron_r3.microbatch import MicrobatchRoutes


class StepMetrics:
    """What one step measured on this rank, and its sums over all ranks.

    Args:
        num_layers: decoder layers of the whole model.
        log_file: to which rank 0 appends a JSON line in each step; None for none.

    Attributes:
        update: what the policy update did.
        measures_update: whether that is reported for this step, the same on all ranks.
    """

    def __init__(self, num_layers: int, log_file: str | None = None) -> None:
        self.num_layers, self.log_file = num_layers, log_file
        self.update = UpdateMetrics()
        self.measures_update = False
        self.microbatches: dict[int, list[MicrobatchRoutes]] = {}  # by number of the model chunk
        self.dispatched = [0, 0]

    def add(self, chunk: int, microbatch: MicrobatchRoutes) -> None:
        """Keep a micro-batch until the report. Called in the order of the micro-batches."""
        self.microbatches.setdefault(chunk, []).append(microbatch)

    def log(self, iteration: int, writer: Any, wandb_writer: Any) -> str:
        """Write the shares of this step, and return them for Megatron's log line.

        Args:
            writer, wandb_writer: Megatron's; None on a rank that has none.
        """
        scalars = self.scalars()
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb_writer is not None and scalars:
            wandb_writer.log(scalars, iteration)
        if self.log_file is not None and torch.distributed.get_rank() == 0:
            line = json.dumps({"iteration": iteration, **scalars})
            with Path(self.log_file).open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        # the shares of single layers, and all of the update, would make the line endless
        return "".join(
            f" {name}: {value:.4f} |" for name, value in scalars.items() if "/" not in name
        )

    def add_dispatched(self, matched: int, total: int) -> None:
        """Count (token, expert) pairs: those that reached the recorded expert, and all of them."""
        self.dispatched[0] += matched
        self.dispatched[1] += total

    def scalars(self) -> dict[str, float]:
        """Return the shares of this step by name, and forget the step.

        Empty where nothing was measured. All ranks call this function together, since it sums over
        the ranks: every rank measures in the same iterations, also a rank without MoE layers.
        """
        scalars = {}
        if self.measures_update:
            device = torch.device("cuda", torch.cuda.current_device())
            values = self.update.values(device)
            scalars = {f"update/{name}": value for name, value in values.items()}
        self.measures_update = False
        if not self.microbatches:
            return scalars
        scalars |= {**self._by_layer(), **self._tokens()}
        matched, total = _sum_over_ranks(torch.tensor(self.dispatched)).tolist()
        if total:
            scalars["routes dispatched as recorded"] = matched / total
        self.microbatches, self.dispatched = {}, [0, 0]
        return scalars

    def _by_layer(self) -> dict[str, float]:
        counts_Y2 = torch.zeros(self.num_layers, 2, dtype=torch.int64)
        counts_Y2 = counts_Y2.to(torch.cuda.current_device())
        for microbatch in (m for chunk in self.microbatches.values() for m in chunk):
            assert microbatch.counted_T is not None
            for number, mismatched in microbatch.mismatched.items():
                counts_Y2[number - 1, 0] += mismatched
                counts_Y2[number - 1, 1] += microbatch.counted_T.sum()
        counts = _sum_over_ranks(counts_Y2).tolist()
        shares = {i: wrong / of for i, (wrong, of) in enumerate(counts) if of}
        if not shares:  # no router was asked: nothing was measured, which is not a share of 0
            return {}
        mean = sum(wrong for wrong, _ in counts) / sum(of for _, of in counts)
        by_layer = {f"router mismatch/layer {i + 1}": share for i, share in shares.items()}
        return {"router mismatch": mean, **by_layer}

    def _tokens(self) -> dict[str, float]:
        """The share of tokens that differ in any layer of any pipeline stage.

        A token's layers lie on several stages, so the stages first agree on which tokens differ
        (a maximum of 0 and 1 over them), and only then are tokens counted.
        """
        from megatron.core import mpu

        microbatches = list(zip(*self.microbatches.values(), strict=True))
        counted_JT = torch.stack([chunks[0].counted_T for chunks in microbatches])  # type: ignore[misc]
        any_JT = torch.zeros_like(counted_JT, dtype=torch.int32)
        measured = torch.zeros((), dtype=torch.int64)
        for index, chunks in enumerate(microbatches):
            for microbatch in chunks:
                if microbatch.mismatched_T is not None:
                    any_JT[index] |= microbatch.mismatched_T
                    measured += 1
        torch.distributed.all_reduce(
            any_JT, torch.distributed.ReduceOp.MAX, group=mpu.get_pipeline_model_parallel_group()
        )
        sums = torch.stack([any_JT.sum(), counted_JT.sum(), measured.to(any_JT.device)])
        wrong, of, measured_somewhere = _sum_over_ranks(sums).tolist()
        return {"token mismatch": wrong / of} if of and measured_somewhere else {}


def _sum_over_ranks(counts: Tensor) -> Tensor:
    counts = counts.to(torch.cuda.current_device())
    torch.distributed.all_reduce(counts)
    return counts
