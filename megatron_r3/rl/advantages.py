"""Advantages of GRPO. M: rollouts."""

from __future__ import annotations

import numpy as np

__all__ = ["group_normalised"]


def group_normalised(reward_M: np.ndarray, group_M: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """(reward - mean of its group) / (standard deviation of its group + eps), float32 `[M]`.

    GRPO, arXiv 2402.03300, section 4.1.2. A group with equal rewards gets zeros.
    """
    _, index_M = np.unique(group_M, return_inverse=True)
    count = np.bincount(index_M)
    reward_M = reward_M.astype(np.float64)
    centred_M = reward_M - (np.bincount(index_M, reward_M) / count)[index_M]
    std = np.sqrt(np.bincount(index_M, centred_M**2) / count)
    return (centred_M / (std[index_M] + eps)).astype(np.float32)
