"""Where the experts of a model are: its experts in another order, layer by layer.

A placement gives each expert of a MoE layer another place. It is a symmetry of the model: the
router's rows and the experts change places together. Ranks hold the places in their order, so a
placement decides which experts share a rank and a node.

Example with 4 experts on 2 ranks: with `place_LE[0] = [0, 2, 1, 3]` rank 0 (places 0 and 1) has the
experts 0 and 2, and a token whose sampler took the experts 0 and 1 goes to the places 0 and 2.

A checkpoint with placed experts says so in Megatron's arguments (`ATTRIBUTE`), which are saved in
it. A store of rollouts and a transformers directory never have placed experts: a sampler is given
an export, not the checkpoint.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.rollout import MoEShape
from megatron_r3.untrusted import quoted, read_json

FORMAT = 1
ATTRIBUTE = "moe_expert_placement"  # of Megatron's arguments


@dataclass(frozen=True)
class Placement:
    """Where each expert of each MoE layer is.

    Attributes:
        moe_layers: the 0-based numbers of the MoE layers, ascending.
        place_LE: int64, the place of each expert; each row has every number from 0 to E - 1 once.
    """

    moe_layers: tuple[int, ...]
    place_LE: np.ndarray

    @property
    def num_experts(self) -> int:
        """E, of each MoE layer."""
        return int(self.place_LE.shape[1])

    @cached_property
    def expert_LE(self) -> np.ndarray:
        """The inverse, int64 `[L, E]`: which expert is at each place."""
        return np.argsort(self.place_LE, axis=1)

    def of_layer(self, layer: int) -> np.ndarray | None:
        """The places of a layer's experts `[E]`; None for a layer without routed experts.

        Args:
            layer: from 0.
        """
        if layer not in self.moe_layers:
            return None
        return self.place_LE[self.moe_layers.index(layer)]

    def placed(self, ids_LTK: np.ndarray, layers: Sequence[int]) -> np.ndarray:
        """Routes of a sampler as places, in the dtype of the routes.

        Args:
            ids_LTK: expert ids of some layers.
            layers: which, as indices of `moe_layers`.
        """
        placed_LTK = np.empty_like(ids_LTK)  # a pipeline stage may have no MoE layer at all
        for layer, ids_TK, placed_TK in zip(layers, ids_LTK, placed_LTK, strict=True):
            placed_TK[...] = self.place_LE[layer][ids_TK]
        return placed_LTK

    def loads(self, load_LE: np.ndarray) -> np.ndarray:
        """The loads of the places, of the loads of the experts `[..., L, E]`."""
        at = np.broadcast_to(self.expert_LE, load_LE.shape)
        return np.take_along_axis(load_LE, at, axis=-1)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers: what a file has, and what a checkpoint has in its arguments."""
        layers = list(self.moe_layers)
        return {"format": FORMAT, "moe_layers": layers, "place": self.place_LE.tolist()}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Placement:
        """The inverse of `to_json`.

        Args:
            where: what errors name.

        Raises:
            ValueError: it is no placement; the message names the layer and the place.
        """
        if not isinstance(value, Mapping) or value.get("format") != FORMAT:
            raise ValueError(
                f"{where}: no placement of format {FORMAT}, which megatron-r3 rollouts place writes"
            )
        layers, rows = value.get("moe_layers"), value.get("place")
        if not isinstance(rows, list) or not isinstance(layers, list) or len(rows) != len(layers):
            raise ValueError(f"{where}: moe_layers and place must be lists of one length")
        experts = len(rows[0]) if rows and isinstance(rows[0], list) else 0
        if wrong := MoEShape(experts, 1, tuple(layers)).wrong_shape():
            raise ValueError(f"{where}: {wrong}")
        for layer, row in zip(layers, rows, strict=True):
            whole = isinstance(row, list) and all(type(place) is int for place in row)
            if not whole or sorted(row) != list(range(experts)):
                raise ValueError(
                    f"{where}: layer {layer}: place is {quoted(row)}; expected each number from 0 "
                    f"to {experts - 1} once"
                )
        return cls(tuple(layers), np.array(rows, np.int64))

    @classmethod
    def read(cls, file: Path) -> Placement:
        """Read a placement that `write` has written.

        Raises:
            ValueError, OSError: there is none.
        """
        return cls.from_json(read_json(file.read_bytes(), str(file)), str(file))

    def write(self, file: Path) -> None:
        """Write it as JSON, whole or not at all."""
        part = file.with_name(f".{file.name}.part")
        try:
            part.write_text(json.dumps(self.to_json()) + "\n")
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)

    def check_layers(self, where: str, moe_layers: Sequence[int], num_experts: int | None) -> None:
        """Refuse a placement of another model.

        Args:
            where: the placement, for the error.
            moe_layers, num_experts: of the model; None experts in a dense model.

        Raises:
            ValueError: it says what differs.
        """
        if num_experts != self.num_experts or tuple(moe_layers) != self.moe_layers:
            raise ValueError(
                f"{where}: a placement of {self.num_experts} experts in the layers "
                f"{list(self.moe_layers)}; the model has {num_experts or 'no'} experts in the "
                f"layers {list(moe_layers)}: give the placement of this model's rollouts"
            )

    def check_groups(self, where: str, num_groups: int | None) -> None:
        """Refuse a placement that takes groups of experts apart.

        A router with groups (DeepSeek-V3) first takes the best groups of experts, by their places:
        experts of one group must stay together, or other experts would be taken.

        Args:
            num_groups: of the router; None or 1 where it has none.

        Raises:
            ValueError: it names the layer and the group.
        """
        if not num_groups or num_groups == 1:
            return
        size = self.num_experts // num_groups
        # Example with 2 groups of 2: the places 2 3 | 1 0 are in the groups 1 1 | 0 0.
        homes = (self.place_LE // size).reshape(len(self.moe_layers), num_groups, size)
        apart = (homes != homes[:, :, :1]).any(2)
        if apart.any():
            layer, group = np.argwhere(apart)[0].tolist()
            raise ValueError(
                f"{where}: layer {self.moe_layers[layer]}: the experts of group {group} are in "
                f"several groups of places, and the router takes the best of {num_groups} groups: "
                f"make the placement with --groups {num_groups}"
            )


def placement_of(args: Any) -> Placement | None:
    """The placement of the weights that were loaded; None where the experts are in their order.

    Args:
        args: Megatron's arguments, once the checkpoint is loaded.

    Raises:
        ValueError: the checkpoint's placement cannot be read.
    """
    value = getattr(args, ATTRIBUTE, None)
    where = f"{ATTRIBUTE} of the checkpoint in --load {getattr(args, 'load', None)}"
    return None if value is None else Placement.from_json(value, where)


def loaded_placement() -> Placement | None:
    """The placement of the weights that Megatron's `load_checkpoint` has loaded in this process.

    None where there is none, or where nobody has Megatron's global arguments.

    Raises:
        ValueError: the checkpoint's placement cannot be read.
    """
    global_vars = sys.modules.get("megatron.training.global_vars")  # not imported for this
    return placement_of(getattr(global_vars, "_GLOBAL_ARGS", None))
