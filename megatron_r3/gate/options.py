"""What a replayed gate is given and gives back, and what it refuses.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
ID_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
MAX_EXPERTS = 1024
MAX_TOPK = 64


class GateOutput(NamedTuple):
    """A replayed gate.

    Attributes:
        probs: `[T, E]`, zero outside the chosen experts; with `dense_output` `[T, K]` in the order
            of `ids_TK`. In the dtype of the logits.
        routing_map: bool `[T, E]`; None with `dense_output`.
        ids_TK: the experts used, in the dtype of the given ids: those given (the same tensor, where
            no row is live), or chosen here. Give them to a recompute.
        differs_T: bool, counted tokens that live top-k would send to another set of experts. None
            where nothing was counted.
    """

    probs: Tensor
    routing_map: Tensor | None
    ids_TK: Tensor
    differs_T: Tensor | None


@dataclass(frozen=True)
class GateOptions:
    """How scores become probabilities.

    Attributes:
        function: "softmax" of the chosen logits, "pre_softmax" of all logits, "sigmoid" or
            "sqrtsoftplus".
        scale: what the probabilities are multiplied by; 1 changes nothing.
        dense: probabilities `[T, K]`.
    """

    function: str
    scale: float
    dense: bool


def check_arguments(
    logits_TE: Tensor,
    ids_TK: Tensor,
    score_function: str,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    expert_bias_E: Tensor | None,
    live_T: Tensor | None,
    counted_T: Tensor | None,
    dense_output: bool,
    group_topk: int | None,
) -> GateOptions:
    """The options, after a look at shapes, dtypes and devices; never at values.

    Raises:
        ValueError: says which argument, and what it should be.
    """
    _check_function(score_function, use_pre_softmax, expert_bias_E)
    if scaling_factor is not None and not isinstance(scaling_factor, (int, float)):
        raise ValueError(f"scaling_factor: a number or None, not {type(scaling_factor).__name__}")
    if logits_TE.ndim != 2 or not logits_TE.is_floating_point():
        raise ValueError(f"logits_TE: floating-point [T, E], not {_said(logits_TE)}")
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"logits_TE: 1 to {MAX_EXPERTS} experts, not {num_experts}")
    _check_ids(ids_TK, num_tokens, num_experts)
    for name, mask_T in (("live_T", live_T), ("counted_T", counted_T)):
        if mask_T is None:
            continue
        if mask_T.dtype != torch.bool or mask_T.shape != (num_tokens,):
            raise ValueError(f"{name}: bool [{num_tokens}], not {_said(mask_T)}")
        if group_topk:
            raise ValueError(
                f"{name}: not with group_topk={group_topk}: group-limited top-k is chosen and "
                "compared by the caller"
            )
    bias_E = expert_bias_E
    if bias_E is not None and (bias_E.shape != (num_experts,) or not bias_E.is_floating_point()):
        raise ValueError(f"expert_bias_E: floating-point [{num_experts}], not {_said(bias_E)}")
    _check_devices(
        logits_TE, ids_TK=ids_TK, expert_bias_E=bias_E, live_T=live_T, counted_T=counted_T
    )
    function = "pre_softmax" if use_pre_softmax and score_function == "softmax" else score_function
    # zero is none, as in Megatron: `if scaling_factor:`
    return GateOptions(function, float(scaling_factor or 1.0), dense_output)


def _check_function(score_function: str, pre_softmax: bool, expert_bias_E: Tensor | None) -> None:
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(
            f"score_function: one of {', '.join(SCORE_FUNCTIONS)}, not {score_function!r}"
        )
    if score_function == "softmax" and expert_bias_E is not None:
        raise ValueError("expert_bias_E: for sigmoid and sqrtsoftplus; softmax takes none")


def _check_ids(ids_TK: Tensor, num_tokens: int, num_experts: int) -> None:
    if ids_TK.ndim != 2 or ids_TK.shape[0] != num_tokens or ids_TK.dtype not in ID_DTYPES:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in ID_DTYPES)
        raise ValueError(f"ids_TK: [{num_tokens}, K] of {kinds}, not {_said(ids_TK)}")
    most = min(MAX_TOPK, num_experts)
    if not 1 <= ids_TK.shape[1] <= most:
        raise ValueError(f"ids_TK: 1 to {most} of {num_experts} experts, not {ids_TK.shape[1]}")
    if num_experts - 1 > torch.iinfo(ids_TK.dtype).max:
        raise ValueError(f"ids_TK: {ids_TK.dtype} cannot name all of {num_experts} experts")


def _check_devices(logits_TE: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != logits_TE.device:
            raise ValueError(f"{name}: on {logits_TE.device} like logits_TE, not on {other.device}")


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
