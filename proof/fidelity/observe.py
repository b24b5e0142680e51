"""Observe the training of one rank: what reached each expert, losses, gradients, metrics.

Hooks in front of the experts see the hidden states that reach an expert. So nothing here relies on
what the router, the dispatcher or replay say. Megatron is imported only inside the functions that
ranks run.

Shape suffixes (docs/glossary.md): B, H, P, S.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.replay.host_routes import HostRoutes
from megatron_r3.replay.layers import local_moe_layers, local_routers
from megatron_r3.seams import pretrain
from megatron_r3.train.lookahead import Preparer
from megatron_r3.train.metrics import StepMetrics
from megatron_r3.train.step import Parts, RolloutStep
from proof.fidelity.gradients import Piece


@dataclass(frozen=True)
class Observed:
    """The input of one call of a layer's local experts.

    Attributes:
        layer: Megatron's number of the layer.
        hidden_PH: the hidden state of each pair, float32.
        experts_P: the global id of the expert that got the state.
        shard: which part of each expert this rank holds (expert tensor parallelism).
        grad: False for the first pass of a recomputed layer, and for a forward-only pass.
        guests: how many of the experts had been copied here from another rank.
    """

    layer: int
    hidden_PH: np.ndarray
    experts_P: np.ndarray
    shard: int
    grad: bool
    guests: int = 0


class Observer:
    """Hooks in front of the experts of every decoder MoE layer of a rank.

    Attributes:
        phase: the phase that runs now; the owner sets it.
        seen: the inputs of the experts, by phase; evaluation is left out.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.seen: dict[str, list[Observed]] = {}

    def attach(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Watch these model chunks."""
        for model in models:
            for layer in local_moe_layers(model).values():
                if getattr(layer, "guests", None) is not None:
                    layer.guests.watchers.append(partial(self._see, layer))
                else:
                    layer.experts.register_forward_pre_hook(self._hook(layer))
        return models

    def _hook(self, layer: Any) -> Any:
        def before_experts(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            self._see(layer, inputs[0], inputs[1], layer.local_expert_indices)

        return before_experts

    def _see(self, layer: Any, hidden_PH: torch.Tensor, counts: Any, experts: list[int]) -> None:
        """Keep the input of a call.

        Args:
            counts: how many rows of `hidden_PH` each local expert gets.
            experts: the global id of each local expert; -1 is an empty guest slot.
        """
        from megatron.core import mpu

        if not layer.training:
            return
        per_expert = torch.as_tensor(counts).cpu().numpy()
        hidden = hidden_PH.detach()[: int(per_expert.sum())]
        observed = Observed(
            layer=layer.layer_number,
            hidden_PH=hidden.float().cpu().numpy().copy(),
            experts_P=np.repeat(experts, per_expert),
            shard=mpu.get_expert_tensor_parallel_rank(),
            grad=torch.is_grad_enabled(),
            guests=sum(e >= 0 for e in experts) - len(layer.local_expert_indices),
        )
        self.seen.setdefault(self.phase, []).append(observed)


@dataclass
class RankResult:
    """What one rank saw, by phase (`right`, and the name of each control) except for `biases`.

    Attributes:
        seen: see `Observer`.
        losses: the mean loss of the steps; empty on a rank without the last pipeline stage.
        gradients: this rank's pieces, of all steps.
        dispatched: the least value of the metric "routes dispatched as recorded" in a phase.
        biases: by layer number, the expert bias after the first step.
    """

    seen: dict[str, list[Observed]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, list[Piece]] = field(default_factory=dict)
    dispatched: dict[str, float] = field(default_factory=dict)
    biases: dict[int, np.ndarray] = field(default_factory=dict)


@contextmanager
def made_of(parts: Parts) -> Iterator[None]:
    """Make trainings that call `pretrain()` inside the `with` block use these parts."""
    with mock.patch.object(pretrain, "RolloutStep", partial(RolloutStep, parts=parts)):
        yield


def watched_parts(
    stores: dict[str, Path], reads: int, result: RankResult, observer: Observer
) -> Parts:
    """The parts of a training in which each phase reads its routes from a store of its own.

    Everything but the routes comes from the first store. Micro-batches are read ahead of their
    step, so the number of micro-batches that were read tells the phase. `result` keeps what
    --moe-router-replay-verify-dispatch reports.

    Args:
        stores: the store of each phase, in the order of the phases.
        reads: how often a phase reads each micro-batch.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    opened = [RolloutStore([folder]) for folder in stores.values()]

    class PhasedPreparer(Preparer):
        num_read = 0

        def read_routes(self, rows_BS: torch.Tensor, mean_tokens: float) -> HostRoutes:
            phase = self.num_read // (reads * get_num_microbatches())
            self.num_read += 1
            assert self.routes is not None
            return self.routes.read(opened[min(phase, len(opened) - 1)], rows_BS, mean_tokens)

    class KeptMetrics(StepMetrics):
        def scalars(self) -> dict[str, float]:
            scalars = super().scalars()
            share = scalars.get("routes dispatched as recorded")
            if share is not None:  # keep the least of all steps of the phase
                before = result.dispatched.get(observer.phase, share)
                result.dispatched[observer.phase] = min(before, share)
            return scalars

    return Parts(preparer=PhasedPreparer, metrics=KeptMetrics)


def forward_only(args: Any, forward_step: Any, data: Any, model: Any) -> Any:
    """Run a forward-only pass over the next batch; return an iterator over the same batch."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        get_rerun_state_machine,
    )

    machine = get_rerun_state_machine()
    batches = [next(data) for _ in range(get_num_microbatches())]
    mode = machine.get_mode()
    machine.set_mode(RerunMode.DISABLED)  # as Megatron's own evaluate() does
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
        )
    machine.set_mode(mode)
    return RerunDataIterator(iter(batches))


def biases(models: list[torch.nn.Module]) -> dict[int, np.ndarray]:
    """The expert bias of every local layer that has one, by layer number."""
    routers = [item for model in models for item in local_routers(model).items()]
    return {
        number: router.expert_bias.cpu().numpy().copy()
        for number, router in routers
        if router.expert_bias is not None
    }
