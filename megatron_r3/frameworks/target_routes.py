"""Turn the targets of one block's routers into the routes of a microbatch.

Code for RouterReplay gives each router a tensor of expert ids, and does not say which rows of the
tensor are valid. A row is "bad" if no router can take its ids: an id twice, below 0, or beyond the
last expert. Engines return bad rows for cached prefixes, and callers pad with zeros or -1. A bad
row chooses live in the layers in which it is bad, and a recompute repeats that choice.

Nothing here waits for the device, except for the one copy to the host that a dispatch plan needs.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_r3.replay.microbatch import MicrobatchRoutes, ReplayError
from megatron_r3.replay.rows import spread_padding
from megatron_r3.replay.tally import Tally


@dataclass(frozen=True)
class TargetRoutes:
    """The targets of L layers, as routes.

    Attributes:
        layers: Megatron's numbers of the L layers.
        ids_LTK: int16. The ids of a bad row are `0, 1, ... K - 1`, and those of an unused row are
            spread over all experts.
        bad_LT: bool, the bad rows, which choose live. None means that no row is bad.
        unused_T: bool, the unused rows: no loss depends on their output. None means that no row
            is unused.
    """

    layers: list[int]
    ids_LTK: Tensor
    bad_LT: Tensor | None
    unused_T: Tensor | None

    @classmethod
    def of(
        cls,
        targets: dict[int, Tensor],
        unused_T: Tensor | None,
        num_experts: int,
        device: torch.device,
    ) -> TargetRoutes:
        """Stack the targets, find the bad rows, and copy all layers to `device` at once.

        Args:
            targets: for each layer number the expert ids `[T, K]`, of any integer dtype.
            unused_T: see `TargetRoutes`.
            num_experts: how many experts a layer has.

        Raises:
            ReplayError: a target is not a tensor `[T, K]` of integers, or the layers have different
                shapes.
        """
        layers = sorted(targets)
        ids_LTK = _stacked([targets[layer] for layer in layers], layers)
        num_tokens, topk = ids_LTK.shape[1:]
        # in a sorted row equal ids are neighbours, and only the ends can be out of range
        ordered_LTK = ids_LTK.sort(dim=2).values
        bad_LT = (ordered_LTK[..., 1:] == ordered_LTK[..., :-1]).any(2)
        bad_LT |= (ordered_LTK[..., 0] < 0) | (ordered_LTK[..., -1] >= num_experts)
        valid_K = torch.arange(topk, device=ids_LTK.device, dtype=ids_LTK.dtype)
        ids_LTK = torch.where(bad_LT[..., None], valid_K, ids_LTK)
        if unused_T is not None:
            unused_T = unused_T.to(ids_LTK.device)
            spread_TK = spread_padding(num_tokens, topk, num_experts).to(ids_LTK)
            ids_LTK = torch.where(unused_T[:, None], spread_TK, ids_LTK)
            bad_LT &= ~unused_T
            unused_T = unused_T.to(device, non_blocking=True)
        # `bad_LT.any()` is read on the host alone: on a device the read would wait for the device
        has_bad = bad_LT.device.type != "cpu" or bool(bad_LT.any())
        return cls(
            layers,
            ids_LTK.to(torch.int16).to(device, non_blocking=True),
            bad_LT.to(device, non_blocking=True) if has_bad else None,
            unused_T,
        )

    def microbatch(self, counts: bool) -> MicrobatchRoutes:
        """The routes of one forward pass of the block.

        Args:
            counts: whether to count the rows in which the live choice differs from the route;
                unused rows are left out.
        """
        bad_LT, tally = self.bad_LT, None
        if counts:
            unused_T = self.unused_T
            everything_T = torch.ones_like(self.ids_LTK[0, :, 0], dtype=torch.bool)
            tally = Tally(everything_T if unused_T is None else ~unused_T)
        return MicrobatchRoutes(
            dict(zip(self.layers, self.ids_LTK, strict=True)),
            live_T=None if bad_LT is None else dict(zip(self.layers, bad_LT, strict=True)),
            padding_T=self.unused_T,
            tally=tally,
            checked=True,  # `of` has replaced wrong ids
        )

    def counted_tokens(self) -> Tensor:
        """How many rows of each layer are neither bad nor unused, int64 `[L]` on the device."""
        counted_LT = torch.ones_like(self.ids_LTK[..., 0], dtype=torch.bool)
        if self.bad_LT is not None:
            counted_LT &= ~self.bad_LT
        if self.unused_T is not None:
            counted_LT &= ~self.unused_T
        return counted_LT.sum(1)

    def on_host(self) -> HostTargets:
        """The ids and the bad rows on the host, by one copy, which waits for the device."""
        ids_LTK = self.ids_LTK
        if self.bad_LT is not None:  # sent as ids of -1: a second copy would be a second wait
            ids_LTK = torch.where(self.bad_LT[..., None], -1, ids_LTK)
        on_host_LTK = ids_LTK.cpu().numpy()
        return HostTargets(np.maximum(on_host_LTK, 0), on_host_LTK[..., 0] < 0)


@dataclass(frozen=True)
class HostTargets:
    """What a planner reads (`megatron_r3.replay.planner.PlannedRoutes`).

    Attributes:
        ids_LTK: int16; zeros in rows that choose live.
        live_T: bool `[L, T]`, True for rows that choose live.
    """

    ids_LTK: np.ndarray
    live_T: np.ndarray


def _stacked(targets: Sequence[Tensor], layers: list[int]) -> Tensor:
    """Stack the targets of all layers: `[L, T, K]`. Errors name the layer that does not fit."""
    for layer, target in zip(layers, targets, strict=True):
        if not isinstance(target, Tensor):
            raise ReplayError(
                f"layer {layer}: the target is a {type(target).__name__}, not a tensor [T, K]"
            )
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise ReplayError(f"layer {layer}: the target holds {target.dtype}, not expert ids")
        if target.ndim != 2:
            raise ReplayError(
                f"layer {layer}: the target has the shape {list(target.shape)}, not [tokens, topk]"
            )
    if len({target.shape for target in targets}) > 1:
        shapes = {layer: list(t.shape) for layer, t in zip(layers, targets, strict=True)}
        raise ReplayError(f"the targets of one forward pass have different shapes: {shapes}")
    # torch sorts no unsigned dtype but uint8
    unsigned = (torch.uint16, torch.uint32, torch.uint64)
    return torch.stack([t.long() if t.dtype in unsigned else t for t in targets])
