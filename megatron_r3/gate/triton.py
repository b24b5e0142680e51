"""The replayed gate on a GPU: launches one Triton kernel forward, and one backward.

`TRITON_INTERPRET=1`, set before Triton is imported, runs both on the CPU.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_r3.gate.options import GateOptions, GateOutput, check_arguments
from megatron_r3.gate.triton_kernels import gate_backward, gate_forward

TILE = 1024  # logits of one program: 32 for each lane of its warp
# Triton 3.10 will no longer fuse multiply-adds unless it is asked to
COMPILED = {"num_warps": 1, "enable_fp_fusion": True}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Gate(torch.autograd.Function):
    """Forward and backward launches; keeps the logits and the ids."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        ids_TK: Tensor,
        expert_bias_E: Tensor | None,
        live_T: Tensor | None,
        counted_T: Tensor | None,
        options: GateOptions,
    ) -> tuple[Tensor | None, ...]:
        (num_tokens, num_experts), topk = logits_TE.shape, ids_TK.shape[1]
        probs = logits_TE.new_empty(num_tokens, topk if options.dense else num_experts)
        map_TE = None if options.dense else torch.empty_like(probs, dtype=torch.bool)
        # given ids that no live row changes are handed on by the caller
        used_TK = None if live_T is None else ids_TK.new_empty(ids_TK.shape)
        differs_T = None if counted_T is None else torch.empty_like(counted_T)
        if num_tokens:
            grid, sizes = _launch(num_tokens, num_experts, topk, options)
            with _current(logits_TE.device):
                gate_forward[grid](
                    logits_TE,
                    ids_TK,
                    expert_bias_E,
                    _as_bytes(live_T),
                    _as_bytes(counted_T),
                    probs,
                    _as_bytes(map_TE),
                    used_TK,
                    _as_bytes(differs_T),
                    num_tokens,
                    options.scale,
                    *logits_TE.stride(),
                    *ids_TK.stride(),
                    **sizes,
                    BLOCK_K=triton.next_power_of_2(topk),
                    **COMPILED,
                )
        ctx.save_for_backward(logits_TE, ids_TK if used_TK is None else used_TK)
        ctx.options = options
        ctx.set_materialize_grads(False)
        others = (map_TE, used_TK, differs_T)
        ctx.mark_non_differentiable(*(other for other in others if other is not None))
        return probs, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dprobs is None:
            return (None,) * 6
        logits_TE, ids_TK = ctx.saved_tensors
        (num_tokens, num_experts), topk = logits_TE.shape, ids_TK.shape[1]
        dlogits_TE = logits_TE.new_empty(logits_TE.shape)
        if num_tokens:
            grid, sizes = _launch(num_tokens, num_experts, topk, ctx.options)
            with _current(logits_TE.device):
                gate_backward[grid](
                    logits_TE,
                    ids_TK,
                    dprobs,
                    dlogits_TE,
                    num_tokens,
                    ctx.options.scale,
                    *logits_TE.stride(),
                    *ids_TK.stride(),
                    *dprobs.stride(),
                    **sizes,
                    **COMPILED,
                )
        return dlogits_TE, None, None, None, None, None


def _launch(
    num_tokens: int, num_experts: int, topk: int, options: GateOptions
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the constants that both kernels are compiled for."""
    words = triton.next_power_of_2(triton.cdiv(num_experts, 32))
    block = TILE // (32 * words)
    sizes = {"E": num_experts, "K": topk, "BLOCK_T": block, "W": words}
    sizes |= {"FUNCTION": options.function, "DENSE": options.dense}
    return (triton.cdiv(num_tokens, block),), sizes


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """Triton's own bool is one bit wide."""
    return None if mask is None else mask.view(torch.uint8)


def replayed_gate_triton(
    logits_TE: Tensor,
    ids_TK: Tensor,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    scaling_factor: float | None = None,
    expert_bias_E: Tensor | None = None,
    live_T: Tensor | None = None,
    counted_T: Tensor | None = None,
    dense_output: bool = False,
    group_topk: int | None = None,
) -> GateOutput:
    """`megatron_r3.gate.replayed_gate` on a CUDA device, or under Triton's interpreter.

    Raises:
        ValueError: as there; also for logits of another dtype than bfloat16, float16, float32.
    """
    options = check_arguments(
        logits_TE,
        ids_TK,
        score_function,
        use_pre_softmax,
        scaling_factor,
        expert_bias_E,
        live_T,
        counted_T,
        dense_output,
        group_topk,
    )
    if logits_TE.dtype not in DTYPES:
        raise ValueError(f"logits_TE: bfloat16, float16 or float32, not {logits_TE.dtype}")
    small = (expert_bias_E, live_T, counted_T)
    flat = (None if each is None else each.detach().contiguous() for each in small)
    probs, map_TE, used_TK, differs_T = _Gate.apply(logits_TE, ids_TK, *flat, options)
    return GateOutput(probs, map_TE, ids_TK if used_TK is None else used_TK, differs_T)
