"""A policy update of one process, each rollout alone, its loss as the papers write it.

As `proof/fidelity/reference.py`, which has one loss, but with the losses of
`proof/fidelity/policy_loss.py`. Megatron is imported only inside the functions that ranks run.

The log-probs of a layout differ from those of one process by rounding. `judge` takes a layout's own
log-probs as they are, and judges what the layout computed from them.

Shape suffixes (docs/glossary.md): B, G, S, T, V.
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
from proof.fidelity.layout import run_layout
from proof.fidelity.observe import RankResult
from proof.fidelity.policy_loss import Expected, Response, advantages, expected, kl_of
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
        kl, entropy: means over the response tokens; `kl` is 0 without a reference.
        gradients: before any clipping.
        controls: the gradients of updates that are wrong.
    """

    loss: float
    scale: float
    kl: float
    entropy: float
    gradients: list[Piece] = field(default_factory=list)
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
        name: replace(
            want,
            gradients=gradients[name, ""],
            controls={c: pieces for (n, c), pieces in gradients.items() if n == name and c},
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


def run_and_keep(rank: int, argv: list[str], stores: dict[str, Path]) -> tuple[RankResult, Any]:
    """As `run_layout`; and what this rank's losses were computed from, float64 `[T, 6]`.

    The columns are the row's id, -log p of the trainer, log p of the reference, the entropy, and
    the derivatives of the rank's loss by -log p and by the entropy.
    """
    from megatron_r3.train.step import RolloutStep

    kept, own = [], RolloutStep._loss

    def loss(self: Any, batch: Any, host: Any, policy: Any, output: Any) -> Any:
        output.retain_grad()  # of -log p `[B, S]`, or with an entropy term of both `[2, B, S]`
        zero_BS = 0 * policy.entropy_BS
        reference_BS = self.reference.policy.logprobs(host["rows"]) if self.reference else zero_BS
        kept.append((host["rows"], output, reference_BS, policy.entropy_BS, zero_BS))
        return own(self, batch, host, policy, output)

    RolloutStep._loss = loss  # type: ignore[method-assign]
    result, found = run_layout(rank, argv, stores), [np.zeros((0, 6))]
    for rows_BS, output, reference_BS, entropy_BS, zero_BS in kept:
        (nll_BS, *_), slopes = (one.reshape(-1, *rows_BS.shape) for one in (output, output.grad))
        columns = [rows_BS, nll_BS, reference_BS, entropy_BS, *slopes, zero_BS][:6]
        all_T6 = torch.stack([c.detach().double().reshape(-1) for c in columns], 1)
        found.append(all_T6[all_T6[:, 0] >= 0].numpy())
    return result, np.concatenate(found)


def judge(
    rollouts: list[Sampled], recipe: Recipe, kept: Sequence[np.ndarray]
) -> tuple[Update, float]:
    """What the update must be with a layout's own log-probs and entropies, without gradients.

    The second result is the relative error of the derivatives in `kept`: of each rank, what
    `run_and_keep` found.
    """
    sizes = [len(sampled.tokens) - 1 for sampled in rollouts]
    all_T5 = np.full((sum(sizes), 5), np.nan)
    for one in kept:
        all_T5[one[:, 0].astype(int)] = one[:, 1:] * (-1, 1, 1, -1, 1)  # from -log p to log p
    each = np.split(all_T5, np.cumsum(sizes)[:-1])
    given = [Given(s, *own_T5.T[:3]) for s, own_T5 in zip(rollouts, each, strict=True)]
    parts = _responses(given, recipe)
    want, slopes = _step(parts, recipe)
    # Megatron later divides by the divisor of the step, or averages over context-parallel ranks.
    later = len(kept) if recipe.micro_batch else max(_expected(parts, recipe)[0].divisor, 1)
    want_T2 = np.concatenate(slopes) * later
    return want, float(np.linalg.norm(all_T5[:, 3:] - want_T2) / np.linalg.norm(want_T2))


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


def _step(parts: Sequence[Part], recipe: Recipe) -> tuple[Update, list[np.ndarray]]:
    """The update of all rollouts; the step's derivatives for each prediction, `[T, 2]`.

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
    want, penalty = _expected(parts, recipe)[0], replace(recipe.loss.penalty, kl=1.0)
    kl = [kl_of(p.response, p.response.trainer, penalty, penalty.kl_place)[0] for p in parts]
    means = [float(np.concatenate(v).mean()) for v in (kl, [part.entropy for part in parts])]
    return Update(want.loss, want.positive / max(want.divisor, 1), *means), slopes


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
