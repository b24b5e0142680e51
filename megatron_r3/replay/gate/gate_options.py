"""What a replayed gate takes and returns, and what it refuses.

Shape suffixes (docs/glossary.md): T, E, K.
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


@dataclass(frozen=True)
class GateOptions:
    """How a router turns scores into probabilities; the names are those of Megatron's options.

    Attributes:
        score_function: "softmax", "sigmoid" or "sqrtsoftplus". With K > 1 the scores of the latter
            two are divided by their sum over the K experts of a row.
        use_pre_softmax: whether "softmax" is taken over all E experts, and not over the K experts
            of a row. It changes nothing for the other score functions.
        scaling_factor: multiplies the probabilities. None and 0 both mean that there is no factor.

    Raises:
        ValueError: another score function, or a factor that is no number.
    """

    score_function: str = "softmax"
    use_pre_softmax: bool = False
    scaling_factor: float | None = None

    def __post_init__(self) -> None:
        if self.score_function not in SCORE_FUNCTIONS:
            raise ValueError(
                f"score_function: one of {', '.join(SCORE_FUNCTIONS)}, not {self.score_function!r}"
            )
        factor = self.scaling_factor
        # a tensor would be read on the host, which then waits for the device
        if factor is not None and not isinstance(factor, (int, float)):
            raise ValueError(f"scaling_factor: a number or None, not {type(factor).__name__}")

    @property
    def function(self) -> str:
        """The score function, or "pre_softmax" for a softmax over all experts."""
        pre_softmax = self.use_pre_softmax and self.score_function == "softmax"
        return "pre_softmax" if pre_softmax else self.score_function

    @property
    def scale(self) -> float:
        """What the probabilities are multiplied by; 1.0 changes nothing."""
        # 0 means that there is no factor, because Megatron asks `if scaling_factor:`
        return float(self.scaling_factor or 1.0)


class GateInputs(NamedTuple):
    """The tensors of one layer and one microbatch, with any strides, on one device.

    Attributes:
        logits_TE: bfloat16, float16 or float32 (the reference takes float64 too); at most 1024
            experts.
        ids_TK: the recorded experts: uint8, int16, int32 or int64, at most 64 in a row. The result
            of a row is undefined if it has an id twice, or an id that is no expert; the kernel
            never touches memory outside of the tensors.
        expert_bias_E: added to the scores when experts are chosen (live and counted rows), never to
            the weights. Any float dtype; for sigmoid and sqrtsoftplus only. None means no bias.
        live_T: bool, True for rows in which the gate chooses the experts: the K with the highest
            selection scores, highest first, and among equals the lowest index first. The selection
            scores are the logits for softmax after top-k, else the scores plus the bias. The
            `ids_TK` of live rows change nothing. None means that no row is live.
        counted_T: bool, True for rows to compare with what live top-k would choose. None means that
            no row is compared.
    """

    logits_TE: Tensor
    ids_TK: Tensor
    expert_bias_E: Tensor | None = None
    live_T: Tensor | None = None
    counted_T: Tensor | None = None


class GateOutput(NamedTuple):
    """What a replayed gate returns.

    Attributes:
        probs_TE: zero outside of the chosen experts, in the dtype of the logits.
        routing_map_TE: bool, the chosen experts.
        ids_TK: the experts that were used, in the dtype of the given ids. It is the given tensor
            itself if `live_T` is None, else a copy with the choice of the live rows. A recompute
            must be given these, so that it repeats the choice.
        differs_T: bool, counted rows that live top-k would send to another set of experts: some
            expert that is not used has a greater selection score than a used expert. Experts with
            equal scores are interchangeable, and a live row never differs. None if `counted_T`
            is None.
    """

    probs_TE: Tensor
    routing_map_TE: Tensor
    ids_TK: Tensor
    differs_T: Tensor | None


def check_inputs(inputs: GateInputs, options: GateOptions) -> None:
    """Check shapes, dtypes and devices. Values are never read: that would make the host wait.

    Raises:
        ValueError: the message names the wrong argument and says what it should be.
    """
    logits_TE, bias_E = inputs.logits_TE, inputs.expert_bias_E
    if options.score_function == "softmax" and bias_E is not None:
        raise ValueError(
            "expert_bias_E: must be None for softmax; sigmoid and sqrtsoftplus take it"
        )
    if logits_TE.ndim != 2 or not logits_TE.is_floating_point():
        raise ValueError(f"logits_TE: floating-point [T, E], not {_describe(logits_TE)}")
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"logits_TE: 1 to {MAX_EXPERTS} experts, not {num_experts}")
    _check_ids(inputs.ids_TK, num_tokens, num_experts)
    for name, mask_T in (("live_T", inputs.live_T), ("counted_T", inputs.counted_T)):
        if mask_T is not None and (mask_T.dtype != torch.bool or mask_T.shape != (num_tokens,)):
            raise ValueError(f"{name}: bool [{num_tokens}], not {_describe(mask_T)}")
    if bias_E is not None and (bias_E.shape != (num_experts,) or not bias_E.is_floating_point()):
        raise ValueError(f"expert_bias_E: floating-point [{num_experts}], not {_describe(bias_E)}")
    for name, tensor in inputs._asdict().items():
        if tensor is not None and tensor.device != logits_TE.device:
            raise ValueError(
                f"{name}: must be on {logits_TE.device} like logits_TE, not on {tensor.device}"
            )


def _check_ids(ids_TK: Tensor, num_tokens: int, num_experts: int) -> None:
    if ids_TK.ndim != 2 or ids_TK.shape[0] != num_tokens or ids_TK.dtype not in ID_DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in ID_DTYPES)
        raise ValueError(f"ids_TK: [{num_tokens}, K] of {dtypes}, not {_describe(ids_TK)}")
    most = min(MAX_TOPK, num_experts)
    if not 1 <= ids_TK.shape[1] <= most:
        raise ValueError(
            f"ids_TK: 1 to {most} ids in each row (of {num_experts} experts), not {ids_TK.shape[1]}"
        )
    if num_experts - 1 > torch.iinfo(ids_TK.dtype).max:
        raise ValueError(
            f"ids_TK: {ids_TK.dtype} cannot name all of {num_experts} experts; give int16 or wider"
        )


def _describe(tensor: Tensor) -> str:
    """The dtype and the shape, for example "float32 [3, 6]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
