"""Rollouts as Megatron's RL loop has them, without Megatron."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_r3.replay.routes import MoEShape
from megatron_r3.rl.turns import Turn, read_turns
from proof.fidelity.rl_loop import sent

SHAPE = MoEShape(num_experts=8, topk=2, moe_layers=(0, 1, 2))


def routes_of(length: int, seed: int = 0) -> np.ndarray:
    """Routes `[T, L, K]` of a request of so many tokens."""
    draw = np.random.default_rng(seed)
    return draw.random((length - 1, 3, 8)).argsort(-1)[..., :2]


def rollout(*lengths: int, prompt: int = 2, **changes: Any) -> SimpleNamespace:
    """A rollout with a turn of each length, whose tokens count from 10 on."""
    masks = [[number >= prompt for number in range(length)] for length in lengths]
    fields = {
        "trajectory": [[*range(10, 10 + length)] for length in lengths],
        "generation_mask": masks,
        "logprobs": [[-1.0] * sum(mask) for mask in masks],
        "routes": [sent(routes_of(length, length)) for length in lengths],
        "reward": 0.5,
        "env_id": "toy",
        "policy_epoch": [[(0, 3)] for _ in lengths],
    }
    return SimpleNamespace(**(fields | changes))


def read(*rollouts: SimpleNamespace, rows: list[Any] | None = None) -> list[Turn]:
    if rows is None:
        rows = [(one, turn) for one in rollouts for turn in range(len(one.trajectory))]
    return read_turns(rows, rollouts, group_size=2, first_group=10)
