"""How the commands write shards: groups stay whole, and a new store appears whole or not at all.

Commands that add to a store use `Shelf`. Conversions, which make a new store, use `new_store`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_r3.collect.prompts import Prompt
from megatron_r3.data.store import Rollout, StoreError, StoreInfo, write_shard
from megatron_r3.replay.words import one_line

CheckRollouts = Callable[[Sequence[Rollout], StoreInfo], None]


class Shelf:
    """Holds rollouts until their group is whole, and whole groups until they fill a shard.

    Advantages are normalised inside a group, and a trainer that follows the store reads shard by
    shard, so a group is kept in one shard. Example: 4 samples of each prompt and a shard size of 6
    make shards of 8, because the second group is not cut. Only a group that is itself larger than
    a shard is stored in parts.

    Args:
        out: the directory of the store.
        info: the header of the new shards. It may be replaced until the first shard is written.
        prompts: their order is the order of the groups in a shard.
        shard_size: a shard is written as soon as the whole groups have this many rollouts.
        check: called with the rollouts of a shard before the shard is written. If it raises, the
            rollouts are dropped.
        whole_groups: leave out a group of which a sample was given up, but for parts of it that
            were stored before, because the group is larger than a shard.

    Attributes:
        stored: how many rollouts were written.
    """

    def __init__(
        self,
        out: Path,
        info: StoreInfo,
        prompts: Iterable[Prompt],
        shard_size: int,
        check: CheckRollouts | None = None,
        whole_groups: bool = False,
    ) -> None:
        self.out, self.info, self.shard_size, self.stored = out, info, shard_size, 0
        self._check, self._whole_groups = check, whole_groups
        self._lost: set[int] = set()  # groups that are left out
        self._order = {prompt.group: i for i, prompt in enumerate(prompts)}
        self._left: Counter[int] = Counter()  # how many samples of each group are still to come
        self._parts: defaultdict[int, list[Rollout]] = defaultdict(list)
        self._whole: list[Rollout] = []

    @property
    def waiting(self) -> int:
        """How many rollouts are in memory only: a kill would lose them."""
        return len(self._whole) + sum(map(len, self._parts.values()))

    def expect(self, groups: Iterable[int]) -> None:
        """Announce samples: `groups` has each group once for each sample that will come of it."""
        self._left.update(groups)

    def take(self, group: int, rollouts: Sequence[Rollout]) -> None:
        """Take the rollouts of one sample of a group; there are none if the sample was given up.

        Raises:
            StoreError, ValueError: what `store` raises.
        """
        parts = self._parts[group]
        self._left[group] -= 1
        parts += rollouts
        if not rollouts and self._whole_groups:
            self._lost.add(group)
        if not self._left[group] and group in self._lost:
            parts.clear()
        if not self._left[group] or len(parts) >= self.shard_size:
            self._whole += parts
            parts.clear()
        self.store(self.shard_size)

    def store(self, least: int = 1) -> None:
        """Write the rollouts of whole groups as one shard, if there are at least `least` of them.

        This is synchronous on purpose: a task that is cancelled at an `await` in here would lose
        the rollouts.

        Raises:
            StoreError: the shard cannot be written.
            ValueError: the check refuses the rollouts, which are dropped.
        """
        if len(self._whole) < least:
            return
        self._whole.sort(key=lambda r: (self._order[r.group], r.sample))
        if self._check is not None:
            # `self._whole` stays empty if the check raises: `collect` calls `store` again at the
            # end, and refused rollouts must not be checked again.
            whole, self._whole = self._whole, []
            self._check(whole, self.info)
            self._whole = whole
        try:
            write_shard(self.out, self.info, self._whole)
        except StoreError as error:
            raise StoreError(
                f"{error}: {len(self._whole)} rollouts are not stored; make room or repair the "
                "disk, then run the same command again"
            ) from error
        self.stored += len(self._whole)
        self._whole = []


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block (full disk, no permission) into an error that names `path`.

    Raises:
        StoreError: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(str(error), 300)
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = f"{error.filename} is no directory"
        raise StoreError(f"{path}: cannot be written ({reason})") from error


@contextmanager
def new_store(directory: Path) -> Iterator[Path]:
    """Yield a folder for shards, which becomes `directory` if the block ends without an error.

    Raises:
        StoreError: `directory` is a symlink, a file or a folder that is not empty, or it cannot be
            written.
    """
    with writing(directory):
        there = directory.exists() and not (directory.is_dir() and not any(directory.iterdir()))
        if directory.is_symlink() or there:
            raise StoreError(
                f"{directory}: exists already; a conversion writes a new store: give another --out"
            )
        parent = directory.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        # beside `directory`: a rename does not cross file systems
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{directory.name}-"))
    try:
        yield folder
        with writing(directory):
            folder.chmod(0o755)  # mkdtemp made it readable for its owner alone
            os.rename(folder, directory)  # replaces an empty folder, and fails on any other
    except StoreError as error:
        # The user knows nothing of the temporary folder, so the message names `directory`.
        raise StoreError(str(error).replace(str(folder), str(directory))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Numbers of options in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses a larger one


def keep_freed_memory() -> None:
    """Have malloc keep freed memory, so that the next shard's routes reuse it.

    Call it in a command that moves many rollouts and then ends. It has no effect without glibc.

    Why: glibc gets an array of 128 kB or more by `mmap` and gives its pages back when the array is
    freed. The kernel clears every page before a process gets the page again. Example: a shard with
    100 MB of routes costs 25,000 page faults. These took a fifth of the time in which routes were
    decoded and stored. With both thresholds raised, arrays below 32 MB come from the heap, and
    freed arrays stay there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
