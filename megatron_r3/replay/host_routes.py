"""The routes of one micro-batch on the host: where they come from, and how they reach a device.

Shape suffixes (docs/glossary.md): L, T, K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_r3.replay.microbatch import MicrobatchRoutes
from megatron_r3.replay.routes import MoEShape, Routes, id_dtype
from megatron_r3.replay.rows import PADDING, spread_padding


class RouteSource(Protocol):
    """Where routes are read by row id: a `RolloutStore`, or `RouteArrays`. Each checks its ids."""

    @property
    def info(self) -> MoEShape:
        """The MoE layers of the model that sampled."""

    def routes(
        self, rows_T: np.ndarray, layers: Sequence[int], into_LTK: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids `[len(layers), T, K]` of these rows, and which rows were recorded, bool `[T]`.

        The ids are uint8, or uint16 from 257 experts on (`routes.id_dtype`).

        Args:
            layers: indices into `info.moe_layers`.
            into_LTK: an array for the ids, which spares the caller a copy; None for a new array. A
                source may also return an array of its own.
        """


class RouteArrays:
    """Routes that are in memory: row id i is row i of the arrays.

    The ids are checked here once, on the host.

    Args:
        ids_LTK: expert ids of any integer dtype; the first axis has the layers of `moe_layers`, the
            second the row ids.
        num_experts: the experts of one MoE layer.
        moe_layers: the 0-based hidden layers that have a router, ascending.
        recorded_T: bool, False for rows that the engine did not return: those tokens choose live.
            None means that every row was recorded.

    Raises:
        RoutesError: ids that no router can take (the message names layer and token), or a
            `recorded_T` of another length.
        ValueError: `moe_layers` is empty, not ascending or has a number below 0; or its length is
            not that of the first axis of `ids_LTK`.
    """

    def __init__(
        self,
        ids_LTK: np.ndarray,
        num_experts: int,
        moe_layers: Sequence[int],
        recorded_T: np.ndarray | None = None,
    ) -> None:
        self._routes = Routes.from_array(ids_LTK, num_experts, recorded_T)
        self.info = MoEShape(num_experts, self._routes.topk, tuple(moe_layers))
        if wrong := self.info.wrong_shape():
            raise ValueError(wrong)
        if len(self.info.moe_layers) != self._routes.num_layers:
            raise ValueError(
                f"routes of {self._routes.num_layers} layers were given for the "
                f"{len(self.info.moe_layers)} MoE layers {list(self.info.moe_layers)}; both "
                "numbers must be equal"
            )

    def routes(
        self, rows_T: np.ndarray, layers: Sequence[int], into_LTK: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and recorded bits of these rows; a row id of -1 (padding) gives zeros and False.

        Raises:
            IndexError: a row id that these routes do not have.
        """
        num_rows = self._routes.num_rows
        if len(rows_T) and not -1 <= int(rows_T.min()) <= int(rows_T.max()) < num_rows:
            wrong = rows_T[(rows_T < -1) | (rows_T >= num_rows)][0]
            raise IndexError(
                f"row id {wrong}: these routes have the rows 0 to {num_rows - 1}, and -1 is padding"
            )
        here_T = rows_T >= 0
        shape = (len(layers), len(rows_T), self.info.topk)
        ids_LTK = np.empty(shape, self._routes.ids_LTK.dtype) if into_LTK is None else into_LTK
        ids_LTK[:, ~here_T] = 0
        for ids_TK, layer in zip(ids_LTK, layers, strict=True):
            ids_TK[here_T] = self._routes.ids_LTK[layer][rows_T[here_T]]
        recorded_T = np.zeros(len(rows_T), bool)
        recorded_T[here_T] = self._routes.recorded_T[rows_T[here_T]]
        return ids_LTK, recorded_T


@dataclass(frozen=True)
class HostRoutes:
    """The routes that one rank needs for one microbatch, on the host.

    Attributes:
        ids_LTK: uint8 or int16; padding is spread over all experts.
        live_T: bool, True for tokens without a recorded route; False for padding.
        padding_T: bool, True for padding.
        rows_T: int64, the row ids.
        mean_tokens: how many tokens of the whole batch are not padding, as a mean over the ranks
            that share its sequences. None means that the mean is not known.
        packed: one buffer, pinned if there is a GPU, of which `ids_LTK`, `live_T` and `padding_T`
            are views.
    """

    ids_LTK: np.ndarray
    live_T: np.ndarray
    padding_T: np.ndarray
    rows_T: np.ndarray
    mean_tokens: float | None
    packed: Tensor

    @classmethod
    def empty(
        cls, num_layers: int, rows_T: np.ndarray, info: MoEShape, mean_tokens: float | None
    ) -> HostRoutes:
        """Memory for the routes of some rows: one buffer, which one copy brings to the device."""
        ids_shape, num_tokens = (num_layers, len(rows_T), info.topk), len(rows_T)
        # torch cannot gather with uint16; ids are below 32,768, so that int16 has the same bits
        dtype = np.dtype(np.uint8 if id_dtype(info.num_experts) == np.uint8 else np.int16)
        # Example with 2 layers, 3 tokens, top-2, one byte an id: ids fill bytes 0 to 11, live_T
        # bytes 12 to 14, padding_T bytes 15 to 17. The widest type is first, so all are aligned.
        num_bytes = math.prod(ids_shape) * dtype.itemsize
        size = num_bytes + 2 * num_tokens
        packed = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        memory = packed.numpy()
        live_T, padding_T = memory[num_bytes:].view(bool).reshape(2, num_tokens)
        ids_LTK = memory[:num_bytes].view(dtype).reshape(ids_shape)
        return cls(ids_LTK, live_T, padding_T, rows_T, mean_tokens, packed)

    @property
    def recorded_T(self) -> Tensor:
        """True for tokens with a recorded route, bool on the host; False for padding."""
        return torch.from_numpy(~(self.live_T | self.padding_T))

    def on_device(
        self, layer_numbers: list[int], device: Any, **microbatch: Any
    ) -> MicrobatchRoutes:
        """A microbatch with these routes on the device; one copy, and no wait.

        Args:
            microbatch: further arguments of MicrobatchRoutes.
        """
        moved = self.packed.to(device, non_blocking=True, copy=True)
        num_tokens, num_bytes = len(self.live_T), self.ids_LTK.nbytes
        dtype = torch.uint8 if self.ids_LTK.dtype == np.uint8 else torch.int16
        ids_LTK = moved[:num_bytes].view(dtype).reshape(self.ids_LTK.shape)
        live_T, padding_T = moved[num_bytes:].view(torch.bool).split(num_tokens)
        return MicrobatchRoutes(
            dict(zip(layer_numbers, ids_LTK, strict=True)),
            live_T=live_T if self.live_T.any() else None,
            padding_T=padding_T,
            mean_tokens=self.mean_tokens,
            checked=True,  # the source has checked the ids on the host
            **microbatch,
        )


def read_routes(
    source: RouteSource, rows_T: Tensor, layer_numbers: list[int], mean_tokens: float | None
) -> HostRoutes:
    """Read the routes of one micro-batch for one rank: those of the rank's layers and tokens.

    Args:
        source: a rollout store, or arrays.
        rows_T: int64 on the host, the row ids in the router's order, -1 for padding.
        layer_numbers: the layers, Megatron's numbers, from 1.
        mean_tokens: see HostRoutes.

    Raises:
        ValueError: the source has no routes of a layer, or its ids have another dtype than
            `id_dtype` says. `source.routes` may raise errors of its own, about rows.
    """
    trace = [source.info.moe_layers.index(number - 1) for number in layer_numbers]
    routes = HostRoutes.empty(len(trace), rows_T.numpy(), source.info, mean_tokens)
    ids_LTK, padding_T = routes.ids_LTK, routes.padding_T
    into_LTK = ids_LTK.view(id_dtype(source.info.num_experts))
    read_LTK, recorded_T = source.routes(routes.rows_T, trace, into_LTK)
    if read_LTK.dtype != into_LTK.dtype:  # an id of 300 would become 44 in one byte
        raise ValueError(
            f"{type(source).__name__}.routes: ids are {read_LTK.dtype}; those of "
            f"{source.info.num_experts} experts must be {into_LTK.dtype}"
        )
    if read_LTK is not into_LTK:  # the source did not use `into_LTK`, and returned its own array
        into_LTK[...] = read_LTK
    padding_T[:] = routes.rows_T == PADDING
    ids_LTK[:, padding_T] = spread_padding(
        int(padding_T.sum()), source.info.topk, source.info.num_experts
    ).numpy()
    routes.live_T[:] = ~recorded_T & ~padding_T
    return routes
