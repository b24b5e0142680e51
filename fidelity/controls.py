"""What goes wrong in replay: routes of another token, another layer, another rollout.

Shape suffixes: L MoE layers, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def shift_token(routes: list[np.ndarray]) -> list[np.ndarray]:
    """Each token gets the routes of the one before; `routes` are `[L, T, K]`, one a rollout."""
    return [np.roll(ids_LTK, 1, axis=1) for ids_LTK in routes]


def swap_layers(routes: list[np.ndarray]) -> list[np.ndarray]:
    """The first two MoE layers are exchanged."""
    return [ids_LTK[[1, 0, *range(2, len(ids_LTK))]] for ids_LTK in routes]


def swap_rollouts(routes: list[np.ndarray]) -> list[np.ndarray]:
    """Each rollout gets the routes of another, cut or continued to its own length."""
    half = len(routes) // 2
    others = routes[half:] + routes[:half]
    return [
        np.resize(other.transpose(1, 0, 2), (own.shape[1], *other.shape[::2])).transpose(1, 0, 2)
        for own, other in zip(routes, others, strict=True)
    ]


CONTROLS: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "shift_token": shift_token,
    "swap_layers": swap_layers,
    "swap_rollouts": swap_rollouts,
}
