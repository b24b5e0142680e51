"""Core attention with context parallelism (CP) and packed sequences (THD), which need TE upstream.

The attention is a plain causal softmax(QK)V: the queries of this rank, over the keys and values
gathered from all CP ranks. Without CP and packing, Megatron's own DotProductAttention runs.

Shape suffixes (docs/glossary.md): B, S, A, F, Q, Z.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_r3.cpu.errors import NotEmulated


def zigzag(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """The positions of a sequence that a CP rank holds.

    The sequence has 2*CP chunks. Rank r holds chunk r from the start and chunk r from the end.
    Later tokens attend to more tokens, so an early and a late chunk give every rank the same work.
    Example: 8 tokens, CP 2, four chunks of two. Rank 0 holds the first and the last chunk,
    positions 0, 1, 6, 7; rank 1 holds 2, 3, 4, 5.

    Raises:
        ValueError: the length is not divisible by 2*CP (any length is fine without CP).
    """
    positions_S = torch.arange(length)
    if cp_size == 1:
        return positions_S
    if length % (2 * cp_size):
        raise ValueError(
            f"a sequence of {length} tokens cannot be split into {2 * cp_size} equal parts, which "
            f"context parallelism over {cp_size} ranks needs"
        )
    chunks = positions_S.view(2 * cp_size, length // (2 * cp_size))
    return chunks[[cp_rank, 2 * cp_size - 1 - cp_rank]].flatten()


def thd_index(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """The positions of a packed stream that a CP rank holds: `zigzag` splits each sequence.

    Args:
        cu_seqlens: where each sequence begins, and the end of the last one: [0, 4, 12] is one
            sequence of 4 tokens and one of 8.
    """
    bounds = [int(bound) for bound in cu_seqlens]
    parts = [
        start + zigzag(end - start, cp_size, cp_rank) for start, end in itertools.pairwise(bounds)
    ]
    return torch.cat(parts) if parts else torch.arange(0)


class _GatherSequence(torch.autograd.Function):
    """Gathers the tokens of all CP ranks, in the order of the ranks.

    Every rank uses the keys and values of all ranks, so a local token gets a gradient from each
    rank. The backward pass adds these gradients up.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.length = group, local.shape[0]
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.narrow(0, ctx.group.rank() * ctx.length, ctx.length), None


