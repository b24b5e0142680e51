"""Row ids: which row of which rollout each token of a batch is.

A batch carries one more field beside its tokens: `rows`, the row ids of a store (-1 for padding).
Whatever splits the tokens splits the rows the same way, so the rows that arrive at a rank say which
routes it needs. Nothing here knows how context parallelism or packing splits a sequence.

Shape suffixes (docs/glossary.md): B, S.
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
        sequence_parallel_size: the tensor-parallel size if sequence parallelism is on, else 1.
        rank: this rank's place in the tensor-parallel group; 0 without sequence parallelism.

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
    # Example, B = 2 sequences a and b of S = 4, split over 2 ranks: rank 1 has the positions 2 and
    # 3, and its router sees them as a2 b2 a3 b3.
    local = length // sequence_parallel_size
    return field_BS[:, rank * local : (rank + 1) * local].t().reshape(-1)


def spread_padding(num_tokens: int, topk: int, num_experts: int) -> Tensor:
    """Routes for padding: distinct experts, spread evenly over all of them.

    The same experts for every token, e.g. arange(topk), would overload them; zeros would be one
    expert several times. Example, top-2 of 5 experts: 0 1, 2 3, 4 0, 1 2, ...

    Returns:
        int64 `[num_tokens, topk]`.
    """
    return (torch.arange(num_tokens)[:, None] * topk + torch.arange(topk)) % num_experts
