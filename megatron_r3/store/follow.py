"""A store that grows while it is read: the sampler adds shards, and training waits for them.

Shard k is taken only when the shards before it are there. So a row id means the same in every
process, whatever the order in which shards arrive, and keeps its meaning while the store grows.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.store.files import listed_shards, shard_name
from megatron_r3.store.reader import Kinship, OpenShards, RolloutStore
from megatron_r3.store.schema import StoreError
from megatron_r3.store.shard import Shard

POLL_S = 0.2  # between two looks at the directory

CheckShard = Callable[[Shard], None]  # refuses a shard by a ValueError


def open_stores(
    directories: Sequence[str | Path],
    mixed_policies: bool = False,
    follow_s: float | None = None,
    check: CheckShard | None = None,
    waits: bool = True,
) -> RolloutStore:
    """Open stores to train on them.

    Args:
        directories, mixed_policies: see RolloutStore.
        follow_s: how many seconds to wait for a rollout that is not there yet, also for the first
            one. There must be one directory then, and it may grow. None means that the stores are
            taken as they are.
        check: called with every shard before a rollout of it is used.
        waits: whether to wait here for the first rollout of a store that grows.

    Raises:
        StoreError: the stores cannot be used, or the first rollout does not come in time.
        ValueError: `check` refuses a shard.
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
    followed = FollowedStore(directories[0], follow_s, mixed_policies, check)
    if waits:
        followed.wait_for(0)
    return followed


class FollowedStore(RolloutStore):
    """A store whose directory grows; it may still be empty or missing when it is opened.

    `shards` has the shards that were found so far. `refresh` looks for more, and so do `shards_of`
    and `routes` when they are asked for a row that lies behind them.

    Args:
        directory: a store whose policy versions never go back from shard to shard.
        wait_s: how long `wait_for` waits for the next shard.
        mixed_policies: as of RolloutStore.
        check: called with every new shard; it refuses one by a ValueError.

    Raises:
        StoreError: a shard that is there cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        wait_s: float,
        mixed_policies: bool = False,
        check: CheckShard | None = None,
    ) -> None:
        self.directories = [Path(directory)]
        self.wait_s, self._check = wait_s, check
        # Hand-over without a lock for readers: `refresh` builds a new OpenShards and puts it here
        # with one assignment, so a reader in another thread has the old shards or the new, never
        # new shards with old row ids. The lock only keeps two refreshes apart.
        self._open = OpenShards()
        self._kinship = Kinship(mixed_policies)
        self._refreshing = threading.Lock()
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned process gets: everything but the lock, which cannot be sent."""
        return {name: value for name, value in vars(self).items() if name != "_refreshing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields in the spawned process, which gets a lock of its own."""
        vars(self).update(state, _refreshing=threading.Lock())

    def refresh(self) -> None:
        """Open the shards that have come since the last look.

        Raises:
            StoreError: a shard is damaged, does not belong to the others, or is refused.
        """
        with self._refreshing:
            there = listed_shards(self.directories[0])
            while (number := len(self.shards)) in there:
                shard = Shard(there[number])
                self._kinship.check(shard, self.shards)
                self._check_order(shard)
                try:
                    if self._check is not None:
                        self._check(shard)
                except ValueError as error:  # in training, readers expect StoreError alone
                    raise StoreError(str(error)) from error
                self._kinship.add(shard)
                self._open = self._open.plus(shard)

    def wait_for(self, rollout: int) -> None:
        """Wait until the store has the rollout of this index.

        Each shard that comes starts the wait anew: of a collection that takes an hour to sample,
        the last rollout is waited for as long as the sampler goes on.

        Raises:
            StoreError: the rollout is not there, and no shard came for `wait_s`; or what comes
                cannot be used.
        """
        known, end = len(self), time.monotonic() + self.wait_s
        while rollout >= len(self):
            self.refresh()
            if rollout < len(self):
                return
            if len(self) > known:
                known, end = len(self), time.monotonic() + self.wait_s
            if time.monotonic() >= end:
                awaited = f"rollout {rollout}" if self.shards else "the first shard"
                raise StoreError(
                    f"{self.directories[0]}: {awaited} did not come within {self.wait_s:g} s; "
                    f"it has {len(self)} rollouts{self._gap()}: is the sampler still running?"
                )
            time.sleep(POLL_S)

    def shards_of(self, rows: np.ndarray) -> list[int]:
        """As in RolloutStore, after a look for new shards if a row lies behind the known ones.

        Example: a dataloader worker has seen shard 5 and sends its row ids; this process, which has
        shards 0 to 4 open, hears of shard 5 by these row ids.
        """
        if rows.size and int(rows.max()) >= int(self._open.first_row[-1]):
            self.refresh()
        return super().shards_of(rows)

    def _check_order(self, shard: Shard) -> None:
        """Refuse a shard of an older policy than that of the shard before it.

        A rollout counts as what it ended with. Example: a long rollout began with version 3 and
        ended with 5, in a shard after one of version 4: that is the order in which they ended.
        """
        if not self.shards:
            return
        last = self.shards[-1]
        newest = int(last.extras.newest_version_M.max())
        oldest = int(shard.extras.newest_version_M.min())
        if oldest < newest:
            raise StoreError(
                f"{shard.path}: policy version {oldest} comes after {newest} of "
                f"{last.path}: in a store that is followed, versions must not go back"
            )

    def _gap(self) -> str:
        """The shard that later shards wait for, for a message; empty if no later shard is there."""
        missing = len(self.shards)
        later = [number for number in listed_shards(self.directories[0]) if number > missing]
        if not later:
            return ""
        return f", {shard_name(missing)} is missing and {shard_name(later[0])} is there"
