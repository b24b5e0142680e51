"""The gate of a replayed MoE layer in one kernel: logits and experts in, weights and map out.

Importing this needs no Triton; running the kernel does.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_r3.gate.options import GateOutput
from megatron_r3.gate.reference import replayed_gate_reference

_HAS_TRITON = find_spec("triton") is not None


def has_kernel(device: torch.device) -> bool:
    """Whether `replayed_gate` runs as one kernel on tensors of this device."""
    return _HAS_TRITON and device.type == "cuda"


def replayed_gate(
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
    """The weights that a router gives to experts it did not choose, and its routing map.

    A Triton kernel on a CUDA device, else `replayed_gate_reference`. It equals
    `topk_routing_with_score_function` of Megatron-LM
    (megatron/core/transformer/moe/moe_utils.py, 0.18 and later) with its top-k replaced by
    `ids_TK`: float32 inside, probabilities and gradient in the logits' dtype, gradient to the
    logits alone (never to a bias). Up to 0.17 Megatron rounds the scores of bfloat16 and float16
    logits to that dtype before it divides them; with float32 logits it is the same.

    Every given expert has its weight and its gradient, also one that top-k would drop. No host
    waits, no shapes that depend on data, no atomics: it can be captured in a CUDA graph, and the
    same input gives the same bits.

    Args:
        logits_TE: bfloat16, float16 or float32; any strides. At most 1024 experts.
        ids_TK: uint8, int16, int32 or int64; any strides; distinct in each row. At most 64. An id
            that is no expert touches no memory outside; what its row gets is undefined, also
            where an id is repeated.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus". The latter two are divided by their
            sum over the row's experts where K > 1.
        use_pre_softmax: softmax over all experts, not renormalised over those of the row.
        scaling_factor: multiplies the probabilities; None or 0: no factor.
        expert_bias_E: added to the scores for choosing (live and counted rows), not to weights;
            any float dtype; sigmoid and sqrtsoftplus only.
        live_T: bool, rows whose experts are chosen here: the top-k of the selection scores (the
            logits for softmax after top-k, else the scores, plus the bias), the lowest index first
            among equals, in descending order. What `ids_TK` has there is not read.
        counted_T: bool, rows to compare with what live top-k would choose: `differs_T` says where
            an expert that is not used has a greater selection score than one that is. Equal scores
            are the same set; a live row never differs.
        dense_output: probabilities `[T, K]` in the order of the ids, and no map.
        group_topk: the router's. Group-limited top-k is not done here: the caller settles its live
            rows, and counts, before; `live_T` and `counted_T` are then refused.

    Returns:
        Probabilities, map, the ids that were used, and where they differ from live.

    Raises:
        ValueError: names the argument and says what it should be.
    """
    gate = replayed_gate_reference
    if has_kernel(logits_TE.device):
        from megatron_r3.gate.triton import replayed_gate_triton

        gate = replayed_gate_triton
    return gate(
        logits_TE,
        ids_TK,
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
        scaling_factor=scaling_factor,
        expert_bias_E=expert_bias_E,
        live_T=live_T,
        counted_T=counted_T,
        dense_output=dense_output,
        group_topk=group_topk,
    )
