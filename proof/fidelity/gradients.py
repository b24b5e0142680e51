"""Gradients, cut into pieces as a distributed checkpoint cuts their parameters.

A piece says which slice of which whole tensor it is. So the pieces of all ranks of a layout can be
put together, and compared with the gradients of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Piece:
    """A slice of one whole gradient.

    Attributes:
        name: the checkpoint's name of the parameter.
        whole: the shape of the whole gradient.
        start: where the slice begins on each axis.
        values: float32, the widest type in which Megatron sums gradients.
    """

    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    values: np.ndarray


def collect(models: list[torch.nn.Module], gradients: dict[int, torch.Tensor]) -> list[Piece]:
    """This rank's pieces of the gradients.

    Args:
        gradients: each gradient by the `id()` of its parameter.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
    from megatron.core.utils import unwrap_model

    metadata = ensure_metadata_has_dp_cp_group(None)  # some modules read metadata["dp_cp_group"]
    pieces = []
    for model in models:
        state = unwrap_model(model).sharded_state_dict(prefix="", metadata=metadata)
        state = dict(_with(state, gradients))
        apply_factories(state)
        for tensor in _tensors(state, ShardedTensor):
            values = tensor.data.detach().float().cpu().numpy().copy()
            values = values.reshape((1,) * tensor.prepend_axis_num + values.shape)
            pieces.append(Piece(tensor.key, tensor.global_shape, tensor.global_offset, values))
    return pieces


def of_step(pieces: list[Piece], number: int) -> list[Piece]:
    """Rename the pieces of an optimizer step, so that pieces of several steps can be kept together.

    Args:
        number: the number of the step, from 0. The pieces of step 0 keep their names.
    """
    if not number:
        return pieces
    return [replace(piece, name=f"{piece.name}, step {number + 1}") for piece in pieces]


def _with(state: dict[str, Any], gradients: dict[int, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Put each gradient in the place of its parameter in a state; yield the changed items."""
    for name, item in state.items():
        gradient = gradients.get(id(getattr(item, "data", None)))
        if gradient is not None:
            item.data = gradient
            yield name, item


def _tensors(state: Any, kind: type) -> Iterator[Any]:
    if isinstance(state, kind):
        yield state
    elif isinstance(state, dict):
        for item in state.values():
            yield from _tensors(item, kind)
    elif isinstance(state, list):
        for item in state:
            yield from _tensors(item, kind)


def assemble(pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """Put the pieces of all ranks together into whole gradients, by name.

    Raises:
        AssertionError: a value is missing or NaN, or ranks have different values for it.
    """
    whole: dict[str, np.ndarray] = {}
    for piece in pieces:
        # NaN marks what no piece has filled yet
        into = whole.setdefault(piece.name, np.full(piece.whole, np.nan, np.float32))
        where = tuple(
            slice(start, start + size)
            for start, size in zip(piece.start, piece.values.shape, strict=True)
        )
        known = ~np.isnan(into[where])
        assert (into[where] == piece.values)[known].all(), f"ranks disagree on {piece.name}"
        into[where] = piece.values
    for name, values in whole.items():
        assert not np.isnan(values).any(), f"{name}: values are missing or NaN"
    return {name: torch.from_numpy(values) for name, values in whole.items()}
