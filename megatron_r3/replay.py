"""The active microbatch: what a router asks for its routes.

The routes are data of the microbatch: `with replaying(routes): model(...)`. What will run again
later (activation recompute) is bound, when it is created, to the microbatch that was active then:
run once, twice or never, in any order and from any thread, it sees the same routes. Without an
active microbatch every router is live, so an evaluation, a reference model or a critic never
replays by accident, and an exception leaves nothing behind.

Shape suffixes: T tokens of this rank in the router's order, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from megatron_r3.gate import replayed_topk
from megatron_r3.plan import LayerSizes

__all__ = [
    "MicrobatchRoutes",
    "ReplayError",
    "active_microbatch",
    "bind_to_microbatch",
    "recording",
    "replaying",
]


class ReplayError(RuntimeError):
    """A router asked for routes that its microbatch does not have: a fault of the caller."""


class MicrobatchRoutes:
    """The routes that one rank needs for one microbatch: its layers, its tokens, its order.

    Attributes:
        ids: for each layer number (Megatron's, from 1) the ids `[T, K]` on the device, uint8 or
            int16.
        live_T: bool, tokens that have no recorded route: chosen live at the first pass of a layer,
            written back into `ids`, so that a recompute repeats them. None: there are none.
        counted_T: bool, tokens that count in the mismatch statistics. None: measure nothing.
        replay: False observes only: the router stays live and is compared with `ids`.
        record: a layer without routes is chosen live at its first pass, and that is kept in `ids`.
        padding_T: bool, tokens that are none: left out of the router's load. None: as the model
            was told.
        plan: the dispatch sizes of each layer, by its number. None: they are learned on the device.
        verify_plan: compare the plan with what a layer would learn, at every pass.
        mean_tokens: the tokens that are not padding, on average over the ranks that share the
            sequences (tensor and context parallel). None: unknown.
        mismatched: for each layer a count, int64 on the device: counted tokens whose live choice
            is another set of experts than `ids`. Filled at the first pass.
        mismatched_T: bool, the tokens for which that is so in any layer of this rank.
    """

    def __init__(
        self,
        ids: dict[int, Tensor],
        *,
        live_T: Tensor | None = None,
        counted_T: Tensor | None = None,
        replay: bool = True,
        record: bool = False,
        padding_T: Tensor | None = None,
        mean_tokens: float | None = None,
    ) -> None:
        self.ids = ids
        self.live_T = live_T
        self.counted_T = counted_T
        self.replay = replay
        self.plan: dict[int, LayerSizes] | None = None
        self.verify_plan = False
        self.mismatched: dict[int, Tensor] = {}
        self.mismatched_T: Tensor | None = None
        self._settled: set[int] = set()
        self.record = record
        self.padding_T = padding_T
        self.mean_tokens = mean_tokens

    @property
    def replays(self) -> bool:
        """Whether its layers take given routes now."""
        return self.replay and not self.record

    def topk(
        self,
        layer_number: int,
        scores_TE: Tensor,
        topk: int,
        live_topk: Callable[[], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """The scores and experts of one layer, `[T, K]` both, ids int64.

        Args:
            layer_number: Megatron's, from 1.
            scores_TE: what live top-k would select from.
            topk: K, as the router was configured.
            live_topk: the router's own choice; called only where it is needed.

        Raises:
            ReplayError: the layer has no routes, or not as many as the router has tokens.
        """
        if self.record and layer_number not in self.ids:
            return self._record_live(layer_number, live_topk)
        ids_TK = self._routes(layer_number, scores_TE.shape[0], topk)
        if not self.replay:
            values_TK, chosen_TK = live_topk()
            self._measure(layer_number, ids_TK, chosen_TK)
            return values_TK, chosen_TK
        if layer_number not in self._settled:
            if self.live_T is not None or self.counted_T is not None:
                ids_TK = self._settle_live(layer_number, ids_TK, live_topk)
            self._settled.add(layer_number)
        return replayed_topk(scores_TE, ids_TK)

    def unsettled(
        self, layer_number: int, num_tokens: int, topk: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A layer's ids `[T, K]`; at its first pass also `live_T` and `counted_T`, else None.

        For a gate that chooses and counts by itself, and then calls `settle`.

        Raises:
            ReplayError: as `topk`.
        """
        ids_TK = self._routes(layer_number, num_tokens, topk)
        if layer_number in self._settled:
            return ids_TK, None, None
        return ids_TK, self.live_T, None if layer_number in self.mismatched else self.counted_T

    def settle(self, layer_number: int, ids_TK: Tensor, differs_T: Tensor | None) -> None:
        """End the first pass of a layer: the ids it used, and where live ones differ."""
        self.ids[layer_number] = ids_TK
        self._settled.add(layer_number)
        if differs_T is not None:
            self._count(layer_number, differs_T)

    def _routes(self, layer_number: int, num_tokens: int, topk: int) -> Tensor:
        if layer_number not in self.ids:
            raise ReplayError(
                f"layer {layer_number} has no routes in the active microbatch; it has layers "
                f"{sorted(self.ids)}"
            )
        ids_TK = self.ids[layer_number]
        if ids_TK.shape != (num_tokens, topk):
            raise ReplayError(
                f"layer {layer_number} routes {num_tokens} tokens to top-{topk}; its "
                f"microbatch has routes {tuple(ids_TK.shape)}: other tokens are in the batch than "
                "its row ids say"
            )
        return ids_TK

    def _record_live(
        self, layer_number: int, live_topk: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        values_TK, chosen_TK = live_topk()
        self.ids[layer_number] = chosen_TK.detach().to(torch.int16)
        self._settled.add(layer_number)
        return values_TK, chosen_TK

    def _settle_live(
        self, layer_number: int, ids_TK: Tensor, live_topk: Callable[[], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """First pass of a layer: fill in its live tokens, and measure."""
        with torch.no_grad():
            _, chosen_TK = live_topk()
            self._measure(layer_number, ids_TK, chosen_TK)
            if self.live_T is not None:
                ids_TK = torch.where(self.live_T[:, None], chosen_TK.to(ids_TK.dtype), ids_TK)
                self.ids[layer_number] = ids_TK
        return ids_TK

    def _measure(self, layer_number: int, ids_TK: Tensor, chosen_TK: Tensor) -> None:
        if self.counted_T is None or layer_number in self.mismatched:
            return
        with torch.no_grad():
            same_TK = ids_TK.long().sort(dim=1).values == chosen_TK.sort(dim=1).values
            self._count(layer_number, ~same_TK.all(dim=1) & self.counted_T)

    def _count(self, layer_number: int, differs_T: Tensor) -> None:
        self.mismatched[layer_number] = differs_T.sum()
        any_T = self.mismatched_T
        self.mismatched_T = differs_T if any_T is None else any_T | differs_T


_ACTIVE: ContextVar[MicrobatchRoutes | None] = ContextVar("megatron_r3_microbatch", default=None)


def active_microbatch() -> MicrobatchRoutes | None:
    """The microbatch whose routes are replayed now, or None: route live."""
    return _ACTIVE.get()


@contextmanager
def replaying(microbatch: MicrobatchRoutes | None) -> Iterator[MicrobatchRoutes | None]:
    """Inside, routers take the routes of `microbatch` (None: live). Undone on any exit."""
    token = _ACTIVE.set(microbatch)
    try:
        yield microbatch
    finally:
        _ACTIVE.reset(token)


@contextmanager
def recording() -> Iterator[MicrobatchRoutes]:
    """Inside, routers are live, and their choice is kept in `.ids` of the microbatch it yields.

    A recompute repeats the choice of the first pass. The result can be replayed as it is.
    """
    microbatch = MicrobatchRoutes({}, record=True)
    with replaying(microbatch):
        yield microbatch
    microbatch.record = False


def bind_to_microbatch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run under the microbatch (or none) that is active now, whenever it runs."""
    microbatch = active_microbatch()

    def bound(*args: Any, **kwargs: Any) -> Any:
        with replaying(microbatch):
            return function(*args, **kwargs)

    return bound
