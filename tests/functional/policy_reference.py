"""A policy update of one process, each rollout alone, its loss as the papers write it.

As `proof/fidelity/reference.py`, which has one loss, but with the losses of
`proof/fidelity/policy_loss.py`. Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): G, T, V.
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
from proof.fidelity.reference import build_and_save, logprobs, nll
from proof.fidelity.rollouts import Sampled


@dataclass(frozen=True)
class Recipe:
    """A policy update, and the options that ask for it.

    Attributes:
        options: for Megatron's command line.
        loss: what these options mean.
        trainer_is_old: in its only update on the rollouts the trainer is then its own old policy.
        centred: advantages without the standard deviation.
        reference: whether `options` name the folder of a reference policy.
        micro_batch: rollouts of a micro-batch, whose averages Megatron averages. None: with
            --calculate-per-token-loss the average is that of the whole step.
    """

    options: str
    loss: LossOptions
    trainer_is_old: bool = False
    centred: bool = False
    reference: bool = False
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
    """Build the model, save it, and work out the update of each recipe.

    The reference policy is the model with other weights, saved beside `checkpoint`.
    """
    args, model = build_and_save(argv, checkpoint)
    reference = _reference(args, model, rollouts, checkpoint.with_name("reference"))
    with torch.no_grad():
        trainer = [-nll(model, sampled).double().numpy() for sampled in rollouts]
        entropy = [_entropy(model, sampled).numpy() for sampled in rollouts]
    given = [Given(*one) for one in zip(rollouts, trainer, reference, entropy, strict=True)]
    wanted, slopes = {}, {}
    for name, recipe in recipes.items():
        wanted[name], slopes[name, ""] = _step(_responses(given, recipe), recipe)
        if recipe.micro_batch:  # the controls of the same recipe without averages are enough
            continue
        for control, wrong in _wrong(given, recipe).items():
            slopes[name, control] = _step(*wrong)[1]
        slopes[name, "shifted mask"] = [np.roll(s, 1, 0) for s in slopes[name, ""]]
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


@dataclass(frozen=True)
class Given:
    """A rollout, and what models give for its predictions: float64 `[T]`.

    Attributes:
        trainer, reference: log-probs; the reference routes live.
        entropy: of the trainer's distributions.
    """

    sampled: Sampled
    trainer: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True)
class Part:
    """The response of a rollout; which predictions it is, bool `[T]`; their entropies `[G]`."""

    response: Response
    on: np.ndarray
    entropy: np.ndarray


def _responses(given: list[Given], recipe: Recipe, shift: int = 0) -> list[Part]:
    """The response of each rollout.

    Args:
        shift: by how many tokens the log-probs of the sampler and of the reference are moved; a
            control.
    """
    sampled = [one.sampled for one in given]
    rewards, groups = [s.reward for s in sampled], [s.group for s in sampled]
    made = []
    for one, advantage in zip(given, advantages(rewards, groups, not recipe.centred), strict=True):
        on_T = one.sampled.response[1:]
        # a store has them in float32
        stored_T = np.roll(one.sampled.logprobs.astype(np.float32), shift)[1:]
        sampler_G, trainer_G = stored_T[on_T].astype(np.float64), one.trainer[on_T]
        old_G = trainer_G if recipe.trainer_is_old else sampler_G
        reference_G = np.roll(one.reference, shift)[on_T]
        response = Response(trainer_G, old_G, sampler_G, advantage, reference_G)
        made.append(Part(response, on_T, one.entropy[on_T]))
    return made


def _wrong(given: list[Given], recipe: Recipe) -> dict[str, tuple[list[Part], Recipe]]:
    other = replace(recipe, trainer_is_old=not recipe.trainer_is_old)
    wrong = {
        "the other old policy": (_responses(given, other), recipe),
        "shifted log-probs": (_responses(given, recipe, shift=1), recipe),
    }
    for term in ("kl", "entropy"):
        if getattr(recipe.loss.penalty, term) is not None:
            penalty = replace(recipe.loss.penalty, **{term: None})
            without = replace(recipe, loss=replace(recipe.loss, penalty=penalty))
            wrong[f"no {term}"] = (_responses(given, recipe), without)
    return wrong


def _step(parts: Sequence[Part], recipe: Recipe) -> tuple[Expected, list[np.ndarray]]:
    """The loss of all rollouts; the step's derivatives for each prediction, `[T, 2]`.

    They are the derivatives by its log-prob and by its entropy.
    """
    size = recipe.micro_batch or len(parts)
    slopes = []
    for start in range(0, len(parts), size):
        some = parts[start : start + size]
        want, falls = _expected(some, recipe)
        for part, slope_G, fall_G in zip(some, want.gradients, falls, strict=True):
            slope_T2 = np.zeros((len(part.on), 2))
            slope_T2[part.on] = np.stack([slope_G, -fall_G], 1) / max(want.divisor, 1)
            slopes.append(slope_T2 * size / len(parts))
    return _expected(parts, recipe)[0], slopes


def _expected(parts: Sequence[Part], recipe: Recipe) -> tuple[Expected, list[np.ndarray]]:
    """The loss, and by what an entropy of 1 lowers its sum, `[G]` for each rollout."""
    want = expected([part.response for part in parts], recipe.loss)
    falls = [(recipe.loss.penalty.entropy or 0.0) * share_G for share_G in want.shares]
    fall = sum(float(f @ part.entropy) for f, part in zip(falls, parts, strict=True))
    return replace(want, sum=want.sum - fall, positive=want.positive + fall), falls


def _entropy(model: Any, sampled: Sampled) -> torch.Tensor:
    """- sum p log p of each prediction, float64 `[T]`."""
    logprobs_TV = logprobs(model, sampled).double()
    return -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def _reference(args: Any, model: Any, rollouts: list[Sampled], folder: Path) -> list[np.ndarray]:
    """Save the reference policy; return its log-probs."""
    from megatron.training.checkpointing import save_checkpoint

    own, saved = [p.detach().clone() for p in model.parameters()], args.save
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.3 * parameter.std() * noise
        args.save = str(folder)
        save_checkpoint(1, [model], None, None, 0)
        args.save = saved
        found = [-nll(model, sampled, live=True).double().numpy() for sampled in rollouts]
        for parameter, value in zip(model.parameters(), own, strict=True):
            parameter.copy_(value)
    return found


def _gradients(
    model: Any, rollouts: list[Sampled], slopes: dict[tuple[str, str], list[np.ndarray]]
) -> dict[tuple[str, str], list[Piece]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = {key: {id(p): torch.zeros_like(p) for p in parameters} for key in slopes}
    for key, slope in slopes.items():
        for sampled, slope_T2 in zip(rollouts, slope, strict=True):
            # A pass for each: the backward pass of Megatron's cross entropy can run only once.
            slope_T, of_entropy_T = torch.from_numpy(slope_T2).unbind(1)
            total = (-nll(model, sampled) * slope_T.float()).sum()
            if of_entropy_T.any():
                total = total + (_entropy(model, sampled) * of_entropy_T).sum()
            found = torch.autograd.grad(total, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    sums[key][id(parameter)] += gradient
    return {key: collect([model], gradients) for key, gradients in sums.items()}
