"""The dispatch plan of a model chunk: counts of its routes, gathered among its expert ranks.

Shape suffixes (docs/glossary.md): E, K, L, R, T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from megatron_r3.replay.plan import ExpertRanks, LayerSizes, count_tokens, layer_sizes

# the token dispatchers that ask for a plan (patch 3); the flex dispatcher learns its sizes
# in a kernel of its own
PLANNED_DISPATCHERS = ("alltoall", "allgather")
# from every rank's counts `[R, L, E]` to the sizes of each layer, as `layer_sizes`
SizesOf = Callable[[np.ndarray, ExpertRanks, list[int]], dict[int, LayerSizes]]
# For an option that changes what is planned: from the config to what plans in the place of
# `layer_sizes`. seams/guests.py adds that of guests; whoever makes a layer with guests has imported
# that file, so no such layer is planned without them.
OTHER_SIZES: dict[str, Callable[[Any], SizesOf]] = {}


class PlannedRoutes(Protocol):
    """What a planner reads of the routes of a micro-batch: `HostRoutes`, or `HostTargets`.

    Attributes:
        ids_LTK: expert ids on the host, of any integer dtype.
        live_T: bool, True where a route is not known yet; of any shape.
    """

    @property
    def ids_LTK(self) -> np.ndarray: ...  # noqa: D102

    @property
    def live_T(self) -> np.ndarray: ...  # noqa: D102


class Planner:
    """Plans the micro-batches of one model chunk together with the ranks that share its experts.

    A plan costs one collective a micro-batch, on the host. All of these ranks make their planners
    in the same order, because a new planner makes a process group.

    Args:
        config: the model's TransformerConfig.
        layer_numbers: the chunk's MoE layers, Megatron's numbers.
    """

    def __init__(self, config: Any, layer_numbers: list[int]) -> None:
        from megatron.core import mpu

        self.num_experts, self.layer_numbers = config.num_moe_experts, layer_numbers
        others = (of for option, of in OTHER_SIZES.items() if getattr(config, option, None))
        self._sizes_of: SizesOf = next((of(config) for of in others), layer_sizes)
        self.ranks = ExpertRanks(
            mpu.get_expert_model_parallel_world_size(),
            mpu.get_expert_model_parallel_rank(),
            mpu.get_expert_tensor_parallel_world_size(),
            mpu.get_expert_tensor_parallel_rank(),
        )
        group = mpu.get_expert_tensor_and_model_parallel_group()
        self.size = group.size()
        # The lookahead thread gathers while the training thread runs collectives of its own. In a
        # shared group the two could pair up differently on two ranks, so the plan has its group.
        if self.size > 1:
            self.group = torch.distributed.new_group(
                torch.distributed.get_process_group_ranks(group),
                backend="gloo",
                use_local_synchronization=True,
            )

    def plan(self, routes: PlannedRoutes) -> dict[int, LayerSizes] | None:
        """The sizes of every layer; None if any rank has tokens whose route is not known yet."""
        counts_LE = count_tokens(routes.ids_LTK, self.num_experts).astype(np.int32)
        known = not routes.live_T.any()
        # One message a rank: the counts of all layers, then 1 if all its routes are known.
        # Example with 2 layers and 4 experts: [3 1 0 2  2 2 1 1  1].
        gathered = self._gather(np.append(counts_LE.ravel(), np.int32(known)))
        if not gathered[:, -1].all():
            return None
        counts_RLE = gathered[:, :-1].reshape(self.size, *counts_LE.shape)
        return self._sizes_of(counts_RLE, self.ranks, self.layer_numbers)

    def _gather(self, message: np.ndarray) -> np.ndarray:
        if self.size == 1:
            return message[None]
        gathered = torch.empty(self.size, len(message), dtype=torch.int32)
        torch.distributed.all_gather_into_tensor(
            gathered.view(-1), torch.from_numpy(message), group=self.group
        )
        return gathered.numpy()
