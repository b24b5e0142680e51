"""The check of a step before its update: routes that were given were taken, and all is finite.

`train_step` calls it after the last backward pass and before the optimizer. Megatron's own
validation of losses and gradients does not look at the first iteration of a process
(megatron/core/rerun_state_machine.py, `validate_result`), and names no rollout.

A step costs one pass over its gradients, one all-reduce of three numbers and one wait of the host,
right before the optimizer, which waits for the gradient's norm anyway.

Shape suffixes: B batch, S sequence of this context-parallel rank, M micro-batches of a step,
V values of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.replay import WHY_UNTAKEN, MicrobatchRoutes
from megatron_r3.store.reader import RolloutStore
from megatron_r3.training.refuse import refuse


@dataclass(frozen=True)
class _Loss:
    """What the loss of one micro-batch was made of, until the step is looked at.

    Attributes:
        rows_BS: the row id of each position, on the host.
        mask_BS: 1 on response tokens, else 0, on the host.
        values: on the device Megatron's loss of each position, which is minus its log-prob (0
            outside the response), and then the policy loss. It is a copy: schedules free or change
            what they were given.
    """

    rows_BS: Tensor
    mask_BS: Tensor
    values: Tensor


def _wrong_places(losses: list[_Loss]) -> tuple[Tensor, Tensor]:
    """For each micro-batch M the first value that is not finite: its place, and it; float64 `[M]`.

    A place is an index of `values`; -1: all are finite. The micro-batches of a step have one shape,
    so all of them are looked at together, without a wait.
    """
    values_MV = torch.stack([one.values for one in losses])
    wrong_MV = ~values_MV.isfinite()
    first_M = wrong_MV.int().argmax(1)
    places_M = torch.where(wrong_MV.any(1), first_M, -1)
    return places_M.double(), values_MV.gather(1, first_M[:, None])[:, 0].double()


class StepGuard:
    """Collects what one step did on this rank, on the device, and looks at it once.

    Args:
        store: the rollouts, which an error names.
        scaled: the loss is scaled (fp16): infinite gradients are then Megatron's to skip.
    """

    def __init__(self, store: RolloutStore, scaled: bool) -> None:
        self.store, self.scaled = store, scaled
        self._losses: list[_Loss] = []
        self._given: list[tuple[list[int], Counter[int]]] = []
        self._rows: list[Tensor] = []

    def add_routes(self, microbatch: MicrobatchRoutes) -> None:
        """Watch whether the layers of a microbatch take its routes; the routes are not kept."""
        if microbatch.replays:
            self._given.append((sorted(microbatch.ids), microbatch.used))

    def add_rows(self, rows_BS: Tensor) -> None:
        """Keep which tokens a microbatch has, on the host, for an error that names them."""
        self._rows.append(rows_BS)

    def add_loss(
        self, host: dict[str, Tensor], losses_BS: Tensor, mask_BS: Tensor, loss: Tensor
    ) -> None:
        """Keep a copy of what the loss of a micro-batch was made of; no wait.

        Args:
            host: the batch on the host, with `rows` and `loss_mask`.
            losses_BS: minus the trainer's log-probs, before they are bounded.
            mask_BS: 1 on response tokens, else 0; on the device, as the other two.
            loss: the policy loss, a scalar.
        """
        with torch.no_grad():
            response_BS = torch.where(mask_BS > 0, losses_BS.float(), 0.0)
            values = torch.cat([response_BS.reshape(-1), loss.float()[None]])
        self._losses.append(_Loss(host["rows"], host["loss_mask"], values))

    def check(self, models: list[Any], iteration: int, same_everywhere: int) -> None:
        """End training before the update, on all ranks, where one of them found something.

        Args:
            models: this rank's model chunks, with their gradients reduced.
            iteration: that is about to be updated, from 1.
            same_everywhere: a number that must be the same on all ranks.
        """
        losses, given, rows = self._losses, self._given, self._rows
        self._losses, self._given, self._rows = [], [], []
        device = torch.cuda.current_device()
        untaken = next((left for layers, used in given if (left := _untaken(layers, used))), [])
        gradients = self._gradients(models, device)
        nothing = gradients.new_zeros(0)
        places, values = _wrong_places(losses) if losses else (nothing, nothing)
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # What was found, as one number of which the largest of all ranks speaks: routes that nobody
        # took before a loss, a loss before the gradients that it spoils, and among ranks the first.
        # Example with 4 ranks: rank 1 finds a gradient (3), rank 2 a loss (4 + 2): rank 2 speaks.
        weight = torch.where(torch.isfinite(gradients), 0, size - rank)
        weight = torch.where((places >= 0).any(), 2 * size - rank, weight)
        weight = torch.full_like(weight, 3 * size - rank) if untaken else weight
        same = torch.tensor([same_everywhere, -same_everywhere]).to(device, non_blocking=True)
        told = torch.cat([weight.to(torch.int64)[None], same])
        if size > 1:
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        on_device = torch.cat([told.double(), weight[None].double(), places, values])
        on_host = on_device.cpu().numpy()  # the one wait
        heaviest, most, least, mine = on_host[:4]
        if most != -least:
            refuse(
                f"{self.store.directories[0]}: the ranks do not see the same shards in it; was it "
                "changed while training runs, or is it another folder on another node?",
                speaks=rank == 0,
            )
        if heaviest:
            told_here = self._say(untaken, losses, on_host[4:], models, rows)
            refuse(f"{told_here}. Iteration {iteration} changed no weight", heaviest == mine)

    def _gradients(self, models: list[Any], device: Any) -> Tensor:
        """The largest gradient of this rank, a scalar; not finite where one is not."""
        largest = [
            torch.linalg.vector_norm(gradient, ord=float("inf")).float()
            for model in models
            for gradient in _gradient_buffers(model)
            if gradient.numel()
        ]
        if self.scaled or not largest:
            return torch.zeros((), device=device)
        stacked = torch.stack(largest)
        return torch.where(torch.isfinite(stacked).all(), stacked.max(), float("nan"))

    def _say(
        self,
        untaken: list[int],
        losses: list[_Loss],
        found: np.ndarray,
        models: list[Any],
        rows: list[Tensor],
    ) -> str:
        if untaken:
            return (
                f"the routes of layers {untaken} were given, and no router took them. {WHY_UNTAKEN}"
            )
        # the places of all micro-batches, then the values there
        for one, place, value in zip(losses, *np.split(found, 2), strict=True):
            if place < 0:
                continue
            rows, of_token = one.rows_BS.reshape(-1), place < one.rows_BS.numel()
            # where all log-probs are finite and the policy loss is not, its first response token
            # stands for it
            position = int(place) if of_token else int(one.mask_BS.reshape(-1).argmax())
            rollout, token = self.store.locate(int(rows[position]))
            # position t of the input predicts token t + 1
            name = f"{self.store.name(rollout)}, token {token + 1}"
            if of_token:
                return f"{name}: the trainer's log-prob is {-value:g}, which is not finite"
            return (
                f"the policy loss of a micro-batch is not finite; its first response is in {name}"
            )
        named = (name for model in models for name in _wrong_parameters(model))
        return (
            f"the gradient of {next(named, 'a parameter')} is not finite, in a step on "
            f"{self._rollouts(rows)}"
        )

    def _rollouts(self, rows: list[Tensor]) -> str:
        """The first and the last rollout of a step, of this rank."""
        used = torch.cat([one.reshape(-1) for one in rows]) if rows else torch.zeros(0)
        used = used[used >= 0]
        if not len(used):
            return f"rollouts of {self.store.directories[0]}"
        first, last = (self.store.locate(int(row))[0] for row in (used.min(), used.max()))
        return f"{self.store.name(first)} to {self.store.name(last)}"


def _untaken(layers: list[int], used: Counter[int]) -> list[int]:
    return [layer for layer in layers if not used[layer]]


def _gradient_buffers(model: Any) -> list[Tensor]:
    """The flat gradients of Megatron's DistributedDataParallel, else those of the parameters."""
    flat: list[Any] = []
    for name in ("buffers", "expert_parallel_buffers"):
        some = getattr(model, name, None)  # `buffers` of another module is a method
        flat += some if isinstance(some, list) else []
    if flat:
        return [buffer.grad_data for buffer in flat]
    gradients = (_gradient(parameter) for parameter in model.parameters())
    return [gradient for gradient in gradients if gradient is not None]


def _gradient(parameter: Any) -> Tensor | None:
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _wrong_parameters(model: Any) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters()
        if (gradient := _gradient(parameter)) is not None and not torch.isfinite(gradient).all()
    ]
