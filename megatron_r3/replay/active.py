"""The active microbatch: which routes a router takes.

The routes are active inside a block: `with replaying(routes): model(...)`. A function that runs
later (an activation recompute, a node of a schedule) is bound, when it is created, to the
microbatch that is active then. Such a function sees the routes of that microbatch however often it
runs, in any order, and on any thread.

Without an active microbatch every router is live. So an evaluation, a reference model or a critic
never replays by accident. An exception ends the block too, so no routes stay active after it.

A block ends with an error if no forward pass ran in it, or if no router took, compared or recorded
anything. There is no error

- for `replaying(None)`, which is live on purpose;
- for a schedule that runs the layers after the block;
- if no routes were given, and the model chunk has no router that replays (a dense pipeline stage);
- in the mode OBSERVE, if no routes were given, or if the routers have hooks (seams/router.py): a
  live sinkhorn router has no top-k, and so never calls its hook.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from megatron_r3.replay.ending import why_unpatched
from megatron_r3.replay.microbatch import ACTIVE, ForwardPass, MicrobatchRoutes, Mode, ReplayError

__all__ = [
    "WHY_UNTAKEN",
    "MicrobatchRoutes",
    "Mode",
    "ReplayError",
    "active_microbatch",
    "begin",
    "bind_to_microbatch",
    "end",
    "num_entered",
    "recording",
    "replaying",
]

OPTION_OFF = (
    "the model was built with moe_router_replay off: set it in the TransformerConfig before the "
    "model is built"
)
WHY_UNTAKEN = (
    f"Likely causes: {OPTION_OFF}; a framework replaced TopKRouter.routing (verl's "
    "apply_router_replay_patch does); the layers that ran belong to another model"
)


def active_microbatch() -> MicrobatchRoutes | None:
    """The microbatch that routers ask now. None means that routing is live."""
    active = ACTIVE.get()
    return None if active is None else active.microbatch


_entered = 0  # what `num_entered` returns


def num_entered() -> int:
    """How many blocks (`replaying`, `recording`) and passes after `begin` this process has entered.

    `replaying(None)` counts too: it says that a pass is live on purpose.
    """
    return _entered


def _enter(forward_pass: ForwardPass, model: torch.nn.Module | None = None) -> Callable[[], None]:
    """Make `forward_pass` active; return a function that ends it and restores what was active.

    Args:
        model: the model that the forward pass runs. None: a hook finds out which modules run.
    """
    global _entered
    _entered += 1
    outer = ACTIVE.get()
    if outer is not None:
        outer.has_inner = True
    token = ACTIVE.set(forward_pass)

    def note(module: torch.nn.Module, _: Any) -> None:
        """Note which modules run, until the module that has the layers (usually the model) is
        called. The hook is removed then, because it would keep submodules from being compiled.
        """
        if torch.compiler.is_compiling():  # the code below would break the compiled graph
            return
        if ACTIVE.get() is forward_pass and _look_into(module, forward_pass) and hook is not None:
            hook.remove()

    hook = None
    if model is not None:
        _look_into(model, forward_pass)
    elif forward_pass.microbatch is not None:  # replaying(None) raises no error about what ran
        hook = register_module_forward_pre_hook(note)

    def leave() -> None:
        if hook is not None:
            hook.remove()
        ACTIVE.reset(token)
        forward_pass.is_open = False
        # What an inner block with the same routes did counts for the outer block too. Example:
        # `with recording() as r:` around a function that enters `replaying(r)` by itself.
        if outer is not None and outer.microbatch is forward_pass.microbatch:
            outer.asked |= forward_pass.asked
            outer.ran |= forward_pass.ran
        forward_pass.nothing = _why_nothing(forward_pass)
        forward_pass.ran = {}  # bound functions keep the pass, which must not keep the model alive

    return leave


def _look_into(module: torch.nn.Module, forward_pass: ForwardPass) -> bool:
    """Note the classes of the submodules up to the first router, for `_why_nothing`.

    Returns:
        Whether `module` has layers or a router.
    """
    has_layers = False
    for some in module.modules():
        forward_pass.ran.setdefault(type(some), some)
        has_layers |= hasattr(some, "layers")
        if hasattr(some, "routing"):
            return True
    return has_layers


@contextmanager
def _block(forward_pass: ForwardPass) -> Iterator[None]:
    leave = _enter(forward_pass)
    try:
        yield
    finally:
        leave()
    _raise_if_untaken(forward_pass)


@contextmanager
def replaying(microbatch: MicrobatchRoutes | None) -> Iterator[MicrobatchRoutes | None]:
    """Make routers ask `microbatch` for their experts inside the block. None makes routing live.

    Any exit from the block, by an exception too, restores what was active before.

    Raises:
        ReplayError: at the end of the block, if no router took, compared or recorded routes (the
            module's docstring has the exceptions), or if ids on a device are wrong. An exception
            that is raised in the block is passed on instead.
    """
    with _block(ForwardPass(microbatch)):
        yield microbatch


@contextmanager
def recording() -> Iterator[MicrobatchRoutes]:
    """Record what routers (but not MTP's) choose inside the block, in the yielded object's `ids`.

    A recompute repeats the choice of the first pass. What was recorded can be replayed as it is,
    any number of times.

    Raises:
        ReplayError: at the end of the block, if nothing was recorded (except from a model chunk
            without MoE layers), or if the schedule runs the layers after the block.
    """
    microbatch = MicrobatchRoutes({}, mode=Mode.RECORD, checked=True)
    forward_pass = ForwardPass(microbatch)
    try:
        with _block(forward_pass):
            yield microbatch
    finally:
        microbatch.stop_recording()
    if forward_pass.runs_later and not microbatch.ids:
        raise ReplayError(
            "recording() ended before a layer ran: the schedule runs its layers after the block. "
            "Use replaying(MicrobatchRoutes({}, mode=Mode.RECORD)), and call stop_recording() of "
            "that object when the step is over"
        )


@dataclass(eq=False)
class _Begun:
    """A forward pass that `begin` has announced for a model.

    Attributes:
        leave: ends the pass; None until the model is called.
        has_run: whether the model's forward pass has returned.
    """

    forward_pass: ForwardPass
    leave: Callable[[], None] | None = None
    has_run: bool = False

    def attach(self, model: torch.nn.Module) -> None:
        """Make the routes active inside the model's next forward pass, and only there.

        `after` is called after an exception too (`always_call`), so that neither the routes nor the
        hooks outlive a forward pass that raised.
        """

        def before(*_: Any) -> None:
            self.leave = _enter(self.forward_pass, model)

        def after(*_: Any) -> None:
            if self.leave is not None:
                self.leave()
            self.forward_pass.is_open = False
            self.detach()

        def returned(*_: Any) -> None:
            self.has_run = True

        self._hooks = [
            model.register_forward_pre_hook(before, prepend=True),
            model.register_forward_hook(returned),
            model.register_forward_hook(after, always_call=True),
        ]

    def detach(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()


_begun: WeakKeyDictionary[torch.nn.Module, _Begun] = WeakKeyDictionary()


def begin(model: torch.nn.Module, microbatch: MicrobatchRoutes | None) -> None:
    """Let the next forward pass of `model` take these routes: `replaying` without a `with`.

    It is for code that is called before and after a forward pass and does not call the model
    itself. The routes are active inside `model.forward` and nowhere else. If that forward pass
    raises, nothing stays active, and the next forward pass is live.

    Args:
        model: the module that is called: the model with its wrappers. The combined 1F1B schedule
            asks a model for nodes and never calls the model: use `replaying` there.
        microbatch: the routes; None makes the forward pass live.

    Raises:
        ReplayError: `begin` was called for this model before, and neither `end` nor a forward pass
            has come since.
    """
    if (begun := _begun.get(model)) is not None and begun.forward_pass.is_open:
        begun.detach()
        del _begun[model]
        raise ReplayError(
            "begin was called twice for one model without a forward pass between, so no router "
            "took the routes of the first call: call the model after each begin"
        )
    _begun[model] = _Begun(ForwardPass(microbatch))
    _begun[model].attach(model)


def end(model: torch.nn.Module) -> None:
    """End the pass that `begin` announced, and check that routers took its routes.

    Raises:
        ReplayError: `begin` was not called; or the model did not run since `begin`, or raised; or
            no router took the routes; or ids on a device are wrong.
    """
    begun = _begun.pop(model, None)
    if begun is None:
        raise ReplayError(
            "end was called for a model without a begin: call begin(model, microbatch) before the "
            "forward pass"
        )
    begun.detach()
    begun.forward_pass.is_open = False
    if not begun.has_run:
        raise ReplayError(
            "the model did not run, or raised, between begin and end: call the model after begin, "
            "and end after the model has returned"
        )
    _raise_if_untaken(begun.forward_pass)


def bind_to_microbatch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it always runs under the microbatch that is active now.

    If no microbatch is active now, routers are live whenever `function` runs.

    Example: `checkpoint(layer, x)` keeps `bind_to_microbatch(layer)`. The backward pass calls the
    wrapper in autograd's own thread, where no block is open: the layer still takes these routes.
    """
    active = ACTIVE.get()
    if active is not None:
        active.bound = True
    return _Bound(function, active)


def _raise_if_untaken(forward_pass: ForwardPass) -> None:
    """Refuse a forward pass with wrong ids on a device, or in which no router asked for routes.

    A schedule that splits a forward pass into nodes runs the nodes after the block, so such a pass
    is not refused here. The caller of such a schedule must look at `MicrobatchRoutes.untaken` when
    the step is over, as `megatron_r3.train.guard` looks at `used`.
    """
    microbatch = forward_pass.microbatch
    if microbatch is None:
        return
    microbatch.raise_wrong_ids()
    if forward_pass.nothing is None or forward_pass.runs_later:
        return
    if microbatch.mode is Mode.RECORD:
        what = "nothing was recorded"
    elif microbatch.ids:
        what = f"the routes of layers {sorted(microbatch.ids)} were given, and no router took them"
    else:
        what = "there were no routes, and nothing was replayed"
    raise ReplayError(f"{what}: {forward_pass.nothing}")


def _why_nothing(forward_pass: ForwardPass) -> str | None:
    """Why no router asked in a block, as text; None if a router asked, or no router had to ask."""
    ran, microbatch = forward_pass.ran, forward_pass.microbatch
    if forward_pass.asked or microbatch is None:
        return None
    moe = [module for kind, module in ran.items() if _is_from(kind, _MOE)]
    if forward_pass.has_inner and (moe or not ran):
        return (
            "the forward pass ran in another replaying or recording block inside of this one; "
            "open one block around a forward pass"
        )
    if not ran:
        return "no forward pass ran inside the block; call the model there"
    if not any(_is_from(kind, "megatron.") for kind in ran):
        return f"what ran inside the block ({next(iter(ran)).__name__}) is no Megatron model"
    routers = [module for module in moe if hasattr(module, "routing")]
    live = [r for r in routers if getattr(getattr(r, "router_replay", None), "has_routes", True)]
    observes = microbatch.mode is Mode.OBSERVE
    # Without the option routers have no hook, so those of MTP are in `live` too. No rollout has
    # routes for MTP: without ids there was nothing to compare.
    compares_nothing = observes and not microbatch.ids
    if observes and any(getattr(router, "router_replay", None) for router in routers):
        return None  # no error: sinkhorn has no top-k, so a live router does not call its hook
    if not moe or (routers and not live) or compares_nothing:
        return "the model chunk that ran has none of these layers" if microbatch.ids else None
    config: Any = (live or moe)[0].config
    if why := why_unpatched():
        return why
    routing = getattr(type((live or moe)[0]), "routing", None)
    if routing is not None and not routing.__module__.startswith(_MOE):
        return f"{routing.__module__} has replaced TopKRouter.routing, and asks for no routes"
    if not config.moe_router_replay:
        return OPTION_OFF
    return f"the forward pass was live. {WHY_UNTAKEN}"


_MOE = "megatron.core.transformer.moe."


def _is_from(kind: type, package: str) -> bool:
    """Whether a class, or one of its base classes, is defined in a package."""
    return any(base.__module__.startswith(package) for base in kind.__mro__)


class _Bound:
    """A function that runs under the routes that were active when it was bound.

    Callers look for things in a function: `__closure__`, `__self__`, `__name__`, an attribute of
    their own. Whatever this class does not have is taken from the function. Example: verl searches
    `run_function.__closure__` for an MTP layer.
    """

    def __init__(self, function: Callable[..., Any], active: ForwardPass | None) -> None:
        functools.update_wrapper(self, function)
        self._active = active

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = self._active
        if active is not None:
            active.bound_ran = True
        token = ACTIVE.set(active)
        try:
            result = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        finally:
            ACTIVE.reset(token)
        # after the block nobody else reads what the check of the ids has found on the device
        if active is not None and active.microbatch is not None and not active.is_open:
            active.microbatch.raise_wrong_ids()
        return result

    def __getattr__(self, name: str) -> Any:
        """An attribute of the function; Python asks here only for names that `_Bound` lacks."""
        if name == "__wrapped__":  # copy and pickle ask before __init__ has run: do not recurse
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)
