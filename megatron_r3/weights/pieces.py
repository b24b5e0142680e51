"""The parts of a model's tensors that this rank holds, under names that are the same in any layout.

For distributed checkpoints Megatron describes every tensor of a model (`sharded_state_dict`) by a
key, the shape of the whole tensor, and the offset of this rank's part. This file reads that
description, so no code of megatron_r3/weights depends on how Megatron splits a model over ranks.

Megatron's keys differ between models and layer specs. A `Place` removes three differences:

- A layer's tensor has an axis for the layer or, if layers differ (a dense first layer), the
  layer's number in its key. A `Place` has the number as a field.
- An expert's tensor has an axis for the expert. A `Place` has the expert as a field.
- Transformer Engine keeps the weight of a norm in the linear layer behind the norm, and Megatron's
  local layers use the same keys. A `Place` names the norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_r3.replay.layers import unwrapped

# `decoder.layers.3.mlp.router.weight` or `decoder.layers.mlp.router.weight`
_LAYER = re.compile(r"((?:decoder|mtp)\.layers\.)(?:(\d+)\.)?(.+)")
# how the key of a norm's weight begins if the linear layer behind the norm holds the weight, and
# how the key in a `Place` begins
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_EXPERTS = ".mlp.experts."
ADAPTER = ".adapter."  # in the key of a tensor of a LoRA adapter


@dataclass(frozen=True, order=True)
class Place:
    """One whole tensor of a Megatron model.

    Attributes:
        key: Megatron's checkpoint key without the layer's number, e.g.
            `decoder.layers.mlp.router.weight`.
        layer: the layer's index from 0; None outside of the layers.
        expert: the expert's index from 0; None for a tensor of no expert.
    """

    key: str
    layer: int | None = None
    expert: int | None = None

    def __str__(self) -> str:
        """The name for messages: `decoder.layers.3.mlp.router.weight` or `... of expert 5`."""
        prefix, dot, name = self.key.partition(".layers.")
        key = self.key if self.layer is None else f"{prefix}{dot}{self.layer}.{name}"
        return key if self.expert is None else f"{key} of expert {self.expert}"


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor.

    Attributes:
        shape: the shape of the whole tensor, without axes for layers and experts.
        offset: for each axis of the whole tensor, the index at which the part begins.
        tensor: the part; it shares its memory with the model's parameter.
        is_first: whether this rank may write the part; other ranks may hold the same part.
    """

    place: Place
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    is_first: bool


def pieces_of(models: Sequence[torch.nn.Module]) -> list[Piece]:
    """The pieces of this rank's model chunks.

    A parameter may be several pieces. Example: if tensor parallelism splits a gated linear layer, a
    rank's parameter is two pieces: one in the gate's half of the whole tensor, one in the other
    half.

    Args:
        models: the chunks, in Megatron's wrappers or without.

    Raises:
        ValueError: the model is sharded by FSDP, has weights in a special format (fp8), or has
            several layers or experts in one tensor.
    """
    for model in models:
        _refuse_fsdp(model)
    chunks: list[Any] = [unwrapped(model) for model in models]
    states = [chunk.sharded_state_dict() for chunk in chunks]
    return [_piece(sharded) for sharded in sharded_tensors(states)]


def _refuse_fsdp(model: Any) -> None:
    """Refuse FSDP: its ranks hold ranges of flattened parameters."""
    while model is not None:
        if "FSDP" in (name := type(model).__name__) or "FullySharded" in name:
            raise ValueError(
                f"the model is wrapped in {name}: weights sharded by FSDP cannot be moved to or "
                "from a transformers directory; train without FSDP"
            )
        model = getattr(model, "module", None)


def sharded_tensors(state: Any) -> Iterator[Any]:
    """Yield Megatron's ShardedTensors in a sharded state dict.

    Any other object in the dict is an extra state of Transformer Engine, and no weight.
    """
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for value in state:
            yield from sharded_tensors(value)
    elif hasattr(state, "build"):  # a ShardedTensorFactory: makes two tensors of gate and up
        yield from sharded_tensors(state.build())
    elif hasattr(state, "local_shape"):
        yield state


def _piece(sharded: Any) -> Piece:
    """A Megatron ShardedTensor (megatron/core/dist_checkpointing/mapping.py) as a piece."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    key, offset = sharded.key, tuple(sharded.global_offset)
    axes = sharded.prepend_axis_num  # how many of the first axes are layer and expert
    rest = list(offset[:axes])
    layer = expert = None
    if match := _LAYER.fullmatch(key):
        prefix, number, name = match.groups()
        layer = int(number) if number else rest.pop(0) if rest else None
        for inside, norm in NORMS.items():
            name = name.replace(inside, norm)
        key = prefix + name
    if rest and _EXPERTS in key:
        expert = rest.pop(0)
    tensor = sharded.data
    if rest or (expert is None and _EXPERTS in key) or (match and layer is None):
        raise ValueError(
            f"{sharded.key}: several layers or experts are in one tensor of this model (legacy "
            "grouped GEMM?), which cannot be moved to or from a transformers directory"
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_floating_point():
        raise ValueError(
            f"{sharded.key} is a {type(tensor).__name__} in a special format (fp8 parameters, "
            "FSDP?), which cannot be moved to or from a transformers directory"
        )
    return Piece(
        Place(key, layer, expert),
        tuple(sharded.global_shape)[axes:],
        offset[axes:],
        tensor.detach(),
        # On every expert-parallel rank but the first, Megatron-Bridge marks an expert's adapter as
        # the copy of one that another rank holds. No other rank holds it, so this rank writes it.
        ADAPTER in key or is_main_replica(sharded.replica_id),
    )
