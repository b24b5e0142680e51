"""Prepare microbatches ahead of the step, in a thread: read their routes, plan their dispatch.

Shape suffixes: L MoE layers of a model chunk, T tokens of this rank in the router's order, K top-k,
E experts, R ranks that share experts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.plan import ExpertRanks, LayerSizes, count_tokens, layer_sizes
from megatron_r3.training.batch import HostRoutes

DEPTH = 2  # microbatches that wait to be used


@dataclass(frozen=True)
class Prepared:
    """A microbatch on the host: this rank's part of the batch, its routes, its plan.

    Attributes:
        batch: the fields that the model and the loss take.
        shards: the numbers of the store's shards that its rollouts are in.
        routes: None where no layer replays or is compared.
        plan: None where the ordinary path has to be taken.
    """

    batch: dict[str, Tensor]
    shards: list[int]
    routes: HostRoutes | None
    plan: dict[int, LayerSizes] | None


class Planner:
    """Plans the microbatches of one model chunk together with the ranks that share its experts.

    One collective a microbatch, on the host. Made by all of these ranks in the same order.
    """

    def __init__(self, num_experts: int, layer_numbers: list[int]) -> None:
        from megatron.core import mpu

        self.num_experts, self.layer_numbers = num_experts, layer_numbers
        self.ranks = ExpertRanks(
            mpu.get_expert_model_parallel_world_size(),
            mpu.get_expert_model_parallel_rank(),
            mpu.get_expert_tensor_parallel_world_size(),
            mpu.get_expert_tensor_parallel_rank(),
        )
        group = mpu.get_expert_tensor_and_model_parallel_group()
        self.size = group.size()
        if self.size > 1:  # a group of its own: other collectives must not come in between
            self.group = torch.distributed.new_group(
                torch.distributed.get_process_group_ranks(group),
                backend="gloo",
                use_local_synchronization=True,
            )

    def plan(self, routes: HostRoutes) -> dict[int, LayerSizes] | None:
        """The sizes of every layer; None if any rank has tokens whose route is not known yet."""
        counts_LE = count_tokens(routes.ids_LTK, self.num_experts)
        known = not routes.live_T.any()
        gathered = self._gather(np.append(counts_LE.ravel(), np.int32(known)))
        if not gathered[:, -1].all():
            return None
        counts_RLE = gathered[:, :-1].reshape(self.size, *counts_LE.shape)
        return layer_sizes(counts_RLE, self.ranks, self.layer_numbers)

    def _gather(self, mine: np.ndarray) -> np.ndarray:
        if self.size == 1:
            return mine[None]
        everyone = torch.empty(self.size, len(mine), dtype=torch.int32)
        torch.distributed.all_gather_into_tensor(
            everyone.view(-1), torch.from_numpy(mine), group=self.group
        )
        return everyone.numpy()


class Lookahead:
    """An iterator that prepares what another one brings, in a thread, ahead of its use.

    It stands inside Megatron's RerunDataIterator, which keeps what it was handed and hands it out
    again where a step is run twice.
    """

    def __init__(self, batches: Iterator[Any], prepare: Callable[[Any], Prepared]) -> None:
        self._device = torch.cuda.current_device()
        self._ready: queue.Queue[tuple[Prepared | None, BaseException | None]] = queue.Queue(DEPTH)
        self._thread = threading.Thread(
            target=self._run, args=(batches, prepare), name="megatron_r3 lookahead", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Lookahead:
        return self

    def __next__(self) -> Prepared:
        prepared, error = self._ready.get()
        if error is not None:
            self._ready.put((None, error))  # whoever asks again hears the same
            raise error
        assert prepared is not None
        return prepared

    def _run(self, batches: Iterator[Any], prepare: Callable[[Any], Prepared]) -> None:
        try:
            torch.cuda.set_device(self._device)  # a thread begins with the first one
            while True:
                self._ready.put((prepare(next(batches)), None))
        except BaseException as error:  # of StopIteration too: the step hears it
            self._ready.put((None, error))
