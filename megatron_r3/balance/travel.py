"""How the weights of hot experts travel to their guests, and the gradients back.

Layers with experts of the same shapes share two sets of slots, so that the weights of the next
layer can travel while this layer computes. In the backward pass the weights are sent again, because
other layers have used the slots since. So guests need memory for the guests' weights of two layers,
and for what is being sent: weights and gradients of one layer.

A guest's home is the expert that it copies, on the expert's own rank. Autograd sends the gradients
home, because for autograd a guest's weights are a function of the home's parameters. When Megatron
reads the gradient of a home's parameter, it is already summed over the tokens of home and guests.
So data parallelism, the distributed optimizer, clipping and checkpoints need no change for guests.

All ranks of the group, also those without a guest, make all calls of this file in the same order.
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
    """Which weights are in a set of slots: those of one layer in one forward pass.

    Attributes:
        forward_pass: number of the pass, unique in the process.
        layer: number of the layer, unique in the process, over all models.
        turn: the number of the layer's call with its micro-batch; a recompute is another call.
    """

    forward_pass: int
    layer: int
    turn: int


@dataclass(frozen=True)
class Trip:
    """What is needed to send the weights of one layer to its guests, also a second time.

    Attributes:
        stay: which weights these are.
        guests: which ranks have guests of which experts.
        weights: returns the parameters of each of this rank's own experts, in the order in which a
            slot has them. It is called when the weights are sent; the parameters must then be
            gathered for this step.
    """

    stay: Stay
    guests: LayerGuests
    weights: Callable[[], Sequence[Sequence[Tensor]]]


@dataclass
class _Set:
    """A set of slots `[slots, numel]`, and which weights are in the set or on their way to it."""

    buffer: Tensor
    stay: Stay | None = None
    arriving: tuple[Any, Tensor] | None = None  # the collective, and what it sends


@dataclass
class Slots:
    """The guest slots of a rank, for all layers with experts of the same shapes.

    Attributes:
        group: a process group of the ranks that share the experts. Nothing else uses the group, so
            no other collective gets between the collectives of the slots.
        shapes: the shapes of the parameters of one expert.
        buffer: `[2, slots, numel]`, two sets of slots.
    """

    group: Any
    shapes: list[torch.Size]
    buffer: Tensor
    _sets: list[_Set] = field(init=False)
    _going_home: tuple[Any, Tensor, Tensor] | None = None  # the collective, its input, its output

    def __post_init__(self) -> None:
        self._sets = [_Set(buffer) for buffer in self.buffer]

    @property
    def sizes(self) -> list[int]:
        """How many numbers each parameter of an expert has."""
        return [shape.numel() for shape in self.shapes]

    def send(self, trip: Trip) -> _Set:
        """Begin to send a layer's weights to a set of slots; return the set.

        Nothing is sent if the weights are there or on their way. Else `_sets[1]`, which was fetched
        less recently than `_sets[0]`, is overwritten.
        """
        for slots in self._sets:
            if slots.stay == trip.stay:
                return slots
        slots = self._sets[1]
        if slots.arriving is not None:
            # These weights were sent ahead for a layer, but another layer was called instead.
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
        """Wait for the weights of a layer, and return them: `[guests of this rank, numel]`."""
        slots = self.send(trip)
        if slots.arriving is not None:
            slots.arriving[0].wait()
            slots.arriving = None
        self._sets = [slots, *(other for other in self._sets if other is not slots)]
        return slots.buffer[: sum(trip.guests.receives)]

    def of_stay(self, stay: Stay) -> Tensor:
        """The set of slots that holds the weights of `stay`; they must have been fetched."""
        for slots in self._sets:
            if slots.stay == stay and slots.arriving is None:
                return slots.buffer
        raise AssertionError(f"the guest slots hold {[s.stay for s in self._sets]}, not {stay}")

    def send_home(self, guests: LayerGuests, grads: Tensor) -> None:
        """Begin to send the gradients of guests home.

        Args:
            grads: the gradients of this rank's guests, concatenated: `[guests * numel]`.
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
        """Wait for the gradients of this rank's experts from their guests, and return them.

        Their shape is `[guests elsewhere, numel]`, in the order of `guests.sends`.
        """
        assert self._going_home is not None, "no gradients are on their way home"
        (work, _, home), self._going_home = self._going_home, None
        work.wait()
        return home

    def kept_elsewhere(self, stay: Stay) -> AbstractContextManager[Any]:
        """Inside the block autograd saves no weights of guests for the backward pass.

        Instead of the weights autograd saves their offset in their set of slots. In the backward
        pass autograd reads the weights at this offset of the set that holds `stay` by then, so
        `stay` must have been fetched again. Autograd does not detect that a tensor which was saved
        inside the block is changed in place.
        """
        begin = self.of_stay(stay).data_ptr()
        end = begin + self.buffer[0].numel() * self.buffer.element_size()

        def keep(tensor: Tensor) -> Tensor | _Place:
            if tensor.dtype == self.buffer.dtype and begin <= tensor.data_ptr() < end:
                first = (tensor.data_ptr() - begin) // self.buffer.element_size()
                return _Place(tuple(tensor.shape), tensor.stride(), first)
            # Detached, because a function that saves its own output would be a reference cycle.
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
    """Forward: the weights of guests. Backward: the gradients of guests, for the homes' parameters.

    Autograd hands no gradients of the guests' weights to `backward`, because `Homecoming` has sent
    those gradients home. `backward` waits for them.

    The hidden states are an input too. So `backward` is called on every rank, and only once the
    layer's other gradients are there.

    All parameters of this rank's experts are inputs, even without any guest. Data parallelism
    reduces a bucket as soon as the bucket's last gradient is there. If only the parameters of
    experts with guests were inputs, two ranks that hold the same experts, but have sent different
    ones to guests, would complete gradients in different orders, and one reduction would mix
    buckets. With all parameters as inputs every rank completes the gradients of a layer at one
    point: after this function.
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
    """Forward: changes nothing. Backward: the gradients of guests begin to travel home.

    The function stands between dispatch and experts, and the hidden states are an input too. So
    `backward` is called on every rank, and the gradients travel while the dispatch's backward pass
    sends those of the hidden states.
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
    """Forward: changes nothing. Backward: fetches the weights again for the guests' backward pass.

    `backward` then begins to send the weights of the layer before.
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
