"""One rank looks at a store and tells all; then all of them share out the reading of every byte.

Each function is called by all ranks together, when the process group exists. A mistake in the store
that one rank finds ends all of them, and one of them says so.
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
    """What the first rank finds, on all ranks.

    Args:
        look: looks at a store on the first rank; what it returns can be pickled.

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
        except Exception as error:  # the others must not wait for what never comes
            torch.distributed.broadcast_object_list([None, f"the first rank: {error!r}"], src=0)
            raise
    torch.distributed.broadcast_object_list(found, src=0)
    if found[1] is not None:
        refuse_together(found[1])
    return found[0]


class Place(NamedTuple):
    """Where a rank stands among the ranks that share out a store.

    Attributes:
        data, data_size: which of how many data-parallel ranks it is.
        peer, peers: which of how many ranks of the same data-parallel rank.
        micro_batch: samples of a micro-batch.
    """

    data: int
    data_size: int
    peer: int
    peers: int
    micro_batch: int

    def shards(self, first_rollout: np.ndarray) -> list[int]:
        """The shards that this rank reads for all; each shard is read by one rank.

        A rank that will use a shard in the steps reads it: then it opens no more files than it
        needs anyway. With the samples in the order of the store, rollout j is used by the
        data-parallel rank j // micro_batch modulo their number. Of a shard one rollout is taken, of
        the next `peers` shards the same one, so as to use all ranks.

        Example: 4 data-parallel ranks of 2 peers, 3 rollouts a shard. Shards 0 and 1 are read where
        their first rollouts 0 and 3 are used, by peers 0 and 1; shards 2 and 3 where their second
        rollouts 7 and 10 are: by the data-parallel ranks 0, 3, 3 and 2.

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
        refuse_together(min(errors)[1])  # the same one on all ranks: that of the first shard
    read = sorted(number for numbers, _ in found for number in numbers)
    assert read == [*range(len(store.shards))], "the places of the ranks leave shards unread"


def refuse_together(message: str) -> NoReturn:
    """End all ranks for a mistake that all of them know; the first rank says it."""
    refuse(message, speaks=torch.distributed.get_rank() == 0, repeats=False)
