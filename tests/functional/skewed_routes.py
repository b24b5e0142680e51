"""What the tests of guest experts share: routes that load one rank most, and a distance.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

import numpy as np
import torch

Gradients = list[dict[str, torch.Tensor]]


def skewed(
    shape_LTK: tuple[int, ...], share: float, ranks: int, num_experts: int, seed: int = 0
) -> np.ndarray:
    """Routes that send `share` of the pairs to the first rank, where some experts are hotter."""
    num_local = num_experts // ranks
    weight_E = np.exp(np.random.default_rng(0).standard_normal(num_experts))
    weight_E[:num_local] *= share / weight_E[:num_local].sum()
    weight_E[num_local:] *= (1 - share) / weight_E[num_local:].sum()
    # the K largest of log-weights with Gumbel noise are a draw without replacement
    rng = np.random.default_rng(seed)
    noisy_LTE = np.log(weight_E) + rng.gumbel(size=(*shape_LTK[:2], num_experts))
    return noisy_LTE.argsort(axis=2)[..., -shape_LTK[2] :]


def furthest(one: Gradients, other: Gradients) -> float:
    """The largest difference of a gradient, by the largest value of its tensor."""
    return max(
        float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-30))
        for a, b in zip(one, other, strict=True)
        for name in b
    )
