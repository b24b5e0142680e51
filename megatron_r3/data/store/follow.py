"""A store that grows while it is read: the sampler adds shards, and training waits for them.

Shards may arrive in any order, but a shard is taken only after all shards with smaller numbers. So
a row id means the same row in every process, also while the store grows.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_r3.data.store.files import POLL_S, listed_shards, shard_name
from megatron_r3.data.store.index import Index
from megatron_r3.data.store.kinship import Kinship, Names, without_collector
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.store.shard import LATE_S, Shard

CheckShard = Callable[[Shard], None]  # raises a ValueError for a shard that it refuses


# The new shards, None if there are none. Then a part of a message: which shard is missing though a
# later shard is there; empty if no shard is missing.
News = tuple[Index | None, str]


class Arrivals(Protocol):
    """A source of new shards: a directory, or messages of a process that lists the directory."""

    def news(self) -> News:
        """The shards that have come since the last call, in order.

        Raises:
            StoreError: a shard is damaged, does not belong to the others, or is refused by a check;
                or the process that lists the directory does not answer.
        """


class Lookout:
    """Finds the new shards of a directory that grows, and reads their headers.

    Args:
        directory: the directory of a store, which need not be there yet. Its policy versions must
            not decrease from shard to shard.
        mixed_policies: see RolloutStore.
        check: called with every new shard; raises a ValueError for one that it refuses.
        late_s: how many seconds to wait for a file that is listed but cannot be opened yet; at most
            `LATE_S` count.

    Attributes:
        shards: the shards taken so far, in the order of their numbers.
    """

    def __init__(
        self,
        directory: Path,
        mixed_policies: bool = False,
        check: CheckShard | None = None,
        late_s: float = 0.0,
    ) -> None:
        self.directory, self._check, self._late_s = directory, check, late_s
        self._kinship, self._names = Kinship(mixed_policies), Names()
        self.shards: list[Shard] = []
        self._taken: set[str] = set()  # the file names of `shards`
        self._folder: tuple[int, int] | None = None  # device and inode, once a shard is there

    def news(self) -> News:
        """The shards that have come since the last call, in order.

        If a new shard is wrong, the call returns only the new shards before it. If there are no new
        shards before it, the call raises.

        Raises:
            StoreError: a shard is damaged, does not belong to the others, or is refused by `check`;
                or the directory cannot be listed, or was replaced by another directory.
        """
        known, there = len(self.shards), {*listed_shards(self.directory, self._taken)}
        if known in there:
            self._check_folder()
        # only the first call may find thousands of shards
        with nullcontext() if self.shards else without_collector():
            while (number := len(self.shards)) in there:
                try:
                    # a file that is listed may not be visible on this machine yet: wait for it
                    path = self.directory / shard_name(number)
                    self._take(Shard.look(path, min(self._late_s, LATE_S)))
                except StoreError:
                    if len(self.shards) == known:
                        raise
                    break  # return the shards before it; the next call raises
        later, missing, waiting = max(there, default=-1), len(self.shards), ""
        if later > missing and missing not in there:
            first = min(number for number in there if number > missing)
            waiting = f", {shard_name(missing)} is missing and {shard_name(first)} is there"
        come = self.shards[known:]
        return Index.of([self.directory], come) if come else None, waiting

    def _check_folder(self) -> None:
        """Refuse a directory that was replaced after shards of it were taken."""
        try:
            status = os.stat(self.directory)
        except OSError as error:
            raise StoreError(f"{self.directory}: cannot be read ({error.strerror})") from error
        folder = status.st_dev, status.st_ino
        if self._folder not in (None, folder):
            raise StoreError(
                f"{self.directory}: another folder took its place while it is in use, after shard "
                f"{len(self.shards) - 1} was taken: put the old one back, and start again"
            )
        self._folder = folder

    def _take(self, shard: Shard) -> None:
        self._kinship.check(shard, self.shards)
        self._names.check(shard, self.shards)
        self._check_order(shard)
        try:
            if self._check is not None:
                self._check(shard)
        except ValueError as error:  # in training, readers expect StoreError alone
            raise StoreError(str(error)) from error
        self._kinship.add(shard)
        self._names.add(shard)
        self.shards.append(shard)
        self._taken.add(shard.path.name)

    def _check_order(self, shard: Shard) -> None:
        """Refuse a shard with an older policy version than the shard before it has.

        A rollout counts with its newest version. Example: a shard of version 4 may come before a
        shard with a long rollout that began under version 3 and ended under version 5.
        """
        if not self.shards:
            return
        last = self.shards[-1]
        newest = int(last.newest_version_M.max())
        oldest = int(shard.newest_version_M.min())
        if oldest < newest:
            raise StoreError(
                f"{shard.path}: policy version {oldest} comes after {newest} of {last.path}: in a "
                "store that is followed, versions must not decrease from shard to shard"
            )


def open_stores(
    directories: Sequence[str | Path],
    mixed_policies: bool = False,
    follow_s: float | None = None,
    check: CheckShard | None = None,
    waits: bool = True,
) -> RolloutStore:
    """Open stores to train on them, in a process that lists the directories itself.

    Args:
        directories, mixed_policies: see RolloutStore.
        follow_s: a number of seconds makes a store that grows, of one directory. The store waits so
            long for the next shard. None means that the stores are read as they are now.
        check: called with every shard before a rollout of it is used; raises a ValueError for a
            shard that it refuses.
        waits: whether to return only when a store that grows has its first rollout.

    Raises:
        StoreError: the stores cannot be used; the first shard does not come in time; or `check`
            refuses a shard of a store that grows.
        ValueError: `check` refuses a shard of a store that is read as it is now.
    """
    if follow_s is None:
        store = RolloutStore(directories, mixed_policies)
        if check is not None:
            for shard in store.shards:
                check(shard)
        return store
    if len(directories) != 1:
        raise StoreError(
            f"{' '.join(map(str, directories))}: only one store can be followed: name one"
        )
    directory = Path(directories[0])
    followed = FollowedStore(
        directory, follow_s, Lookout(directory, mixed_policies, check, follow_s)
    )
    followed.refresh()
    if waits:
        followed.wait_for(0)
    return followed


class FollowedStore(RolloutStore):
    """A store that grows; its directory may still be empty or missing when the store is opened.

    `shards` has the shards that are known so far. `refresh` looks for more shards. `shards_of`, and
    what calls it, also do that if a row id lies behind the known shards.

    Args:
        directory: the store's directory.
        wait_s: how many seconds to wait for the next shard.
        arrivals: tells which shards have come.
        index: the shards that are known already; None if no shard is known.
    """

    def __init__(
        self,
        directory: Path,
        wait_s: float,
        arrivals: Arrivals,
        index: Index | None = None,
    ) -> None:
        self.directories = [directory]
        self.wait_s, self._arrivals, self._waiting = wait_s, arrivals, ""
        # Readers need no lock: `refresh` makes a new Index and puts it here with one assignment. So
        # a reader in another thread has either the old index or the new index. The lock only keeps
        # two refreshes apart.
        self.index = Index.of(self.directories, []) if index is None else index
        self._refreshing = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """The fields that a spawned process gets: all but the lock, which cannot be sent."""
        return {name: value for name, value in vars(self).items() if name != "_refreshing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields in the spawned process, which gets a lock of its own."""
        vars(self).update(state, _refreshing=threading.Lock())

    def refresh(self) -> None:
        """Take the shards that have come since the last call.

        Raises:
            StoreError: as `Arrivals.news`.
        """
        with self._refreshing:
            while True:
                come, self._waiting = self._arrivals.news()
                if come is None:
                    return
                self.index = self.index.plus(come)

    def wait_for(self, rollout: int) -> None:
        """Wait until the store has the rollout of this index.

        Each new shard restarts the wait of `wait_s` seconds. So a collection may take an hour, if
        each shard comes in time.

        Raises:
            StoreError: the rollout is not there, and no shard came within `wait_s` seconds; or a
                new shard cannot be used.
        """
        awaited = f"rollout {rollout}" if self.shards else "the first shard"
        self._wait(lambda: rollout < len(self), awaited)

    def _wait(self, there: Callable[[], bool], awaited: str) -> None:
        known, end = len(self), time.monotonic() + self.wait_s
        while not there():
            self.refresh()
            if there():
                return
            if len(self) > known:
                known, end = len(self), time.monotonic() + self.wait_s
            if time.monotonic() >= end:
                raise StoreError(
                    f"{self.directories[0]}: {awaited} did not come within {self.wait_s:g} s; "
                    f"it has {len(self)} rollouts{self._waiting}: is the sampler still running?"
                )
            time.sleep(POLL_S)

    def shards_of(self, rows: np.ndarray) -> list[int]:
        """The shards of these row ids; waits first if a row lies behind the known shards.

        Example: a dataloader worker knows shard 5 and sends row ids of it; this process, which
        knows shards 0 to 4, looks for shard 5 when it gets these row ids.

        Raises:
            StoreError: as `wait_for`.
        """
        last = int(rows.max()) if rows.size else -1
        self._wait(lambda: last < int(self.index.first_row[-1]), f"row {last}")
        return super().shards_of(rows)
