"""Row ids: which row of which rollout each token of a batch is.

A batch carries one more field beside its tokens: `rows`, the row ids of a store (-1 for padding).
Whatever splits the tokens splits the rows the same way, so the rows that arrive at a rank say which
routes this rank needs. Nothing here knows how context parallelism or packing splits a sequence.

Shape suffixes (docs/glossary.md): B, E, K, L, S, T.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_r3.replay.routes import RoutesError

PADDING = -1


def router_order(field_BS: Tensor, sequence_parallel_size: int = 1, rank: int = 0) -> Tensor:
    """A batch field in the order in which this rank's router sees the tokens.

    Megatron's hidden states have the axes position, sequence, hidden. Sequence parallelism splits
    the positions, and a router sees position s of sequence b as token s * B + b
    (megatron/core/transformer/moe/router.py, `TopKRouter.routing`).

    Args:
        field_BS: the field of this context-parallel rank.
        sequence_parallel_size: the tensor-parallel size if sequence parallelism is on, else 1.
        rank: this rank's place in the tensor-parallel group; 0 without sequence parallelism.

    Returns:
        `[S * B / sequence_parallel_size]`, same dtype.

    Raises:
        ValueError: the sequence does not divide by the sequence parallel size.
    """
    length = field_BS.shape[1]
    if length % sequence_parallel_size:
        raise ValueError(
            f"a sequence of {length} tokens cannot be split evenly over the sequence parallel size "
            f"{sequence_parallel_size}: pad it to a multiple"
        )
    # Example, B = 2 sequences a and b of S = 4, split over 2 ranks: rank 1 has the positions 2 and
    # 3, and its router sees them as a2 b2 a3 b3.
    local = length // sequence_parallel_size
    return field_BS[:, rank * local : (rank + 1) * local].t().reshape(-1)


def spread_padding(num_tokens: int, topk: int, num_experts: int) -> Tensor:
    """Routes for padding: distinct experts, spread evenly over all of them.

    With the experts 0 to K - 1 for every token these experts would be overloaded; a row of zeros
    would have one expert several times. Example, top-2 of 5 experts: 0 1, 2 3, 4 0, 1 2, ...

    Returns:
        int64 `[num_tokens, topk]`.
    """
    return (torch.arange(num_tokens)[:, None] * topk + torch.arange(topk)) % num_experts


def count_tokens(ids_LTK: np.ndarray, num_experts: int) -> np.ndarray:
    """How many of these tokens each layer sends to each expert, int64 `[L, E]`.

    Example: two tokens of one layer with 4 experts, `[[[0, 2], [2, 3]]]`, are counted as `1 0 2 1`.

    Args:
        ids_LTK: uint8, uint16 or a signed integer dtype; copied only where a layer is not
            contiguous.

    Raises:
        RoutesError: an id is out of range; the message names the layer.
    """
    counts_LE = np.empty((len(ids_LTK), num_experts), np.int64)
    # torch counts bytes as they are, where numpy makes eight bytes of each id first. But torch does
    # not count uint16; ids are below 32,768, so that int16 has the same bits.
    ids_LTK = ids_LTK.view(np.int16) if ids_LTK.dtype == np.uint16 else ids_LTK
    if ids_LTK.dtype.kind == "i" and ids_LTK.size and ids_LTK.min() < 0:
        layer = int(np.argmax((ids_LTK < 0).any((1, 2))))
        raise RoutesError(f"MoE layer {layer} has an expert id below 0 or above 32,767")
    for layer, ids_TK in enumerate(ids_LTK):
        ids = torch.from_numpy(np.ascontiguousarray(ids_TK)).view(-1)
        counts_E = torch.bincount(ids, minlength=num_experts).numpy()
        # bincount returns more counts if an id is too large
        if len(counts_E) > num_experts:
            raise RoutesError(
                f"MoE layer {layer} has the expert id {len(counts_E) - 1}; there are {num_experts} "
                "experts"
            )
        counts_LE[layer] = counts_E
    return counts_LE
