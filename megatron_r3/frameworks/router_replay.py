"""Megatron's `RouterReplay` interface on our replay: code that is written for it runs unchanged.

    import megatron_r3.frameworks.router_replay  # before the model is made

After this import a config's `moe_enable_routing_replay` (or verl's `enable_routing_replay`) turns
on `moe_router_replay` instead, and each router's `router_replay` has upstream's interface
(megatron/core/transformer/moe/router_replay.py): targets, actions, the global list.

When the forward pass of a block of layers begins, the actions of the block's own routers decide
how the block runs:

    no action         as without this import
    RECORD            inside `recording()`; after the pass each router gets its recorded indices
    REPLAY_FORWARD    inside `replaying()`, with the targets of the block's routers
    REPLAY_BACKWARD   does not run: an error

A recompute reads no action: it takes the routes of its own forward pass (patch 2), whether the
caller sets REPLAY_BACKWARD before the backward pass or not. So upstream's queue of targets for the
backward pass is not needed. An exception in a block clears the actions and targets of its routers.
MTP routers stay live, and are not in the global list, since no engine returns routes for them. They
have the interface, because some code (NeMo-RL's) looks for routers in all modules of a model.

Shape suffixes (docs/glossary.md): T.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_r3.frameworks.target_routes import TargetRoutes
from megatron_r3.replay.active import recording, replaying
from megatron_r3.replay.ending import why_unpatched
from megatron_r3.replay.microbatch import ACTIVE, MicrobatchRoutes, ReplayError
from megatron_r3.replay.plan import LayerSizes
from megatron_r3.replay.planner import PLANNED_DISPATCHERS, Planner
from megatron_r3.replay.tally import Tally

# The classes that run a block of layers, in Megatron 0.16 to main. From 0.18 on MambaStack is
# another name of HybridStack; 0.16 and 0.17 have no HybridStack.
_BLOCKS = (
    ("megatron.core.transformer.transformer_block", "TransformerBlock"),
    ("megatron.core.models.hybrid.hybrid_block", "HybridStack"),
    ("megatron.core.ssm.mamba_block", "MambaStack"),
)

# Lists of routers that frameworks read beside upstream's global list; `join_list` adds a list.
_more_lists: list[list[Any]] = []


class BoundTargets:
    """The targets and the action of one router, which `_forward_pass` reads.

    Attributes:
        router_replay_action: an action of upstream's enum, or of a framework's enum with the same
            values. None means no action.
        target_topk_idx: the expert ids `[T, K]` that the next forward pass replays.
        target_replay_mask: the `replay_mask` of `set_target_indices`.
        recorded_topk_idx: the expert ids that the last forward pass with RECORD chose, int64
            `[T, K]`.
        replay_backward_list: upstream's queue of targets for the backward pass; always empty here.
    """

    _router: weakref.ref[Any]

    layer_number: int | None
    router_replay_action: Any
    target_topk_idx: Tensor | None
    target_replay_mask: Tensor | None
    recorded_topk_idx: Tensor | None
    replay_backward_list: list[Tensor]

    @property
    def router(self) -> Any:
        """The router that has this hook; None if the router's model was freed."""
        return self._router()

    def set_target_indices(self, topk_indices: Tensor, replay_mask: Tensor | None = None) -> None:
        """Keep what the next forward pass replays.

        Args:
            topk_indices: expert ids `[T, K]` of any integer dtype. A row that no router can take
                (an id twice, negative, or beyond the last expert) chooses live.
            replay_mask: True for rows to replay; bool or 0 and 1, T entries. None means that every
                row is replayed. Rows with False are treated as padding: their experts are spread
                over all experts, and they are not in the router's load. Only verl gives a mask. It
                is False for the last token of a sequence, for sequences without a response, and
                for packing padding (verl/utils/megatron/router_replay_utils.py,
                `build_r3_replay_mask`). No loss depends on these rows, not even by attention, so
                their experts do not matter.
        """
        self.target_topk_idx, self.target_replay_mask = topk_indices, replay_mask

    def clear_indices(self) -> None:
        """Forget the recorded indices, the targets and their mask."""
        self.recorded_topk_idx = self.target_topk_idx = self.target_replay_mask = None
        self.replay_backward_list = []

    def microbatch(self) -> MicrobatchRoutes | None:
        """The active microbatch; None if there is none. The router calls this in each pass.

        Raises:
            ReplayError: an action is set, but the router runs outside of its block's `__call__`,
                which alone reads actions. Upstream would have obeyed the action.
        """
        acts = self.has_routes and self.router_replay_action is not None
        if acts and ACTIVE.get() is None:
            raise ReplayError(
                f"layer {self.layer_number}: the action is {action_of(self)}, and the router runs "
                "outside of a call of TransformerBlock or HybridStack, where megatron_r3 reads "
                "actions. Likely causes: a block of layers of another class, a router or a "
                "layer that is called by itself, or a recompute that is not Megatron's"
            )
        return super().microbatch()  # type: ignore[misc]

    @property
    def has_routes(self) -> bool:
        """Whether rollouts have routes for this router; False for an MTP router."""
        return bool(self.__dict__["has_routes"])

    @has_routes.setter
    def has_routes(self, value: bool) -> None:
        # On 0.16 `keep_live` (seams/router.py) sets this to False after an MTP router was made.
        self.__dict__["has_routes"] = value
        if not value:
            for instances in (_upstream().global_router_replay_instances, *_more_lists):
                instances[:] = [hook for hook in instances if hook is not self]


