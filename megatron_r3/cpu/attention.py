"""Core attention with context parallelism (CP) and packed sequences (THD), which need TE upstream.

A plain causal softmax(QK)V over the keys and values of all CP ranks, gathered. Without CP and
packing Megatron's own DotProductAttention runs, untouched.

Shape suffixes: Q query tokens (local), K key tokens (all ranks'), B batch, N heads, H head size.
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
    """Positions of a sequence that a CP rank holds: the rank-th chunk of 2*CP and its mirror."""
    positions = torch.arange(length)
    if cp_size == 1:
        return positions
    if length % (2 * cp_size):
        raise ValueError(f"a sequence of {length} tokens does not split into 2 * CP{cp_size} parts")
    chunks = positions.view(2 * cp_size, length // (2 * cp_size))
    return chunks[[cp_rank, 2 * cp_size - 1 - cp_rank]].flatten()


def thd_index(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """Tokens of a packed stream that a CP rank holds: each sequence is split by zigzag."""
    bounds = [int(bound) for bound in cu_seqlens]
    parts = [
        start + zigzag(end - start, cp_size, cp_rank) for start, end in itertools.pairwise(bounds)
    ]
    return torch.cat(parts) if parts else torch.arange(0)


class _GatherSequence(torch.autograd.Function):
    """Local tokens to those of all CP ranks, in rank order; backward adds all ranks' gradients."""

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
    """Positions of the local queries and of the gathered keys."""
    parts = [index_of(rank) for rank in range(cp_size)]
    return parts[cp_rank], torch.cat(parts)


def _thd_mask_QK(packed: Any, tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """What a packed query sees: the earlier tokens of its own sequence, so no padding after it."""
    padded = packed.cu_seqlens_q_padded
    bounds = (packed.cu_seqlens_q if padded is None else padded).long()
    queries, keys = _positions(
        lambda rank: thd_index(bounds.tolist(), cp_size, rank), cp_size, cp_rank
    )
    if queries.numel() != tokens:
        raise NotEmulated(f"cu_seqlens covers {queries.numel()} of a rank's {tokens} tokens")
    sequence_Q = torch.searchsorted(bounds, queries, right=True)
    sequence_K = torch.searchsorted(bounds, keys, right=True)
    return (sequence_Q[:, None] == sequence_K) & (queries[:, None] >= keys)


def _causal_mask_QK(
    tokens: int, cp_size: int, cp_rank: int, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """What a query of a split sequence sees: the earlier tokens of the whole sequence."""
    queries, keys = _positions(
        lambda rank: zigzag(tokens * cp_size, cp_size, rank), cp_size, cp_rank
    )
    seen = queries[:, None] >= keys
    if attention_mask is not None:  # True where hidden, keys in the order of the whole sequence
        hidden = queries[:, None] < torch.arange(tokens * cp_size)
        if attention_mask.shape[-2:] != hidden.shape or (attention_mask != hidden).any():
            raise NotEmulated("with CP, only a causal attention mask is emulated on the CPU")
    return seen


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen_QK: torch.Tensor
) -> torch.Tensor:
    """softmax(QK)V of [token, batch, head, size] tensors, the softmax in float32."""
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:  # grouped queries
        key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
    scores = torch.einsum("qbnh,kbnh->bnqk", query, key).float() * module.softmax_scale
    weights = scores.masked_fill(~seen_QK, float("-inf")).softmax(-1).to(query.dtype)
    weights = _dropout(module, weights)
    return torch.einsum("bnqk,kbnh->qbnh", weights, value).flatten(2)


def _dropout(module: Any, weights: torch.Tensor) -> torch.Tensor:
    """Attention dropout, from the stream of random numbers that Megatron draws it from."""
    from megatron.core import tensor_parallel

    if module.config.sequence_parallel:  # the layer has already switched streams
        return module.attention_dropout(weights)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return module.attention_dropout(weights)


def _check_emulated(module: Any, kind: Any, attention_bias: Any) -> None:
    """Refuse what Megatron's own attention does and this one does not."""
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
                f"{reason} with context parallelism or packed sequences on the CPU: "
                "leave one of the two out"
            )


def patch() -> None:
    """Give Megatron's DotProductAttention context parallelism and packed sequences."""
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    init, forward_alone = DotProductAttention.__init__, DotProductAttention.forward

    def init_with_cp(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        without_cp = copy.copy(config)  # all that upstream does with CP is to refuse it
        without_cp.context_parallel_size = 1
        init(self, without_cp, *args, **kwargs)
        self.config = config
        groups = kwargs.get("pg_collection")
        self.cp_group = getattr(groups, "cp", None)
        if self.cp_group is None:
            self.cp_group = parallel_state.get_context_parallel_group(check_initialized=False)

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
            return forward_alone(
                self, query, key, value, attention_mask, attn_mask_type, attention_bias, **kwargs
            )
        _check_emulated(self, attn_mask_type or self.attn_mask_type, attention_bias)
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            seen_QK = _thd_mask_QK(packed_seq_params, len(query), cp_size, cp_rank)
        else:
            seen_QK = _causal_mask_QK(len(query), cp_size, cp_rank, attention_mask)
        if cp_size > 1:
            key, value = (_GatherSequence.apply(t, group) for t in (key, value))
        output = _attend(self, query, key, value, seen_QK)
        return output.squeeze(1) if packed else output

    DotProductAttention.__init__, DotProductAttention.forward = init_with_cp, forward
