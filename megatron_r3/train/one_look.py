"""The first rank looks at a store and tells all; then all ranks read every byte, each its share.

All ranks call `told_by_first` and `shared_out` together, once the process group exists. If a rank
finds a mistake in the store, all ranks end, and one of them reports the mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.shard import Shard
from megatron_r3.train.refuse import refuse


def told_by_first(look: Callable[[], Any]) -> Any:
    """Call `look` on the first rank, and return its result on all ranks.

    Args:
        look: looks at a store; its result can be pickled.

    Raises:
        ValueError: `look` raised it, in a process that trains alone.
    """
    if torch.distributed.get_world_size() == 1:
        return look()
    found: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            found = [look(), None]
        except ValueError as error:
            found = [None, str(error)]
        except Exception as error:  # else the other ranks would wait forever
            torch.distributed.broadcast_object_list([None, f"the first rank: {error!r}"], src=0)
            raise
    torch.distributed.broadcast_object_list(found, src=0)
    if found[1] is not None:
        refuse_together(found[1])
    return found[0]


class Place(NamedTuple):
    """Where a rank stands among the ranks that share the reading of a store.

    Attributes:
        data, data_size: its data-parallel rank, and the number of these.
        peer, peers: its number among the ranks with the same data-parallel rank, and their number.
        micro_batch: samples of a micro-batch.
    """

    data: int
    data_size: int
    peer: int
    peers: int
    micro_batch: int

    def shards(self, first_rollout: np.ndarray) -> list[int]:
        """The shards that this rank reads for all; each shard is read by one rank.

        A shard is read by a rank that will also train on it, so that no rank opens more files than
        it needs anyway. In store order, rollout j is used by the data-parallel rank
        j // micro_batch modulo data_size. One rollout of a shard decides who reads the shard: the
        first one for the first `peers` shards, the second one for the next `peers`, and so on, so
        as to use all ranks.

        Example: 4 data-parallel ranks of 2 peers, micro-batches of 1, 3 rollouts a shard. For
        shards 0 and 1 the first rollouts decide, 0 and 3, for shards 2 and 3 the second ones, 7 and
        10. So the data-parallel ranks 0, 3, 3 and 2 read them, by their peers 0, 1, 0 and 1.

        Args:
            first_rollout: `[shards + 1]`, the first rollout of each shard, and how many there are.
        """
        shard = np.arange(len(first_rollout) - 1)
        rollout = first_rollout[:-1] + shard // self.peers % np.diff(first_rollout)
        data, peer = rollout // self.micro_batch % self.data_size, shard % self.peers
        return np.flatnonzero((data == self.data) & (peer == self.peer)).tolist()


def place_of_this_rank(micro_batch: int) -> Place:
    """Where this rank stands in Megatron's groups, which exist by now."""
    from megatron.core import mpu

    data, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    peer, peers = 0, 1
    for rank, number in (
        (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
        (mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()),
        (mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()),
    ):
        peer, peers = peer * number + rank, peers * number
    return Place(data, size, peer, peers, micro_batch)


def shared_out(store: RolloutStore, place: Place, check: Callable[[Shard], None]) -> None:
    """Check every byte of the store, each shard on one rank.

    Args:
        place: of this rank.
        check: reads a shard, and raises a ValueError for what is wrong.
    """
    wrong, mine = None, place.shards(store.index.first_rollout)
    for number in mine:
        try:
            check(store.shards[number])
        except ValueError as error:
            wrong = number, str(error)
            break
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (mine, wrong))
    if errors := [error for _, error in found if error is not None]:
        refuse_together(min(errors)[1])  # the error of the first wrong shard, on all ranks
    read = sorted(number for numbers, _ in found for number in numbers)
    assert read == [*range(len(store.shards))], "the places of the ranks leave shards unread"


def refuse_together(message: str) -> NoReturn:
    """End all ranks for a mistake that all of them know; the first rank reports it."""
    refuse(message, speaks=torch.distributed.get_rank() == 0, repeats=False)
