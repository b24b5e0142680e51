"""The replayed gate on a GPU: one Triton kernel in the forward pass, and one in the backward pass.

If there are live or counted rows, a third kernel runs first in the forward pass. That kernel
chooses the experts of the live rows, and compares the counted rows with the live choice.

`TRITON_INTERPRET=1`, set before Triton is imported, runs the kernels on the CPU.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_r3.replay.gate.gate_options import GateInputs, GateOptions, GateOutput, check_inputs
from megatron_r3.replay.gate.triton_kernels import gate_backward, gate_choose, gate_forward

# No fused multiply-add: which products and sums a compiler fuses depends on the code around them,
# so one logit could get two scores that differ in the last bit.
COMPILE_OPTIONS = {"enable_fp_fusion": False}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOGITS = 1024  # the logits of one program, which is one warp of 32 lanes: 32 for each lane

# Whether `_launch` may call a compiled kernel by itself. Before Triton 3.3 that call takes no
# constants. On AMD a kernel is compiled for a tensor's size too, which `_launch` does not compare.
_LAUNCHES_COMPILED = torch.version.hip is None and tuple(
    map(int, triton.__version__.split(".")[:2])
) >= (3, 3)
_compiled: dict[tuple[Any, ...], Any] = {}  # the compiled kernel for each `key` of `_launch`


def replayed_gate_triton(inputs: GateInputs, options: GateOptions) -> GateOutput:
    """`megatron_r3.replay.gate.replayed_gate` on a CUDA device, or under Triton's interpreter.

    Raises:
        ValueError: as `replayed_gate`, and for logits of a dtype other than bfloat16, float16 and
            float32.
    """
    check_inputs(inputs, options)
    logits_TE, given_TK, *small = inputs
    if logits_TE.dtype not in DTYPES:
        raise ValueError(f"logits_TE: bfloat16, float16 or float32, not {logits_TE.dtype}")
    logits_TE, ids_TK = logits_TE.contiguous(), given_TK.contiguous()
    bias_E, live_T, counted_T = (None if t is None else t.detach().contiguous() for t in small)
    probs_TE, map_TE, used_TK, differs_T = _Gate.apply(
        logits_TE, ids_TK, bias_E, live_T, counted_T, options
    )
    # an autograd function must not return its own input, so given ids are handed on here
    return GateOutput(probs_TE, map_TE, given_TK if used_TK is None else used_TK, differs_T)


class _Gate(torch.autograd.Function):
    """The gate as an autograd function, which keeps only logits and ids for the backward pass."""

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
        probs_TE = torch.empty_like(logits_TE)
        map_TE = torch.empty_like(logits_TE, dtype=torch.bool)
        used_TK = None if live_T is None else torch.empty_like(ids_TK)
        differs_T = None if counted_T is None else torch.empty_like(counted_T)
        if live_T is not None or counted_T is not None:
            masks = (_as_bytes(live_T), _as_bytes(counted_T))
            made = (used_TK, _as_bytes(differs_T))
            _launch(gate_choose, options, logits_TE, ids_TK, expert_bias_E, *masks, *made)
        if used_TK is not None:
            ids_TK = used_TK
        _launch(gate_forward, options, logits_TE, ids_TK, probs_TE, _as_bytes(map_TE))
        # `ids_TK` has the choice of the live rows: the backward pass does not choose again
        ctx.save_for_backward(logits_TE, ids_TK)
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
        dlogits_TE = torch.empty_like(logits_TE)
        _launch(gate_backward, ctx.options, logits_TE, ids_TK, dprobs_TE.contiguous(), dlogits_TE)
        return dlogits_TE, None, None, None, None, None


def _launch(
    kernel: Any, options: GateOptions, logits_TE: Tensor, ids_TK: Tensor, *others: Tensor | None
) -> None:
    """Launch a kernel with contiguous tensors.

    The first launch of a kind compiles a kernel, and later launches call the compiled kernel
    directly. Otherwise Triton would look at each argument at every launch, which takes about half
    of the host's time for a gate. A kernel is compiled for the constants, the device, and the dtype
    and alignment of each tensor (whether it begins at a multiple of 16 bytes). Example: the ids of
    a layer are a part of all layers' ids. Those of layer 1 begin at byte 0, those of layer 2 at
    byte T x K = 999 x 2 = 1998, which is no multiple of 16, so layer 2 has a kernel of its own.
    """
    num_tokens, num_experts = logits_TE.shape
    if not num_tokens:  # a grid of no programs cannot be launched
        return
    constants = launch_constants(num_experts, ids_TK.shape[1], options)
    tensors = (logits_TE, ids_TK, *others)
    kind = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    key = (kernel.__name__, logits_TE.device, constants, *kind)
    arguments = (*tensors, num_tokens, options.scale, *constants)
    # 1000 rows in programs of 8 are -(-1000 // 8) = 125 programs; triton.cdiv would take 5 us
    grid = (-(-num_tokens // constants.BLOCK_T), 1, 1)
    # Triton launches on the current device, not on that of the tensors
    on_gpu = logits_TE.device.type == "cuda"
    with torch.cuda.device(logits_TE.device) if on_gpu else nullcontext():
        if (compiled := _compiled.get(key)) is not None:
            compiled[grid](*arguments)
            return
        compiled = kernel[grid](*arguments, num_warps=1, **COMPILE_OPTIONS)
        if compiled is not None and _LAUNCHES_COMPILED:  # Triton's interpreter compiles nothing
            _compiled[key] = compiled


class LaunchConstants(NamedTuple):
    """The constants that all kernels are compiled for; see triton_kernels.py."""

    E: int
    K: int
    BLOCK_T: int
    W: int
    BITS: int
    BLOCK_K: int
    FUNCTION: str


@lru_cache
def launch_constants(num_experts: int, topk: int, options: GateOptions) -> LaunchConstants:
    """What the kernels of a router are compiled for.

    Example: 384 experts need 16 words (12, padded to a power of two). A program has
    1024 / (32 x 16) = 2 rows, and 1000 rows need a grid of 500 programs.
    """
    bits = min(32, triton.next_power_of_2(num_experts))
    words = triton.next_power_of_2(triton.cdiv(num_experts, bits))
    rows = max(1, LOGITS // (bits * words))
    block_k = triton.next_power_of_2(topk)
    return LaunchConstants(num_experts, topk, rows, words, bits, block_k, options.function)


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask's memory as uint8, because Triton's own bool is one bit wide; None for None."""
    return None if mask is None else mask.view(torch.uint8)