def action_of(hook: BoundTargets) -> str | None:
    """The value of the hook's action in upstream's enum, e.g. "record"; None without an action."""
    action = hook.router_replay_action
    return None if action is None else str(getattr(action, "value", action))


@dataclass
class _Mismatch:
    """How many tokens would choose other experts live, summed on the device until `take_mismatch`.

    Attributes:
        wanted: whether forward passes count; `count_mismatch` sets it.
        sums: for each layer number int64 `[tokens that differ, tokens that were compared]`.
    """

    wanted: bool = False
    sums: dict[int, Tensor] = field(default_factory=dict)

    def add(self, routes: TargetRoutes, tally: Tally) -> None:
        for layer, compared in zip(routes.layers, routes.counted_tokens(), strict=True):
            pair = torch.stack([tally.mismatched[layer], compared])
            before = self.sums.get(layer)
            self.sums[layer] = pair if before is None else before + pair


_mismatch = _Mismatch()


def count_mismatch(wanted: bool = True) -> None:
    """Switch on or off, for the whole process, the comparison of replayed routes with live ones.

    The comparison costs one more top-k in each layer of a replayed pass.
    """
    _mismatch.wanted = wanted


def take_mismatch() -> dict[int, tuple[int, int]]:
    """Return what `count_mismatch` counted on this rank since the last call; wait for the device.

    Returns:
        For each layer number: how many tokens have a live choice that is another set of experts
        than their route, and how many tokens were compared. Rows that chose live, and padding, are
        not compared. Empty if nothing was replayed while `count_mismatch` was on.
    """
    sums, _mismatch.sums = _mismatch.sums, {}
    if not sums:
        return {}
    values = torch.stack(list(sums.values())).tolist()
    return {layer: (int(n), int(of)) for layer, (n, of) in zip(sums, values, strict=True)}


# -- the forward pass of a block of layers


_hooks: WeakKeyDictionary[torch.nn.Module, list[BoundTargets]] = WeakKeyDictionary()
_planners: WeakKeyDictionary[torch.nn.Module, Planner] = WeakKeyDictionary()


def _hooks_of(block: torch.nn.Module) -> list[BoundTargets]:
    """The hooks of a block's routers, without MTP's; a block's modules are walked only once."""
    if block not in _hooks:
        found = (getattr(module, "router_replay", None) for module in block.modules())
        _hooks[block] = [hook for hook in found if isinstance(hook, BoundTargets)]
    return [hook for hook in _hooks[block] if hook.has_routes]


def _with_routes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a block's `__call__` so that it obeys the actions of the block's routers.

    `forward` is not wrapped, because a subclass may override it and not call Megatron's `forward`.
    The TransformerBlock of mcore-bridge, with which ms-swift builds its models, is an example.
    """

    @functools.wraps(call)
    def with_routes(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        hooks = _hooks_of(self)
        if not hooks:
            return call(self, *args, **kwargs)
        try:
            with _forward_pass(self, hooks):
                return call(self, *args, **kwargs)
        except BaseException:
            for hook in hooks:
                hook.clear_indices()
                hook.router_replay_action = None
            raise

    return with_routes


@contextmanager
def _forward_pass(block: Any, hooks: list[BoundTargets]) -> Iterator[None]:
    """Do what the actions of a block's routers ask for, around the block's forward pass."""
    actions = {action_of(hook) for hook in hooks}
    if len(actions) > 1:
        by_layer = {hook.layer_number: action_of(hook) for hook in hooks}
        raise ReplayError(
            f"the routers of one block of layers have different actions: {by_layer}; give all the "
            "same action"
        )
    (action,) = actions
    if action is None:
        # Inside another `with replaying(...)` or `recording()` nothing is done. Elsewhere the pass
        # is marked as live: when it is recomputed, the action of the next pass may have been set,
        # and `BoundTargets.microbatch` would raise its error.
        with nullcontext() if ACTIVE.get() else replaying(None):
            yield
    elif action == "record":
        with recording() as recorded:
            yield
        _keep_recorded(hooks, recorded)
    elif action == "replay_forward":
        routes = _targets_of(block, hooks)
        microbatch = routes.microbatch(_mismatch.wanted)
        microbatch.plan = _plan(block, routes)
        microbatch.verify_plan = block.config.moe_router_replay_verify_plan
        with replaying(microbatch):
            yield
        if microbatch.untaken:
            raise ReplayError(f"no router took the targets of layers {microbatch.untaken}")
        if _mismatch.wanted:
            assert microbatch.tally is not None
            _mismatch.add(routes, microbatch.tally)
    else:
        raise ReplayError(
            f"a forward pass began with the action {action}: recomputes need no action; for a new "
            "forward pass set replay_forward (and targets) or record, or clear the action"
        )


def _keep_recorded(hooks: list[BoundTargets], recorded: MicrobatchRoutes) -> None:
    """Give each router its recorded choice, by upstream's `record_indices`."""
    silent = [hook.layer_number for hook in hooks if hook.layer_number not in recorded.ids]
    if silent:
        raise ReplayError(f"the routers of layers {silent} did not run, so nothing was recorded")
    for hook in hooks:
        assert hook.layer_number is not None
        hook.record_indices(recorded.ids[hook.layer_number].long())  # type: ignore[attr-defined]


