"""What a model chooses is recorded, and replayed: loss and gradients stay the same to the last bit.

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

# layouts in which a layer runs once, runs again in the backward pass, and sends tokens to a rank
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
    """Record one micro-batch, and replay it as it is and with two faults; return what is wrong.

    Args:
        arguments: of the layout, for Megatron's command line.
    """
    argv = [*MODELS["base"].argv(), *shlex.split(arguments), "--micro-batch-size", "1"]
    argv += ["--global-batch-size", "2"]  # a micro-batch for each rank, where there are two
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
    """The loss and the gradients of one micro-batch, another one on each rank."""
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
