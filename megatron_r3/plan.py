"""The dispatch plan: how many tokens go where in every MoE layer, from the routes alone.

With live routing a layer learns its all-to-all sizes on the device: it sums the routing map,
gathers the sums over the ranks that share its experts, copies them to the host and waits. Replayed
routes are on the host before the step, so all layers' sizes can be: one gather for a microbatch.

Shape suffixes: L MoE layers, T tokens of this rank, K top-k, E experts, R ranks of the expert
tensor-and-expert-parallel group (tensor parallel fastest), P expert-parallel size, N local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class PlanError(RuntimeError):
    """A plan that cannot be: the message names layer and rank."""


@dataclass(frozen=True)
class ExpertRanks:
    """Where a rank stands among those that share its experts.

    Attributes:
        expert_size, expert_rank: of the expert-parallel group.
        tensor_size, tensor_rank: of the expert-tensor-parallel group.
    """

    expert_size: int
    expert_rank: int
    tensor_size: int
    tensor_rank: int

    @property
    def rank(self) -> int:
        """This rank's place in the group of both."""
        return self.expert_rank * self.tensor_size + self.tensor_rank


@dataclass(frozen=True)
class LayerSizes:
    """What one layer's dispatcher needs to know, on the host, int64.

    The types are those that Megatron's MoEAlltoAllTokenDispatcher has after its copy to the host
    (megatron/core/transformer/moe/token_dispatcher.py, `preprocess`).

    Attributes:
        input_splits, output_splits: `[P]`, tokens sent to, and received from, each expert-parallel
            rank.
        output_splits_tp: `[tensor_size]`, tokens that each expert-tensor-parallel rank received.
        received: `[R, N]`, tokens that each rank of the group sent to each local expert, tensor
            parallel slowest.
        tokens_per_expert: `[N]`, of this rank's experts.
    """

    input_splits: np.ndarray
    output_splits: np.ndarray
    output_splits_tp: np.ndarray
    received: Tensor
    tokens_per_expert: Tensor


def count_tokens(ids_LTK: np.ndarray, num_experts: int) -> np.ndarray:
    """How many of this rank's tokens each layer sends to each expert, int32 `[L, E]`."""
    num_layers = len(ids_LTK)
    first_L = np.arange(num_layers, dtype=np.int32)[:, None, None] * num_experts
    counts = np.bincount((ids_LTK + first_L).ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.int32)


def layer_sizes(
    counts_RLE: np.ndarray, ranks: ExpertRanks, layer_numbers: list[int]
) -> dict[int, LayerSizes]:
    """The sizes of every layer, by its number.

    Args:
        counts_RLE: every rank's `count_tokens`, in the order of the group.
        layer_numbers: Megatron's, of the L layers.

    Raises:
        PlanError: a rank sends more tokens in one layer than in another.
    """
    num_ranks, num_layers, num_experts = counts_RLE.shape
    assert num_ranks == ranks.expert_size * ranks.tensor_size
    _check(counts_RLE, layer_numbers)
    num_local = num_experts // ranks.expert_size
    first = ranks.expert_rank * num_local
    counts_RLE = counts_RLE.astype(np.int64)
    own_LE = counts_RLE[ranks.rank]
    local = counts_RLE[:, :, first : first + num_local]
    # layer, tensor-parallel rank, expert-parallel rank, local expert
    local = local.reshape(ranks.expert_size, ranks.tensor_size, num_layers, num_local)
    local = np.ascontiguousarray(local.transpose(2, 1, 0, 3))
    per_rank = local.sum(3)
    input_splits = own_LE.reshape(num_layers, ranks.expert_size, num_local).sum(2)
    return {
        number: LayerSizes(
            input_splits=input_splits[index],
            output_splits=per_rank[index, ranks.tensor_rank],
            output_splits_tp=per_rank[index].sum(1),
            received=torch.from_numpy(local[index].reshape(num_ranks, num_local)),
            tokens_per_expert=torch.from_numpy(local[index].sum((0, 1))),
        )
        for index, number in enumerate(layer_numbers)
    }


def _check(counts_RLE: np.ndarray, layer_numbers: list[int]) -> None:
    """Every layer routes the same tokens to the same number of experts."""
    totals_RL = counts_RLE.sum(2)
    for rank, index in np.argwhere(totals_RL != totals_RL[:, :1])[:1]:
        raise PlanError(
            f"dispatch plan: rank {rank} of the expert group sends {totals_RL[rank, index]} "
            f"(token, expert) pairs in layer {layer_numbers[index]}, and "
            f"{totals_RL[rank, 0]} in layer {layer_numbers[0]}"
        )
