"""Whole tensors on one rank, out of the pieces of all ranks.

No rank holds more than its part of the model, the tensors that are gathered at the time, and one
message.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_r3.weights.all_ranks import everyones, my_rank, receive, send
from megatron_r3.weights.pieces import Piece, Place

MESSAGE = 1 << 22  # bytes of a message, unless a single piece is longer
Dtypes = Mapping[Place, torch.dtype]


@dataclass(frozen=True)
class Part:
    """What a rank has of a tensor: where its part begins, and the shape of the part."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the part lies in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class Whole:
    """A tensor's shape, and all parts of it, each once."""

    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


Plan = dict[Place, Whole]


def plan_of(pieces: Sequence[Piece]) -> Plan:
    """Which rank has which parts of which tensors. All ranks call it.

    Args:
        pieces: this rank's.

    Returns:
        Every tensor of the model, in Megatron's order; the same on all ranks.

    Raises:
        ValueError: the parts of a tensor do not make it whole; the same on all ranks.
    """
    mine = [(p.place, p.shape, p.offset, tuple(p.tensor.shape)) for p in pieces if p.is_first]
    plan: Plan = {}
    for rank, theirs in enumerate(everyones(mine)):
        for place, shape, offset, part in theirs:
            plan.setdefault(place, Whole(shape)).parts.append(Part(rank, offset, part))
            if plan[place].shape != shape:
                raise ValueError(f"{place} is {shape} on rank {rank}, elsewhere another shape")
    for place, whole in plan.items():
        held = sum(math.prod(part.shape) for part in whole.parts)
        offsets = {part.offset for part in whole.parts}
        if held != math.prod(whole.shape) or len(offsets) != len(whole.parts):
            raise ValueError(
                f"the ranks' parts of {place} do not make a tensor of {whole.shape}: {whole.parts}"
            )
    return plan


def holders(plan: Plan, places: Sequence[Place]) -> list[int]:
    """The ranks that hold a part of some of these tensors, in order; the first is to gather them.

    The first of them, not a fixed rank, so that pipeline stages gather their layers at once.
    """
    return sorted({part.rank for place in places for part in plan[place].parts})


def gather(
    plan: Plan, pieces: Mapping[Place, Sequence[Piece]], places: Sequence[Place], dtypes: Dtypes
) -> dict[Place, Tensor]:
    """Whole tensors on the first of their holders. All holders call it, in the same order.

    Args:
        pieces: of this rank.
        places: which tensors.
        dtypes: of the result, by place.

    Returns:
        The tensors, on the host; none on ranks other than the first holder.
    """
    me, (writer, *others) = my_rank(), holders(plan, places)
    if me != writer:
        for batch in _messages(plan, places, me, dtypes):
            by_offset = {(p.place, p.offset): p.tensor for p in _first(pieces, places)}
            send([by_offset[at, p.offset].to(dtypes[at]) for at, p in batch], writer)
        return {}
    wholes = {at: torch.empty(plan[at].shape, dtype=dtypes[at]) for at in places}
    for piece in _first(pieces, places):
        part = Part(me, piece.offset, tuple(piece.tensor.shape))
        wholes[piece.place][part.slices].copy_(piece.tensor)
    for rank in others:
        for batch in _messages(plan, places, rank, dtypes):
            shapes = [(part.shape, dtypes[at]) for at, part in batch]
            for (at, part), tensor in zip(batch, receive(shapes, rank), strict=True):
                wholes[at][part.slices].copy_(tensor)
    return wholes


def _first(pieces: Mapping[Place, Sequence[Piece]], places: Sequence[Place]) -> Iterator[Piece]:
    return (piece for place in places for piece in pieces.get(place, ()) if piece.is_first)


def _messages(
    plan: Plan, places: Sequence[Place], rank: int, dtypes: Dtypes
) -> Iterator[list[tuple[Place, Part]]]:
    """What a rank sends of these tensors, message by message; both sides compute the same."""
    batch: list[tuple[Place, Part]] = []
    size = 0
    for place in places:
        for part in plan[place].parts:
            if part.rank != rank:
                continue
            more = math.prod(part.shape) * dtypes[place].itemsize
            if batch and size + more > MESSAGE:
                yield batch
                batch, size = [], 0
            batch.append((place, part))
            size += more
    if batch:
        yield batch


def by_place(pieces: Sequence[Piece]) -> dict[Place, list[Piece]]:
    """Pieces by the tensor that they are parts of."""
    found: dict[Place, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.place].append(piece)
    return dict(found)
