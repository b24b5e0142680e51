"""What a store directory has already, and that one process at a time adds to it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.store import RolloutStore, StoreError, StoreInfo
from megatron_r3.store.files import SHARD_GLOB
from megatron_r3.store.schema import differences
from megatron_r3.untrusted import one_line

LOCK = ".collect.lock"


@dataclass(frozen=True)
class Stored:
    """What a store has of one policy version.

    Attributes:
        samples: (group, sample) of each rollout.
        engine_policy: what its engine said of its weights; None: it has no rollout.
    """

    samples: set[tuple[int, int]] = field(default_factory=set)
    engine_policy: str | None = None


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Keep other collections away from the directory, which is made if there is none.

    What a killed writer left half-written is removed, and at the end the directory, if it is empty.

    Raises:
        StoreError: another one is at work, or nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(directory)
    except OSError as error:
        raise StoreError(
            f"--out {directory}: nothing can be written there ({error.strerror or error}); give a "
            "directory of your own, or a new name"
        ) from error
    try:
        with suppress(OSError):  # another one's, or a disk that fails: no harm in what is left
            for left in directory.glob(".shard-*.tmp"):
                left.unlink()
        yield
    finally:
        with suppress(OSError):
            (directory / LOCK).unlink()
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
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed it in between


def stored_samples(
    directory: Path, info: StoreInfo, policy_version: int, prompts: Sequence[Prompt]
) -> Stored:
    """The rollouts of this policy version in the directory.

    Raises:
        StoreError: a damaged shard, another model or engine, another policy of the same version, or
            rollouts of a group whose prompt is another one now.
    """
    if not any(directory.glob(SHARD_GLOB)):
        return Stored()
    store = RolloutStore([directory], mixed_policies=True)
    engine_policy = _check_info(store, info, policy_version)
    mine_M = store.column("policy_version") == policy_version
    _check_prompts(store, mine_M, prompts)
    groups, samples = (store.column(name)[mine_M].tolist() for name in ("group", "sample"))
    return Stored({*zip(groups, samples, strict=True)}, engine_policy)


def _check_info(store: RolloutStore, info: StoreInfo, policy_version: int) -> str | None:
    """Refuse shards of something else; returns what the engine of this policy version said of it.

    Where a server says of its weights only in its responses, the first of those is compared.
    """
    engine_policy = None
    for shard in store.shards:
        theirs = shard.info
        same_policy = replace(
            theirs,
            router_fingerprint=info.router_fingerprint,
            policy_stamp=info.policy_stamp,
            engine_policy=info.engine_policy,
        )
        if same_policy != info:
            raise StoreError(
                f"{shard.path}: its rollouts were collected otherwise than this command would: "
                f"{'; '.join(differences(same_policy, info))}: take another --out"
            )
        if policy_version not in shard.tensors["policy_version"]:
            continue
        engine_policy = theirs.engine_policy
        if not info.engine_policy:
            theirs = replace(theirs, engine_policy="")
        if theirs != info:
            raise StoreError(
                f"{shard.path}: its rollouts of policy version {policy_version} are of another "
                f"policy: {'; '.join(differences(theirs, info))}: take another --policy-version "
                "or --out"
            )
    return engine_policy


def _check_prompts(store: RolloutStore, mine_M: np.ndarray, prompts: Sequence[Prompt]) -> None:
    """Refuse rollouts of a group that were sampled from another prompt than it has now.

    Args:
        mine_M: bool, the rollouts of this policy version.

    Raises:
        StoreError: naming the prompt, the rollout and its group.
    """
    groups_P = np.array([prompt.group for prompt in prompts], np.int64)
    digests_P = np.array([prompt.digest for prompt in prompts], np.int64)
    order_P = np.argsort(groups_P)
    group_M, digest_M = store.column("group"), store.column("prompt_digest")
    place_M = np.searchsorted(groups_P[order_P], group_M).clip(max=len(prompts) - 1)
    prompt_M = order_P[place_M]  # of each rollout, if any prompt is of its group
    asked_M = mine_M & (groups_P[prompt_M] == group_M)
    unknown_M = digest_M == 0
    for rollout in np.flatnonzero(asked_M & (unknown_M | (digest_M != digests_P[prompt_M]))):
        prompt = prompts[prompt_M[rollout]]
        name = f"{prompt.where}: {store.name(int(rollout))} of its group {prompt.group}"
        if not unknown_M[rollout]:
            raise StoreError(
                f"{name} has another prompt: other prompts take another --out, or a `group` of "
                "their own"
            )
        if prompt.tokens is None:
            raise StoreError(f"{name}: its store does not say what was asked; take another --out")
        fields = store.fields(int(rollout))
        stored = fields["tokens"][: int(np.argmax(fields["response"]))]
        if not np.array_equal(stored, np.asarray(prompt.tokens)):
            raise StoreError(
                f"{name} has another prompt: other prompts take another --out, or a `group` of "
                "their own"
            )


# A new store, whole or not at all, and what is said where it cannot be written.


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name what was being written in the error of a full disk or a folder that may not be written.

    Raises:
        StoreError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or one_line(str(error), 300)
        if isinstance(error, FileExistsError | NotADirectoryError):
            why = f"{error.filename} is no directory"
        raise StoreError(f"{path}: cannot be written ({why})") from error


@contextmanager
def new_store(directory: Path) -> Iterator[Path]:
    """A folder to write shards to, which becomes `directory` when the block ends well.

    Raises:
        StoreError: something is there already, or it cannot be written.
    """
    with writing(directory):
        if directory.is_symlink() or (directory.exists() and not _empty(directory)):
            raise StoreError(f"{directory}: is there already; a conversion writes a new store")
        parent = directory.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{directory.name}-"))
    try:
        yield folder
        with writing(directory):
            folder.chmod(0o755)
            os.rename(folder, directory)  # over an empty folder, no other
    except StoreError as error:  # of a shard in a folder that nobody has asked for
        raise StoreError(str(error).replace(str(folder), str(directory))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())


# Memory that is freed stays with the process: the next shard's routes go where the last ones were.
#
# glibc gives freed memory back to the system, which clears every page of it before it lends it
# again;
# of decoding and storing routes that was a fifth of the time.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Tell the allocator; for commands that move many rollouts and then end. No glibc: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
