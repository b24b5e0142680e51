"""The gate of a replayed MoE layer as a kernel: logits and experts in, weights and map out.

A live router chooses experts by top-k and then weighs them. Under replay the experts are given, so
only the weighing is left: `replayed_gate`. Importing this package needs no Triton; running the
kernel does.

Shape suffixes (docs/glossary.md): E, T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from megatron_r3.replay.gate.gate_options import GateInputs, GateOptions, GateOutput
from megatron_r3.replay.gate.reference import replayed_gate_reference

__all__ = [
    "Gate",
    "GateInputs",
    "GateOptions",
    "GateOutput",
    "gate_for",
    "has_kernel",
    "replayed_gate",
    "replayed_gate_reference",
    "substitute_gate",
]

Gate = Callable[[GateInputs, GateOptions], GateOutput]

_HAS_TRITON = find_spec("triton") is not None
# What `substitute_gate` has set. This is a plain variable and not a ContextVar, because on a GPU
# autograd recomputes layers in threads of its own, which do not inherit the caller's context.
_substitute: Gate | None = None


def has_kernel(device: torch.device) -> bool:
    """Whether `replayed_gate` runs a kernel, or a substitute, for tensors of this device."""
    return _substitute is not None or (_HAS_TRITON and device.type == "cuda")


def gate_for(device: torch.device) -> Gate:
    """The function that `replayed_gate` calls for tensors of this device.

    It is the Triton kernel on a CUDA device if Triton is installed, else `replayed_gate_reference`.
    Inside a block of `substitute_gate` it is the substitute.
    """
    if _substitute is not None:
        return _substitute
    if not has_kernel(device):
        return replayed_gate_reference
    from megatron_r3.replay.gate.triton import replayed_gate_triton

    return replayed_gate_triton


def replayed_gate(inputs: GateInputs, options: GateOptions) -> GateOutput:
    """The weights that a router gives to the given experts, and the routing map.

    `gate_for` says whether a Triton kernel or plain torch computes them. The result equals that of
    `topk_routing_with_score_function` of Megatron-LM (0.18 and later;
    megatron/core/transformer/moe/moe_utils.py) if its top-k returned the given experts. The gate
    computes in float32, returns probabilities and gradients in the dtype of the logits, and gives
    the logits alone a gradient, never a bias. Up to 0.17 Megatron rounds the scores of bfloat16 and
    float16 logits to that dtype before it divides them; with float32 logits the results are the
    same.

    Every given expert has a weight and a gradient, also one that top-k would drop. The host never
    waits, no shape depends on data, and there are no atomics: the kernel can be captured in a CUDA
    graph, and the same input gives the same bits.

    Returns:
        Probabilities, map, the ids that were used, and which rows differ from the live choice.

    Raises:
        ValueError: the message names the wrong argument and says what it should be.
    """
    return gate_for(inputs.logits_TE.device)(inputs, options)


@contextmanager
def substitute_gate(gate: Gate) -> Iterator[None]:
    """Have `replayed_gate` call `gate`, on every device, until the block ends.

    This is the hook for tests and benchmarks: they count calls, or run the reference where a GPU
    would run the kernel. Inside the block `has_kernel` is true everywhere, so that routers under
    `moe_router_fusion` take the fused path on a CPU as well. The substitution holds for the whole
    process, so do not open two blocks in two threads.
    """
    global _substitute
    before, _substitute = _substitute, gate
    try:
        yield
    finally:
        _substitute = before
