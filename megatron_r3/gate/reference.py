"""The replayed gate in plain torch: what the kernel must equal, and what runs where it cannot.

What it follows is `topk_routing_with_score_function` of Megatron-LM
(megatron/core/transformer/moe/moe_utils.py), with the top-k replaced by given experts.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_r3.gate.options import GateOutput, check_arguments


def replayed_gate_reference(
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
    """`megatron_r3.gate.replayed_gate`, differentiable by autograd, also in float64.

    Inside it is float64 for float64 logits, else float32. Ids that are no expert are torch's error.
    Below logits of -103 in float32 the gradient of sqrtsoftplus is NaN, as in Megatron; the
    kernel's is not.
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
    inner = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    scores_TE = _scores(logits_TE.to(inner), options.function)
    selected_by_TE = scores_TE.detach()
    if expert_bias_E is not None:
        selected_by_TE = selected_by_TE + expert_bias_E.detach().to(inner)

    used_TK = ids_TK
    if live_T is not None:
        best_TE = selected_by_TE.sort(dim=1, descending=True, stable=True).indices
        best_TK = best_TE[:, : ids_TK.shape[1]].to(ids_TK.dtype)
        used_TK = torch.where(live_T[:, None], best_TK, ids_TK)
    indices_TK = used_TK.long()
    probs_TK = _normalised(scores_TE.gather(1, indices_TK), options.function)
    probs_TK = (probs_TK * options.scale).to(logits_TE.dtype)
    map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, indices_TK, True)

    differs_T = None
    if counted_T is not None:
        best_left_T = selected_by_TE.masked_fill(map_TE, -torch.inf).amax(dim=1)
        worst_taken_T = selected_by_TE.masked_fill(~map_TE, torch.inf).amin(dim=1)
        differs_T = counted_T & (best_left_T > worst_taken_T)
    if dense_output:
        return GateOutput(probs_TK, None, used_TK, differs_T)
    probs_TE = torch.zeros_like(logits_TE).scatter(1, indices_TK, probs_TK)
    return GateOutput(probs_TE, map_TE, used_TK, differs_T)


def _scores(logits_TE: Tensor, function: str) -> Tensor:
    """What top-k selects from, before any bias."""
    if function == "softmax":
        return logits_TE
    if function == "pre_softmax":
        return logits_TE.softmax(dim=1)
    if function == "sigmoid":
        return logits_TE.sigmoid()
    return torch.nn.functional.softplus(logits_TE).sqrt()


def _normalised(scores_TK: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return scores_TK.softmax(dim=1)
    if function == "pre_softmax" or scores_TK.shape[1] == 1:
        return scores_TK
    return scores_TK / (scores_TK.sum(dim=1, keepdim=True) + 1e-20)


# Replayed gate weights: given experts, live scores.
#
# Shape suffixes: T tokens, E experts, K top-k.


def replayed_topk(scores_TE: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """What top-k would return, had it chosen the given experts.

    The score function that follows normalises over these K scores alone: equation 5 of
    arXiv 2510.11370, g_i = I_i exp(s_i) / sum_j I_j exp(s_j). They are gathered from the dense live
    scores, so every replayed expert gets weight and gradient, also one that live top-k would drop.

    With gradients the columns come in descending score, the order of a live `torch.topk`; sums over
    K then round as they do live, and replaying a live choice is bitwise the live pass. Without
    gradients (where Megatron's top-k is unsorted) the recorded order is kept, for the same reason.

    Args:
        scores_TE: what live top-k would select from; any float dtype.
        ids_TK: any integer dtype, distinct in each row.

    Returns:
        Scores `[T, K]` in the dtype of `scores_TE`, and their ids `[T, K]`, int64.
    """
    indices_TK = ids_TK.long()
    if torch.is_grad_enabled():
        with torch.no_grad():
            order_TK = scores_TE.gather(1, indices_TK).argsort(dim=1, descending=True, stable=True)
            indices_TK = indices_TK.gather(1, order_TK)
    return scores_TE.gather(1, indices_TK), indices_TK