def _targets_of(block: Any, hooks: list[BoundTargets]) -> TargetRoutes:
    """The targets of a block's routers, on the device."""
    targets, masks = {}, []
    for hook in hooks:
        assert hook.layer_number is not None, "the router has no layer number yet"
        if hook.target_topk_idx is not None:
            targets[hook.layer_number] = hook.target_topk_idx
            masks.append(hook.target_replay_mask)
    without = [hook.layer_number for hook in hooks if hook.layer_number not in targets]
    if without:
        raise ReplayError(
            f"the action is replay_forward, and the routers of layers {without} have no targets: "
            "call set_target_indices (or RouterReplay.set_replay_data) before the forward pass"
        )
    if any(mask is not masks[0] for mask in masks):
        raise ReplayError(
            "the layers of one forward pass have different replay masks: give all the same tensor"
        )
    unused_T = None if masks[0] is None else ~masks[0].reshape(-1).bool()
    num_experts = block.config.num_moe_experts
    return TargetRoutes.of(targets, unused_T, num_experts, torch.device("cuda"))


def _plan(block: Any, routes: TargetRoutes) -> dict[int, LayerSizes] | None:
    """The dispatch plan of one forward pass; None if the config or the dispatcher asks for none.

    A plan costs one wait for the device, since the targets must be copied to the host.
    """
    config = block.config
    asks = config.moe_token_dispatcher_type in PLANNED_DISPATCHERS
    if not (config.moe_router_replay_dispatch_plan and asks):
        return None
    if block not in _planners:
        _planners[block] = Planner(config, routes.layers)
    return _planners[block].plan(routes.on_host())


# -- the switch


def install() -> None:
    """Give upstream's interface to all routers made from now on; importing this module calls it.

    Raises:
        ReplayError: the Megatron-LM that is imported is not patched.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    if why := why_unpatched():
        raise ReplayError(f"{__name__}: {why}")
    if "_megatron_r3_bound" in vars(TopKRouter):
        return
    TopKRouter.__init__ = _binding(TopKRouter.__init__)
    TopKRouter._megatron_r3_bound = True
    wrapped = []
    for module, name in _BLOCKS:
        try:
            block = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError:  # this release has no such module
            continue
        if block is not None and block not in wrapped:
            block.__call__ = _with_routes(block.__call__)
            wrapped.append(block)


def join_list(instances: list[Any]) -> None:
    """Have each router that is made from now on join `instances`, a framework's list, too."""
    if not any(instances is some for some in _more_lists):
        _more_lists.append(instances)


def _upstream() -> Any:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    return RouterReplay


def _binding(build: Callable[..., None]) -> Callable[..., None]:
    """A `TopKRouter.__init__` that gives the router a hook with RouterReplay's interface."""

    @functools.wraps(build)
    def bound(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _choose_ours(config)
        build(self, config, *args, **kwargs)
        hook = self.router_replay
        if config.moe_router_replay:
            _bind(hook, self)

    return bound


def _choose_ours(config: Any) -> None:
    """If a config asks for upstream's replay, or verl's, have it ask for ours instead."""
    names = ("moe_enable_routing_replay", "enable_routing_replay")
    asked = [name for name in names if getattr(config, name, False)]
    if not asked:
        return
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            f"{asked[0]}: with overlap_moe_expert_parallel_comm the layers do not run in the "
            "forward pass of their block, where megatron_r3 looks at the action of RouterReplay; "
            "turn the overlap off, or call megatron_r3.replaying around the forward step"
        )
    for name in asked:
        setattr(config, name, False)
    config.moe_router_replay = True


def _bind(hook: Any, router: Any) -> None:
    """Add upstream's interface to the hook that the patch made, and put the hook into the lists."""
    layer_number, has_routes = hook.layer_number, hook.has_routes
    # The hook's class is in megatron_r3/seams, which this folder must not import. So the new class
    # is made from the object's own: `BoundTargets` comes first, then the class of the seam, then
    # upstream's class of the installed release.
    seams_class: Any = type(hook)
    hook.__class__ = _bound_class(seams_class, _upstream())
    _upstream().__init__(hook)  # sets upstream's fields; the hook joins upstream's list
    hook.layer_number, hook.target_replay_mask = layer_number, None
    hook._router = weakref.ref(router)
    for instances in _more_lists:
        instances.append(hook)
    hook.has_routes = has_routes  # an MTP router leaves the lists again


@functools.cache
def _bound_class(hook_class: Any, upstream: Any) -> type:
    return type("BoundRouterReplay", (BoundTargets, hook_class, upstream), {})


install()
