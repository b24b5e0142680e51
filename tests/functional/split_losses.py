"""Policy losses in the ranks of a group that shares rollouts, without a model.

Shape suffixes (docs/glossary.md): B, S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_r3.train.losses.loss import LossOptions, policy_loss
from megatron_r3.train.losses.terms import LossTerms, Sequences

FIELDS = ("logprobs", "old_logprobs", "sampled_logprobs", "advantages", "mask", "index")


@dataclass(frozen=True)
class Part:
    """What one rank returned for one micro-batch.

    Attributes:
        loss, count: what Megatron divides.
        slope_BS: the gradient of `loss` in the places of the whole micro-batch; 0 in other ranks'.
        logged: the policy loss of the report, and what it is divided by.
        exchanges: how often the ranks summed something for it.
    """

    loss: float
    count: int
    slope_BS: Tensor
    logged: tuple[float, float]
    exchanges: int


def own_places(length: int, ranks: int, rank: int) -> Tensor:
    """The positions of a rank, as Megatron splits a sequence: the r-th piece from both ends.

    Example: 8 positions on 2 ranks: 0 1 6 7, and 2 3 4 5.
    """
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def losses_of(
    rank: int,
    batches: list[dict[str, Tensor]],
    options: Mapping[str, LossOptions],
    per_token: bool,
    forgets: bool = False,
) -> dict[str, list[Part]]:
    """The losses of this rank, by name of the options, one for each micro-batch.

    Args:
        batches: whole micro-batches, FIELDS `[B, S]`.
        forgets: a control: each rank believes that its tokens are all there are.
    """
    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    group = torch.distributed.group.WORLD if ranks > 1 and not forgets else None
    made: dict[str, list[Part]] = {}
    exchanges, all_reduce = 0, torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal exchanges
        exchanges += 1
        all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = counted
    for name, option in options.items():
        for batch in batches:
            length = batch["mask"].shape[1]
            own = own_places(length, ranks, rank) if ranks > 1 else torch.arange(length)
            *fields, index_BS = (batch[field][:, own] for field in FIELDS)
            logprobs_BS = fields[0].clone().requires_grad_()
            num_rollouts = int(batch["index"].max()) + 1
            terms = LossTerms(logprobs_BS, *fields[1:], Sequences(index_BS, num_rollouts, group))
            exchanges = 0
            loss, count, report, _ = policy_loss(terms, torch.ones(1), option, per_token)
            loss.backward()
            slope_BS = torch.zeros_like(batch["mask"])
            slope_BS[:, own] = logprobs_BS.grad
            value, number = report["policy loss"].tolist()
            made.setdefault(name, []).append(
                Part(loss.item(), int(count), slope_BS, (value, number), exchanges)
            )
    return made
