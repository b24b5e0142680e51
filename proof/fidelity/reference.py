"""The reference: one process, each rollout alone, its routes handed over as arrays.

The reference has no store, no row ids, no batch, no padding and no schedule: only the model and
`replaying`. Its loss, advantages, temperature and optimizer are written apart from the trainer's,
so the two share no formula. Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): E, K, L, T, V.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_r3.replay.active import MicrobatchRoutes, replaying
from megatron_r3.replay.layers import local_moe_layers, local_routers
from megatron_r3.train.launch import build_model, initialize
from megatron_r3.weights.checkpoint import save_whole
from proof.fidelity.gradients import Piece, collect, of_step
from proof.fidelity.policy_loss import advantages
from proof.fidelity.rollouts import Sampled
from proof.fidelity.update import RATE, Update

CLIP_EPS = 0.9


@dataclass(frozen=True)
class Wrong:
    """The result of an update that is wrong on purpose (`Update.controls`).

    Attributes:
        gradients: of all steps of the update.
        routes_LTK: the routes of all rollouts in this update; None if these are the right routes.
    """

    gradients: list[Piece]
    routes_LTK: np.ndarray | None


@dataclass(frozen=True)
class Reference:
    """What every layout must reproduce.

    Attributes:
        hidden: by layer number, the MoE input of every token of all rollouts, float32, a row each.
        loss: the mean over the response tokens of a step, and over the steps.
        loss_scale: the same mean of the absolute losses. Advantages of both signs let most of
            `loss` cancel out, so errors are measured against `loss_scale`.
        gradients: of the loss of each step.
        routes_LTK: the routes of all rollouts, if the model chose them itself (R2); else None.
        wrong: the results of the wrong updates, by their names in `Update.controls`.
    """

    hidden: dict[int, np.ndarray]
    loss: float
    loss_scale: float
    gradients: list[Piece]
    routes_LTK: np.ndarray | None = None
    wrong: dict[str, Wrong] = field(default_factory=dict)


def build(argv: list[str]) -> tuple[Any, torch.nn.Module]:
    """Megatron's parsed arguments, and the whole model that they describe."""
    sys.argv = ["reference.py", *argv]
    args = initialize()
    return args, build_model(args).train()


def build_and_save(argv: list[str], checkpoint: Path) -> tuple[Any, torch.nn.Module]:
    """As `build`, with replay on; also save the model, so that layouts can load it."""
    argv = [*argv, "--moe-router-replay", "--save", str(checkpoint), "--save-interval", "1"]
    args, model = build(argv)
    save_whole([model], args)
    return args, model


def make_reference(
    rank: int,
    argv: list[str],
    rollouts: list[Sampled],
    checkpoint: Path,
    update: Update,
) -> Reference:
    """Build and save the model; update it on every rollout, the right way and each wrong way."""
    model = build_and_save(argv, checkpoint)[1]
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    runs = {}
    for name, way in {"": update, **update.controls()}.items():
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), saved, strict=True):
                parameter.copy_(value)
        runs[name] = way.source, _run(model, rollouts, way)
    source, right = runs.pop("")
    wrong = {
        name: Wrong(run.gradients, None if other == source else run.routes_LTK)
        for name, (other, run) in runs.items()
    }
    routes_LTK = right.routes_LTK if source == "old-policy" else None
    return replace(right, routes_LTK=routes_LTK, wrong=wrong)


def _run(model: torch.nn.Module, rollouts: list[Sampled], update: Update) -> Reference:
    rollouts, old = [*rollouts], [s.logprobs[1:] for s in rollouts]
    rewards, groups = [s.reward for s in rollouts], [s.group for s in rollouts]
    chosen = advantages(rewards, groups, normalised=True)
    loss, loss_scale, gradients = 0.0, 0.0, []
    with _moe_inputs(model) as hidden:
        for number, part in enumerate(update.steps(len(rollouts))):
            first = not number
            # A step routes live if its routes are those that the trainer chooses just then.
            live = update.source == "live" or (update.source == "old-policy" and first)
            its_own = update.old == "newest" or (update.old == "trainer" and first)
            # Before the first step the trainer is the old policy of all rollouts, not only of those
            # of this step.
            for index in range(len(rollouts)) if first else part:
                if live:
                    rollouts[index] = _with_chosen_routes(model, rollouts[index])
                if its_own:
                    with torch.no_grad():
                        nll_T = nll(model, rollouts[index], update.temperature)
                    old[index] = -nll_T.double().numpy()
            losses, means = _step(
                model,
                lambda sampled, live=live: nll(model, sampled, update.temperature, live),
                [(rollouts[index], old[index], chosen[index]) for index in part],
            )
            gradients += of_step(collect([model], means), number)
            loss += losses[0] / update.mini_steps
            loss_scale += losses[1] / update.mini_steps
            if update.mini_steps > 1:
                _descend(model, means)
    return Reference(
        hidden={number: np.concatenate(parts) for number, parts in hidden.items()},
        loss=loss,
        loss_scale=loss_scale,
        gradients=gradients,
        routes_LTK=np.concatenate([s.routes_LTK for s in rollouts], axis=1),
    )


