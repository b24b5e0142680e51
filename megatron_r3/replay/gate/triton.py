"""The replayed gate on a GPU: launches one Triton kernel forward, and one backward.

One more chooses the experts of live rows and compares counted ones, where there are any.

`TRITON_INTERPRET=1`, set before Triton is imported, runs them on the CPU.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_r3.replay.gate.gate_options import GateInputs, GateOptions, GateOutput, check_inputs
from megatron_r3.replay.gate.triton_kernels import gate_backward, gate_choose, gate_forward

# Triton 3.10 will no longer fuse multiply-adds unless it is asked to
COMPILE_OPTIONS = {"enable_fp_fusion": True}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOGITS = 1024  # of one program, which is one warp: 32 for each lane


def replayed_gate_triton(inputs: GateInputs, options: GateOptions) -> GateOutput:
    """`megatron_r3.replay.gate.replayed_gate` on a CUDA device, or under Triton's interpreter.

    Raises:
        ValueError: as `replayed_gate`, and for logits of a dtype other than bfloat16, float16 and
            float32.
    """
    check_inputs(inputs, options)
    logits_TE, ids_TK, *small = inputs
    if logits_TE.dtype not in DTYPES:
        raise ValueError(f"logits_TE: bfloat16, float16 or float32, not {logits_TE.dtype}")
    bias_E, live_T, counted_T = (None if t is None else t.detach().contiguous() for t in small)
    probs_TE, map_TE, used_TK, differs_T = _Gate.apply(
        logits_TE, ids_TK, bias_E, live_T, counted_T, options
    )
    # an autograd function must not return its own input, so given ids are handed on here
    return GateOutput(probs_TE, map_TE, ids_TK if used_TK is None else used_TK, differs_T)


class _Gate(torch.autograd.Function):
    """Launches forward and backward; keeps the logits and the ids, and nothing else."""

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
        probs_TE = logits_TE.new_empty(logits_TE.shape)
        map_TE = torch.empty_like(probs_TE, dtype=torch.bool)
        used_TK = None if live_T is None else ids_TK.new_empty(ids_TK.shape)
        differs_T = None if counted_T is None else torch.empty_like(counted_T)
        if live_T is not None or counted_T is not None:
            masks = (_as_bytes(live_T), _as_bytes(counted_T))
            made = (used_TK, _as_bytes(differs_T))
            given = (logits_TE, ids_TK)
            _launch(gate_choose, (*given, expert_bias_E, *masks, *made), (), given, options)
        strided = (logits_TE, ids_TK if used_TK is None else used_TK)
        made = (probs_TE, _as_bytes(map_TE))
        _launch(gate_forward, (*strided, *made), (options.scale,), strided, options)
        # backward replays what live rows chose; it does not choose again
        ctx.save_for_backward(*strided)
        ctx.options = options
        ctx.set_materialize_grads(False)
        others = (map_TE, used_TK, differs_T)
        ctx.mark_non_differentiable(*(other for other in others if other is not None))
        return probs_TE, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs_TE: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dprobs_TE is None:
            return (None,) * 6
        logits_TE, ids_TK = ctx.saved_tensors
        dlogits_TE = logits_TE.new_empty(logits_TE.shape)
        strided = (logits_TE, ids_TK, dprobs_TE)
        _launch(gate_backward, (*strided, dlogits_TE), (ctx.options.scale,), strided, ctx.options)
        return dlogits_TE, None, None, None, None, None


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    strided: tuple[Tensor, ...],
    options: GateOptions,
) -> None:
    """Launch a kernel with tensors, numbers, and the strides of those tensors that may have any."""
    logits_TE, ids_TK = strided[:2]
    if not len(logits_TE):  # a grid of no programs cannot be launched
        return
    sizes = launch_constants(logits_TE.shape[1], ids_TK.shape[1], options)
    grid = (triton.cdiv(len(logits_TE), sizes["BLOCK_T"]),)
    strides = [stride for tensor in strided for stride in tensor.stride()]
    # Triton launches on the current device, not on that of the tensors
    on_gpu = logits_TE.device.type == "cuda"
    with torch.cuda.device(logits_TE.device) if on_gpu else nullcontext():
        kernel[grid](
            *tensors,
            len(logits_TE),
            *numbers,
            *strides,
            **sizes,
            num_warps=1,
            **COMPILE_OPTIONS,
        )


@lru_cache
def launch_constants(num_experts: int, topk: int, options: GateOptions) -> dict[str, Any]:
    """The constants that all kernels are compiled for; see triton_kernels.py.

    Example: 384 experts need W = 16 words (12, padded to a power of two). A program has
    1024 / (32 x 16) = 2 rows, and 1000 rows need a grid of 500 programs.
    """
    bits = min(32, triton.next_power_of_2(num_experts))
    words = triton.next_power_of_2(triton.cdiv(num_experts, bits))
    rows = max(1, LOGITS // (bits * words))
    constants = {"E": num_experts, "K": topk, "BLOCK_T": rows, "W": words, "BITS": bits}
    constants["BLOCK_K"] = triton.next_power_of_2(topk)
    return {**constants, "FUNCTION": options.function}


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """The same memory as bytes: a bool of Triton's own is one bit wide."""
    return None if mask is None else mask.view(torch.uint8)
