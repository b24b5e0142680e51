"""Open the rollout stores of a training, and refuse shards that could not be trained on.

Once the process group exists, the first rank opens a store and tells the other ranks what is in the
store (`one_look.py`). Then the ranks check every byte, each rank its share. With `--rollouts-check
reads`, and in a store that grows (`announce.py`), each rank checks only what it reads, as it reads.

A process that trains alone opens its store when the arguments are checked, and so refuses a wrong
store before Megatron starts up.

Shape suffixes (docs/glossary.md): C, M.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_r3.data.fingerprint import policy_stamp
from megatron_r3.data.store.follow import Lookout, open_stores
from megatron_r3.data.store.index import Index, numbered
from megatron_r3.data.store.kinship import Versions
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.shard import Shard
from megatron_r3.data.store.verify_shard import ReadChecks, verify_shard
from megatron_r3.train.announce import follow_together
from megatron_r3.train.one_look import Place, refuse_together, shared_out, told_by_first
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.policy_check import published_folder, version_of
from megatron_r3.train.publish_options import published
from megatron_r3.train.schedule import STORED

# The shards that this process has read byte by byte, and with which checks. A shard that replaces
# one of them has another identity, so it is read too.
_verified: set[tuple[str, ReadChecks]] = set()


def open_store(options: RolloutOptions, place: Place | None = None) -> RolloutStore:
    """The store that these options name, checked as the options ask. All ranks call this together.

    A training that publishes policies does not wait here for the first rollout: no sampler has a
    policy before the model is loaded and published (seams/pretrain.py).

    Args:
        place: the place of this rank among the ranks that share the check; None for a process that
            trains alone, before there is a process group.

    Raises:
        ValueError: a shard cannot be read, or cannot be trained on as the options ask; there is
            nothing to replay or to learn; or the first rollout does not come in time. With a
            `place`, all ranks end instead, unless the wait for the first rollout raises.
    """
    as_read = options.follow_s is not None or options.checks_as_read
    store = _opened(options, place)
    store.trained_on(_read_checks(options) if as_read else None)
    if not as_read:
        check = partial(_check_bytes, options)
        if place is None:
            for shard in store.shards:
                check(shard)
        else:
            shared_out(store, place, check)
    if store.shards:
        try:
            check_use(options, store)
        except ValueError as error:
            if place is None:
                raise
            refuse_together(str(error))  # all ranks have found the same error
    return store


def _opened(options: RolloutOptions, place: Place | None) -> RolloutStore:
    """The store, with the head of every shard checked."""
    follow_s, waits = options.follow_s, options.publish is None
    names, mixed = list(options.directories), options.any_policy or follow_s is not None
    versions = None if options.any_policy else Versions(partial(_is_published, options))
    head = partial(_check_head, options, versions)
    if place is None:
        return open_stores(names, mixed, follow_s, head, waits)
    if follow_s is not None:
        directory = Path(names[0])
        store = follow_together(directory, follow_s, Lookout(directory, mixed, head, follow_s))
        if waits:
            store.wait_for(0)
        return store

    def look() -> Index:
        first = open_stores(names, mixed, check=head)
        first.groups()  # computed here, so that the index brings them to all ranks
        return first.index

    return RolloutStore.told(told_by_first(look))


def check_use(options: RolloutOptions, store: RolloutStore) -> None:
    """Refuse a store with no route to replay, or with nothing to learn.

    Raises:
        ValueError: in the open shards no token has a recorded route, although the options ask for
            replay; or each rollout is the only one of its group, so that every advantage is 0.
    """
    if options.replays_rollouts and not store.recorded_share():
        raise ValueError(
            f"{options.where}: no token has recorded routes to replay: sample with an engine that "
            "returns routes, or leave --moe-router-replay out"
        )
    name, alone = options.use.advantages, int(store.groups().max()) + 1 == len(store)
    # A store that grows may begin with one rollout alone, if the group's other samples failed.
    if name != STORED and alone and (len(store) > 1 or options.follow_s is None):
        raise ValueError(
            f"{options.where}: each rollout is the only one of its prompt, so every advantage is 0 "
            f"(--rollouts-advantages {name}) and nothing would be learned: sample several of each "
            f"prompt, or store advantages and give --rollouts-advantages {STORED}"
        )


def warnings(options: RolloutOptions, store: RolloutStore) -> list[str]:
    """What a user should know before training begins, a line each."""
    lines = []
    sampler, trainer = store.info.vocab_size, options.padded_vocab_size
    if sampler and trainer and sampler > trainer:
        lines.append(
            f"warning: the sampler's softmax has {sampler} rows, and the trainer's softmax has "
            f"{trainer}: the log-probs of sampler and trainer do not agree to the last digits"
        )
    sampling = store.info.sampling
    names = ("temperature", "top_p", "top_k", "min_p")
    if unsaid := [name for name in names if getattr(sampling, name) is None]:
        lines.append(
            f"the store does not say with which {', '.join(unsaid)} it was sampled; training "
            "assumes values that change nothing (temperature 1, no cut-off)"
        )
    if biased := sampling.unknown_to_the_loss(bool(store.column("num_kept").all())):
        lines.append(
            f"warning: the rollouts were sampled with {', '.join(biased)}, and --rollouts-sampling "
            "any takes them: the policy loss compares log-probs of two distributions"
        )
    if options.follow_s is None and _is_even(options, store):
        lines.append(
            "warning: every advantage is 0, so nothing will be learned: look at the rewards of "
            "samples of one prompt (megatron-r3 rollouts inspect)"
        )
    if options.reads_a_dataset:
        lines.append(
            "--data-path and --mock-data are not trained on; only validation and test read them"
        )
    return lines


def _is_even(options: RolloutOptions, store: RolloutStore) -> bool:
    """Whether every advantage is 0: all stored ones are, or no group has two different rewards."""
    if options.use.advantages == STORED:
        return not store.column("advantage").any()
    groups = store.groups()
    return bool(numbered(groups, store.column("reward")).max() == groups.max())


def _refuse_mixed_versions(shard: Shard) -> None:
    """Refuse a shard of several policy versions that has the router digests of one policy.

    The trainer's routers are compared with these digests. Tokens that other versions sampled would
    pass unchecked, as if the trainer's own policy had sampled them.
    """
    version_M, newest_M = shard.tensors["policy_version"], shard.newest_version_M
    oldest, newest = int(version_M.argmin()), int(newest_M.argmax())
    if not shard.info.router_fingerprint or version_M[oldest] == newest_M[newest]:
        return
    spans_C2 = shard.versions_C2(newest)
    token = "" if spans_C2 is None else f", from token {spans_C2[-1, 0]} on"
    raise ValueError(
        f"{shard.path}: rollout {newest}{token}: sampled with policy version {newest_M[newest]}, "
        f"rollout {oldest} with version {version_M[oldest]}, and the shard has the router digests "
        "of one policy alone, so other versions cannot be checked: to train on rollouts of several "
        "policies, give --rollouts-policy any"
    )


def _is_published(options: RolloutOptions, shard: Shard) -> bool:
    """Whether this training published, as the shard's version, the weights that sampled it."""
    info, folder = shard.info, published_folder(options, shard)
    if folder is not None:
        return policy_stamp(folder) == info.policy_stamp
    # A version that --rollouts-publish-keep has removed passes: its weights are gone. Example: a
    # resumed training opens the shards of versions 0 to 9, and has the folders of 8 and 9.
    there = [] if options.publish is None else published(options.publish.directory)
    return bool(there) and version_of(shard) < min(there)


