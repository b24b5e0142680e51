"""Run a layout in Megatron's own training loop, in phases over the same rollouts.

The first phase replays the right routes, each other phase the wrong routes of one control. A phase
is one step, whose learning rate is too small to change a weight. A training with mini-steps has
only the first phase, whose steps do change the weights. Megatron is imported only inside the
functions that ranks run.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_r3.train.launch import train, watch_models
from proof.fidelity.gradients import collect, of_step
from proof.fidelity.observe import (
    Observer,
    RankResult,
    biases,
    forward_only,
    made_of,
    watched_parts,
)


def run_layout(
    rank: int,
    argv: list[str],
    stores: dict[str, Path],
    forward_only_first: bool = False,
    script: Path | None = None,
    mini_steps: int = 1,
) -> RankResult:
    """Train on `stores["right"]`, with the routes of each store in turn; return what a rank saw.

    Args:
        forward_only_first: run a forward-only pass over the batch before each step, as a trainer
            that computes old log-probs does.
        script: a training script of the tree, run instead of our own training.
        mini_steps: optimizer steps on the rollouts. With several, `stores` has `right` alone.
    """
    from proof.fidelity.script import datasets, forward_step

    sys.argv = ["layout.py", *argv]
    observer, result = Observer(), RankResult()
    built: list[torch.nn.Module] = []
    parts = watched_parts(stores, 2 if forward_only_first else 1, result, observer)
    phases = [name for name in stores for _ in range(mini_steps)]
    _watch_steps(observer, result, built, phases, forward_only_first)
    watch_models(lambda models: observer.attach(built.extend(models) or models))
    with made_of(parts):
        if script is None:
            train(datasets, forward_step)
        else:
            runpy.run_path(str(script), run_name="__main__")
    result.seen = observer.seen
    return result


def _watch_steps(
    observer: Observer,
    result: RankResult,
    built: list[torch.nn.Module],
    phases: list[str],
    forward_only_first: bool,
) -> None:
    """Wrap Megatron's `train_step` and `finalize_model_grads`, and keep losses and gradients.

    Args:
        phases: the phase of each step.
    """
    from megatron.training import get_args, training

    train_step, finalize = training.train_step, training.finalize_model_grads
    remaining = iter(phases)
    finished: list[str] = []

    def step(forward_step: Any, data: Any, model: Any, *more: Any, **kwargs: Any) -> Any:
        observer.phase = next(remaining)
        if forward_only_first:
            data = forward_only(get_args(), forward_step, data, model)
        losses, *rest = train_step(forward_step, data, model, *more, **kwargs)
        if losses:
            part = float(losses["policy loss"]) / phases.count(observer.phase)
            result.losses[observer.phase] = result.losses.get(observer.phase, 0.0) + part
        return losses, *rest

    def finalized(models: Any, *more: Any, **kwargs: Any) -> None:
        finalize(models, *more, **kwargs)
        number = finished.count(observer.phase)
        finished.append(observer.phase)
        pieces = of_step(collect(built, _gradients(built)), number)
        result.gradients.setdefault(observer.phase, []).extend(pieces)
        if not result.biases:
            result.biases = biases(built)

    training.train_step, training.finalize_model_grads = step, finalized


def _gradients(models: list[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """Every whole gradient by the `id()` of its parameter, as it is before the optimizer's step."""
    for model in models:
        if model.ddp_config.use_distributed_optimizer:
            _gather_shards(model)
    parameters = (p for model in models for p in model.parameters())
    return {id(p): p.main_grad for p in parameters if p.requires_grad}


def _gather_shards(model: torch.nn.Module) -> None:
    """Gather the gradients: with a distributed optimizer each rank has only its own shard."""
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shards = shard_buffer(bucket.grad_data, group.size())
            torch.distributed.all_gather(shards, shards[group.rank()].clone(), group=group)
