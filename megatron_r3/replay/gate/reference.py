"""The replayed gate in plain torch: what the kernel must equal, and what runs without a kernel.

`replayed_topk` stands in for the top-k inside of Megatron's own unfused function;
`replayed_gate_reference` stands in for that whole function, as the kernel does. Both follow
`topk_routing_with_score_function` of Megatron-LM (megatron/core/transformer/moe/moe_utils.py).

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_r3.replay.gate.gate_options import GateInputs, GateOptions, GateOutput, check_inputs


def replayed_topk(scores_TE: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """What top-k would return if it had chosen the given experts.

    A softmax after top-k then normalises over these K scores alone: equation 5 of
    arXiv 2510.11370, g_i = I_i exp(s_i) / sum_j I_j exp(s_j). The scores are gathered from the
    dense live scores, so every replayed expert gets a weight and a gradient, also one that live
    top-k would drop.

    Sums over K must round as in the live pass, so that a replay of a live choice gives the bits of
    that pass. With gradients enabled the columns are therefore in descending score, the order of a
    live `torch.topk`. Without gradients Megatron's top-k is unsorted (from 0.18 on), so the columns
    are in the recorded order.

    Args:
        scores_TE: what live top-k would select from; any float dtype.
        ids_TK: any integer dtype, distinct in each row.

    Returns:
        Scores `[T, K]` in the dtype of `scores_TE`, and their ids `[T, K]`, int64.
    """
    # One row, E = 4, K = 2: of the scores [.1, .9, .3, .7] the recorded ids [2, 1] have .3 and .9;
    # with gradients enabled the answer is ([.9, .3], [1, 2]).
    indices_TK = ids_TK.long()
    if torch.is_grad_enabled():
        given_TK = scores_TE.detach().gather(1, indices_TK)
        order_TK = given_TK.argsort(dim=1, descending=True, stable=True)
        indices_TK = indices_TK.gather(1, order_TK)
    return scores_TE.gather(1, indices_TK), indices_TK


def replayed_gate_reference(inputs: GateInputs, options: GateOptions) -> GateOutput:
    """The result of `megatron_r3.replay.gate.replayed_gate`, computed in plain torch.

    The computation is in float64 for float64 logits, else in float32. Out-of-range ids raise in
    torch.gather. For float32 logits of -104 and less the gradient of sqrtsoftplus is NaN, as in
    Megatron; the gradient of the kernel is finite there.

    Raises:
        ValueError: the message names the wrong argument and says what it should be.
    """
    check_inputs(inputs, options)
    logits_TE, ids_TK = inputs.logits_TE, inputs.ids_TK
    inner_dtype = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    scores_TE = _scores(logits_TE.to(inner_dtype), options.function)
    selection_TE = scores_TE.detach()  # the scores by which a live top-k would select
    if inputs.expert_bias_E is not None:
        selection_TE = selection_TE + inputs.expert_bias_E.detach().to(inner_dtype)

    used_TK = ids_TK
    if inputs.live_T is not None:
        # a stable sort and not topk: among equal scores the lowest index must come first
        best_TE = selection_TE.sort(dim=1, descending=True, stable=True).indices
        best_TK = best_TE[:, : ids_TK.shape[1]].to(ids_TK.dtype)
        used_TK = torch.where(inputs.live_T[:, None], best_TK, ids_TK)
    indices_TK = used_TK.long()
    probs_TK = _normalised(scores_TE.gather(1, indices_TK), options.function)
    probs_TK = (probs_TK * options.scale).to(logits_TE.dtype)
    probs_TE = torch.zeros_like(logits_TE).scatter(1, indices_TK, probs_TK)
    map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, indices_TK, True)

    differs_T = None
    if inputs.counted_T is not None:
        # The sets are equal exactly if no expert that was left out beats the worst taken one.
        # Selection scores [.1, .9, .3, .7], taken {1, 2}: .7 was left out and beats .3.
        best_left_T = selection_TE.masked_fill(map_TE, -torch.inf).amax(dim=1)
        worst_taken_T = selection_TE.masked_fill(~map_TE, torch.inf).amin(dim=1)
        differs_T = inputs.counted_T & (best_left_T > worst_taken_T)
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
    """The scores of the chosen experts as weights, before the scaling factor."""
    if function == "softmax":
        return scores_TK.softmax(dim=1)
    if function == "pre_softmax" or scores_TK.shape[1] == 1:
        return scores_TK
    return scores_TK / (scores_TK.sum(dim=1, keepdim=True) + 1e-20)  # Megatron's own epsilon
