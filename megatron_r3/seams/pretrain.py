"""Other half of the training patches: check the arguments, swap in the rollouts.

`check_args` is called by `validate_args`, before any process group exists; `use_rollouts` by
`pretrain()`; `check_step` by `train_step`, before the update. What they swap in lives beside this
file: forward.py, metrics.py, witness.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_r3.seams.option import refusals
from megatron_r3.store.follow import open_stores
from megatron_r3.store.reader import RolloutStore
from megatron_r3.store.schema import StoreError
from megatron_r3.store.shard import Shard
from megatron_r3.training.layers import hybrid_pattern, shape_differences
from megatron_r3.training.refuse import refuse

if TYPE_CHECKING:
    from megatron_r3.training.step import RolloutStep


# Megatron's other ways to make batches, losses or a model's parts
NOT_WITH_ROLLOUTS = {
    "sft": "it brings its own batches",
    "perform_rl_step": "it samples and trains in a loop of its own",
    "hybrid_context_parallel": "it moves whole samples between ranks",
    "logits_load_dir": "it brings its own loss",
    "use_legacy_models": "they have routers of their own",  # up to 0.17
    "use_megatron_fsdp": "replay was not proved on sharded modules",
    "use_torch_fsdp2": "replay was not proved on sharded modules",
    "iterations_to_skip": "the step that skips reads the script's own batches; leave the "
    "rollouts that you do not want out of the store",
    "phase_transition_iterations": "each phase would begin at the first rollout again",
    "override_ckpt_iteration": "the checkpoint's own iteration says which rollouts it has used",
}


def check_args(args: Any) -> None:
    """Refuse arguments and rollout stores that could not be replayed exactly.

    Args:
        args: Megatron's validated arguments.
    """
    if args.moe_router_replay:
        from megatron.core.transformer.transformer_config import TransformerConfig

        reasons = refusals(args, TransformerConfig)
        if reasons:
            refuse("--moe-router-replay: " + "; ".join(reasons))
    if args.rollouts is None:
        return
    try:
        _check_options(args)
        _open(args)
    except ValueError as error:
        refuse(str(error))


# shards of which this process has read every byte: their identity, and the state of their file
_verified: set[tuple[Any, ...]] = set()


def _open(args: Any) -> RolloutStore:
    return open_stores(
        args.rollouts,
        mixed_policies=args.rollouts_policy == "any" or args.rollouts_follow is not None,
        follow_s=args.rollouts_follow,
        check=partial(_check_shard, args),
    )


def _check_options(args: Any) -> None:
    where = f"--rollouts {' '.join(args.rollouts)}"
    if not 0 < args.rollouts_clip_eps < 1:
        raise ValueError(f"--rollouts-clip-eps {args.rollouts_clip_eps}: it lies between 0 and 1")
    if args.rollouts_pack and args.micro_batch_size != 1:
        raise ValueError(
            f"--rollouts-pack with --micro-batch-size {args.micro_batch_size}: a pack is a "
            "micro-batch; set it to 1 and raise --seq-length instead"
        )
    pattern = hybrid_pattern(args)
    if args.rollouts_pack and {*pattern} & {*"MG"}:
        raise ValueError(
            f"--rollouts-pack with the hybrid pattern {pattern}: the state of its recurrent layers "
            "would run on from one rollout into the next; unset one"
        )
    for other in (name for name in NOT_WITH_ROLLOUTS if getattr(args, name, None)):
        reason = NOT_WITH_ROLLOUTS[other]
        raise ValueError(f"{where}: not together with --{other.replace('_', '-')}: {reason}")
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        raise ValueError(
            f"{where}: not together with --non-persistent-ckpt-type local: which rollouts such a "
            "checkpoint was trained on could not be read when training is resumed; use global"
        )
    if args.dataloader_type == "external":
        raise ValueError(f"{where}: not together with --dataloader-type external")
    if args.rollouts_follow is not None and args.rollouts_pack:
        raise ValueError(
            f"{where}: --rollouts-follow not together with --rollouts-pack: what fits into a pack "
            "is known when the next rollout is"
        )
    if args.rollouts_follow is not None and args.dataloader_type != "single":
        raise ValueError(f"{where}: --rollouts-follow needs --dataloader-type single: their order")
    if args.rollouts_max_lag is not None and args.rollouts_max_lag < 0:
        raise ValueError(f"--rollouts-max-lag {args.rollouts_max_lag}: 0 or more policy versions")


def _check_shard(args: Any, shard: Shard) -> None:
    """Refuse a shard that cannot be trained on. Its bytes are read by one process of a node."""
    biased = shard.info.sampling.unknown_to_the_loss()
    if biased and args.rollouts_sampling == "plain":
        raise ValueError(
            f"{shard.path}: sampled with {', '.join(biased)}, while the policy loss takes all "
            "log-probs at temperature 1 over the whole vocabulary: the ratio would compare two "
            "distributions; sample again without, or give --rollouts-sampling any"
        )
    if args.moe_router_replay:
        differences = shape_differences(args, shard.info)
        if differences:
            raise ValueError(
                f"{shard.path}: sampled from another model "
                f"({shard.info.model or shard.info.engine}): " + "; ".join(differences)
            )
    longest = int(shard.tensors["num_tokens"].argmax())
    inputs = int(shard.tensors["num_tokens"][longest]) - 1
    if inputs > args.seq_length:
        raise ValueError(
            f"{shard.path}: rollout {longest} has {inputs} input tokens, more than --seq-length "
            f"{args.seq_length}: raise it, or leave long rollouts out of the store"
        )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    content = (shard.identity, *shard.file.state)
    if content not in _verified:
        shard.verify()
        _verified.add(content)
    shard.check_tokens(args.padded_vocab_size or args.vocab_size or np.iinfo(np.int32).max)
    refuse_missing = args.moe_router_replay and args.moe_router_replay_missing == "error"
    missing = np.flatnonzero(shard.tensors["recorded"] == 0)
    if refuse_missing and len(missing):
        rollout, token = shard.locate_row(int(missing[0]))
        raise ValueError(
            f"{shard.path}: rollout {rollout}, token {token} has no recorded routes, and "
            "--moe-router-replay-missing is error; sample it again, or choose live"
        )


def use_rollouts(
    args: Any, provider: Callable[..., Any], forward_step: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The dataset provider and forward step that pretrain() uses instead of the script's own.

    Validation and test data, and their forward step, stay the script's.
    """
    from megatron.training.utils import print_rank_0

    from megatron_r3.training.dataset import FollowedRollouts, PackedRollouts, RolloutDataset
    from megatron_r3.training.ledger import Ledger, alignment
    from megatron_r3.training.step import RolloutStep

    if args.rollouts is None:
        refuse("--moe-router-replay has nothing to replay: give --rollouts DIR, a rollout store")
    try:
        store = _open(args)  # its tokens once more: a tokenizer may have set the vocabulary since
    except ValueError as error:
        refuse(str(error))
    print_rank_0(
        f"> rollouts: {len(store)} from {store.info.engine} {store.info.engine_version}, "
        f"{_recorded_share(args, store):.2%} of their tokens with recorded routes, "
        + ("replaying them" if args.moe_router_replay else "routing live, not replaying")
        + ("" if any(store.info.policy) else "; not stamped: any policy may have sampled")
    )
    for line in _warnings(args, store):
        print_rank_0(f"> rollouts: {line}")
    ledger = Ledger(args, store)

    def training_data(num_samples: int) -> RolloutDataset:
        if not ledger.entries:  # once, after the checkpoint was loaded
            told = ledger.settle()
            if told:
                print_rank_0(f"> rollouts: {told}")
        if args.rollouts_follow is not None:
            return FollowedRollouts(store, args.seq_length, num_samples, ledger.start)
        if args.rollouts_pack:
            align = alignment(args)
            return PackedRollouts(store, args.seq_length, num_samples, align, ledger.start)
        return RolloutDataset(store, args.seq_length, num_samples, ledger.start)

    def rollout_provider(sizes: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        try:
            train = training_data(sizes[0])
        except StoreError as error:
            refuse(str(error))
        if not args.eval_iters:
            return train, None, None
        takes_stage = "vp_stage" in inspect.signature(provider).parameters
        _, valid, test = provider(sizes, vp_stage=vp_stage) if takes_stage else provider(sizes)
        return train, valid, test

    rollout_provider.is_distributed = True  # type: ignore[attr-defined]
    global _step
    _step = RolloutStep(args, store, forward_step, ledger)
    return rollout_provider, _step


_step: RolloutStep | None = None  # of the training that runs in this process


def check_step(models: list[Any]) -> None:
    """Look at what a step has done, before its update; it ends training, or returns.

    Args:
        models: this rank's model chunks, as `train_step` has them.
    """
    assert _step is not None, "pretrain() has not called use_rollouts"
    _step.check(models)


def _warnings(args: Any, store: RolloutStore) -> list[str]:
    """What a user should know before training begins, a line each."""
    lines = []
    sampler, here = store.info.vocab_size, args.padded_vocab_size
    if sampler and here and sampler != here:
        lines.append(
            f"warning: the sampler's softmax has {sampler} rows, the trainer's {here} (padding): "
            "the rows that differ take part in it, so log-probs do not agree to the last digits; "
            "--make-vocab-size-divisible-by says how far it is padded"
        )
    sampling = store.info.sampling
    if sampling.temperature is None:
        lines.append("the store does not say at which temperature it was sampled; 1 is assumed")
    elif biased := sampling.unknown_to_the_loss():
        lines.append(
            f"warning: sampled with {', '.join(biased)}, and trained on as --rollouts-sampling any "
            "asks: the policy loss compares log-probs of two distributions"
        )
    if getattr(args, "data_path", None) or getattr(args, "mock_data", False):
        lines.append(
            "--data-path and --mock-data are not trained on; only validation and test read them"
        )
    return lines


def _recorded_share(args: Any, store: RolloutStore) -> float:
    """The share of rows with routes, so far; the first rank of a node reads, and speaks."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0.0
    counts = [(shard.tensors["recorded"].sum(), shard.num_rows) for shard in store.shards]
    share = float(sum(n for n, _ in counts) / sum(of for _, of in counts))
    if args.moe_router_replay and not share:
        refuse(f"--rollouts {' '.join(args.rollouts)}: no token has recorded routes to replay")
    return share
