"""The replayed gate on a GPU: one Triton kernel in the forward pass, and one in the backward pass.

If there are live or counted rows, a third kernel runs first in the forward pass. That kernel
chooses the experts of the live rows, and compares the counted rows with the live choice.

`TRITON_INTERPRET=1`, set before Triton is imported, runs the kernels on the CPU.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

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
    constants = launch_constants(logits_TE.shape[1], ids_TK.shape[1], options)
    # without live rows the given tensor itself is used, whatever its strides are
    used_TK, differs_T = given_TK, None if counted_T is None else torch.empty_like(counted_T)
    if live_T is not None or counted_T is not None:
        chosen_TK = None if live_T is None else torch.empty_like(ids_TK)
        given = (logits_TE, ids_TK, bias_E, _as_bytes(live_T), _as_bytes(counted_T))
        _launch(gate_choose, constants, given, (chosen_TK, _as_bytes(differs_T)))
        if chosen_TK is not None:
            used_TK = ids_TK = chosen_TK
    map_TE = torch.empty_like(logits_TE, dtype=torch.bool)
    probs_TE = _Gate.apply(logits_TE, (ids_TK, map_TE, constants))
    return GateOutput(probs_TE, map_TE, used_TK, differs_T)


class _Gate(torch.autograd.Function):
    """The probabilities as an autograd function, which keeps only logits and ids.

    The function writes the routing map too. The map is an argument, because each result of an
    autograd function takes about 1 us of Python, and the map has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, others: tuple[Any, ...]) -> Tensor:
        ids_TK, map_TE, ctx.constants = others
        probs_TE = torch.empty_like(logits_TE)
        made = (probs_TE, map_TE.view(torch.uint8))
        _launch(gate_forward, ctx.constants, (logits_TE, ids_TK), made)
        # `ids_TK` has the choice of the live rows: the backward pass does not choose again
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.set_materialize_grads(False)
        return probs_TE

    @staticmethod
    def backward(ctx: Any, dprobs_TE: Tensor | None) -> tuple[Tensor | None, None]:
        # Only under create_graph are gradients on here. Otherwise torch's refusal of a second
        # derivative has nothing to do, and would take 3 us.
        if torch.is_grad_enabled():
            return once_differentiable(_Gate.backward)(ctx, dprobs_TE)
        if dprobs_TE is None:
            return None, None
        logits_TE, ids_TK = ctx.saved_tensors
        dlogits_TE = torch.empty_like(logits_TE)
        given = (logits_TE, ids_TK, dprobs_TE.contiguous())
        _launch(gate_backward, ctx.constants, given, (dlogits_TE,))
        return dlogits_TE, None


def _launch(
    kernel: Any,
    constants: LaunchConstants,
    given: tuple[Tensor | None, ...],
    made: tuple[Tensor | None, ...],
) -> None:
    """Launch a kernel with contiguous tensors: `given` ones, and new ones that the kernel fills.

    The first launch of a kind compiles a kernel, and later launches call the compiled kernel
    directly. Otherwise Triton would look at each argument at every launch, which takes about half
    of the host's time for a gate. A kernel is compiled for the constants, the device, and the dtype
    and alignment of each tensor (whether it begins at a multiple of 16 bytes, as all new tensors
    do). Example: the ids of a layer are a part of all layers' ids. Those of layer 1 begin at byte
    0, those of layer 2 at byte T x K = 999 x 2 = 1998, which is no multiple of 16, so layer 2 has a
    kernel of its own.
    """
    logits_TE: Any = given[0]
    num_tokens = logits_TE.shape[0]
    if not num_tokens:  # a grid of no programs cannot be launched
        return
    # Triton launches on the current device, not on that of the tensors
    if logits_TE.is_cuda and logits_TE.get_device() != torch.cuda.current_device():
        with torch.cuda.device(logits_TE.device):
            _launch(kernel, constants, given, made)
        return
    kind = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in given]
    key = (kernel.__name__, logits_TE.device, constants, *kind)
    arguments = (*given, *made, num_tokens, *constants)
    # 1000 rows in programs of 8 are -(-1000 // 8) = 125 programs; triton.cdiv would take 5 us
    grid = (-(-num_tokens // constants.BLOCK_T), 1, 1)
    if (compiled := _compiled.get(key)) is not None:
        compiled[grid](*arguments)
        return
    compiled = kernel[grid](*arguments, num_warps=1, **COMPILE_OPTIONS)
    if compiled is not None and _LAUNCHES_COMPILED:  # Triton's interpreter compiles nothing
        _compiled[key] = compiled


class LaunchConstants(NamedTuple):
    """The scale, and the constants that all kernels are compiled for; see triton_kernels.py."""

    scale: float
    E: int
    K: int
    BLOCK_T: int
    W: int
    BITS: int
    BLOCK_K: int
    FUNCTION: str


@lru_cache
def launch_constants(num_experts: int, topk: int, options: GateOptions) -> LaunchConstants:
    """The arguments after the number of tokens, with which a router's kernels are launched.

    Example: 384 experts need 16 words (12, padded to a power of two). A program has
    1024 / (32 x 16) = 2 rows, and 1000 rows need a grid of 500 programs.
    """
    bits = min(32, triton.next_power_of_2(num_experts))
    words = triton.next_power_of_2(triton.cdiv(num_experts, bits))
    rows = max(1, LOGITS // (bits * words))
    block_k = triton.next_power_of_2(topk)
    return LaunchConstants(
        options.scale, num_experts, topk, rows, words, bits, block_k, options.function
    )


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask's memory as uint8, because Triton's own bool is one bit wide; None for None."""
    return None if mask is None else mask.view(torch.uint8)
