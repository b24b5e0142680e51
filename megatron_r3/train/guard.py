"""The check of a step before its update: routes were taken, values are finite, ranks agree.

`train_step` calls the check after the last backward pass and before the optimizer. Megatron's own
validation of losses and gradients skips the first iteration of a process
(megatron/core/rerun_state_machine.py, `validate_result`), and names no rollout.

The check costs one pass over the gradients, one all-reduce of three numbers and one wait of the
host. The optimizer, which comes next, would wait for the gradient's norm anyway.

Shape suffixes (docs/glossary.md): B, S, J, V.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.replay.active import WHY_UNTAKEN
from megatron_r3.replay.microbatch import MicrobatchRoutes, Mode
from megatron_r3.train.refuse import refuse


@dataclass(frozen=True)
class _Loss:
    """What the loss of one micro-batch was computed from, kept until the step is checked.

    Attributes:
        rows_BS: the row id of each position, on the host.
        mask_BS: 1 on response tokens, else 0, on the host.
        values_V: on the device: minus the log-prob of each position (0 outside the response), and
            the policy loss as the last value. A copy, because schedules free or change the tensors
            that they are given.
    """

    rows_BS: Tensor
    mask_BS: Tensor
    values_V: Tensor


def _wrong_places(losses: list[_Loss]) -> tuple[Tensor, Tensor]:
    """For each micro-batch the index in `values_V` of the first value that is not finite.

    The micro-batches of a step have one shape, so they are checked together, without a wait.

    Returns:
        The indices, float64 `[J]`, -1 where all values are finite; and the values at these indices,
        float64 `[J]`.
    """
    values_JV = torch.stack([loss.values_V for loss in losses])
    wrong_JV = ~values_JV.isfinite()
    first_J = wrong_JV.int().argmax(1)  # argmax of equal values is the first of them
    places_J = torch.where(wrong_JV.any(1), first_J, -1)
    return places_J.double(), values_JV.gather(1, first_J[:, None])[:, 0].double()


class StepGuard:
    """Keeps what a step did on this rank, without a wait, and checks all of it before the update.

    Args:
        store: the rollouts, for errors that name a rollout.
        scaled: whether the loss is scaled (fp16). Megatron then skips a step with gradients that
            are not finite, so the guard does not look at gradients.
    """

    def __init__(self, store: RolloutStore, scaled: bool) -> None:
        self.store, self.scaled = store, scaled
        self._losses: list[_Loss] = []
        self._given: list[tuple[list[int], Counter[int]]] = []
        self._rows: list[Tensor] = []

    def add_routes(self, microbatch: MicrobatchRoutes) -> None:
        """Watch whether the layers of a micro-batch take its routes; the routes are not kept."""
        if microbatch.mode is Mode.REPLAY:
            self._given.append((sorted(microbatch.ids), microbatch.used))

    def add_rows(self, rows_BS: Tensor) -> None:
        """Keep the row ids of a micro-batch, on the host, for an error that names its rollouts."""
        self._rows.append(rows_BS)

    def add_loss(
        self, host: dict[str, Tensor], losses_BS: Tensor, mask_BS: Tensor, loss: Tensor
    ) -> None:
        """Keep a copy of what the loss of a micro-batch was computed from; no wait.

        Args:
            host: the batch on the host, with `rows` and `loss_mask`.
            losses_BS: minus the trainer's log-probs.
            mask_BS: 1 on response tokens, else 0; on the device, as `losses_BS` and `loss` are.
            loss: the policy loss, a scalar.
        """
        with torch.no_grad():
            response_BS = torch.where(mask_BS > 0, losses_BS.float(), 0.0)
            values_V = torch.cat([response_BS.reshape(-1), loss.float()[None]])
        self._losses.append(_Loss(host["rows"], host["loss_mask"], values_V))

    def check(self, models: list[Any], iteration: int, same_everywhere: int) -> None:
        """End training on all ranks, before the update, if any rank found a fault.

        Args:
            models: this rank's model chunks, with their gradients reduced.
            iteration: the iteration that is about to update weights, from 1.
            same_everywhere: a number that must be the same on all ranks.
        """
        losses, given, rows = self._losses, self._given, self._rows
        self._losses, self._given, self._rows = [], [], []
        device = torch.cuda.current_device()
        untaken = next((left for layers, used in given if (left := _untaken(layers, used))), [])
        gradient = self._largest_gradient(models, device)
        nothing = gradient.new_zeros(0)
        places_J, values_J = _wrong_places(losses) if losses else (nothing, nothing)
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        weight = _weight(bool(untaken), places_J, gradient, rank, size)
        # One MAX over ranks finds the largest x and the largest -x, which is minus the smallest x.
        # If the sum of these two is 0, x is the same on all ranks.
        same = torch.tensor([same_everywhere, -same_everywhere]).to(device, non_blocking=True)
        over_ranks = torch.cat([weight.to(torch.int64)[None], same])
        if size > 1:
            torch.distributed.all_reduce(over_ranks, torch.distributed.ReduceOp.MAX)
        on_device = torch.cat([over_ranks.double(), weight[None].double(), places_J, values_J])
        on_host = on_device.cpu().numpy()  # the one wait
        heaviest, most, minus_least, own = on_host[:4]
        if most != -minus_least:
            refuse(
                f"{self.store.directories[0]}: the ranks do not see the same shards in this "
                "store: do not change a store while training runs, and give every node the same "
                "folder",
                speaks=rank == 0,
            )
        if heaviest:
            places, values = np.split(on_host[4:], 2)
            message = self._describe(untaken, losses, places, values, models, rows)
            refuse(f"{message}. Iteration {iteration} changed no weight", heaviest == own)

    def _largest_gradient(self, models: list[Any], device: Any) -> Tensor:
        """The largest absolute gradient on this rank; NaN if any is not finite.

        It is 0 if `scaled`, or if the rank has no gradient.
        """
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

    def _describe(
        self,
        untaken: list[int],
        losses: list[_Loss],
        places: np.ndarray,
        values: np.ndarray,
        models: list[Any],
        rows: list[Tensor],
    ) -> str:
        """The error message for this rank's fault; it names layers, a token or a parameter.

        Args:
            untaken: the layers in which no router took its routes.
            places, values: what `_wrong_places` returned.
            rows: the row ids of the step's micro-batches.
        """
        if untaken:
            return (
                f"the routes of layers {untaken} were given, and no router took them. {WHY_UNTAKEN}"
            )
        for loss, place, value in zip(losses, places, values, strict=True):
            if place < 0:
                continue
            of_token = place < loss.rows_BS.numel()
            # The last value is the policy loss. Where it alone is not finite, the micro-batch is
            # named by its first response token.
            position = int(place) if of_token else int(loss.mask_BS.reshape(-1).argmax())
            rollout, token = self.store.locate(int(loss.rows_BS.reshape(-1)[position]))
            # position t of the input predicts token t + 1
            name = f"{self.store.name(rollout)}, token {token + 1}"
            if of_token:
                return f"{name}: the trainer's log-prob is {-value:g}, which is not finite"
            return (
                f"the policy loss is not finite, in the micro-batch with {name} as its first "
                "response token"
            )
        names = (name for model in models for name in _wrong_parameters(model))
        return (
            f"the gradient of {next(names, 'a parameter')} is not finite, in a step on "
            f"{self._rollouts(rows)}"
        )

    def _rollouts(self, rows: list[Tensor]) -> str:
        """The names of the first and the last rollout that this rank used in the step."""
        used = torch.cat([rows_BS.reshape(-1) for rows_BS in rows]) if rows else torch.zeros(0)
        used = used[used >= 0]  # -1 is padding
        if not len(used):
            return f"rollouts of {self.store.directories[0]}"
        first, last = (self.store.locate(int(row))[0] for row in (used.min(), used.max()))
        return f"{self.store.name(first)} to {self.store.name(last)}"


def _weight(untaken: bool, places_J: Tensor, gradient: Tensor, rank: int, size: int) -> Tensor:
    """A number for this rank's fault, 0 without a fault; the rank with the largest number reports.

    Untaken routes have the largest numbers, then come losses, then gradients, because a loss that
    is not finite gives gradients that are not finite. Of ranks with the same kind of fault the
    lowest rank reports. Example with 4 ranks: rank 1 has a wrong gradient (4 - 1 = 3) and rank 2 a
    wrong loss (2 * 4 - 2 = 6), so rank 2 reports.
    """
    weight = torch.where(torch.isfinite(gradient), 0, size - rank)
    weight = torch.where((places_J >= 0).any(), 2 * size - rank, weight)
    return torch.full_like(weight, 3 * size - rank) if untaken else weight


def _untaken(layers: list[int], used: Counter[int]) -> list[int]:
    return [layer for layer in layers if not used[layer]]


def _gradient_buffers(model: Any) -> list[Tensor]:
    """The flat gradient buffers of DistributedDataParallel, else the gradient of each parameter."""
    flat: list[Any] = []
    for name in ("buffers", "expert_parallel_buffers"):
        # `buffers` is a list in DistributedDataParallel, and a method in other torch modules
        held = getattr(model, name, None)
        flat += held if isinstance(held, list) else []
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
