"""Replayed gate weights: given experts, live scores.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["replayed_topk"]


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
