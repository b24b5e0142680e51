"""Advantages of rollouts, from their rewards: the functions for --rollouts-advantages.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def group_normalised(reward_M: np.ndarray, group_M: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """(reward - mean of its group) / (standard deviation of its group + eps), float32 `[M]`.

    GRPO, arXiv 2402.03300, section 4.1.2. A group with equal rewards gets zeros.
    """
    centred_M, index_M, count = _centred(reward_M, group_M)
    std = np.sqrt(np.bincount(index_M, centred_M**2) / count)
    return (centred_M / (std[index_M] + eps)).astype(np.float32)


def group_centred(reward_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """Reward - mean of its group, float32 `[M]`.

    Dr.GRPO, arXiv 2503.20783, section 3.2: without the standard deviation, hard and easy prompts
    weigh as much as others.
    """
    return _centred(reward_M, group_M)[0].astype(np.float32)


def group_spread(reward_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """For each rollout the largest reward of its group minus the smallest, `[M]`.

    A group with a spread of 0 teaches nothing: its advantages by the functions above are 0.
    """
    _, index_M = np.unique(group_M, return_inverse=True)
    most, least = np.full(len(index_M), -np.inf), np.full(len(index_M), np.inf)
    np.maximum.at(most, index_M, reward_M)
    np.minimum.at(least, index_M, reward_M)
    return most[index_M] - least[index_M]


ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "group-normalised": group_normalised,
    "group-centred": group_centred,
}


def _centred(
    reward_M: np.ndarray, group_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards in relation to their groups.

    Returns:
        For each rollout its reward minus the mean of its group, float64; for each rollout the index
        of its group, from 0 on; for each group the number of its rollouts.
    """
    _, index_M = np.unique(group_M, return_inverse=True)
    count = np.bincount(index_M)
    reward_M = reward_M.astype(np.float64)
    return reward_M - (np.bincount(index_M, reward_M) / count)[index_M], index_M, count
