"""Row ids: which row of which rollout each token of a batch is.

A batch carries one more field beside its tokens: `rows`, the row ids of a store (-1 for padding).
Whatever splits the tokens splits the rows the same way, so what arrives at a rank says which routes
it needs. Nothing here knows how context parallelism or packing splits a sequence.

Shape suffixes: B batch, S sequence, T tokens of this rank in the router's order.
"""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = -1


def router_order(field_BS: Tensor, sequence_parallel_size: int = 1, rank: int = 0) -> Tensor:
    """A batch field in the order in which this rank's router sees the tokens.

    Megatron's hidden states are [S, B, H], split along S by sequence parallelism and flattened to
    s * B + b (megatron/core/transformer/moe/router.py, `TopKRouter.routing`).

    Args:
        field_BS: the field of this context-parallel rank.
        sequence_parallel_size: the tensor-parallel size where sequence parallelism is on, else 1.
        rank: this rank among them.

    Returns:
        `[S * B / sequence_parallel_size]`, same dtype.

    Raises:
        ValueError: the sequence does not divide.
    """
    length = field_BS.shape[1]
    if length % sequence_parallel_size:
        raise ValueError(
            f"sequence of {length} tokens does not divide by sequence parallel size "
            f"{sequence_parallel_size}"
        )
    local = length // sequence_parallel_size
    return field_BS[:, rank * local : (rank + 1) * local].t().reshape(-1)


def spread_padding(num_tokens: int, topk: int, num_experts: int) -> Tensor:
    """Routes for padding: distinct experts, spread evenly over all of them.

    Zeros or arange(topk) would make a hot expert, and zeros are duplicates.

    Returns:
        int64 `[num_tokens, topk]`.
    """
    return (torch.arange(num_tokens)[:, None] * topk + torch.arange(topk)) % num_experts
