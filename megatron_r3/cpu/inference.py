"""What Megatron's dynamic inference engine takes from FlashAttention, Triton and CUDA.

Keys and values are in blocks of a cache that all requests share. FlashAttention finds them by a
block table. Here plain torch joins the blocks of each request and attends to them, one request
after another. Multi-latent attention decodes by another kernel, which is not emulated.

Shape suffixes (docs/glossary.md): A, F, Q, Z.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_r3.cpu.errors import NotEmulated

_Generator = torch.Generator


def patch() -> None:
    """Give Megatron's dynamic engine what it lacks on a CPU; a tree without it stays as it is."""
    try:
        attention = importlib.import_module("megatron.core.transformer.attention")
        context = importlib.import_module("megatron.core.inference.contexts.dynamic_context")
    except ImportError:  # a program that needs these modules gets this error itself
        return
    attention.flash_attn_varlen_func = attend_to_blocks  # type: ignore[attr-defined]
    attention.flash_attn_with_kvcache = decode_from_blocks  # type: ignore[attr-defined]
    attention.is_fa_min_version = lambda *version, **options: True  # type: ignore[attr-defined]
    # without the Triton kernel upstream's own torch code writes to the cache
    context.triton_append_key_value_cache = None  # type: ignore[attr-defined]
    torch.Generator = _CpuGenerator  # type: ignore[misc]
    _let_gloo_write_into_buffers()


def attend_to_blocks(
    q_QAF: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor | None = None,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Attention of packed queries, as `flash_attn.flash_attn_varlen_func` computes it.

    Args:
        k, v: the cache, `[blocks, tokens of a block, heads, F]`.
        cu_seqlens_q, cu_seqlens_k: where the queries and the keys of each request begin, and the
            end of the last one. A request may have fewer queries than keys, because earlier steps
            wrote its first keys into the cache. A padding request has no queries.
        block_table: the blocks of each request, `[requests, blocks of the longest]`.

    Returns:
        `[Q, A, F]`.

    Raises:
        NotEmulated: the call has a window or an attention sink, or lacks a causal mask or a block
            table.
    """
    _refuse(causal, window_size, block_table, return_attn_probs)
    assert block_table is not None
    out_QAF = torch.zeros(*q_QAF.shape[:-1], v.shape[-1], dtype=q_QAF.dtype)
    begins_q, begins_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(begins_q) - 1):
        begin, end, length = begins_q[i], begins_q[i + 1], begins_k[i + 1] - begins_k[i]
        if end > begin and length > 0:
            k_ZAF, v_ZAF = (_gathered(cache, block_table[i], length) for cache in (k, v))
            out_QAF[begin:end] = _attention(q_QAF[begin:end], k_ZAF, v_ZAF, softmax_scale)
    return out_QAF


def decode_from_blocks(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """Attention of the last tokens of each request, as `flash_attn_with_kvcache` computes it.

    Args:
        q: `[requests, tokens of a request, A, F]`.
        cache_seqlens: how many keys each request has, the keys of `q` included; 0 for padding.

    Returns:
        A tensor of the shape of `q`.

    Raises:
        NotEmulated: as `attend_to_blocks`.
    """
    _refuse(causal, window_size, block_table, return_softmax_lse)
    assert block_table is not None
    out = torch.zeros_like(q)
    for i, length in enumerate(cache_seqlens.tolist()):
        if length > 0:
            k_ZAF, v_ZAF = (
                _gathered(cache, block_table[i], length) for cache in (k_cache, v_cache)
            )
            out[i] = _attention(q[i], k_ZAF, v_ZAF, softmax_scale)
    return out


def _refuse(causal: bool, window: Any, block_table: Any, return_lse: bool) -> None:
    if not causal or tuple(window) != (-1, -1) or block_table is None or return_lse:
        raise NotEmulated(
            "attention of the inference engine with a window or a sink, or without a causal mask "
            "or a block table, is not emulated on the CPU"
        )


def _gathered(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` keys or values of a request, `[length, heads, F]`, from its blocks."""
    size = cache.shape[1]
    mine = cache[blocks[: -(-length // size)].long()]
    return mine.reshape(-1, *cache.shape[2:])[:length]


def _attention(
    q_QAF: torch.Tensor, k_ZAF: torch.Tensor, v_ZAF: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Causal softmax(QK)V `[Q, A, F]` over Z tokens; the last Q tokens are the queries."""
    scale = scale or q_QAF.shape[-1] ** -0.5
    group = q_QAF.shape[1] // k_ZAF.shape[1]
    k_ZAF, v_ZAF = (part.repeat_interleave(group, dim=1) for part in (k_ZAF, v_ZAF))
    scores_AQZ = torch.einsum("qaf,zaf->aqz", q_QAF, k_ZAF) * scale
    num_q, num_k = scores_AQZ.shape[1:]
    seen_QZ = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
    probs_AQZ = scores_AQZ.masked_fill(~seen_QZ, float("-inf")).float().softmax(dim=-1)
    return torch.einsum("aqz,zaf->qaf", probs_AQZ.to(q_QAF.dtype), v_ZAF)


class _AnyGenerator(type(_Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


class _CpuGenerator(_Generator, metaclass=_AnyGenerator):
    """torch.Generator on the CPU, whatever device is asked for.

    The function mode of `device` sees calls of functions only, and torch.Generator is a class.
    """

    def __new__(cls, device: object = None) -> Any:
        return _Generator("cpu")


def _let_gloo_write_into_buffers() -> None:
    """Allocate the buffers of collectives outside of inference mode.

    torch refuses to write into a tensor of inference mode from outside of that mode. gloo writes
    after the call has returned, and so from outside. NCCL writes on the device, where torch checks
    nothing.
    """
    from megatron.core.utils import GlobalMemoryBuffer

    get_tensor = GlobalMemoryBuffer.get_tensor

    def get_normal_tensor(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            tensor: torch.Tensor = get_tensor(self, *args, **options)
        return tensor

    GlobalMemoryBuffer.get_tensor = get_normal_tensor
