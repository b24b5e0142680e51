"""Called by patch 4: gives the training its rollouts, and checks and logs each step.

`pretrain()` calls `use_rollouts`, `train_step()` calls `begin_step` before its forward passes and
`check_step` before its update, and `training_log()` calls `log_step`. The training itself lives in
`megatron_r3/train/`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.seams import deferred
from megatron_r3.seams.rl import use_loop
from megatron_r3.seams.router import RouterHook
from megatron_r3.train.dataset import FollowedRollouts, PackedRollouts, RolloutDataset
from megatron_r3.train.launch import watch_models
from megatron_r3.train.ledger import Ledger
from megatron_r3.train.one_look import place_of_this_rank
from megatron_r3.train.open_store import (
    check_use,
    open_store,
    warnings,
)
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.progress import MegatronProgress
from megatron_r3.train.reference_policy import Reference
from megatron_r3.train.refuse import refuse
from megatron_r3.train.script_step import refuse_silence
from megatron_r3.train.step import RolloutStep, StepHook

Provider = Callable[..., Any]

_step: RolloutStep | None = None  # of the training that runs in this process


def use_rollouts(
    args: Any, provider: Provider, forward_step: Callable[..., Any]
) -> tuple[Provider, Callable[..., Any]]:
    """The dataset provider and forward step that pretrain() uses instead of the script's own.

    Validation and test data, and their forward step, stay the script's. Without --rollouts the
    script's own data and forward step are used, and a training pass that enters no replay ends the
    training (`refuse_silence`). Under --perform-rl-step the forward step replays what Megatron's RL
    loop samples. A wrong option or store ends the process.
    """
    global _step
    if args.rollouts is None and getattr(args, "perform_rl_step", False):
        return provider, use_loop(args, forward_step)
    if args.rollouts is None:
        return provider, refuse_silence(forward_step)
    try:
        # read once more, because a tokenizer may have set the vocabulary after check_args
        options = RolloutOptions.from_args(args)
        store = open_store(options, place_of_this_rank(options.micro_batch_size))
        progress = MegatronProgress(args)
        ledger = Ledger(options, progress, store)
        hooks, reference = _hooks(options), _reference(options, args)
        _step = RolloutStep(
            options, store, progress, ledger, forward_step, observe, hooks, reference=reference
        )
    except ValueError as error:
        refuse(str(error))
    if store.shards:
        _announce(options, store)

    def begin(models: list[Any]) -> None:
        for hook in hooks:
            hook.begin(models, args.iteration)

    if hooks:
        # Called once the checkpoint is loaded: the sampler waits for the first published policy.
        watch_models(begin)
    return _provider(_step, provider, args.eval_iters), _step


def _hooks(options: RolloutOptions) -> list[StepHook]:
    if options.publish is None:
        return []
    from megatron_r3.loop.publish import Publisher

    return [Publisher(options.publish, options, observe)]


def _reference(options: RolloutOptions, args: Any) -> Reference | None:
    if options.loss.penalty.kl is None:
        return None
    from megatron_r3.weights.load_reference import load_reference

    return Reference(options, partial(load_reference, args))


def begin_step(models: list[Any]) -> None:
    """Call the hooks, and run the passes that a step needs, before the step's forward passes.

    Args:
        models: this rank's model chunks, as `train_step` has them.
    """
    assert _step is not None, "pretrain() has not called use_rollouts"
    _step.begin(models)


def check_step(models: list[Any]) -> None:
    """Check a step before its update: end the training on a fault, else return.

    Args:
        models: this rank's model chunks, as `train_step` has them.
    """
    assert _step is not None, "pretrain() has not called use_rollouts"
    _step.check(models)


def log_step(
    iteration: int,
    writer: Any,
    wandb_writer: Any,
    learning_rate: float | None,
    grad_norm: float | None,
) -> str:
    """Write what the last step measured, and return it for Megatron's log line.

    `training_log` calls this on every rank.

    Args:
        writer, wandb_writer: Megatron's writers; None on a rank without one.
    """
    if _step is None:
        return ""
    named = {"update/learning rate": learning_rate, "update/gradient norm": grad_norm}
    beside = {name: float(value) for name, value in named.items() if value is not None}
    return _step.log(iteration, writer, wandb_writer, beside)


def observe(router: Any, layer_number: int) -> None:
    """Let a live router compare its choice with the routes of the active microbatch."""
    router.router_replay = RouterHook(router.config, layer_number=layer_number)
    # so that a schedule which runs layers after the forward step (combined 1F1B) is compared too
    deferred.install()


def _announce(options: RolloutOptions, store: RolloutStore) -> None:
    if torch.distributed.get_rank() != 0:
        return
    print(
        f"> rollouts: {len(store)} from {store.info.engine} {store.info.engine_version}, "
        f"{store.recorded_share():.2%} of their tokens with recorded routes, "
        + ("replaying them" if options.replay else "routing live, not replaying")
        + ("" if any(store.info.policy) else "; the store does not say which policy sampled"),
        flush=True,
    )
    for line in warnings(options, store):
        print(f"> rollouts: {line}", flush=True)


def _wait_for_the_first(options: RolloutOptions, store: RolloutStore) -> None:
    """Wait for the first rollout of a store that was empty when training began."""
    if store.shards:
        return
    store.wait_for(0)
    check_use(options, store)
    _announce(options, store)


def _provider(step: RolloutStep, scripts: Provider, eval_iters: int) -> Provider:
    """A dataset provider with the rollouts for training, and the script's own data for the rest."""
    options, store, ledger = step.options, step.store, step.ledger

    def training_data(num_samples: int) -> RolloutDataset:
        # Megatron calls `provider` once for each virtual pipeline stage, and `provider` comes here
        # twice if there is a pass of the old policy or of the reference. Only in the first call
        # the ledger compares the store with the checkpoint.
        if not ledger.entries:
            notice = ledger.begin()
            if notice and torch.distributed.get_rank() == 0:
                print(f"> rollouts: {notice}", flush=True)
        use = replace(options.use, start=ledger.start)
        if options.follow_s is not None:
            return FollowedRollouts(store, use, num_samples)
        if options.pack:
            multiple = options.document_multiple
            data: RolloutDataset = PackedRollouts(store, use, num_samples, multiple)
        else:
            data = RolloutDataset(store, use, num_samples)
        data.check_collection()
        return data

    def provider(sizes: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        try:
            _wait_for_the_first(options, store)
            train = training_data(sizes[0])
            # The passes do not share `train`, which another thread reads at the same time.
            if step.passes:
                data = training_data(sizes[0])
            for one in step.passes:
                one.data = data
        except ValueError as error:
            refuse(str(error))
        if not eval_iters:
            return train, None, None
        takes_stage = "vp_stage" in inspect.signature(scripts).parameters
        _, valid, test = scripts(sizes, vp_stage=vp_stage) if takes_stage else scripts(sizes)
        return train, valid, test

    provider.is_distributed = True  # type: ignore[attr-defined]  # each rank builds its own
    return provider
