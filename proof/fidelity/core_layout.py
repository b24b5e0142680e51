"""Run a layout on a tree without `megatron.training`, as `proof.fidelity.layout` does on others.

Rollouts, routes, batches and the forward step are those that `pretrain()` would use. The loop over
the steps is written out here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.seams.pretrain import observe
from megatron_r3.train.dataset import PackedRollouts, RolloutDataset
from megatron_r3.train.ledger import Ledger
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.step import RolloutStep
from proof.fidelity import core_only
from proof.fidelity.gradients import collect
from proof.fidelity.observe import Observer, RankResult, biases, forward_only, watched_parts


@dataclass
class Progress:
    """Stands in for `megatron_r3.train.progress.Progress` in a training that is never resumed."""

    iteration: int = 0
    consumed_samples: int = 0

    def remember(self, entries: Any) -> None:
        """Do nothing: there is no checkpoint."""

    def remembered(self) -> list[Any]:
        """No checkpoint was loaded."""
        return []


def run_core_layout(
    rank: int,
    argv: list[str],
    stores: dict[str, Path],
    forward_only_first: bool = False,
    script: Path | None = None,
    mini_steps: int = 1,
) -> RankResult:
    """Do what `proof.fidelity.layout.run_layout` does, with the same arguments.

    Trees without a training loop have no scripts, and no `begin_step`, which mini-steps need. So
    `script` must be None, and `mini_steps` 1.
    """
    assert script is None
    assert mini_steps == 1
    args = core_only.initialize(argv)
    observer, result = Observer(), RankResult()
    models = core_only.wrap(args, core_only.build_chunks(args))
    observer.attach(models)
    store, options = RolloutStore([stores["right"]]), core_only.rollout_options(args)
    progress = Progress()
    parts = watched_parts(stores, 2 if forward_only_first else 1, result, observer)
    ledger = Ledger(options, progress, store)
    step = RolloutStep(options, store, progress, ledger, lambda *_: None, observe, parts=parts)
    for progress.iteration, observer.phase in enumerate(stores):
        data: Any = [_batches(args, options, store) for _ in models]
        data = data if len(models) > 1 else data[0]
        if forward_only_first:
            data = forward_only(args, step, data, models)
        reports = core_only.forward_backward(args, models, step, data)
        step.check(models)
        if reports:
            result.losses[observer.phase] = _mean(reports)
        gradients = {id(p): p.main_grad for model in models for p in model.parameters()}
        result.gradients[observer.phase] = collect(models, gradients)
        result.biases = result.biases or biases(models)
        step.metrics.log(progress.iteration, None, None)
    result.seen = observer.seen
    return result


def _batches(args: argparse.Namespace, options: RolloutOptions, store: RolloutStore) -> Any:
    """This data parallel rank's microbatches of one step, in Megatron's order."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunDataIterator

    if options.pack:
        multiple = options.document_multiple
        data: RolloutDataset = PackedRollouts(store, options.use, None, multiple)
    else:
        data = RolloutDataset(store, options.use)
    size, ranks = args.micro_batch_size, args.data_parallel_size
    first = parallel_state.get_data_parallel_rank() * size
    starts = range(first, args.global_batch_size, size * ranks)
    collate = torch.utils.data.default_collate
    return RerunDataIterator(
        iter([collate([data[i] for i in range(start, start + size)]) for start in starts])
    )


def _mean(reports: list[dict[str, torch.Tensor]]) -> float:
    """The policy loss of a step, as Megatron's loop logs it."""
    from megatron.core import parallel_state

    total = torch.stack([report["policy loss"] for report in reports]).sum(0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=group)
    return float(total[0] / total[1])
