"""The reference: one process, each rollout alone, its routes handed over as arrays.

It has no store, no row ids, no batch, no padding and no schedule: only the model and `replaying`.
It has a loss and advantages of its own, so it shares no formula with the trainer either. Megatron
is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): L, T, K.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fidelity import core_only
from fidelity.gradients import Piece, collect
from fidelity.rollouts import Sampled
from megatron_r3.integrations.layers import local_moe_layers
from megatron_r3.launch import build_model, initialize
from megatron_r3.replay import MicrobatchRoutes, replaying

CLIP_EPS = 0.9


@dataclass(frozen=True)
class Reference:
    """What every layout must reproduce.

    Attributes:
        hidden: the MoE input of every token of all rollouts, by layer number, float32 `[T, H]`.
        loss: mean over response tokens.
        loss_scale: the mean of the absolute losses. Advantages of both signs let most of `loss`
            cancel out, so errors are measured against this.
        gradients: of that mean.
    """

    hidden: dict[int, np.ndarray]
    loss: float
    loss_scale: float
    gradients: list[Piece]


def build(argv: list[str]) -> tuple[Any, torch.nn.Module]:
    """Megatron's arguments, and the whole model that they name."""
    if core_only.is_core_only():
        args: Any = core_only.initialize(argv)
        return args, core_only.build_chunks(args)[0].train()
    sys.argv = ["reference.py", *argv]
    args = initialize()
    return args, build_model(args).train()


def build_and_save(argv: list[str], checkpoint: Path) -> tuple[Any, torch.nn.Module]:
    """As `build`, with replay on, and a checkpoint for layouts to load."""
    argv = [*argv, "--moe-router-replay", "--save", str(checkpoint), "--save-interval", "1"]
    args, model = build(argv)
    if not core_only.is_core_only():
        from megatron.training.checkpointing import save_checkpoint

        # iteration 1, because 0.15 does not load a checkpoint of iteration 0
        save_checkpoint(1, [model], None, None, 0)
    return args, model


def make_reference(
    rank: int, argv: list[str], rollouts: list[Sampled], checkpoint: Path
) -> Reference:
    """Build the model, save it, and run every rollout through it."""
    return _run(build_and_save(argv, checkpoint)[1], rollouts)


def _run(model: torch.nn.Module, rollouts: list[Sampled]) -> Reference:
    hidden = _watch_moe_inputs(model)
    numbers = sorted(hidden)
    gradients = {id(p): torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()}
    advantages = _advantages(rollouts)
    total, positive, num_tokens = 0.0, 0.0, 0
    for sampled, advantage in zip(rollouts, advantages, strict=True):
        losses = _losses(model, sampled, advantage, numbers)
        losses.sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradients[id(parameter)] += parameter.grad.float()
                parameter.grad = None
        total, positive = total + losses.sum().item(), positive + losses.abs().sum().item()
        num_tokens += int(sampled.response.sum())
    gradients = {i: gradient / num_tokens for i, gradient in gradients.items()}
    return Reference(
        hidden={number: np.concatenate(parts) for number, parts in hidden.items()},
        loss=total / num_tokens,
        loss_scale=positive / num_tokens,
        gradients=collect([model], gradients),
    )


def _losses(
    model: torch.nn.Module, sampled: Sampled, advantage: float, numbers: list[int]
) -> torch.Tensor:
    """-min(r A, clip(r) A) of every response token, `[1, T]`, 0 elsewhere."""
    tokens = torch.from_numpy(sampled.tokens).long()[None]
    mask = torch.from_numpy(sampled.response[1:]).float()[None]
    ids = {n: torch.from_numpy(sampled.routes_LTK[i]) for i, n in enumerate(numbers)}
    missing_T = torch.from_numpy(~sampled.recorded_T)
    routes = MicrobatchRoutes(ids, live_T=missing_T if missing_T.any() else None)
    positions = torch.arange(tokens.shape[1] - 1)[None]
    with replaying(routes):
        nll = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask)
    log_ratio = torch.where(mask > 0, -nll.float() - torch.from_numpy(sampled.logprobs[1:]), 0.0)
    ratio = log_ratio.exp().float()
    clipped = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -gain * mask


def _advantages(rollouts: list[Sampled]) -> list[float]:
    """(reward - mean of the group) / standard deviation of the group."""
    by_group: dict[int, list[float]] = {}
    for sampled in rollouts:
        by_group.setdefault(sampled.group, []).append(sampled.reward)
    return [
        float((s.reward - np.mean(by_group[s.group])) / (np.std(by_group[s.group]) + 1e-6))
        for s in rollouts
    ]


def _watch_moe_inputs(model: torch.nn.Module) -> dict[int, list[np.ndarray]]:
    hidden: dict[int, list[np.ndarray]] = {}
    for number, layer in local_moe_layers(model).items():
        hidden[number] = parts = []

        def keep(_: Any, inputs: tuple[Any, ...], parts: list[np.ndarray] = parts) -> None:
            parts.append(inputs[0].detach()[:, 0].float().cpu().numpy().copy())

        layer.register_forward_pre_hook(keep)
    return hidden
