"""Report what a step measured (router mismatch, update, load) with Megatron's own writers.

Megatron's `training_log` asks for a report in every iteration. The counts stay on the device until
then. The report sums counts over all ranks before it divides, so shares are exact in every layout.
docs/metrics.md has the formulas.

Shape suffixes (docs/glossary.md): J, T, Y.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_r3.data.json_lines import append_line
from megatron_r3.data.truth import Alarm
from megatron_r3.train.mismatch import Places, StepAlarms, measure, scalars_of
from megatron_r3.train.update_metrics import UpdateMetrics

if TYPE_CHECKING:
    from megatron_r3.replay.microbatch import MicrobatchRoutes


EXPERT_LOAD = "expert load max/mean"
WITHOUT_GUESTS = f"{EXPERT_LOAD} without guests"


class StepMetrics:
    """What one step measured on this rank, and its sums over all ranks.

    Args:
        num_layers: decoder layers of the whole model.
        log_file: the file to which rank 0 appends a JSON line in each step; None for none.
        prefix: stands before each name that is logged.

    Attributes:
        update: what the policy update did.
        measures_update: whether `update` is reported for this step; the same on all ranks.
        begins_collection: whether this is the first step on its collection. Alarms are raised in
            first steps alone: in later steps the trainer has moved away from the rollouts, which
            would look like routes of wrong tokens.
    """

    def __init__(self, num_layers: int, log_file: str | None = None, prefix: str = "") -> None:
        self.num_layers, self.log_file, self.prefix = num_layers, log_file, prefix
        self.update = UpdateMetrics()
        self.measures_update = False
        self.begins_collection = True
        # the keys are the numbers of the model chunks
        self.microbatches: dict[int, list[tuple[MicrobatchRoutes, Places]]] = {}
        self.dispatched = [0, 0]
        self.alarms = StepAlarms()
        self._new_alarms: list[Alarm] = []
        self._started = 0.0

    def start(self) -> None:
        """Start the clock at the step's first micro-batch; later calls in the step do nothing."""
        self._started = self._started or time.monotonic()

    def add(self, chunk: int, microbatch: MicrobatchRoutes, places: Places) -> None:
        """Keep a micro-batch until the report. Called in the order of the micro-batches."""
        self.microbatches.setdefault(chunk, []).append((microbatch, places))

    def log(
        self, iteration: int, writer: Any, wandb_writer: Any, beside: Mapping[str, float] = {}
    ) -> str:
        """Write the values of this step, and return the text for Megatron's log line.

        Args:
            writer, wandb_writer: Megatron's; None on a rank that has none.
            beside: values that go into `log_file` alone.
        """
        scalars = {f"{self.prefix}{name}": value for name, value in self.scalars().items()}
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if wandb_writer is not None and scalars:
            wandb_writer.log(scalars, iteration)
        if torch.distributed.get_rank() == 0:
            for alarm in self._new_alarms:
                print(f"> rollouts: warning: iteration {iteration}: {alarm}", flush=True)
        self._new_alarms = []
        if self.log_file is not None and torch.distributed.get_rank() == 0:
            line = {"iteration": iteration, **scalars, **beside}
            if self._started:
                line["update/seconds"] = time.monotonic() - self._started
            append_line(Path(self.log_file), line)
        self._started = 0.0
        # Values of single layers and of the update would make the line too long: names with a slash
        # (`router mismatch/layer 1`) are left out, except for `expert load max/mean`.
        return "".join(
            f" {name}: {value:.4f} |"
            for name, value in scalars.items()
            if "/" not in name or name in (EXPERT_LOAD, WITHOUT_GUESTS)
        )

    def add_dispatched(self, matched: int, total: int) -> None:
        """Count (token, expert) pairs: those that reached the recorded expert, and all of them."""
        self.dispatched[0] += matched
        self.dispatched[1] += total

    def scalars(self) -> dict[str, float]:
        """Return the values of this step by name, and forget the step; empty if none was measured.

        All ranks call this function together, since it sums over the ranks. So all ranks must
        measure in the same iterations, also a rank without MoE layers.
        """
        from megatron.core import mpu

        scalars = {}
        if self.measures_update:
            device = torch.device("cuda", torch.cuda.current_device())
            values = self.update.values(device)
            if "tokens" in values:  # every rank of a tensor-parallel group counted the same tokens
                values["tokens"] /= mpu.get_tensor_model_parallel_world_size()
            scalars = {f"update/{name}": value for name, value in values.items()}
        self.measures_update = False
        if not self.microbatches:
            return scalars
        everything = [pair for chunk in self.microbatches.values() for pair in chunk]
        tables = measure(everything, self.num_layers)
        scalars |= {**scalars_of(tables), **self._tokens()}
        if tables.layers and self.begins_collection:
            alarms, self._new_alarms = self.alarms.look(tables)
            scalars["router mismatch/alarms"] = alarms
        scalars |= self._expert_load()
        matched, total = _sum_over_ranks(torch.tensor(self.dispatched)).tolist()
        if total:
            scalars["routes dispatched as recorded"] = matched / total
        self.microbatches, self.dispatched = {}, [0, 0]
        return scalars

    def _expert_load(self) -> dict[str, float]:
        """The load of the busiest rank divided by the mean load, of each layer and of all layers.

        With guests a second value says what the first would be without guests. Loads come from the
        dispatch plans, and a rank's plan has that rank's load alone. So for each layer and
        micro-batch the ranks that share experts find their largest load. Then two sums are made
        over all ranks: of the largest loads, and of the ranks' own loads. Example: two ranks have
        the loads 6 and 2. The sums are 6 + 6 = 12 and 6 + 2 = 8, and the value is 12 / 8 = 1.5.
        """
        from megatron.core import mpu

        microbatches = [one for chunk in self.microbatches.values() for one, _ in chunk]
        # loads_JY2: this rank's load, and its load without guests, in each micro-batch and layer;
        # slots_Y1: how many of a layer's plans have guest slots
        loads_JY2 = torch.zeros(len(microbatches), self.num_layers, 2, dtype=torch.float64)
        slots_Y1 = torch.zeros(self.num_layers, 1, dtype=torch.float64)
        group = mpu.get_expert_model_parallel_group()
        for index, microbatch in enumerate(microbatches if group.size() > 1 else []):
            for number, sizes in (microbatch.plan or {}).items():
                load, at_home = int(sizes.tokens_per_expert.sum()), sizes.load_at_home
                loads_JY2[index, number - 1, 0] = load
                loads_JY2[index, number - 1, 1] = load if at_home is None else at_home
                slots_Y1[number - 1] += at_home is not None
        busiest_JY2 = loads_JY2.to(torch.cuda.current_device(), copy=True)
        torch.distributed.all_reduce(busiest_JY2, torch.distributed.ReduceOp.MAX, group=group)
        sums = (busiest_JY2.sum(0).cpu(), loads_JY2[..., :1].sum(0), slots_Y1)
        sums_Y4 = _sum_over_ranks(torch.cat(sums, dim=1)).cpu()
        rows = [("", sums_Y4.sum(0).tolist())]
        rows += [(f"/layer {n}", sums) for n, sums in enumerate(sums_Y4.tolist(), start=1)]
        found = {}
        for layer, (busiest, at_home, mean, has_slots) in rows:
            if mean:
                found[f"{EXPERT_LOAD}{layer}"] = busiest / mean
            if has_slots:
                found[f"{WITHOUT_GUESTS}{layer}"] = at_home / mean
        return found

    def _tokens(self) -> dict[str, float]:
        """The share of tokens that differ in any layer of any pipeline stage: "token mismatch".

        A token passes layers of several stages. So the stages first find out together which tokens
        differ (the maximum over the stages of 0 or 1), and then count these tokens.
        """
        from megatron.core import mpu

        chunks_of = ([one.tally for one, _ in chunk] for chunk in self.microbatches.values())
        tallies: list[tuple[Any, ...]] = list(zip(*chunks_of, strict=True))
        counted_JT = torch.stack([chunks[0].counted_T for chunks in tallies])
        any_JT = torch.zeros_like(counted_JT, dtype=torch.int32)
        measured = torch.zeros((), dtype=torch.int64)
        for index, chunks in enumerate(tallies):
            for tally in chunks:
                if tally.mismatched_T is not None:
                    any_JT[index] |= tally.mismatched_T
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
