"""The dispatch plan: how many tokens go where in every MoE layer, from the routes alone.

With live routing a layer learns its all-to-all sizes on the device: it sums the routing map,
gathers the sums over the ranks that share its experts, copies them to the host and waits. Replayed
routes are on the host before the step, and so the sizes of all layers can be worked out there, with
one collective for a microbatch.

The R ranks that share the experts form one group of expert-parallel size x expert-tensor-parallel
size, in which the tensor-parallel rank counts fastest. Example of 2 x 2: the ranks 0 1 2 3 have the
(expert, tensor) ranks (0, 0) (0, 1) (1, 0) (1, 1).

Shape suffixes (docs/glossary.md): E, L, O, R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class PlanError(RuntimeError):
    """A plan that contradicts itself or the routing map; the message names layer and rank."""


@dataclass(frozen=True)
class ExpertRanks:
    """Where a rank stands among the ranks that share its experts.

    Attributes:
        expert_size, expert_rank: size of the expert-parallel group, and this rank's place in it.
        tensor_size, tensor_rank: size of the expert-tensor-parallel group, and this rank's place.
    """

    expert_size: int
    expert_rank: int
    tensor_size: int
    tensor_rank: int

    @property
    def rank(self) -> int:
        """This rank's place in the group of all R ranks."""
        return self.expert_rank * self.tensor_size + self.tensor_rank


@dataclass(frozen=True)
class LayerSizes:
    """What one layer's dispatcher needs to know, on the host, int64.

    The types are those that Megatron's MoEAlltoAllTokenDispatcher has after its copy to the host
    (megatron/core/transformer/moe/token_dispatcher.py, `preprocess`).

    Attributes:
        input_splits, output_splits: `[expert_size]`, how many tokens this rank sends to, and
            receives from, each expert-parallel rank.
        output_splits_tp: `[tensor_size]`, how many tokens each expert-tensor-parallel rank
            receives.
        received: `[R, O]`, how many tokens each rank sends to each expert of this rank. Unlike in
            the group, the tensor-parallel rank counts slowest here.
        tokens_per_expert: `[O]`, how many tokens each expert of this rank receives.
        guests: where hot experts have copies (`megatron_r3/balance/places.py`); None in a layer
            without guests. With guests, `received` and `tokens_per_expert` count by place (own
            experts and guest slots) instead of by expert.
        load_at_home: the sum of `tokens_per_expert` as it would be without guests.
    """

    input_splits: np.ndarray
    output_splits: np.ndarray
    output_splits_tp: np.ndarray
    received: Tensor
    tokens_per_expert: Tensor
    guests: Any = None
    load_at_home: int | None = None


def pads(config: Any) -> bool:
    """Whether the all-to-all dispatcher pads the tokens of each expert, for fp8 or fp4."""
    return bool(getattr(config, "moe_router_padding_for_quantization", False))


def padded_counts(counts_LE: np.ndarray, multiple: int, num_tokens: int) -> np.ndarray:
    """How many tokens a rank sends to each expert if its dispatcher pads the routing map.

    Megatron sends more of the rank's own tokens to an expert, with weight 0, until their number is
    a multiple (megatron/core/transformer/moe/moe_utils.py, `pad_routing_map`). Example: counts 3 0
    9 10 of 10 tokens and the multiple 4 become 4 0 10 10, as there are no 12 tokens.
    """
    return np.minimum(-(-counts_LE // multiple) * multiple, num_tokens)


def by_owner(counts_LE: np.ndarray, ranks: ExpertRanks) -> np.ndarray:
    """The counts split by the rank that owns the expert, `[R, L, O]`, in the order of the group.

    Expert-parallel rank p owns the experts p * O to p * O + O - 1. Example: of the counts 3 1 0 4
    of 4 experts on 2 ranks, 3 1 are for the first rank and 0 4 for the second.
    """
    num_layers, num_experts = counts_LE.shape
    of_ranks = counts_LE.reshape(num_layers, ranks.expert_size, num_experts // ranks.expert_size)
    of_ranks = of_ranks.swapaxes(0, 1)
    return of_ranks.repeat(ranks.tensor_size, axis=0)


def layer_sizes(
    own_LE: np.ndarray, arriving_RLO: np.ndarray, ranks: ExpertRanks, layer_numbers: list[int]
) -> dict[int, LayerSizes]:
    """The `LayerSizes` of every layer, by the layer's number.

    Args:
        own_LE: how many tokens this rank sends to each expert (`rows.count_tokens`); with guest
            slots, to each place (`megatron_r3/balance/places.py`).
        arriving_RLO: how many tokens each rank sends to each expert of this rank, in the order of
            the group: this rank's part of every rank's `by_owner`.
        layer_numbers: Megatron's number of each of the L layers.
    """
    num_ranks, num_layers, num_local = arriving_RLO.shape
    assert num_ranks == ranks.expert_size * ranks.tensor_size
    own_LE, arriving_RLO = own_LE.astype(np.int64), arriving_RLO.astype(np.int64)
    # Example: O = 2 and counts 3 1 0 4 of 4 experts: 4 tokens to each rank.
    input_splits = own_LE.reshape(num_layers, ranks.expert_size, num_local).sum(2)
    # Megatron's `preprocess` has the counts in the order [tensor-parallel rank, expert-parallel
    # rank, expert of this rank]. So `received` is [layer, tensor-parallel rank, expert-parallel
    # rank, expert of this rank].
    by_rank = arriving_RLO.reshape(ranks.expert_size, ranks.tensor_size, num_layers, num_local)
    received = np.ascontiguousarray(by_rank.transpose(2, 1, 0, 3))
    per_rank = received.sum(3)
    return {
        number: LayerSizes(
            input_splits=input_splits[index],
            output_splits=per_rank[index, ranks.tensor_rank],
            output_splits_tp=per_rank[index].sum(1),
            received=torch.from_numpy(received[index].reshape(num_ranks, num_local)),
            tokens_per_expert=torch.from_numpy(received[index].sum((0, 1))),
        )
        for index, number in enumerate(layer_numbers)
    }


def check_totals(totals_RL: np.ndarray, layer_numbers: list[int]) -> None:
    """Check that each rank sends equally many (token, expert) pairs in all its layers.

    Raises:
        PlanError: a rank sends more pairs in one layer than in another.
    """
    wrong = np.argwhere(totals_RL != totals_RL[:, :1])
    if len(wrong):
        rank, index = wrong[0]
        raise PlanError(
            f"dispatch plan: rank {rank} of the expert group sends {totals_RL[rank, index]} "
            f"(token, expert) pairs in layer {layer_numbers[index]}, and "
            f"{totals_RL[rank, 0]} in layer {layer_numbers[0]}; all layers must have equally many"
        )
