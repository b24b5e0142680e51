"""One layout: Megatron's own training loop, four steps over the same rollouts.

The first step replays the right routes; the others those of one control each. The learning rate is
too small to change a weight. Megatron is imported only inside the functions that ranks run.
"""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fidelity.core_only import is_core_only
from fidelity.gradients import Piece, collect
from fidelity.observe import Observed, Observer
from fidelity.reference import CLIP_EPS
from megatron_r3.launch import train, watch_models
from megatron_r3.store.reader import RolloutStore


@dataclass
class RankResult:
    """What one rank saw, by phase: `right`, and each control.

    Attributes:
        losses: empty where the rank has no last pipeline stage.
        dispatched: the witness's own metric, where this rank was told it.
        biases: the expert bias of each layer after the first step.
    """

    seen: dict[str, list[Observed]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, list[Piece]] = field(default_factory=dict)
    dispatched: dict[str, float] = field(default_factory=dict)
    biases: dict[int, np.ndarray] = field(default_factory=dict)


def run_layout(
    rank: int,
    argv: list[str],
    stores: dict[str, Path],
    forward_only_first: bool = False,
    script: Path | None = None,
) -> RankResult:
    """Train on `stores["right"]`, with the routes of each store in turn.

    Args:
        forward_only_first: run a forward-only pass over the batch before each step, as a trainer
            does that computes old log-probs.
        script: of the tree, to run instead of our own.
    """
    argv = [*argv, "--rollouts", str(stores["right"]), "--moe-router-replay"]
    argv += ["--rollouts-clip-eps", str(CLIP_EPS), "--train-iters", str(len(stores))]
    argv += ["--lr", "1e-30", "--min-lr", "0"]
    argv += ["--moe-router-replay-verify-dispatch", "--log-interval", "1"]
    argv += ["--moe-router-replay-verify-plan"]
    if is_core_only():
        from fidelity.core_layout import run_core_layout

        return run_core_layout(argv, stores, forward_only_first)
    from demo.pretrain import forward_step

    sys.argv = ["layout.py", *argv]
    observer, result = Observer(), RankResult()
    built: list[torch.nn.Module] = []
    switch_routes(stores, reads=2 if forward_only_first else 1)
    keep_dispatch_metric(result, observer)
    _watch_steps(observer, result, built, [*stores], forward_only_first)
    watch_models(lambda models: observer.attach(built.extend(models) or models))
    if script is None:
        train(_datasets, forward_step)
    else:
        runpy.run_path(str(script), run_name="__main__")
    result.seen = observer.seen
    return result


def _datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
    """The script's own data: evaluation uses it."""
    from megatron.training import get_args

    from demo.pretrain import Problems

    problems = Problems(64, get_args().seq_length)
    return problems, problems, problems


_datasets.is_distributed = True  # type: ignore[attr-defined]


def switch_routes(stores: dict[str, Path], reads: int) -> None:
    """Each phase reads its routes from its own store; everything else stays that of `right`.

    Microbatches are read ahead of their step, so a phase is known by their number.

    Args:
        reads: how often a phase reads each microbatch.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    opened = [RolloutStore([folder]) for folder in stores.values()]
    read, microbatches = RolloutStore.routes, Counter[tuple[int, ...]]()

    def routes(self: RolloutStore, rows_T: Any, layers: Any) -> Any:
        phase = microbatches[tuple(layers)] // (reads * get_num_microbatches())
        microbatches[tuple(layers)] += 1
        return read(opened[min(phase, len(opened) - 1)], rows_T, layers)

    RolloutStore.routes = routes  # type: ignore[method-assign]


def _watch_steps(
    observer: Observer,
    result: RankResult,
    built: list[torch.nn.Module],
    phases: list[str],
    forward_only_first: bool,
) -> None:
    """Wrap what Megatron's loop calls for a step, and what ends its backward pass."""
    from megatron.training import get_args, training

    train_step, finalize = training.train_step, training.finalize_model_grads
    remaining = iter(phases)

    def step(forward_step: Any, data: Any, model: Any, *more: Any, **kwargs: Any) -> Any:
        observer.phase = next(remaining)
        if forward_only_first:
            data = forward_only(get_args(), forward_step, data, model)
        losses, *rest = train_step(forward_step, data, model, *more, **kwargs)
        if losses:
            result.losses[observer.phase] = float(losses["policy loss"])
        return losses, *rest

    def finalized(models: Any, *more: Any, **kwargs: Any) -> None:
        finalize(models, *more, **kwargs)
        result.gradients[observer.phase] = collect(built, _gradients(built))
        if not result.biases:
            result.biases = biases(built)

    training.train_step, training.finalize_model_grads = step, finalized


def forward_only(args: Any, forward_step: Any, data: Any, model: Any) -> Any:
    """Run forward over the next batch; an iterator that brings the same batch again."""
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


def keep_dispatch_metric(result: RankResult, observer: Observer) -> None:
    """Keep what --moe-router-replay-verify-dispatch reports of each step."""
    from megatron_r3.training.metrics import StepMetrics

    scalars = StepMetrics.scalars

    def kept(self: StepMetrics) -> dict[str, float]:
        found = scalars(self)
        if found:
            result.dispatched[observer.phase] = found["routes dispatched as recorded"]
        return found

    StepMetrics.scalars = kept  # type: ignore[method-assign]


def _gradients(models: list[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """Every whole gradient by id of its parameter, as the optimizer is about to see it."""
    for model in models:
        if model.ddp_config.use_distributed_optimizer:
            _gather_shards(model)
    return {id(p): p.main_grad for model in models for p in model.parameters()}


def biases(models: list[torch.nn.Module]) -> dict[int, np.ndarray]:
    """The expert bias of every local layer that has one."""
    from megatron_r3.training.layers import local_routers

    routers = [item for model in models for item in local_routers(model).items()]
    return {
        number: router.expert_bias.cpu().numpy().copy()
        for number, router in routers
        if router.expert_bias is not None
    }


def _gather_shards(model: torch.nn.Module) -> None:
    """A distributed optimizer leaves each rank its shard of the gradients: fetch the others."""
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shards = shard_buffer(bucket.grad_data, group.size())
            torch.distributed.all_gather(shards, shards[group.rank()].clone(), group=group)
