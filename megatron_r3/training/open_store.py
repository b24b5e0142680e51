"""Open the rollout stores of a training, and refuse shards that could not be trained on.

A store is opened twice: when the arguments are checked, before any process group exists, so that a
wrong store costs no start-up; and when training begins, when a tokenizer has set the vocabulary.
The bytes of a shard are read once, by one process of each node.

Shape suffixes (docs/glossary.md): C, M.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np

from megatron_r3.placement import Placement
from megatron_r3.store.follow import open_stores
from megatron_r3.store.reader import RolloutStore
from megatron_r3.store.shard import Shard
from megatron_r3.training.options import RolloutOptions
from megatron_r3.training.schedule import STORED

# The shards of which this process has read every byte: their identity, and the state of their file
# (size, time of change). A shard that was replaced since has another state, and is read again.
_verified: set[tuple[Any, ...]] = set()


def open_store(options: RolloutOptions) -> RolloutStore:
    """The store of these options, with every shard checked.

    A training that publishes policies does not wait here for the first rollout: no sampler has a
    policy before the model is loaded and published (seams/pretrain.py).

    Raises:
        ValueError: a shard that cannot be read, or cannot be trained on as the options ask; or
            nothing to replay. The message names the shard, and the rollout and token where there
            is one.
    """
    store = open_stores(
        list(options.directories),
        mixed_policies=options.any_policy or options.follow_s is not None,
        follow_s=options.follow_s,
        check=partial(_check_shard, options),
        waits=options.publish is None,
    )
    if store.shards:
        check_recorded(options, store)
    return store


def check_recorded(options: RolloutOptions, store: RolloutStore) -> None:
    """Refuse a store without anything to replay.

    Raises:
        ValueError: no token of the shards that are open has recorded routes.
    """
    if options.replays_rollouts and _reads_all() and not recorded_share(store):
        raise ValueError(f"{options.where}: no token has recorded routes to replay")


def check_placement(
    options: RolloutOptions, store: RolloutStore, placement: Placement | None
) -> None:
    """Refuse rollouts whose routes have no place in the model that was loaded.

    Args:
        placement: where the experts of the loaded model are; None where they are in their order.

    Raises:
        ValueError: it is a placement of other layers, or of another number of experts.
    """
    # routes of another model than the trainer's are not read (`step.py`, `_has_routes`)
    if placement is not None and not options.shape_differences(store.info):
        where = f"the checkpoint that was loaded, with {options.where}"
        placement.check_layers(where, store.info.moe_layers, store.info.num_experts)


def recorded_share(store: RolloutStore) -> float:
    """The share of tokens with recorded routes, from 0 to 1, in the shards that are open."""
    counts = [(shard.tensors["recorded"].sum(), shard.num_rows) for shard in store.shards]
    return float(sum(n for n, _ in counts) / sum(total for _, total in counts))


def warnings(options: RolloutOptions, store: RolloutStore) -> list[str]:
    """What a user should know before training begins, a line each."""
    lines = []
    sampler, trainer = store.info.vocab_size, options.padded_vocab_size
    if sampler and trainer and sampler > trainer:
        lines.append(
            f"warning: the sampler's softmax has {sampler} rows, the trainer's {trainer}: the rest "
            "take no part in the trainer's softmax, so log-probs do not agree to the last digits"
        )
    sampling = store.info.sampling
    if sampling.temperature is None:
        lines.append("the store does not say at which temperature it was sampled; 1 is assumed")
    elif biased := sampling.unknown_to_the_loss(all(map(_has_kept, store.shards))):
        lines.append(
            f"warning: sampled with {', '.join(biased)}, and trained on as --rollouts-sampling any "
            "asks: the policy loss compares log-probs of two distributions"
        )
    if options.reads_a_dataset:
        lines.append(
            "--data-path and --mock-data are not trained on; only validation and test read them"
        )
    return lines


def _has_kept(shard: Shard) -> bool:
    """Whether every rollout of a shard says what the sampler kept."""
    return bool((shard.extras.num_kept_M > 0).all())


def _reads_all() -> bool:
    """Whether this process reads shards for its node, and the others of the node rely on it."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _refuse_mixed_versions(shard: Shard) -> None:
    """Refuse a shard of several policy versions that has the router digests of one policy.

    The routers of the trainer are compared with these digests. They would say nothing of the
    tokens that other versions sampled, which would pass as those of the trainer's own policy.
    """
    version_M, newest_M = shard.tensors["policy_version"], shard.extras.newest_version_M
    oldest, newest = int(version_M.argmin()), int(newest_M.argmax())
    if not shard.info.router_fingerprint or version_M[oldest] == newest_M[newest]:
        return
    spans_C2 = shard.extras.versions_C2(newest)
    token = "" if spans_C2 is None else f", from token {spans_C2[-1, 0]} on"
    raise ValueError(
        f"{shard.path}: rollout {newest}{token}: sampled with policy version {newest_M[newest]}, "
        f"rollout {oldest} with version {version_M[oldest]}, and the shard has the router digests "
        "of one policy, which say nothing of the others: to train on rollouts of several policies, "
        "give --rollouts-policy any"
    )


def _check_shard(options: RolloutOptions, shard: Shard) -> None:
    """Refuse a shard that cannot be trained on."""
    biased = shard.info.sampling.unknown_to_the_loss(_has_kept(shard))
    if biased and not options.any_sampling:
        raise ValueError(
            f"{shard.path}: sampled with {', '.join(biased)}, and it does not have what the loss "
            "needs for that, the log-probs of the distribution that was drawn from and what was "
            "kept of the vocabulary: the ratio would compare two distributions; sample again "
            "without these settings or with an engine that returns both, or give "
            "--rollouts-sampling any"
        )
    differences = options.shape_differences(shard.info)
    if options.replay and differences:
        raise ValueError(
            f"{shard.path}: sampled from another model "
            f"({shard.info.model or shard.info.engine}): " + "; ".join(differences)
        )
    if options.num_experts and not differences and not options.any_policy:
        _refuse_mixed_versions(shard)
    if options.use.advantages == STORED:
        shard.extras.advantages_M()
    longest = int(shard.tensors["num_tokens"].argmax())
    # the last token of a rollout is predicted, and never an input
    num_inputs = int(shard.tensors["num_tokens"][longest]) - 1
    if num_inputs > options.seq_length:
        raise ValueError(
            f"{shard.path}: rollout {longest} has {num_inputs} input tokens, more than --seq-length"
            f" {options.seq_length}: raise --seq-length, or leave long rollouts out of the store"
        )
    if not _reads_all():
        return
    content = (shard.identity, *shard.file.state)
    if content not in _verified:
        shard.verify(counts_load=False)  # nothing in training reads the load
        _verified.add(content)
    shard.check_tokens(options.vocab_size or np.iinfo(np.int32).max)
    missing = np.flatnonzero(shard.tensors["recorded"] == 0)
    if options.replays_rollouts and options.refuse_missing and len(missing):
        rollout, token = shard.locate_row(int(missing[0]))
        raise ValueError(
            f"{shard.path}: rollout {rollout}, token {token} has no recorded routes, and "
            "--moe-router-replay-missing is error; sample it again, or choose live"
        )
