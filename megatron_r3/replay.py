"""The active microbatch: what a router asks for its routes.

The routes are data of the microbatch: `with replaying(routes): model(...)`. What will run again
later (activation recompute) is bound, when it is created, to the microbatch that was active then:
run once, twice or never, in any order and from any thread, it sees the same routes. Without an
active microbatch every router is live, so an evaluation, a reference model or a critic never
replays by accident, and an exception leaves nothing behind.

A block in which routes were given and no router took any is an error, when the block ends.

Shape suffixes: L layers, T tokens of this rank in the router's order, E experts, K top-k.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from megatron_r3.gate.reference import replayed_topk
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
    """Routes that were not replayed as they were given: a fault of the caller."""


class MicrobatchRoutes:
    """The routes that one rank needs for one microbatch: its layers, its tokens, its order.

    Where tokens are chosen live or counted, one forward pass uses it, and the recomputes of that
    pass: what a token without a recorded route chose, and what was measured, belongs to a pass.
    `fresh()` makes another one of the same routes, for the next forward pass.

    Attributes:
        ids: for each layer number (Megatron's, from 1) the ids `[T, K]` on the device, of any
            integer dtype. The dict is a copy of the caller's.
        live_T: bool, tokens that have no recorded route: chosen live at the first pass of a layer,
            written back into `ids`, so that a recompute repeats them. None: there are none.
        counted_T: bool, tokens that count in the mismatch statistics. None: measure nothing.
        replay: False observes only: the router stays live and is compared with `ids`.
        record: a layer without routes is chosen live at its first pass, and that is kept in `ids`.
        padding_T: bool, True for padding, which is left out of the router's load. Its ids must be
            a route too: distinct experts, spread over all of them (`rows.spread_padding`). None:
            the padding mask that the model was given is used.
        plan: the dispatch sizes of each layer, by its number. None: they are learned on the device.
        verify_plan: compare the plan with what a layer would learn, at every pass.
        mean_tokens: the tokens that are not padding, on average over the ranks that share the
            sequences (tensor and context parallel). None: unknown.
        mismatched: for each layer a count, int64 on the device: counted tokens whose live choice
            is another set of experts than `ids`. Filled at the first pass.
        mismatched_T: bool, the tokens for which that is so in any layer of this rank.
        used: how often each layer took its routes, recomputes included, by its number.
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
        checked: bool = False,
    ) -> None:
        """Keep the routes of one microbatch.

        Args:
            checked: the ids are known to be in range and distinct, as those of a verified store.
                Else all of them are checked when the first router asks: on the host at once; on a
                device without a wait there, and with one wait at the end of the block.
        """
        self.ids = dict(ids)
        self.live_T = live_T
        self.counted_T = counted_T
        self.replay = replay
        self.plan: dict[int, LayerSizes] | None = None
        self.verify_plan = False
        self.mismatched: dict[int, Tensor] = {}
        self.mismatched_T: Tensor | None = None
        self.record = record
        self.padding_T = padding_T
        self.mean_tokens = mean_tokens
        self.used: Counter[int] = Counter()
        self._given = dict(ids)
        # the forward pass in which each layer first took its routes
        self._settled: dict[int, _Pass | None] = {}
        self._check = not checked
        self._wrong_LT: Tensor | None = None  # on a device, until somebody reads it

    def fresh(self) -> MicrobatchRoutes:
        """The same routes for another forward pass: nothing chosen, nothing measured."""
        other = MicrobatchRoutes(
            self._given or self.ids,
            live_T=self.live_T,
            counted_T=self.counted_T,
            replay=self.replay,
            record=self.record,
            padding_T=self.padding_T,
            mean_tokens=self.mean_tokens,
            checked=not self._check,
        )
        other.plan, other.verify_plan = self.plan, self.verify_plan
        return other

    @property
    def replays(self) -> bool:
        """Whether its layers take given routes now."""
        return self.replay and not self.record

    @property
    def untaken(self) -> list[int]:
        """The layers whose routes were given and that no router has taken."""
        return [layer for layer in self.ids if not self.used[layer]] if self.replays else []

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
        ids_TK = self._routes(layer_number, scores_TE.shape, topk)
        if not self.replay:
            values_TK, chosen_TK = live_topk()
            self._measure(layer_number, ids_TK, chosen_TK)
            return values_TK, chosen_TK
        if layer_number not in self._settled:
            if self.live_T is not None or self.counted_T is not None:
                ids_TK = self._settle_live(layer_number, ids_TK, live_topk)
            self._settled[layer_number] = _ACTIVE.get()
        return replayed_topk(scores_TE, ids_TK)

    def unsettled(
        self, layer_number: int, logits_TE: Tensor, topk: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A layer's ids `[T, K]`; at its first pass also `live_T` and `counted_T`, else None.

        For a gate that chooses and counts by itself, and then calls `settle`.

        Raises:
            ReplayError: as `topk`.
        """
        ids_TK = self._routes(layer_number, logits_TE.shape, topk)
        if layer_number in self._settled:
            return ids_TK, None, None
        return ids_TK, self.live_T, None if layer_number in self.mismatched else self.counted_T

    def settle(self, layer_number: int, ids_TK: Tensor, differs_T: Tensor | None) -> None:
        """End the first pass of a layer: the ids it used, and where live ones differ."""
        self.ids[layer_number] = ids_TK
        self._settled[layer_number] = _ACTIVE.get()
        if differs_T is not None:
            self._count(layer_number, differs_T)

    def _routes(self, layer_number: int, shape_TE: torch.Size, topk: int) -> Tensor:
        """A layer's ids, counted as taken; at the first call the ids of all layers are checked."""
        num_tokens, num_experts = shape_TE
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
        self._refuse_second_pass(layer_number)
        if self._check and self._wrong_LT is None:
            self._check_ids(num_experts)
            ids_TK = self.ids[layer_number]
        self.used[layer_number] += 1
        active = _ACTIVE.get()
        if active is not None:
            active.asked = True
        return ids_TK

    def _refuse_second_pass(self, layer_number: int) -> None:
        """Another forward pass must choose for itself where no route was recorded, and measure."""
        chosen = self.live_T is not None or self.counted_T is not None
        if chosen and self._settled.get(layer_number, _ACTIVE.get()) is not _ACTIVE.get():
            raise ReplayError(
                f"layer {layer_number} took these routes in an earlier forward pass, whose choice "
                "for tokens without a recorded route would be repeated, and whose mismatch would "
                "be reported: give the next forward pass `microbatch.fresh()`"
            )

    def _check_ids(self, num_experts: int) -> None:
        """Compare the ids of all layers with what a router can take.

        On the host wrong ids are an error at once. On a device the rows that are wrong are replaced
        by `0, 1, ... K - 1`, so that no kernel reads outside its tensor, and `raise_wrong_ids`
        tells of them when the block ends.

        Raises:
            ReplayError: ids that are no integers, or wrong ones on the host.
        """
        layers = list(self.ids)
        if any(ids_TK.is_floating_point() for ids_TK in self.ids.values()):
            raise ReplayError("expert ids are integers")
        if len({ids_TK.shape for ids_TK in self.ids.values()}) > 1:
            shapes = {layer: tuple(ids_TK.shape) for layer, ids_TK in self.ids.items()}
            raise ReplayError(f"the layers of one microbatch have routes of other shapes: {shapes}")
        ids_LTK = torch.stack([ids_TK.to(torch.int32) for ids_TK in self.ids.values()])
        ordered_LTK = ids_LTK.sort(dim=2).values
        wrong_LT = (ordered_LTK[..., 1:] == ordered_LTK[..., :-1]).any(2)
        wrong_LT |= (ordered_LTK[..., 0] < 0) | (ordered_LTK[..., -1] >= num_experts)
        if self.live_T is not None:  # the ids of tokens that nobody recorded may be anything
            wrong_LT &= ~self.live_T
        self._wrong_LT = wrong_LT
        self._num_experts = num_experts
        if ids_LTK.device.type == "cpu":
            self.raise_wrong_ids()
            return
        valid_K = torch.arange(ids_LTK.shape[2], device=ids_LTK.device, dtype=torch.int32)
        replaced_LTK = torch.where(wrong_LT[..., None], valid_K, ids_LTK)
        for layer, ids_TK in zip(layers, replaced_LTK, strict=True):
            self.ids[layer] = ids_TK.to(self.ids[layer].dtype)

    def raise_wrong_ids(self) -> None:
        """Read what the check has found, if that was not done yet; wrong ids stay wrong.

        Raises:
            ReplayError: naming the layer and the token of the first wrong row, and its ids.
        """
        wrong_LT = self._wrong_LT
        if wrong_LT is None:
            return
        if not wrong_LT.any():
            self._wrong_LT, self._check = None, False
            return
        index, token = wrong_LT.nonzero()[0].tolist()
        layer = list(self._given)[index]
        raise ReplayError(
            f"layer {layer}, token {token}: ids {self._given[layer][token].tolist()}; a route is "
            f"distinct experts from 0 to {self._num_experts - 1}, that of padding too "
            f"({int(wrong_LT.sum())} such rows)"
        )

    def _record_live(
        self, layer_number: int, live_topk: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        values_TK, chosen_TK = live_topk()
        self.ids[layer_number] = chosen_TK.detach().to(torch.int16)
        self._settled[layer_number] = _ACTIVE.get()
        self.used[layer_number] += 1
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


class _Pass:
    """One `with replaying(...)` block: a forward pass, and what was bound in it to run later.

    Attributes:
        asked: a router took routes.
        bound, ran: a function was bound in the block; one of those ran before the block ended.
        open: the block has not ended.
    """

    __slots__ = ("asked", "bound", "microbatch", "open", "ran")

    def __init__(self, microbatch: MicrobatchRoutes | None) -> None:
        self.microbatch = microbatch
        self.asked = self.bound = self.ran = False
        self.open = True

    def end(self) -> None:
        """Refuse a forward pass that ended without any router asking for its routes.

        A schedule that only builds nodes in the block binds functions and runs none of them: there
        the caller looks at `MicrobatchRoutes.untaken` later, as `megatron_r3.training` does.
        """
        self.open = False
        microbatch = self.microbatch
        if microbatch is None:
            return
        microbatch.raise_wrong_ids()
        runs_later = self.bound and not self.ran
        if microbatch.replays and microbatch.ids and not self.asked and not runs_later:
            raise ReplayError(
                f"the routes of layers {sorted(microbatch.ids)} were given, and no router took "
                "them: the forward pass was live. " + WHY_UNTAKEN
            )


WHY_UNTAKEN = (
    "Likely causes: the model was built with moe_router_replay off, or the option was set after it "
    "was built; a framework replaced TopKRouter.routing (verl's apply_router_replay_patch does); "
    "the layers run in another model than this one; the Megatron-LM tree is not patched"
)

_ACTIVE: ContextVar[_Pass | None] = ContextVar("megatron_r3_microbatch", default=None)


def active_microbatch() -> MicrobatchRoutes | None:
    """The microbatch whose routes are replayed now, or None: route live."""
    active = _ACTIVE.get()
    return None if active is None else active.microbatch


@contextmanager
def replaying(microbatch: MicrobatchRoutes | None) -> Iterator[MicrobatchRoutes | None]:
    """Inside, routers take the routes of `microbatch` (None: live). Undone on any exit.

    Raises:
        ReplayError: at the end of the block, where no router took the routes, or where ids that
            are on a device are wrong. An exception of the block itself comes first.
    """
    current = _Pass(microbatch)
    token = _ACTIVE.set(current)
    try:
        yield microbatch
    finally:
        _ACTIVE.reset(token)
    current.end()


@contextmanager
def recording() -> Iterator[MicrobatchRoutes]:
    """Inside, routers are live, and their choice is kept in `.ids` of the microbatch it yields.

    A recompute repeats the choice of the first pass. The result can be replayed as it is, also
    several times.
    """
    microbatch = MicrobatchRoutes({}, record=True, checked=True)
    try:
        with replaying(microbatch):
            yield microbatch
    finally:
        microbatch.record = False


def bind_to_microbatch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run under the microbatch (or none) that is active now, whenever it runs."""
    active = _ACTIVE.get()
    if active is not None:
        active.bound = True
    return _Bound(function, active)


class _Bound:
    """A function that runs in the forward pass in which it was bound.

    Everything that callers look for in the function (`__closure__`, `__self__`, `__name__`, an
    attribute of their own) is found here: what this class does not have is the function's.
    Example: verl looks through `run_function.__closure__` for an MTP layer.
    """

    def __init__(self, function: Callable[..., Any], active: _Pass | None) -> None:
        functools.update_wrapper(self, function)
        self._active = active

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = self._active
        if active is None:
            token = _ACTIVE.set(None)
        else:
            active.ran = True
            token = _ACTIVE.set(active)
        try:
            result = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        finally:
            _ACTIVE.reset(token)
        if active is not None and active.microbatch is not None and not active.open:
            active.microbatch.raise_wrong_ids()
        return result

    def __getattr__(self, name: str) -> Any:
        """What the function has; called only for what is not found here."""
        if name == "__wrapped__":  # of an object that is not made yet (copy, pickle)
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)
