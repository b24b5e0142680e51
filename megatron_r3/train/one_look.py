"""The first rank looks at a store and tells all ranks; then each rank checks a share of the bytes.

All ranks call `told_by_first` and `shared_out` together, once the process group exists. If a rank
finds a mistake in the store, all ranks end, and the first rank reports the mistake.
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

    If `look` raises a ValueError, all ranks end.

    Args:
        look: looks at a store; its result can be pickled.
    """
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
    """The place of a rank among the ranks that share the reading of a store.

    Attributes:
        data, data_size: the data-parallel rank, and how many data-parallel ranks there are.
        peer, peers: the rank's number among the ranks with the same data-parallel rank, and how
            many of these there are.
        micro_batch: samples of a micro-batch.
    """

    data: int
    data_size: int
    peer: int
    peers: int
    micro_batch: int

    def shards(self, first_rollout: np.ndarray) -> list[int]:
        """The numbers of the shards that this rank checks; each shard is checked by one rank.

        A shard is checked by a rank that will also train on it, so that no rank opens more files
        than it needs anyway. In store order, rollout j is used by the data-parallel rank
        j // micro_batch modulo data_size. One rollout of a shard decides which data-parallel rank
        checks the shard: its first rollout for the first `peers` shards, its second rollout for
        the next `peers` shards, and so on. In this way all ranks get shards.

        Example: 4 data-parallel ranks of 2 peers, micro-batches of 1, 3 rollouts a shard.

            shard                 0  1  2  3
            rollout that decides  0  3  7  10
            data-parallel rank    0  3  3  2
            peer                  0  1  0  1

        Args:
            first_rollout: int `[shards + 1]`, the number of each shard's first rollout, and last
                the number of all rollouts.
        """
        shard = np.arange(len(first_rollout) - 1)
        rollout = first_rollout[:-1] + shard // self.peers % np.diff(first_rollout)
        data, peer = rollout // self.micro_batch % self.data_size, shard % self.peers
        return np.flatnonzero((data == self.data) & (peer == self.peer)).tolist()


def place_of_this_rank(micro_batch: int) -> Place:
    """The place of this rank, by Megatron's process groups, which must exist."""
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
    """Check each shard of the store on one of the ranks; all ranks end if a shard is wrong.

    Args:
        place: the place of this rank.
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
    """End all ranks; the first rank reports `message`. Each rank must call this function."""
    refuse(message, speaks=torch.distributed.get_rank() == 0, repeats=False)
