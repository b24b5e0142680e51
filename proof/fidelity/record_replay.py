"""Record the experts that a model chooses, and replay them: loss and gradients stay bitwise equal.

Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): T, K.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_r3.replay.active import MicrobatchRoutes, recording, replaying
from proof.fidelity.models import EXPERTS, MODELS, SEQ_LENGTH, VOCAB_SIZE
from proof.fidelity.reference import build

# a layer runs once; it runs again in the backward pass; it sends tokens to another rank
LAYOUTS = {
    "1 process": (1, ""),
    "full recompute": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "EP2": (2, "--expert-model-parallel-size 2"),
}

LossAndGradients = tuple[torch.Tensor, dict[str, torch.Tensor]]


def record_and_replay(rank: int, arguments: str) -> list[str]:
    """Record a micro-batch, and replay it as recorded, and with each of two faults.

    Args:
        arguments: Megatron's options of the layout.

    Returns:
        The claims that do not hold.
    """
    argv = [*MODELS["base"].argv(), *shlex.split(arguments), "--micro-batch-size", "1"]
    argv += ["--global-batch-size", "2"]  # with two ranks, a micro-batch for each
    _, model = build([*argv, "--moe-router-replay"])
    live = _run(model, rank, contextlib.nullcontext)
    with recording() as microbatch:
        recorded = _run(model, rank, lambda: replaying(microbatch))
    ids = dict(microbatch.ids)

    def replay(change: Callable[[torch.Tensor], torch.Tensor]) -> LossAndGradients:
        changed = {layer: change(ids_TK) for layer, ids_TK in ids.items()}
        return _run(model, rank, lambda: replaying(MicrobatchRoutes(changed)))

    claims = {
        "every layer is recorded": sorted(ids) == [1, 2, 3, 4],
        "recording changes nothing": _same(live, recorded),
        "replay is bitwise what was recorded": _same(live, replay(lambda ids_TK: ids_TK)),
        "other experts show": not _same(live, replay(lambda ids_TK: (ids_TK + 1) % EXPERTS)),
        "shifted tokens show": not _same(live, replay(lambda ids_TK: ids_TK.roll(1, 0))),
    }
    return [claim for claim, holds in claims.items() if not holds]


def _run(
    model: torch.nn.Module, rank: int, active: Callable[[], AbstractContextManager[Any]]
) -> LossAndGradients:
    """The loss and the gradients of one micro-batch; each rank has a different one."""
    ids = torch.arange(SEQ_LENGTH + 1)[None] * (7 + 2 * rank) % VOCAB_SIZE
    positions = torch.arange(SEQ_LENGTH)[None]
    model.zero_grad(set_to_none=True)
    with active():
        loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).sum()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _same(one: LossAndGradients, other: LossAndGradients) -> bool:
    return (
        torch.equal(one[0], other[0])
        and one[1].keys() == other[1].keys()
        and all(torch.equal(grad, other[1][name]) for name, grad in one[1].items())
    )
