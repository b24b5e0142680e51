"""Stores the rollouts of the sessions that were rewarded.

A call of `store` returns once its rollouts are in the store, so an agent that got the answer to its
reward knows that its rollouts outlive a kill. Sessions that end within the same moment share a
shard.

The group of a session is a digest of the ids of its first answered request. So the sessions that
began with the same prompt are one group, also after the recorder was started again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_r3.collect.engine import EnginePolicy
from megatron_r3.collect.prompts import prompt_digest
from megatron_r3.collect.resume import stored_samples
from megatron_r3.collect.writing import Shelf
from megatron_r3.data.store import Rollout, StoreInfo, write_shard

# Sessions that are rewarded within so many seconds share a shard.
_GATHER_S = 0.2


class SessionShards:
    """Gathers the rollouts of sessions, numbers them inside their groups, and writes shards.

    Args:
        out: the directory of the store.
        info: the header of the shards.
        policy_version: which policy samples.

    Attributes:
        policy: checks each response against the weights that the header names.

    Raises:
        StoreError: the store holds rollouts that do not fit the header.
    """

    def __init__(self, out: Path, info: StoreInfo, policy_version: int) -> None:
        stored = stored_samples(out, info, policy_version, ())
        self._shelf, self._policy_version = Shelf(out, info, (), 1), policy_version
        self.policy = EnginePolicy(self._shelf, stored.engine_policy)
        self._next: Counter[int] = Counter()  # the next sample number of each group
        for group, sample in stored.samples:
            self._next[group] = max(self._next[group], sample + 1)
        self._waiting: list[tuple[list[Rollout], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    @property
    def stored(self) -> int:
        """How many rollouts were written."""
        return self._shelf.stored

    async def store(self, rollouts: Sequence[Rollout], first_ids: list[int]) -> None:
        """Return once the rollouts of a session are in the store.

        Args:
            rollouts: what the session's responses became, with their rewards.
            first_ids: the ids of the session's first request.

        Raises:
            StoreError: the store cannot be written.
        """
        digest = prompt_digest(first_ids)
        named = [
            replace(
                rollout,
                group=digest,
                prompt_digest=digest,
                policy_version=self._policy_version,
            )
            for rollout in rollouts
        ]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((named, future))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())
        await future

    async def _write(self) -> None:
        """Write what waits as one shard; the numbers of samples are given here."""
        while self._waiting:
            await asyncio.sleep(_GATHER_S)
            batch, self._waiting = self._waiting, []
            numbers = Counter(self._next)
            numbered = []
            for rollouts, _ in batch:
                for rollout in rollouts:
                    numbered.append(replace(rollout, sample=numbers[rollout.group]))
                    numbers[rollout.group] += 1
            numbered.sort(key=lambda rollout: (rollout.group, rollout.sample))
            error: Exception | None = None
            try:
                write_shard(self._shelf.out, self._shelf.info, numbered)
                self._next = numbers
                self._shelf.stored += len(numbered)
            except Exception as failure:
                error = failure
            for _, future in batch:
                if future.done():  # the request was cancelled
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(None)
