"""What a collection's store has already, and the lock that keeps a second collection away.

A store says itself which samples it holds, and a shard appears whole or not at all. So the same
command goes on after a kill: it reads the store, and samples what is missing.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megatron_r3.collect.prompts import Prompt
from megatron_r3.data.store import RolloutStore, StoreError, StoreInfo
from megatron_r3.data.store.files import SHARD_GLOB
from megatron_r3.data.store.link import check_links
from megatron_r3.data.store.schema import differences

LOCK = ".collect.lock"


@dataclass(frozen=True)
class Stored:
    """What a store has of one policy version.

    Attributes:
        samples: (group, sample) of each rollout.
        engine_policy: the version of the engine's weights in the headers of these rollouts; "" if
            the headers name none; None if the store has no rollout of the policy version.
    """

    samples: set[tuple[int, int]] = field(default_factory=set)
    engine_policy: str | None = None


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Keep other collections away from the directory while the block runs.

    The directory is made if it does not exist. Files that a killed writer left half-written are
    removed at the start. At the end the directory is removed if it is empty.

    Raises:
        StoreError: another collection writes to the directory, this process cannot write to it, or
            its file system has no hard links, by which shards get their names.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(directory)
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        # A half-written file does no harm, so an error of its removal is ignored.
        with suppress(OSError):
            for unfinished in directory.glob(".shard-*.tmp"):
                unfinished.unlink()
        try:
            check_links(directory)
        except OSError as error:
            raise _unwritable(directory, error) from error
        yield
    finally:
        with suppress(OSError):
            (directory / LOCK).unlink()
        os.close(descriptor)
        with suppress(OSError):  # a directory that is not empty stays
            directory.rmdir()


def _unwritable(directory: Path, error: OSError) -> StoreError:
    return StoreError(
        f"--out {directory}: nothing can be written there ({error.strerror or error}); give a "
        "directory of your own, or a new name"
    )


def _lock(directory: Path) -> int:
    """Lock the directory's lock file, and return its descriptor. The kernel frees the lock however
    this process ends.

    A writer removes the lock file at its end, so a process may lock a file that has no name any
    more. Example: A has the lock; B opens the file; A removes the file and ends; B gets the lock of
    the removed file while C makes and locks a new file. So once B has a lock, B compares the locked
    file with the file that now has the name, and tries again if the two differ.
    """
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:  # of `os.stat`: the file was removed
            pass
        except BlockingIOError as error:
            os.close(descriptor)
            raise StoreError(
                f"{directory}: another collection writes to it: wait until that one ends"
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def stored_samples(
    directory: Path,
    info: StoreInfo,
    policy_version: int,
    prompts: Sequence[Prompt],
    pushed: bool = False,
) -> Stored:
    """What the directory has of this policy version.

    Args:
        info: the header of the shards that the collection will write.
        pushed: whether the caller loaded this version into the engine. Then equal weights under two
            versions are no mistake: an update with a learning rate of 0 changes no weights.

    Raises:
        StoreError: a shard is damaged, of another model or engine, of another policy with the same
            version, or of the same policy with another version (unless `pushed`); or a group's
            rollouts were sampled from another prompt than the group has now.
    """
    if not any(directory.glob(SHARD_GLOB)):
        return Stored()
    store = RolloutStore([directory], mixed_policies=True)
    engine_policy = _check_info(store, info, policy_version, pushed)
    of_version_M = store.column("policy_version") == policy_version
    _check_prompts(store, of_version_M, prompts)
    groups, samples = (store.column(name)[of_version_M].tolist() for name in ("group", "sample"))
    return Stored({*zip(groups, samples, strict=True)}, engine_policy)


def _check_info(
    store: RolloutStore, info: StoreInfo, policy_version: int, pushed: bool
) -> str | None:
    """Refuse shards that this command would not have written; returns `Stored.engine_policy`."""
    engine_policy = None
    policy = ("router_fingerprint", "policy_stamp", "engine_policy")
    for shard in store.shards:
        stored_info = shard.info
        # Shards of another policy version may differ in the fields of `policy`, and in no others.
        same_policy = replace(stored_info, **{name: getattr(info, name) for name in policy})
        if same_policy != info:
            raise StoreError(
                f"{shard.path}: its rollouts were not collected as this command would collect "
                f"them: {'; '.join(differences(same_policy, info))}: give another --out"
            )
        if not info.engine_policy:
            # The engine named no version at the start. `EnginePolicy` compares what its responses
            # name.
            stored_info = replace(stored_info, engine_policy="")
        version_M = shard.tensors["policy_version"]
        if policy_version not in version_M:
            if info.policy_stamp and stored_info.policy == info.policy and not pushed:
                raise StoreError(
                    f"{shard.path}: its rollouts of policy version {version_M[0]} were sampled by "
                    f"the weights of --model, which are --policy-version {policy_version} now: "
                    f"give --model the new weights, --policy-version {version_M[0]}, or another "
                    "--out"
                )
            continue
        engine_policy = shard.info.engine_policy
        if stored_info != info:
            raise StoreError(
                f"{shard.path}: its rollouts of policy version {policy_version} are of another "
                f"policy: {'; '.join(differences(stored_info, info))}: give another "
                "--policy-version or --out"
            )
    return engine_policy


def _check_prompts(
    store: RolloutStore, of_version_M: np.ndarray, prompts: Sequence[Prompt]
) -> None:
    """Refuse rollouts that were sampled from another prompt than their group has now.

    Args:
        of_version_M: bool, True for the rollouts of this policy version.
    """
    of_group = {prompt.group: prompt for prompt in prompts}
    rollouts = np.flatnonzero(of_version_M).tolist()
    groups, digests = (
        store.column(name)[of_version_M].tolist() for name in ("group", "prompt_digest")
    )
    for rollout, group, digest in zip(rollouts, groups, digests, strict=True):
        prompt = of_group.get(group)
        if prompt is None or digest == prompt.digest:
            continue
        name = f"{prompt.where}: {store.name(rollout)} of this line's group {group}"
        if digest == 0:  # not known: the user's own code may have written the store
            raise StoreError(
                f"{name}: the store has no digest of the rollout's prompt, so the prompts cannot "
                "be compared: give another --out"
            )
        raise StoreError(
            f"{name} was sampled from another prompt: give the new prompts another --out, "
            "or a `group` of their own"
        )