def _positions(
    index_of: Callable[[int], torch.Tensor], cp_size: int, cp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of this rank's queries, and of all ranks' keys in the order of the ranks."""
    parts = [index_of(rank) for rank in range(cp_size)]
    return parts[cp_rank], torch.cat(parts)


def _thd_mask_QZ(packed: Any, tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Which keys a packed query sees: its own token and the earlier ones of its sequence.

    Padding follows the sequence that it pads, so no real token sees it.
    """
    padded = packed.cu_seqlens_q_padded
    bounds = (packed.cu_seqlens_q if padded is None else padded).long()
    queries_Q, keys_Z = _positions(
        lambda rank: thd_index(bounds.tolist(), cp_size, rank), cp_size, cp_rank
    )
    if queries_Q.numel() != tokens:
        raise NotEmulated(
            f"cu_seqlens says {queries_Q.numel()} tokens for a rank that has {tokens}"
        )
    # the sequence of each token: with bounds [0, 4, 12] tokens 0 to 3 are in 1, 4 to 11 in 2
    sequence_Q = torch.searchsorted(bounds, queries_Q, right=True)
    sequence_Z = torch.searchsorted(bounds, keys_Z, right=True)
    return (sequence_Q[:, None] == sequence_Z) & (queries_Q[:, None] >= keys_Z)


def _causal_mask_QZ(
    tokens: int, cp_size: int, cp_rank: int, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Which keys a query of a sequence that CP splits sees: its own token and all earlier ones."""
    queries_Q, keys_Z = _positions(
        lambda rank: zigzag(tokens * cp_size, cp_size, rank), cp_size, cp_rank
    )
    seen_QZ = queries_Q[:, None] >= keys_Z
    if attention_mask is not None:
        # Megatron's mask is True where a key is hidden, with the keys in the sequence's own order
        hidden_QZ = queries_Q[:, None] < torch.arange(tokens * cp_size)
        if attention_mask.shape[-2:] != hidden_QZ.shape or (attention_mask != hidden_QZ).any():
            raise NotEmulated("with CP, only a causal attention mask is emulated on the CPU")
    return seen_QZ


def _attend(
    module: Any,
    query_QBAF: torch.Tensor,
    key_ZBAF: torch.Tensor,
    value_ZBAF: torch.Tensor,
    seen_QZ: torch.Tensor,
) -> torch.Tensor:
    """softmax(QK)V with the softmax in float32; K and V may have fewer heads than Q (GQA)."""
    repeats = query_QBAF.shape[2] // key_ZBAF.shape[2]
    if repeats > 1:  # example: 4 query heads and 2 key heads: key heads 0, 0, 1, 1
        key_ZBAF = key_ZBAF.repeat_interleave(repeats, 2)
        value_ZBAF = value_ZBAF.repeat_interleave(repeats, 2)
    scores_BAQZ = torch.einsum("qbaf,zbaf->baqz", query_QBAF, key_ZBAF).float()
    scores_BAQZ = scores_BAQZ * module.softmax_scale
    weights_BAQZ = scores_BAQZ.masked_fill(~seen_QZ, float("-inf")).softmax(-1)
    weights_BAQZ = _dropout(module, weights_BAQZ.to(query_QBAF.dtype))
    return torch.einsum("baqz,zbaf->qbaf", weights_BAQZ, value_ZBAF).flatten(2)


def _dropout(module: Any, weights: torch.Tensor) -> torch.Tensor:
    """Attention dropout, drawn from the random stream that Megatron uses for attention."""
    from megatron.core import tensor_parallel

    if module.config.sequence_parallel:  # the layer has switched streams already
        return module.attention_dropout(weights)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return module.attention_dropout(weights)


def _check_emulated(module: Any, kind: Any, attention_bias: Any) -> None:
    """Refuse options of Megatron's attention that this file does not emulate."""
    config = module.config
    reasons = {
        "an attention bias": attention_bias is not None,
        f"{kind}": kind.name not in ("causal", "padding_causal"),
        "softmax_type": getattr(module, "softmax_offset", None) is not None,
        "window_size": getattr(config, "window_size", None) is not None,
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
    }
    for reason, present in reasons.items():
        if present:
            raise NotEmulated(
                f"{reason} is not emulated on the CPU with context parallelism or packed "
                "sequences: leave one of the two out"
            )


def patch() -> None:
    """Give Megatron's DotProductAttention context parallelism and packed sequences."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.__init__ = _init_with_cp(DotProductAttention.__init__)
    DotProductAttention.forward = _forward_with_cp(DotProductAttention.forward)


def _init_with_cp(upstream: Callable[..., None]) -> Callable[..., None]:
    """A constructor of DotProductAttention that accepts CP and the head sizes of MLA.

    Upstream's constructor refuses both, so it is called with CP 1 and with the head size of the
    values, which gives the size of the output. Example: with 16 heads, keys of 192 channels and
    values of 128 the output has 16 * 128.
    """

    def init(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        from megatron.core import parallel_state

        accepted = copy.copy(config)
        accepted.context_parallel_size = 1
        if v_channels is not None:
            accepted.kv_channels = v_channels
        upstream(self, accepted, *args, **kwargs)
        self.config = config
        self.cp_group = getattr(kwargs.get("pg_collection"), "cp", None)
        if self.cp_group is None:
            self.cp_group = parallel_state.get_context_parallel_group(check_initialized=False)

    return init


def _forward_with_cp(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A forward pass of DotProductAttention that uses `_attend` with CP or packed sequences."""

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        group = getattr(packed_seq_params, "cp_group", None) or self.cp_group
        cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
        if cp_size == 1 and not packed:
            return upstream(
                self, query, key, value, attention_mask, attn_mask_type, attention_bias, **kwargs
            )
        _check_emulated(self, attn_mask_type or self.attn_mask_type, attention_bias)
        if packed:
            # packed tensors have no batch dimension: [Q, A, F] becomes [Q, 1, A, F]
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            seen_QZ = _thd_mask_QZ(packed_seq_params, len(query), cp_size, cp_rank)
        else:
            seen_QZ = _causal_mask_QZ(len(query), cp_size, cp_rank, attention_mask)
        if cp_size > 1:
            key, value = (_GatherSequence.apply(t, group) for t in (key, value))
        output = _attend(self, query, key, value, seen_QZ)
        return output.squeeze(1) if packed else output

    return forward
