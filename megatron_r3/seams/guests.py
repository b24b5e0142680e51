"""Called by patch 101: a MoE layer in which hot experts have copies (guests) on other ranks.

A place of a rank is one of its own experts or one of its guest slots. The layer gets a dispatcher
that takes places for experts. If a micro-batch has no guests in a layer, the slots are empty, and
the layer's output is bitwise the same as without slots.

Shape suffixes (docs/glossary.md): E, H, I, P, T.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_r3.balance.experts import checked_weights, compute_with_guests, expert_weights
from megatron_r3.balance.guest_refusals import guest_refusals
from megatron_r3.balance.parameters import parameters_are_there, wait_for_parameters
from megatron_r3.balance.places import own_places, sizes_with_guests
from megatron_r3.balance.travel import Departure, Homecoming, Return, Slots, Stay, Trip
from megatron_r3.replay.microbatch import ACTIVE, MicrobatchRoutes
from megatron_r3.replay.planner import OTHER_SIZES

__all__ = ["GuestLayer", "guest_refusals"]

OTHER_SIZES["moe_router_replay_guest_slots"] = sizes_with_guests


class GuestLayer:
    """Sends a MoE layer's tokens to guests, and computes with own experts and guests.

    Attributes:
        dispatcher: replaces the layer's own dispatcher; its experts are places.
        watchers: called before the experts compute, with the hidden states `[P, H]` that came, how
            many of them are for each place of this rank, and the expert in each place, -1 for none.
    """

    def __init__(self, layer: Any, pg_collection: Any) -> None:
        config = layer.config
        self._layer = layer
        self._num_slots = config.moe_router_replay_guest_slots
        self._num_local = layer.num_local_experts
        ranks, rank = layer.ep_group.size(), layer.ep_group.rank()
        places = self._num_local + self._num_slots
        wide = copy.copy(config)  # not `replace`, which would run `__post_init__` again
        wide.num_moe_experts = ranks * places
        self.dispatcher = type(layer.token_dispatcher)(
            places,
            list(range(rank * places, (rank + 1) * places)),
            config=wide,
            pg_collection=pg_collection,
        )
        own_E = own_places(config.num_moe_experts, ranks, self._num_slots)
        self._own_E = torch.from_numpy(own_E)
        self._shared = _shared_by(layer.ep_group)
        self._id = next(_ids)
        self._visit: _Visit | None = None
        # the layers before and after this one, once a forward pass has shown them (`_follow`)
        self._previous: GuestLayer | None = None
        self._next: GuestLayer | None = None
        self.watchers: list[Callable[[Tensor, Tensor, list[int]], None]] = []

    def invite(
        self, hidden: Tensor, probs_TE: Tensor, map_TE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens to places instead of experts, and bring the guests' weights to their slots.

        Returns:
            The hidden states, and probabilities and routing map `[T, I]`.

        Raises:
            ValueError: moe_router_replay_guest_slots was changed after the layer was made, or the
                experts have weights that cannot be sent to guests (`checked_weights`).
        """
        # Ranks that hold the same experts (data parallel) may have guests in different layers, but
        # must gather parameters, and reduce gradients, in the same order. So every rank waits here
        # and calls `_depart`, with guests or without.
        wait_for_parameters(self._layer.experts)
        microbatch = self._layer.router.router_replay.replayed_microbatch()
        forward_pass = ACTIVE.get()
        trip = earlier = ahead = None
        if microbatch is not None and forward_pass is not None:
            turn = microbatch.used[self._number]
            # not in a recompute, in which layers may be called in another order
            if turn == 1:
                self._follow(forward_pass.number)
            trip, earlier, ahead = (
                None if layer is None else layer._trip_in(microbatch, forward_pass.number, turn)
                for layer in (self, self._previous, self._next if turn == 1 else None)
            )
        hidden, *weights = self._depart(hidden, trip)
        if trip is None:
            self._visit = None
            probs_TI, map_TI = self._to_own(probs_TE, map_TE)
        else:
            self._visit = _Visit(trip, weights, earlier)
            probs_TI, map_TI = trip.guests.to_places(probs_TE, map_TE)
        after = self._next
        if ahead is not None and after is not None and parameters_are_there(after._layer.experts):
            after._slots.send(ahead)
        return hidden, probs_TI, map_TI

    def compute(
        self, hidden_PH: Tensor, tokens_per_place: Tensor, probs_P: Tensor
    ) -> tuple[Tensor, None]:
        """The output `[P, H]` of own experts and guests, for tokens in the order of places.

        None stands for the bias that experts may return; a config with such a bias is refused.
        """
        visit, self._visit = self._visit, None
        if self.watchers:
            visiting = [] if visit is None else visit.trip.guests.expert_of_slot
            first = self._layer.local_expert_indices[0]
            in_places = [*range(first, first + self._num_local), *visiting]
            in_places += [-1] * (self._num_local + self._num_slots - len(in_places))
            for watch in self.watchers:
                watch(hidden_PH, tokens_per_place, in_places)
        experts = self._layer.experts
        each = len(self._slots.shapes)  # the parameters of a guest
        num_guests = 0 if visit is None else len(visit.weights) // each
        of_all = tokens_per_place[: self._num_local + num_guests]
        assert not any(tokens_per_place[len(of_all) :].tolist()), "tokens for an empty guest slot"
        if visit is None:
            return experts(hidden_PH, of_all, probs_P)[0], None
        slots, trip = self._slots, visit.trip
        hidden_PH, *weights = Homecoming.apply(hidden_PH, slots, trip, *visit.weights)
        guests = [weights[i : i + each] for i in range(0, len(weights), each)]
        with slots.kept_elsewhere(trip.stay):
            output = compute_with_guests(experts, guests, hidden_PH, of_all, probs_P)
        return Return.apply(output, slots, trip, visit.earlier), None

    @property
    def expert_I(self) -> np.ndarray:
        """The expert in each place, from `invite` to `compute`; 0 in an empty slot."""
        if self._visit is not None:
            guests = self._visit.trip.guests
            return guests.packed[: guests.num_places].numpy()
        expert_I = np.zeros(self.dispatcher.num_experts, np.int64)
        expert_I[self._own_E.cpu()] = np.arange(len(self._own_E))
        return expert_I

    def _depart(self, hidden: Tensor, trip: Trip | None) -> tuple[Tensor, ...]:
        """The hidden states, and the weights of this rank's guests, one after the other."""
        if not torch.is_grad_enabled() and trip is None:
            return (hidden,)
        if torch.is_grad_enabled() and trip is not None and not hidden.requires_grad:
            # So autograd calls `Departure.backward` on every rank, even if all layers below are
            # frozen.
            hidden = hidden.detach().requires_grad_()
        parameters = [part for weights in self._all_weights() for part in weights]
        return Departure.apply(hidden, self._slots, trip, *parameters)

    def _to_own(self, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and map `[T, I]` without guests: tokens go to the experts' own places."""
        shape = len(probs_TE), self.dispatcher.num_experts
        own_E = self._own_E = self._own_E.to(probs_TE.device)
        probs_TI = probs_TE.new_zeros(shape).index_copy(1, own_E, probs_TE)
        return probs_TI, map_TE.new_zeros(shape).index_copy(1, own_E, map_TE)

    def _trip_in(self, microbatch: MicrobatchRoutes, forward_pass: int, turn: int) -> Trip | None:
        """How guests' weights travel in this layer; None if the micro-batch has no guests in it.

        Args:
            turn: how often the layer was called with the micro-batch. Example: it is 1 in a forward
                pass, and 2 in the recompute of that pass.
        """
        plan = None if microbatch.plan is None else microbatch.plan.get(self._number)
        if plan is None or plan.guests is None:
            return None
        if plan.guests.num_places != self.dispatcher.num_experts:
            raise ValueError(
                f"moe_router_replay_guest_slots was {self._num_slots} when layer {self._number} "
                "was made, and another number when its guests were planned; do not change it"
            )
        return Trip(Stay(forward_pass, self._id, turn), plan.guests, self._all_weights)

    def _follow(self, forward_pass: int) -> None:
        """Link this layer with the layer that the forward pass called just before."""
        global _last, _last_pass
        before, number = _last() if _last is not None else None, _last_pass
        _last, _last_pass = weakref.ref(self), forward_pass
        if before is not None and number == forward_pass:
            before._next, self._previous = self, before

    @property
    def _number(self) -> int:
        return int(self._layer.router.layer_number)

    @cached_property
    def _slots(self) -> Slots:
        """The slots of this layer. Layers of a group share slots if their parameters are alike."""
        weights = checked_weights(self._layer.experts)[0]
        first, shapes = weights[0], [part.shape for part in weights]
        key = (tuple(shapes), first.dtype, first.device, self._num_slots)
        if key not in self._shared.slots:
            numel = sum(shape.numel() for shape in shapes)
            buffer = first.new_empty(2, self._num_slots, numel, requires_grad=False)
            self._shared.slots[key] = Slots(self._shared.group, shapes, buffer)
        return self._shared.slots[key]

    def _all_weights(self) -> list[list[Tensor]]:
        return expert_weights(self._layer.experts)


@dataclass
class _Shared:
    """What all layers with experts on the same ranks share.

    Attributes:
        group: a process group of these ranks, which only sends weights and their gradients.
        slots: by the shapes, dtype and device of the parameters, and the number of slots.
    """

    group: Any
    slots: dict[Any, Slots] = field(default_factory=dict)


_ids = count()
_shared: WeakKeyDictionary[Any, _Shared] = WeakKeyDictionary()
# the layer that was called last in a forward pass, not a recompute, and the pass's number
_last: weakref.ref[GuestLayer] | None = None
_last_pass = 0


class _Visit(NamedTuple):
    """What a layer keeps between `invite` and `compute`.

    Attributes:
        trip: how the guests' weights of this layer travel.
        weights: the parameters of this rank's guests, guest by guest.
        earlier: the trip of the layer before; the backward pass needs that layer's weights next.
    """

    trip: Trip
    weights: list[Tensor]
    earlier: Trip | None


def _shared_by(ep_group: Any) -> _Shared:
    """The `_Shared` of a group; the first layer makes it, on all ranks of the group together."""
    if ep_group not in _shared:
        ranks = torch.distributed.get_process_group_ranks(ep_group)
        group = torch.distributed.new_group(ranks, use_local_synchronization=True)
        _shared[ep_group] = _Shared(group)
    return _shared[ep_group]
