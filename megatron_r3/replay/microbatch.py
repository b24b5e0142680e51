"""The routes of one microbatch, and what each of its MoE layers does with them.

A router asks `MicrobatchRoutes.topk` for the experts of its tokens. The answer is the given routes
(REPLAY), the router's own choice, compared with the given routes (OBSERVE), or the router's own
choice, which is kept (RECORD). `megatron_r3.replay.active` decides which microbatch a router asks.

One forward pass and the recomputes of that pass share a MicrobatchRoutes. A layer asks for the
first time in the forward pass; there the tokens without a recorded route choose, and the mismatch
is counted. When a recompute asks again, these tokens repeat their choice, and nothing is counted
twice.

Shape suffixes (docs/glossary.md): L, T, E, K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count

import torch
from torch import Tensor

from megatron_r3.replay.gate.reference import replayed_topk
from megatron_r3.replay.plan import LayerSizes
from megatron_r3.replay.tally import Tally

LiveTopk = Callable[[], tuple[Tensor, Tensor]]  # a router's own choice: scores and ids `[T, K]`


class ReplayError(RuntimeError):
    """Routes were not replayed as they were given. The caller made a mistake."""


class Mode(Enum):
    """What the layers do while a microbatch is active.

    REPLAY: a layer takes the given routes, with gate weights from its own scores.
    OBSERVE: a layer routes live; its choice is only compared with the given routes.
    RECORD: a layer routes live in its first pass; the choice is kept and repeated by recomputes.
    """

    REPLAY = "replay"
    OBSERVE = "observe"
    RECORD = "record"


_numbers = count(1)


class ForwardPass:
    """A block (`replaying`, `recording`), or a pass after `begin`: what was active and what ran.

    Attributes:
        microbatch: the routes of the block; None inside `replaying(None)`, which routes live.
        number: counts the passes of the process, from 1.
        asked: whether a router took, compared or recorded routes.
        bound: whether a function was bound in the block, to run later.
        bound_ran: whether a bound function ran.
        has_inner: whether another block was opened inside of this one.
        is_open: whether the block has not ended yet.
        ran: one module of each class that ran, up to the first router; empty after the block.
        nothing: after the block, why no router asked, as text for an error; None if a router asked,
            or if none had to ask.
    """

    __slots__ = (
        *("asked", "bound", "bound_ran", "has_inner", "is_open"),
        *("microbatch", "nothing", "number", "ran"),
    )

    def __init__(self, microbatch: MicrobatchRoutes | None) -> None:
        self.microbatch, self.number = microbatch, next(_numbers)
        self.asked = self.bound = self.bound_ran = self.has_inner = False
        self.is_open = True
        self.ran: dict[type, torch.nn.Module] = {}
        self.nothing: str | None = None

    @property
    def runs_later(self) -> bool:
        """Whether functions were bound in the block and none of them has run yet."""
        return self.bound and not self.bound_ran


# Which block the running code belongs to. A context variable is per thread and per asyncio task, so
# a lookahead thread, or an evaluation in another thread, never sees these routes.
ACTIVE: ContextVar[ForwardPass | None] = ContextVar("megatron_r3_forward_pass", default=None)


def _described(value: object) -> str:
    """What a caller gave, in a few words: "numpy.ndarray int64 [16, 2]"."""
    kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    return " ".join(str(x) for x in (kind, dtype, shape and list(shape)) if x is not None)


def _number(forward_pass: ForwardPass | None) -> int:
    return 0 if forward_pass is None else forward_pass.number


@dataclass(eq=False)
class MicrobatchRoutes:
    """The routes of one microbatch that one rank needs, in the order of that rank's tokens.

    With live tokens or a tally an object serves one forward pass and its recomputes, since the
    choice and the count belong to that pass. `fresh()` makes an object with the same routes for the
    next forward pass.

    Args:
        ids: for each layer number (Megatron's, from 1) the expert ids `[T, K]` on the device, of
            any integer dtype. The dict is copied.
        mode: what the layers do.
        live_T: bool, True for tokens without a recorded route. Such a token takes the live choice
            in the first pass of a layer, and the choice is written into `ids`. Where tokens lack a
            route in some layers only, a dict has the mask of each such layer by its number; in a
            layer that the dict lacks, every token has a route. None means that every token has a
            recorded route in every layer.
        padding_T: bool, True for padding tokens, which are left out of the router's load. Padding
            needs valid routes too (`rows.spread_padding` makes them). None means that the padding
            mask that the model was given is used.
        mean_tokens: the tokens that are not padding, as an average over the ranks that share the
            sequences (tensor and context parallel). None means unknown.
        plan: the dispatch sizes of each layer by its number. None means that the layers learn
            their sizes on the device.
        verify_plan: whether each layer compares the plan with the sizes learned on the device.
        checked: True where the ids are known to be in range and distinct, as those of a verified
            store are. False means that the ids of all layers are checked when the first router
            asks: ids on the host at once, ids on a device with one wait at the end of the block.
        as_with_gradients: the layers that order their experts by score even with gradients off.
            Megatron (from 0.18 on) orders them only with gradients on, and the order decides how a
            sum over experts rounds. A forward-only pass is bitwise that of the training step if
            these are the layers that have gradients on in the step's forward pass.
        tally: counts where the live choice differs. None means that nothing is compared.

    Attributes:
        used: how often each layer took, compared or recorded routes, recomputes included.

    Raises:
        ReplayError: ids or a mask of a wrong type, or a tally that another micro-batch has.
    """

    ids: dict[int, Tensor]
    mode: Mode = field(default=Mode.REPLAY, kw_only=True)
    live_T: Tensor | Mapping[int, Tensor] | None = field(default=None, kw_only=True)
    padding_T: Tensor | None = field(default=None, kw_only=True)
    mean_tokens: float | None = field(default=None, kw_only=True)
    plan: dict[int, LayerSizes] | None = field(default=None, kw_only=True)
    verify_plan: bool = field(default=False, kw_only=True)
    checked: bool = field(default=False, kw_only=True)
    as_with_gradients: Collection[int] = field(default=(), kw_only=True)
    tally: Tally | None = field(default=None, kw_only=True)
    used: Counter[int] = field(default_factory=Counter, init=False)
    # The number of the forward pass in which each layer asked for the first time, 0 outside a pass.
    # The ForwardPass itself is not kept, because it refers to this object: with a reference cycle
    # routes would stay on the device until Python's cyclic garbage collection.
    _first_pass: dict[int, int] = field(default_factory=dict, init=False)
    _given: dict[int, Tensor] = field(default_factory=dict, init=False)
    _wrong_LT: Tensor | None = field(default=None, init=False)  # what the check of the ids found
    _num_experts: int = field(default=0, init=False)  # E of the router that asked first

    def __post_init__(self) -> None:
        """Check the arguments, and copy the dict `ids`, into which live choices are written."""
        if not isinstance(self.ids, Mapping):
            raise ReplayError(
                f"MicrobatchRoutes: ids is {_described(self.ids)}; expected a dict with the ids "
                "[T, K] of each layer by its number: {1: ids_TK, 2: ...}"
            )
        for layer, ids_TK in self.ids.items():
            if not isinstance(ids_TK, Tensor):
                raise ReplayError(
                    f"MicrobatchRoutes: the ids of layer {layer!r} are {_described(ids_TK)}; "
                    "expected a tensor [T, K] on the model's device (torch.as_tensor(ids).cuda())"
                )
        self.ids, self._given = dict(self.ids), dict(self.ids)
        tally = self.tally
        for name, given in (
            ("live_T", self.live_T),
            ("padding_T", self.padding_T),
            ("counted_T", None if tally is None else tally.counted_T),
            ("watched_T", None if tally is None else tally.watched_T),
        ):
            for mask_T in given.values() if isinstance(given, Mapping) else [given]:
                is_mask = (
                    isinstance(mask_T, Tensor) and mask_T.dtype == torch.bool and mask_T.dim() == 1
                )
                may_be_none = name != "counted_T" or tally is None
                if not is_mask and not (mask_T is None and may_be_none):
                    raise ReplayError(
                        f"MicrobatchRoutes: {name} is {_described(mask_T)}; expected a bool tensor "
                        "[T], True or False for each token of this rank"
                    )
        if tally is not None and not tally.claim():
            raise ReplayError(
                "MicrobatchRoutes: its tally counts another micro-batch already, and would add up "
                "both: give each micro-batch a Tally of its own"
            )

    def fresh(self) -> MicrobatchRoutes:
        """The same routes for another forward pass: no token has chosen yet, counts are 0."""
        return replace(self, ids=self._given or self.ids, tally=self.tally and self.tally.fresh())

    def stop_recording(self) -> None:
        """Turn what was recorded into routes to replay."""
        assert self.mode is Mode.RECORD
        self.mode = Mode.REPLAY

    @property
    def chooses(self) -> bool:
        """Whether a layer needs its live choice: for tokens without a route, or to compare."""
        return self.live_T is not None or self.tally is not None

    @property
    def untaken(self) -> list[int]:
        """The layers with routes that no router took; empty unless the mode is REPLAY."""
        if self.mode is not Mode.REPLAY:
            return []
        return [layer for layer in self.ids if not self.used[layer]]

    def topk(
        self, layer_number: int, scores_TE: Tensor, topk: int, live_topk: LiveTopk
    ) -> tuple[Tensor, Tensor]:
        """The scores and expert ids of one layer's tokens, both `[T, K]`, ids int64.

        Args:
            layer_number: Megatron's, from 1.
            scores_TE: the scores among which live top-k would select.
            topk: K, as the router was configured.
            live_topk: the router's own choice, called only where that choice is needed.

        Raises:
            ReplayError: the layer has no routes, routes of another shape, ids that are no integers,
                or wrong ids on the host; the layers have routes of different shapes; or the live
                choices or the tally belong to an earlier forward pass.
        """
        if layer_number in self.as_with_gradients and not torch.is_grad_enabled():
            with torch.enable_grad():  # the scores have no graph, so none is made here
                return self.topk(layer_number, scores_TE, topk, live_topk)
        if self.mode is Mode.RECORD and layer_number not in self.ids:
            values_TK, chosen_TK = live_topk()
            self.ids[layer_number] = chosen_TK.detach().to(torch.int16)
            self._first_pass[layer_number] = _number(ACTIVE.get())
            self._count_use(layer_number)
            return values_TK, chosen_TK
        ids_TK = self._take(layer_number, scores_TE.shape, topk)
        if self.mode is Mode.OBSERVE:
            values_TK, chosen_TK = live_topk()
            self._compare(layer_number, ids_TK, chosen_TK)
            return values_TK, chosen_TK
        if layer_number not in self._first_pass:
            if self.chooses:
                ids_TK = self._choose_live(layer_number, ids_TK, live_topk)
            self._first_pass[layer_number] = _number(ACTIVE.get())
        return replayed_topk(scores_TE, ids_TK)

    def begin_layer(
        self, layer_number: int, logits_TE: Tensor, topk: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What a gate kernel needs to choose and count. Call `end_layer` when the gate has run.

        Returns:
            The layer's ids `[T, K]`; and in its first pass `live_T` and the tokens `[T]` that
            `tally` compares. In a recompute the second and third are None: the ids then have the
            choice of the live tokens already.

        Raises:
            ReplayError: as `topk`.
        """
        ids_TK = self._take(layer_number, logits_TE.shape, topk)
        if layer_number in self._first_pass:
            return ids_TK, None, None
        compared_T = self.tally.compared_in(layer_number) if self.tally else None
        return ids_TK, self._live_in(layer_number), compared_T

    def end_layer(self, layer_number: int, ids_TK: Tensor, differs_T: Tensor | None) -> None:
        """Keep what the gate of `begin_layer` used.

        Args:
            ids_TK: the ids, with the choice of live tokens written in.
            differs_T: bool, the compared tokens that mismatch. None means that the gate compared
                nothing.
        """
        self.ids[layer_number] = ids_TK
        self._first_pass[layer_number] = _number(ACTIVE.get())
        if differs_T is not None and self.tally is not None:
            self.tally.add(layer_number, differs_T)

    def raise_wrong_ids(self) -> None:
        """Refuse wrong ids that `_check_ids` found; the host waits for the device to read them.

        Nothing is read if no ids were checked, or if an earlier call found none that is wrong.

        Raises:
            ReplayError: the message has the layer, token and ids of the first wrong row.
        """
        wrong_LT = self._wrong_LT
        if wrong_LT is None:
            return
        if not wrong_LT.any():
            self._wrong_LT, self.checked = None, True
            return
        index, token = wrong_LT.nonzero()[0].tolist()
        layer = list(self._given)[index]
        raise ReplayError(
            f"layer {layer}, token {token}: ids {self._given[layer][token].tolist()}; expected "
            f"distinct experts from 0 to {self._num_experts - 1}, also for a padding token "
            f"(wrong rows: {int(wrong_LT.sum())})"
        )

    def _live_in(self, layer_number: int) -> Tensor | None:
        """The tokens `[T]` that choose live in this layer; None if all of them have a route."""
        live_T = self.live_T
        return live_T if live_T is None or isinstance(live_T, Tensor) else live_T.get(layer_number)

    def _take(self, layer_number: int, shape_TE: torch.Size, topk: int) -> Tensor:
        """A layer's ids, counted as used. Unless `checked`, the first call checks all layers."""
        num_tokens, num_experts = shape_TE
        if layer_number not in self.ids:
            raise ReplayError(
                f"layer {layer_number} has no routes in the active microbatch, only the layers "
                f"{sorted(self.ids)} have: give routes of every MoE layer of the model chunk"
            )
        if self.ids[layer_number].shape != (num_tokens, topk):
            raise ReplayError(self._other_shape(layer_number, num_tokens, topk))
        active = ACTIVE.get()
        # Example: an old-policy pass and the training pass share one object. The second pass would
        # replay what tokens without a route chose in the first, and report the first's mismatch.
        number = _number(active)
        if self.chooses and self._first_pass.get(layer_number, number) != number:
            raise ReplayError(
                f"layer {layer_number} took these routes in an earlier forward pass. This pass "
                "would repeat that pass's choice for tokens without a recorded route, and report "
                "that pass's mismatch: give each forward pass a `microbatch.fresh()` of its own"
            )
        if not self.checked and self._wrong_LT is None:
            self._check_ids(num_experts)
        self._count_use(layer_number)
        return self.ids[layer_number]

    def _count_use(self, layer_number: int) -> None:
        self.used[layer_number] += 1
        if (active := ACTIVE.get()) is not None:
            active.asked = True

    def _other_shape(self, layer_number: int, num_tokens: int, topk: int) -> str:
        """What is wrong with ids of another shape than `[num_tokens, topk]`."""
        shape = list(self.ids[layer_number].shape)
        why = f"the router has {num_tokens} tokens: these are the routes of another batch"
        if len(shape) != 2:
            why = (
                "one row for each token of this rank, in the router's order, sequence first "
                "(of ids [B, S, K] that is ids.transpose(0, 1).reshape(-1, K))"
            )
        elif shape[1] != topk:
            why = f"moe_router_topk is {topk}"
        expected = [num_tokens, topk]
        return f"layer {layer_number}: ids of shape {shape}; expected [T, K] {expected}: {why}"

    def _check_ids(self, num_experts: int) -> None:
        """Look for ids that a router cannot take, in all layers at once.

        Wrong ids on the host are an error at once. Reading the result from a device would make the
        host wait in the middle of a forward pass. So wrong rows on a device are replaced by
        `0, 1, ... K - 1` (no kernel then reads outside its tensor), and `raise_wrong_ids` is called
        when the block ends. Example with 8 experts: the rows `[3, 3, 1]` and `[7, 8, 0]` are wrong,
        and each becomes `[0, 1, 2]`.
        """
        layers = list(self.ids)
        for layer, ids_TK in self.ids.items():
            if ids_TK.is_floating_point():
                raise ReplayError(
                    f"layer {layer}: expert ids must be integers; got {_described(ids_TK)}"
                )
        if len({ids_TK.shape for ids_TK in self.ids.values()}) > 1:
            shapes = {layer: tuple(ids_TK.shape) for layer, ids_TK in self.ids.items()}
            raise ReplayError(
                f"the layers of one microbatch have routes of different shapes: {shapes}; expected "
                "one shape [T, K] for all layers"
            )
        ids_LTK = torch.stack([ids_TK.to(torch.int32) for ids_TK in self.ids.values()])
        # in a sorted row equal ids are neighbours, and if an id is out of range, an end id is too
        ordered_LTK = ids_LTK.sort(dim=2).values
        wrong_LT = (ordered_LTK[..., 1:] == ordered_LTK[..., :-1]).any(2)
        wrong_LT |= (ordered_LTK[..., 0] < 0) | (ordered_LTK[..., -1] >= num_experts)
        for index, layer in enumerate(layers):
            # the ids of a token without a recorded route may be anything
            if (live_T := self._live_in(layer)) is not None:
                wrong_LT[index] &= ~live_T
        self._wrong_LT, self._num_experts = wrong_LT, num_experts
        if ids_LTK.device.type == "cpu":
            self.raise_wrong_ids()
            return
        valid_K = torch.arange(ids_LTK.shape[2], device=ids_LTK.device, dtype=torch.int32)
        replaced_LTK = torch.where(wrong_LT[..., None], valid_K, ids_LTK)
        for layer, ids_TK in zip(layers, replaced_LTK, strict=True):
            self.ids[layer] = ids_TK.to(self.ids[layer].dtype)

    def _choose_live(self, layer_number: int, ids_TK: Tensor, live_topk: LiveTopk) -> Tensor:
        """The layer's ids with the live choice of the tokens that have no recorded route."""
        with torch.no_grad():
            _, chosen_TK = live_topk()
            if (live_T := self._live_in(layer_number)) is not None:
                ids_TK = torch.where(live_T[:, None], chosen_TK.to(ids_TK.dtype), ids_TK)
                self.ids[layer_number] = ids_TK
            # by now `ids_TK` has the choice of the live tokens, so such a token never differs
            self._compare(layer_number, ids_TK, chosen_TK)
        return ids_TK

    def _compare(self, layer_number: int, ids_TK: Tensor, chosen_TK: Tensor) -> None:
        """Count the tokens for which the live choice is another set of experts."""
        compared_T = None if self.tally is None else self.tally.compared_in(layer_number)
        if self.tally is None or compared_T is None:
            return
        with torch.no_grad():
            same_TK = ids_TK.long().sort(dim=1).values == chosen_TK.sort(dim=1).values
            self.tally.add(layer_number, ~same_TK.all(dim=1) & compared_T)