def _step(
    model: torch.nn.Module,
    nll_of: Callable[[Sampled], torch.Tensor],
    part: list[tuple[Sampled, np.ndarray, float]],
) -> tuple[tuple[float, float], dict[int, torch.Tensor]]:
    """Compute the loss and the gradients of one step, without changing the weights.

    Args:
        nll_of: computes -log p of a rollout's next tokens, `[T]`.
        part: the rollouts of the step, each with its old log-probs `[T]` and its advantage.

    Returns:
        The mean loss and the mean absolute loss; the gradients by the `id()` of their parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = {id(p): torch.zeros_like(p, dtype=torch.float32) for p in trained}
    total, positive, num_tokens = 0.0, 0.0, 0
    for sampled, old_T, advantage in part:
        losses_T = _losses(nll_of(sampled), old_T, sampled, advantage)
        losses_T.sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradients[id(parameter)] += parameter.grad.float()
                parameter.grad = None
        total, positive = total + losses_T.sum().item(), positive + losses_T.abs().sum().item()
        num_tokens += int(sampled.response.sum())
    means = {i: gradient / num_tokens for i, gradient in gradients.items()}
    return (total / num_tokens, positive / num_tokens), means


def nll(
    model: torch.nn.Module, sampled: Sampled, temperature: float = 1.0, live: bool = False
) -> torch.Tensor:
    """-log p of each next token, float32 `[T]`; the rollout's routes are replayed.

    Args:
        temperature: what the logits are divided by.
        live: whether the model chooses the experts, instead of replay.
    """
    tokens = torch.from_numpy(sampled.tokens).long()[None]
    if temperature == 1:
        mask = torch.from_numpy(sampled.response[1:]).float()[None]
        return _forward(model, sampled, live, labels=tokens[:, 1:], loss_mask=mask)[0].float()
    logprobs_TV = logprobs(model, sampled, temperature, live)
    return -logprobs_TV.gather(-1, tokens[0, 1:, None])[:, 0]


def logprobs(
    model: torch.nn.Module, sampled: Sampled, temperature: float = 1.0, live: bool = False
) -> torch.Tensor:
    """The log-probs of all tokens of the vocabulary after each token, float32 `[T, V]`."""
    logits_TV = _forward(model, sampled, live)[0].float()
    return torch.log_softmax(logits_TV / temperature, -1)


def _forward(model: torch.nn.Module, sampled: Sampled, live: bool, **more: Any) -> torch.Tensor:
    tokens = torch.from_numpy(sampled.tokens).long()[None]
    numbers = sorted(local_moe_layers(model))
    ids = {n: torch.from_numpy(sampled.routes_LTK[i]) for i, n in enumerate(numbers)}
    missing_T = torch.from_numpy(~sampled.recorded_T)
    routes = MicrobatchRoutes(ids, live_T=missing_T if missing_T.any() else None)
    positions = torch.arange(tokens.shape[1] - 1)[None]
    given = (tokens[:, :-1], positions, None)
    with replaying(None if live else routes):
        return model(*given, **more)


def _losses(
    nll_T: torch.Tensor, old_T: np.ndarray, sampled: Sampled, advantage: float
) -> torch.Tensor:
    """-min(r A, clip(r) A), `[T]`, where the next token is sampled; else 0. r is the ratio."""
    mask_T = torch.from_numpy(sampled.response[1:]).float()
    log_ratio_T = torch.where(mask_T > 0, -nll_T - torch.from_numpy(old_T), 0.0)
    ratio_T = log_ratio_T.exp().float()
    clipped_T = ratio_T.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
    gain_T = torch.minimum(ratio_T * advantage, clipped_T * advantage)
    return -gain_T * mask_T


def _descend(model: torch.nn.Module, gradients: dict[int, torch.Tensor]) -> None:
    """One step of plain SGD."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * gradients[id(parameter)]


def _with_chosen_routes(model: torch.nn.Module, sampled: Sampled) -> Sampled:
    """A copy of the rollout with the routes that the model chooses now."""
    maps: dict[int, torch.Tensor] = {}

    def keep(number: int, map_TE: torch.Tensor) -> None:
        maps[number] = map_TE.nonzero()[:, 1].reshape(len(map_TE), -1)

    handles = [
        router.register_forward_hook(lambda _, inputs, output, n=n: keep(n, output[1]))
        for n, router in local_routers(model).items()
    ]
    with torch.no_grad():
        nll(model, sampled, live=True)
    for handle in handles:
        handle.remove()
    routes_LTK = np.stack([maps[number].numpy() for number in sorted(maps)])
    return replace(sampled, routes_LTK=routes_LTK)


@contextmanager
def _moe_inputs(model: torch.nn.Module) -> Iterator[dict[int, list[np.ndarray]]]:
    """Record the input of every MoE layer in each pass with gradients, by layer number."""
    hidden: dict[int, list[np.ndarray]] = {}
    handles = []
    for number, layer in local_moe_layers(model).items():
        hidden[number] = parts = []

        def keep(_: Any, inputs: tuple[Any, ...], parts: list[np.ndarray] = parts) -> None:
            if torch.is_grad_enabled():
                parts.append(inputs[0].detach()[:, 0].float().cpu().numpy().copy())

        handles.append(layer.register_forward_pre_hook(keep))
    yield hidden
    for handle in handles:
        handle.remove()
