"""What a store directory has already, and that one process at a time adds to it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.store import RolloutStore, StoreError, StoreInfo
from megatron_r3.store.writer import SHARD_GLOB

__all__ = ["only_writer", "stored_samples"]

LOCK = ".collect.lock"


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Keep other collections away from the directory, which is made if there is none.

    What a killed writer left half-written is removed, and at the end the directory, if it is empty.

    Raises:
        StoreError: another one is at work.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(directory)
    try:
        for left in directory.glob(".shard-*.tmp"):
            left.unlink()
        yield
    finally:
        (directory / LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):
            directory.rmdir()


def _lock(directory: Path) -> int:
    """The open lock file; the kernel frees the lock whatever ends this process."""
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            os.close(descriptor)
            raise StoreError(f"{directory}: another collection writes to it") from error
        os.close(descriptor)  # its owner removed it in between


def stored_samples(
    directory: Path, info: StoreInfo, policy_version: int, prompts: Sequence[Prompt]
) -> set[tuple[int, int]]:
    """(group, sample) of every rollout of this policy version in the directory.

    Raises:
        StoreError: a damaged shard, another model or engine, another policy of the same version, or
            rollouts of a group whose prompt is another one now.
    """
    if not any(directory.glob(SHARD_GLOB)):
        return set()
    store = RolloutStore([directory], mixed_policies=True)
    _check_info(store, info, policy_version)
    mine_M = store.column("policy_version") == policy_version
    group_M, sample_M = store.column("group"), store.column("sample")
    first = {int(group_M[i]): int(i) for i in np.flatnonzero(mine_M)[::-1]}
    for prompt in prompts:
        if prompt.tokens is not None and prompt.group in first:
            _check_prompt(store, first[prompt.group], prompt)
    return {(int(g), int(s)) for g, s in zip(group_M[mine_M], sample_M[mine_M], strict=True)}


def _check_info(store: RolloutStore, info: StoreInfo, policy_version: int) -> None:
    for shard in store.shards:
        theirs = shard.info
        if policy_version not in shard.tensors["policy_version"]:
            theirs = replace(theirs, router_fingerprint=info.router_fingerprint)
        if theirs != info:
            raise StoreError(
                f"{shard.path}: its rollouts of policy version {policy_version} are of {theirs}, "
                f"the new ones of {info}: take another --out or --policy-version"
            )


def _check_prompt(store: RolloutStore, rollout: int, prompt: Prompt) -> None:
    fields = store.fields(rollout)
    stored = fields["tokens"][: int(np.argmax(fields["response"]))]
    if not np.array_equal(stored, np.asarray(prompt.tokens)):
        raise StoreError(
            f"{prompt.where}: {store.name(rollout)} of its group {prompt.group} has another "
            "prompt: other prompts take another --out, or a `group` of their own"
        )
