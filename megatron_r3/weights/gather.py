"""Gather whole tensors on one rank, from the pieces of all ranks.

The gathering rank needs memory for its part of the model, for the tensors that it gathers in one
call, and for one part that another rank sends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_r3.weights.all_ranks import everyones, my_rank, receive, send
from megatron_r3.weights.pieces import ADAPTER, Piece, Place

Dtypes = Mapping[Place, torch.dtype]


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one rank has: where the part begins, and its shape."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the part in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class Whole:
    """A tensor's shape, and the parts that make up the tensor without overlap."""

    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


Plan = dict[Place, Whole]


def plan_of(pieces: Sequence[Piece]) -> Plan:
    """Which rank has which parts of which tensors. All ranks must call this function.

    Args:
        pieces: all pieces of this rank.

    Returns:
        Every tensor of the model; the result and its order are the same on all ranks.

    Raises:
        ValueError: the parts do not make up a whole tensor; all ranks raise the same.
    """
    mine = [(p.place, p.shape, p.offset, tuple(p.tensor.shape)) for p in pieces if p.is_first]
    plan: Plan = {}
    for rank, theirs in enumerate(everyones(mine)):
        for place, shape, offset, part in theirs:
            whole = plan.setdefault(place, Whole(shape))
            if whole.shape != shape:
                raise ValueError(f"{place} is {shape} on rank {rank}, {whole.shape} elsewhere")
            # several ranks may give the same part of an adapter; the first rank's counts
            if ADAPTER not in place.key or all(offset != one.offset for one in whole.parts):
                whole.parts.append(Part(rank, offset, part))
    for place, whole in plan.items():
        held = sum(math.prod(part.shape) for part in whole.parts)
        offsets = {part.offset for part in whole.parts}
        if held != math.prod(whole.shape) or len(offsets) != len(whole.parts):
            raise ValueError(
                f"the ranks' parts of {place} do not make a tensor of {whole.shape}: {whole.parts}"
            )
    return plan


def gather(
    plan: Plan, pieces: Mapping[Place, Sequence[Piece]], places: Sequence[Place], dtypes: Dtypes
) -> dict[Place, Tensor]:
    """Gather whole tensors on the lowest rank that holds a part of any of them.

    So pipeline stages gather their layers at the same time. All ranks that hold a part must call
    this function, with the same places in the same order.

    Args:
        pieces: all pieces of this rank, by place.
        places: the tensors to gather.
        dtypes: the dtypes of the result, by place.

    Returns:
        The tensors, on the host; {} on every other rank.
    """
    holders = sorted({part.rank for place in places for part in plan[place].parts})
    me, (writer, *others) = my_rank(), holders
    mine = {
        (piece.place, piece.offset): piece.tensor
        for place in places
        for piece in pieces.get(place, ())
        if piece.is_first
    }
    if me != writer:
        for place, part in _parts(plan, places, me):
            send(mine[place, part.offset].to(dtypes[place]), writer)
        return {}
    wholes = {place: torch.empty(plan[place].shape, dtype=dtypes[place]) for place in places}
    for rank in (me, *others):
        for place, part in _parts(plan, places, rank):
            if rank == me:
                tensor = mine[place, part.offset]
            else:
                tensor = receive(part.shape, dtypes[place], rank)
            wholes[place][part.slices].copy_(tensor)
    return wholes


def _parts(plan: Plan, places: Sequence[Place], rank: int) -> Iterator[tuple[Place, Part]]:
    """The parts of these tensors that `rank` has, in an order that all ranks agree on."""
    return ((at, part) for at in places for part in plan[at].parts if part.rank == rank)


def by_place(pieces: Sequence[Piece]) -> dict[Place, list[Piece]]:
    """The pieces of each tensor, by the tensor's place."""
    found: dict[Place, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.place].append(piece)
    return dict(found)
