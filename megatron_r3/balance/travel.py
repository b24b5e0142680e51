"""How the weights of hot experts travel to their guests, and the gradients back.

Weights lie in slots that all layers of one shape share: two sets of slots, so that the weights of
the next layer can travel while this layer computes. In the backward pass they travel again, because
by then other layers have had the slots. So weights of guests take no more memory than those of two
layers, beside what is being sent: a copy of the weights and of the gradients of one layer.

Autograd brings the gradients home: to it a guest's weights are a function of its home's parameters.
A home parameter has its gradient whole, own tokens and guests', before anything of Megatron looks:
data parallelism, the distributed optimizer, clipping and checkpoints know nothing of guests.

All ranks of the group call everything here in the same order, those without a guest too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_r3.balance.places import LayerGuests


class Stay(NamedTuple):
    """Whose weights are in a set of slots: those of a layer, as they were in a forward pass.

    Attributes:
        forward_pass: number of the pass; no two of a process have the same one.
        layer: a number that no other layer of the process has, of whatever model.
        turn: how often the layer was called with its micro-batch; a recompute is another turn.
    """

    forward_pass: int
    layer: int
    turn: int


@dataclass(frozen=True)
class Trip:
    """What brings the weights of one layer to its guests, once or again.

    Attributes:
        stay: what they are.
        guests: who has guests where.
        weights: the parameters of each of this rank's own experts, in the order in which they lie
            in a slot. It is called when they are sent; by then they must be those of this step.
    """

    stay: Stay
    guests: LayerGuests
    weights: Callable[[], Sequence[Sequence[Tensor]]]


@dataclass
class _Set:
    """A set of slots `[slots, numel]`, and whose weights are in it or on the way."""

    buffer: Tensor
    stay: Stay | None = None
    arriving: tuple[Any, Tensor] | None = None  # the collective, and what it sends


@dataclass
class Slots:
    """The guest slots of a rank, for all layers whose experts have the same parameters.

    Attributes:
        group: of the ranks that share the experts. Nothing else uses it, so that weights on their
            way meet no other collective.
        shapes: of the parameters of one expert.
        buffer: `[2, slots, numel]`, two sets of slots.
    """

    group: Any
    shapes: list[torch.Size]
    buffer: Tensor
    _sets: list[_Set] = field(init=False)
    _going_home: tuple[Any, Tensor, Tensor] | None = None  # the collective, what it sends, brings

    def __post_init__(self) -> None:
        self._sets = [_Set(buffer) for buffer in self.buffer]

    @property
    def sizes(self) -> list[int]:
        """Numbers of each parameter of an expert."""
        return [shape.numel() for shape in self.shapes]

    def send(self, trip: Trip) -> _Set:
        """Begin to fill a set of slots, unless its weights are there or on their way.

        The set that was used less recently is overwritten. It is the second of the two.
        """
        for slots in self._sets:
            if slots.stay == trip.stay:
                return slots
        slots = self._sets[1]
        if slots.arriving is not None:
            # Weights that were sent ahead for a layer, and another layer was called after all.
            slots.arriving[0].wait()
        slots.stay = trip.stay
        guests, numel = trip.guests, self.buffer.shape[2]
        weights = trip.weights() if any(guests.sends) else []
        rows = [
            part.detach().reshape(-1)
            for to in guests.sends
            for expert in to
            for part in weights[expert]
        ]
        sent = torch.cat(rows) if rows else self.buffer.new_empty(0)
        received = slots.buffer[: sum(guests.receives)].view(-1)
        work = torch.distributed.all_to_all_single(
            received,
            sent,
            [count * numel for count in guests.receives],
            [len(to) * numel for to in guests.sends],
            group=self.group,
            async_op=True,
        )
        slots.arriving = work, sent
        return slots

    def fetch(self, trip: Trip) -> Tensor:
        """The slots with the weights of a layer, `[guests of this rank, numel]`, once they came."""
        slots = self.send(trip)
        if slots.arriving is not None:
            slots.arriving[0].wait()
            slots.arriving = None
        self._sets = [slots, *(other for other in self._sets if other is not slots)]
        return slots.buffer[: sum(trip.guests.receives)]

    def of_stay(self, stay: Stay) -> Tensor:
        """The set of slots that holds the weights of a layer."""
        for slots in self._sets:
            if slots.stay == stay and slots.arriving is None:
                return slots.buffer
        raise AssertionError(f"the guest slots hold {[s.stay for s in self._sets]}, not {stay}")

    def send_home(self, guests: LayerGuests, grads: Tensor) -> None:
        """Begin to send the gradients of guests home.

        Args:
            grads: those of this rank's guests, one behind the other `[guests * numel]`.
        """
        assert self._going_home is None, "gradients of another layer are on their way home"
        numel = self.buffer.shape[2]
        counts = [len(to) for to in guests.sends]
        home = grads.new_empty(sum(counts), numel)
        work = torch.distributed.all_to_all_single(
            home.view(-1),
            grads,
            [count * numel for count in counts],
            [count * numel for count in guests.receives],
            group=self.group,
            async_op=True,
        )
        self._going_home = work, grads, home

    def come_home(self) -> Tensor:
        """The gradients of this rank's experts from their guests `[guests elsewhere, numel]`.

        They are in the order of `guests.sends`.
        """
        assert self._going_home is not None, "no gradients are on their way home"
        (work, _, home), self._going_home = self._going_home, None
        work.wait()
        return home

    def kept_elsewhere(self, stay: Stay) -> AbstractContextManager[Any]:
        """Inside the block autograd keeps no weights of guests for the backward pass.

        It keeps where they lay in their set of slots, and takes what lies there when it asks:
        `stay` must have been fetched again by then. Nothing in the block is told of tensors that
        are changed in place before the backward pass, as autograd does it without such a block.
        """
        begin = self.of_stay(stay).data_ptr()
        end = begin + self.buffer[0].numel() * self.buffer.element_size()

        def keep(tensor: Tensor) -> Tensor | _Place:
            if tensor.dtype == self.buffer.dtype and begin <= tensor.data_ptr() < end:
                first = (tensor.data_ptr() - begin) // self.buffer.element_size()
                return _Place(tuple(tensor.shape), tensor.stride(), first)
            # An output of the function that keeps it would keep itself alive, in a circle.
            return tensor.detach()

        def take(kept: Tensor | _Place) -> Tensor:
            if isinstance(kept, _Place):
                slots = self.of_stay(stay)
                return slots.as_strided(
                    kept.shape, kept.stride, slots.storage_offset() + kept.first
                )
            return kept

        return torch.autograd.graph.saved_tensors_hooks(keep, take)


class _Place(NamedTuple):
    """Where a tensor lies in a set of slots."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


