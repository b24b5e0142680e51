"""A policy update of one process, each rollout alone, its loss as the papers write it.

As `proof/fidelity/reference.py`, which has one loss, but with the losses of
`proof/fidelity/policy_loss.py`. Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): G, T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_r3.train.losses.loss import LossOptions
from proof.fidelity.gradients import Piece, collect
from proof.fidelity.policy_loss import Expected, Response, advantages, expected
from proof.fidelity.reference import build_and_save, nll
from proof.fidelity.rollouts import Sampled


@dataclass(frozen=True)
class Recipe:
    """A policy update, and the options that ask for it.

    Attributes:
        options: for Megatron's command line.
        loss: what these options mean.
        trainer_is_old: in its only update on the rollouts the trainer is then its own old policy.
        centred: advantages without the standard deviation.
        micro_batch: rollouts of a micro-batch, whose averages Megatron averages. None: with
            --calculate-per-token-loss the average is that of the whole step.
    """

    options: str
    loss: LossOptions
    trainer_is_old: bool = False
    centred: bool = False
    micro_batch: int | None = None


@dataclass(frozen=True)
class Update:
    """What an update must be.

    Attributes:
        loss: as it is logged.
        scale: of the loss, with each token's part taken positive.
        gradients: before any clipping.
        controls: the gradients of updates that are wrong.
    """

    loss: float
    scale: float
    gradients: list[Piece]
    controls: dict[str, list[Piece]] = field(default_factory=dict)


def make_updates(
    rank: int,
    argv: list[str],
    rollouts: list[Sampled],
    checkpoint: Path,
    recipes: dict[str, Recipe],
) -> dict[str, Update]:
    """Build the model, save it, and work out the update of each recipe."""
    model = build_and_save(argv, checkpoint)[1]
    with torch.no_grad():
        trainer = [-nll(model, sampled).double().numpy() for sampled in rollouts]
    wanted, slopes = {}, {}
    for name, recipe in recipes.items():
        right = _responses(rollouts, trainer, recipe)
        wanted[name], slopes[name, ""] = _step(right, recipe)
        if recipe.micro_batch:  # the controls of the same recipe without averages are enough
            continue
        for control, wrong in _wrong(rollouts, trainer, recipe).items():
            slopes[name, control] = _step(wrong, recipe)[1]
        slopes[name, "shifted mask"] = [np.roll(s, 1) for s in slopes[name, ""]]
    gradients = _gradients(model, rollouts, slopes)
    return {
        name: Update(
            want.loss,
            want.positive / max(want.divisor, 1),
            gradients[name, ""],
            {c: pieces for (n, c), pieces in gradients.items() if n == name and c},
        )
        for name, want in wanted.items()
    }


def _responses(
    rollouts: list[Sampled], trainer: list[np.ndarray], recipe: Recipe, shift: int = 0
) -> list[tuple[Response, np.ndarray]]:
    """The response of each rollout, and which of its inputs' predictions it is, bool `[T]`.

    Args:
        shift: by how many tokens the sampler's log-probs are moved; a control.
    """
    rewards, groups = [r.reward for r in rollouts], [r.group for r in rollouts]
    made = []
    for sampled, logprobs_T, advantage in zip(
        rollouts, trainer, advantages(rewards, groups, not recipe.centred), strict=True
    ):
        on_T = sampled.response[1:]
        # a store has them in float32
        stored_T = np.roll(sampled.logprobs.astype(np.float32), shift)[1:]
        sampler_G = stored_T[on_T].astype(np.float64)
        old_G = logprobs_T[on_T] if recipe.trainer_is_old else sampler_G
        made.append((Response(logprobs_T[on_T], old_G, sampler_G, advantage), on_T))
    return made


def _wrong(
    rollouts: list[Sampled], trainer: list[np.ndarray], recipe: Recipe
) -> dict[str, list[tuple[Response, np.ndarray]]]:
    other = replace(recipe, trainer_is_old=not recipe.trainer_is_old)
    return {
        "the other old policy": _responses(rollouts, trainer, other),
        "shifted log-probs": _responses(rollouts, trainer, recipe, shift=1),
    }


def _step(
    responses: Sequence[tuple[Response, np.ndarray]], recipe: Recipe
) -> tuple[Expected, list[np.ndarray]]:
    """The loss of all rollouts, and the step's derivative by each prediction's log-prob, `[T]`."""
    size = recipe.micro_batch or len(responses)
    slopes = []
    for start in range(0, len(responses), size):
        part = responses[start : start + size]
        want = expected([response for response, _ in part], recipe.loss)
        for (_, on_T), slope_G in zip(part, want.gradients, strict=True):
            slope_T = np.zeros(len(on_T))
            slope_T[on_T] = slope_G / max(want.divisor, 1) * size / len(responses)
            slopes.append(slope_T)
    return expected([response for response, _ in responses], recipe.loss), slopes


def _gradients(
    model: Any, rollouts: list[Sampled], slopes: dict[tuple[str, str], list[np.ndarray]]
) -> dict[tuple[str, str], list[Piece]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = {key: {id(p): torch.zeros_like(p) for p in parameters} for key in slopes}
    for key, slope in slopes.items():
        for sampled, slope_T in zip(rollouts, slope, strict=True):
            # A pass for each: the backward pass of Megatron's cross entropy can run only once.
            logprobs_T = -nll(model, sampled)
            found = torch.autograd.grad(
                logprobs_T, parameters, torch.from_numpy(slope_T).float(), allow_unused=True
            )
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    sums[key][id(parameter)] += gradient
    return {key: collect([model], gradients) for key, gradients in sums.items()}
