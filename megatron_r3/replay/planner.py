"""The dispatch plan of a model chunk: the ranks that share its experts exchange token counts.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from megatron_r3.replay.plan import (
    ExpertRanks,
    LayerSizes,
    by_owner,
    check_totals,
    layer_sizes,
    padded_counts,
    pads,
)
from megatron_r3.replay.rows import count_tokens

# the token dispatchers that ask for a plan (patch 3); the flex dispatcher learns its sizes
# in a kernel of its own
PLANNED_DISPATCHERS = ("alltoall", "allgather")
# a function from the counts of all ranks, [ranks, layers, experts], to the sizes of each layer
SizesOf = Callable[[np.ndarray, ExpertRanks, list[int]], dict[int, LayerSizes]]
# The key is an option of the config that changes the sizes. If the option is set, the function gets
# the config, and returns a SizesOf that replaces `layer_sizes` and needs the counts of all experts.
# seams/guests.py adds its option here; a process that makes layers with guests imports that file.
OTHER_SIZES: dict[str, Callable[[Any], SizesOf]] = {}


class PlannedRoutes(Protocol):
    """What a planner needs of a micro-batch's routes; `HostRoutes` and `HostTargets` have it.

    Attributes:
        ids_LTK: expert ids on the host: uint8, uint16 or a signed integer dtype.
        live_T: bool, True where a route is not known yet; of any shape.
    """

    @property
    def ids_LTK(self) -> np.ndarray: ...  # noqa: D102

    @property
    def live_T(self) -> np.ndarray: ...  # noqa: D102


class Planner:
    """Plans the micro-batches of one model chunk together with the ranks that share its experts.

    With several such ranks a plan costs one collective a micro-batch, on the host. These ranks make
    their planners in the same order, because a new planner makes a process group.

    Args:
        config: the model's TransformerConfig.
        layer_numbers: the chunk's MoE layers, Megatron's numbers.
    """

    def __init__(self, config: Any, layer_numbers: list[int]) -> None:
        from megatron.core import mpu

        self.num_experts, self.layer_numbers = config.num_moe_experts, layer_numbers
        self._multiple = pad_multiple(config)
        others = (of for option, of in OTHER_SIZES.items() if getattr(config, option, None))
        self._other_sizes: SizesOf | None = next((of(config) for of in others), None)
        self.ranks = ExpertRanks(
            mpu.get_expert_model_parallel_world_size(),
            mpu.get_expert_model_parallel_rank(),
            mpu.get_expert_tensor_parallel_world_size(),
            mpu.get_expert_tensor_parallel_rank(),
        )
        group = mpu.get_expert_tensor_and_model_parallel_group()
        self.size = group.size()
        # The lookahead thread exchanges counts while the training thread runs collectives of its
        # own. In a shared group the collectives of the two threads could be matched differently on
        # two ranks, so the planner has a group of its own.
        if self.size > 1:
            self.group = torch.distributed.new_group(
                torch.distributed.get_process_group_ranks(group),
                backend="gloo",
                use_local_synchronization=True,
            )

    def plan(self, routes: PlannedRoutes) -> dict[int, LayerSizes] | None:
        """The sizes of every layer; None if any rank has tokens without a known route.

        Raises:
            PlanError: a rank sends more (token, expert) pairs in one layer than in another.
        """
        counts_LE = count_tokens(routes.ids_LTK, self.num_experts).astype(np.int32)
        totals_L = counts_LE.sum(1)
        counts_LE = padded_counts(counts_LE, self._multiple, routes.ids_LTK.shape[1])
        # `layer_sizes` needs the counts of the receiver's experts alone; `_other_sizes` needs all.
        if self._other_sizes is None:
            for_rank = by_owner(counts_LE, self.ranks)
        else:
            for_rank = np.broadcast_to(counts_LE, (self.size, *counts_LE.shape))
        sent = messages(for_rank, totals_L, not routes.live_T.any())
        received, layers = self._exchange(sent), len(self.layer_numbers)
        if not received[:, -1].all():
            return None
        check_totals(received[:, -layers - 1 : -1], self.layer_numbers)
        arrived = received[:, : -layers - 1].reshape(for_rank.shape)
        if self._other_sizes is None:
            return layer_sizes(counts_LE, arrived, self.ranks, self.layer_numbers)
        return self._other_sizes(arrived, self.ranks, self.layer_numbers)

    def _exchange(self, sent: np.ndarray) -> np.ndarray:
        """The message of each rank to this rank, in the order of the group."""
        if self.size == 1:
            return sent
        received = torch.empty(sent.shape, dtype=torch.int32)
        torch.distributed.all_to_all_single(received, torch.from_numpy(sent), group=self.group)
        return received.numpy()


def pad_multiple(config: Any) -> int:
    """The number to whose multiples a dispatcher pads each expert's tokens; 1: it pads nothing."""
    if not pads(config):
        return 1
    from megatron.core.transformer.moe import token_dispatcher

    return int(token_dispatcher.get_align_size_for_quantization(config))


def messages(for_rank: np.ndarray, totals_L: np.ndarray, known: bool) -> np.ndarray:
    """What a rank sends to all ranks, int32: one row for each receiver.

    A row has the counts for its receiver, the sender's total of each layer (without the padding of
    `padded_counts`), and 1 if the sender knows all its routes, else 0. Example with 2 layers and 2
    experts of the receiver: [3 1  2 2  8 8  1]. With 256 experts on 256 ranks and 58 layers, a rank
    receives 120 kB. With the counts of all experts, which a plan with guests needs, the rank
    receives 15 MB.

    Args:
        for_rank: int32, the counts for each receiver along the first axis.
    """
    counts, alike = for_rank.reshape(len(for_rank), -1), np.append(totals_L, known)
    rows = np.empty((len(counts), counts.shape[1] + len(alike)), np.int32)  # the dtype that is sent
    rows[:, : counts.shape[1]], rows[:, counts.shape[1] :] = counts, alike
    return rows