class Departure(torch.autograd.Function):
    """Forward: the weights of guests. Backward: their gradients, to the parameters at home.

    Autograd gives no gradients of the weights here: `Homecoming` has sent them home.

    The hidden states go through it, so that every rank is called in the backward pass, and is
    called when the layer's gradients are there.

    All parameters of this rank's experts go in, also those without guests, and where there are no
    guests at all. Data parallelism reduces a bucket of gradients once its last one is there. Two
    ranks that hold the same experts send different ones, as their tokens want, so gradients
    would be there in another order on each, and different buckets would meet in one reduction.
    As it is, every gradient of a layer is there after this function, which is one order on all.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, hidden: Tensor, slots: Slots, trip: Trip | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.slots, ctx.trip, ctx.num_parameters = slots, trip, len(parameters)
        ctx.set_materialize_grads(False)
        if trip is None:
            return (hidden.view_as(hidden),)
        rows = slots.fetch(trip)
        parts = [
            part.view(shape)
            for row in rows
            for part, shape in zip(row.split(slots.sizes), slots.shapes, strict=True)
        ]
        return (hidden.view_as(hidden), *parts)

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor, *_: None) -> tuple[Any, ...]:  # noqa: D102
        if ctx.trip is None:
            return (grad_hidden, None, None, *[None] * ctx.num_parameters)
        slots, guests = ctx.slots, ctx.trip.guests
        home = slots.come_home()
        # An expert with several guests has several gradients. Example: the experts 1 and 4 go to
        # rank 0, 4 goes to rank 2: row 0 is expert 1's, rows 1 and 2 are expert 4's.
        sums: dict[int, Tensor] = {}
        for row, expert in zip(home, (e for to in guests.sends for e in to), strict=True):
            sums[expert] = sums[expert] + row if expert in sums else row
        each = len(slots.shapes)
        of_parameters: list[Tensor | None] = [None] * ctx.num_parameters
        for expert, row in sums.items():
            of_parameters[expert * each : (expert + 1) * each] = [
                part.view(shape)
                for part, shape in zip(row.split(slots.sizes), slots.shapes, strict=True)
            ]
        return (grad_hidden, None, None, *of_parameters)


class Homecoming(torch.autograd.Function):
    """Forward: nothing. Backward: the gradients of guests begin to travel home.

    It stands between dispatch and experts, and the hidden states go through it too. So it is called
    on every rank, and the gradients travel while those of the hidden states go back to their ranks.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, hidden: Tensor, slots: Slots, trip: Trip, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.slots, ctx.trip = slots, trip
        return (hidden.view_as(hidden), *(part.view_as(part) for part in weights))

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor, *grads: Tensor) -> tuple[Any, ...]:  # noqa: D102
        slots = ctx.slots
        flat = [grad.reshape(-1) for grad in grads]
        slots.send_home(ctx.trip.guests, torch.cat(flat) if flat else slots.buffer.new_empty(0))
        return (grad_hidden, None, None, *[None] * len(grads))


class Return(torch.autograd.Function):
    """Forward: nothing. Backward: the weights come again, before the guests' backward needs them.

    Then those of the layer before begin to travel.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, output: Tensor, slots: Slots, trip: Trip, earlier: Trip | None
    ) -> Tensor:
        ctx.slots, ctx.trip, ctx.earlier = slots, trip, earlier
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: D102
        ctx.slots.fetch(ctx.trip)
        if ctx.earlier is not None:
            ctx.slots.send(ctx.earlier)
        return grad, None, None, None
