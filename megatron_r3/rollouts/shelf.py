"""Where rollouts wait: for the others of their group, then for their shard to be full."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.store import Rollout, StoreError, StoreInfo, write_shard


class Shelf:
    """Rollouts that are not stored yet.

    Args:
        out: the store.
        info: of its new shards; it may be replaced until the first is written.
        prompts: whose order is that of the groups in a shard.
        shard_size: rollouts of a shard, or more, so that groups stay whole.

    Attributes:
        stored: how many rollouts were written.
    """

    def __init__(
        self, out: Path, info: StoreInfo, prompts: Iterable[Prompt], shard_size: int
    ) -> None:
        self.out, self.info, self.shard_size, self.stored = out, info, shard_size, 0
        self._order = {prompt.group: i for i, prompt in enumerate(prompts)}
        self._left: Counter[int] = Counter()  # samples of a group that are neither done nor lost
        self._parts: defaultdict[int, list[Rollout]] = defaultdict(list)
        self._ready: list[Rollout] = []

    @property
    def waiting(self) -> int:
        """Rollouts that a kill would lose."""
        return len(self._ready) + sum(map(len, self._parts.values()))

    def expect(self, groups: Iterable[int]) -> None:
        """One sample of each of these groups, which may repeat, is on its way."""
        self._left.update(groups)

    def take(self, group: int, rollout: Rollout | None) -> None:
        """Take a sample that is done or lost (None); groups that are whole then go to their shard.

        Advantages are normalised inside a group, so a reader that follows the store needs a group
        in one shard. One that is larger than a shard is stored in parts.

        Raises:
            StoreError: the shard cannot be written.
        """
        parts = self._parts[group]
        self._left[group] -= 1
        if rollout is not None:
            parts.append(rollout)
        if not self._left[group] or len(parts) >= self.shard_size:
            self._ready += parts
            parts.clear()
        self.store(self.shard_size)

    def store(self, least: int = 1) -> None:
        """Write the groups that are whole, if they have so many rollouts.

        It is not a thread's work, so no cancel ends it half-way.

        Raises:
            StoreError: the shard cannot be written.
        """
        if len(self._ready) < least:
            return
        self._ready.sort(key=lambda r: (self._order[r.group], r.sample))
        try:
            write_shard(self.out, self.info, self._ready)
        except StoreError as error:
            raise StoreError(
                f"{error}: {len(self._ready)} rollouts are not stored; make room or mend it, then "
                "the same command samples them again"
            ) from error
        self.stored += len(self._ready)
        self._ready = []