def _check_head(options: RolloutOptions, versions: Versions | None, shard: Shard) -> None:
    """Refuse a shard that cannot be trained on, if this is known without its tokens and routes.

    Args:
        versions: the policy versions of the shards checked so far; None with --rollouts-policy any.
    """
    biased = shard.info.sampling.unknown_to_the_loss(bool(shard.tensors["num_kept"].all()))
    if biased and not options.any_sampling:
        raise ValueError(
            f"{shard.path}: sampled with {', '.join(biased)}, and it does not have what the loss "
            "needs for that: the log-probs of the distribution from which tokens were drawn, and "
            "the tokens that top-k and top-p kept. Sample again without these settings, or with an "
            "engine that returns these log-probs and tokens, or give --rollouts-sampling any"
        )
    differences = options.shape_differences(shard.info)
    if differences and (options.replay or not options.any_policy):
        more = "" if options.replay else "; to train on its rollouts, give --rollouts-policy any"
        raise ValueError(
            f"{shard.path}: sampled from another model ({shard.info.model or shard.info.engine}) "
            f"than the one trained here: {'; '.join(differences)}{more}"
        )
    if versions is not None:
        _refuse_mixed_versions(shard)
        versions.check(shard)
    if options.use.advantages == STORED:
        shard.advantages_M()
    longest = int(shard.tensors["num_tokens"].argmax())
    # the last token of a rollout is predicted, and never an input
    num_inputs = int(shard.tensors["num_tokens"][longest]) - 1
    if num_inputs > options.seq_length:
        raise ValueError(
            f"{shard.path}: rollout {longest} has {num_inputs} input tokens, more than --seq-length"
            f" {options.seq_length}: raise --seq-length, or leave long rollouts out of the store"
        )


def _read_checks(options: RolloutOptions) -> ReadChecks:
    missing = options.replays_rollouts and options.refuse_missing
    return ReadChecks(options.vocab_size or 0, missing)


def _check_bytes(options: RolloutOptions, shard: Shard) -> None:
    """Refuse a shard that is damaged, or has tokens or missing rows that `options` do not allow."""
    checks = _read_checks(options)
    if (shard.identity, checks) not in _verified:
        verify_shard(shard, checks, thorough=False)
        _verified.add((shard.identity, checks))
