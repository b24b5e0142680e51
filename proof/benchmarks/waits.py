"""Count what would make the host wait for a GPU, or would move metadata, in MoE layers.

On a CPU nothing waits, so this module replaces functions of torch by functions that count calls. A
call counts if code below megatron/core/transformer/moe makes it on a tensor that a GPU would hold,
which is every tensor that is not on the host. A tensor is on the host if it came from numpy, if it
was copied to the host, or if it is a sum, cast or view of a tensor on the host. A tensor that
Megatron makes on the host must be marked by `mark_host`. Example:

    sizes = torch.from_numpy(...)   on the host
    sizes.sum().item()              not counted: a sum of a tensor on the host
    probs.sum().item()              counted: a GPU would have to finish first
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

WAITS, COPIES = "host waits", "copies to the host"
GATHERS, PLANS = "metadata collectives", "plan collectives"

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
# These return a tensor whose shape depends on values, so the host must wait for the values.
READS += ("nonzero", "masked_select")
# these return a tensor that is on the host if their argument is
SAME_PLACE = ("sum", "long", "ravel", "view", "reshape", "contiguous")
COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base", "all_gather")
# all_to_all_single carries a plan's counts, which are integers, and also tokens, which are floats
COLLECTIVES += ("all_to_all_single",)
PLACE = "megatron.core.transformer.moe"
# Two names of the CPU that torch takes alike: here "cpu" is the host, "cpu:0" stands for a GPU.
HOST, ON_DEVICE = torch.device("cpu"), torch.device("cpu", 0)
_state = threading.local()


def instrument(counts: Counter[str]) -> None:
    """Replace functions of torch by functions that count, until this process ends.

    Args:
        counts: gets a number for each of WAITS, COPIES, GATHERS and PLANS.
    """
    for name in READS:
        _wrap_read(counts, name)
    for name in SAME_PLACE:
        _keep_place(name)
    _name_device()
    transposed = torch.Tensor.T  # T is a property, so a property replaces it
    torch.Tensor.T = property(lambda self: _marked(transposed.__get__(self), _is_host(self)))
    _wrap_copies(counts)
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda array: _marked(from_numpy(array), True)
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        _wrap_synchronize(counts, kind)
    for name in COLLECTIVES:
        if hasattr(dist, name):
            _wrap_collective(counts, name)
    from megatron.core.tensor_parallel import mappings

    # mappings took the uncounted function when mappings was imported
    mappings.dist_all_gather_func = dist.all_gather_into_tensor


def count_passes(models: Iterable[torch.nn.Module], passes: Counter[str]) -> None:
    """From now on, count as "experts" how often MoE layers run their experts, recomputes too."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def count(*_: Any) -> None:
        passes["experts"] += 1

    for layer in (module for model in models for module in model.modules()):
        if isinstance(layer, MoELayer):
            layer.experts.register_forward_pre_hook(count)
            for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
                # a tensor on permute_idx_device: the CPU, unless moe_permute_fusion is on
                mark_host(getattr(layer.token_dispatcher, name))


def _inside_moe() -> bool:
    """Whether code of a MoE layer is anywhere on the stack.

    False inside a call that is already being counted: see `_call`.
    """
    if getattr(_state, "depth", 0) > 1:
        return False
    frame: Any = sys._getframe(2)  # skips this function and the one that replaces torch's
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(PLACE):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _call() -> Iterator[None]:
    """Mark that a counted call runs, so that calls inside it are not counted again.

    Under `megatron_r3.cpu` a torch function mode sees `tensor.item()` first and makes the same call
    once more: two calls of the replaced function for one read.
    """
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1


def _is_host(tensor: Any) -> bool:
    return getattr(tensor, "on_host", False)


def mark_host(tensor: torch.Tensor) -> torch.Tensor:
    """Mark this tensor as one that a GPU would not hold; return the tensor."""
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def _marked(tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
    return mark_host(tensor) if on_host else tensor


def _wrap_read(counts: Counter[str], name: str) -> None:
    original = getattr(torch.Tensor, name)

    def read(self: torch.Tensor, *args: Any) -> Any:
        with _call():
            if not _is_host(self) and _inside_moe():
                counts[WAITS] += 1
            return original(self, *args)

    setattr(torch.Tensor, name, read)


def _keep_place(name: str) -> None:
    original = getattr(torch.Tensor, name)

    def same_place(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _marked(original(self, *args, **kwargs), _is_host(self))

    setattr(torch.Tensor, name, same_place)


def _name_device() -> None:
    """Have `tensor.device` return "cpu" for a tensor on the host, and "cpu:0" for other tensors.

    So `ids.to(scores.device)` is no copy to the host if a GPU would hold the scores.
    """
    device: Any = torch.Tensor.device  # device is a property, so a property replaces it

    def named(self: torch.Tensor) -> torch.device:
        found: torch.device = device.__get__(self)
        return ON_DEVICE if found == HOST and not _is_host(self) else found

    torch.Tensor.device = property(named)  # type: ignore[assignment]


def _wrap_copies(counts: Counter[str]) -> None:
    to, cpu = torch.Tensor.to, torch.Tensor.cpu

    # what a copy returns is on the host, so that reading it later is no second wait
    def counted(self: torch.Tensor, waits: bool, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
        if not _is_host(self) and _inside_moe():
            counts[COPIES] += 1
            counts[WAITS] += waits
        # Under `megatron_r3.cpu` a copy to a GPU calls this once more, as a copy to the CPU. The
        # outer call says where the copy goes.
        return _marked(copy(), getattr(_state, "depth", 0) == 1)

    def copy_cpu(self: torch.Tensor, *args: Any) -> torch.Tensor:
        with _call():
            return counted(self, True, lambda: cpu(self, *args))

    def copy_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device", args[0] if args else None)
        with _call():
            if isinstance(device, torch.device) and device == HOST:
                waits = not kwargs.get("non_blocking", False)
                return counted(self, waits, lambda: to(self, *args, **kwargs))
            return to(self, *args, **kwargs)

    torch.Tensor.cpu = copy_cpu  # type: ignore[assignment]
    torch.Tensor.to = copy_to  # type: ignore[assignment]


def _wrap_synchronize(counts: Counter[str], kind: Any) -> None:
    original = kind.synchronize

    def synchronize(self: Any) -> None:
        counts[WAITS] += _inside_moe()
        original(self)

    kind.synchronize = synchronize


def _wrap_collective(counts: Counter[str], name: str) -> None:
    original = getattr(dist, name)

    def collective(*args: Any, **kwargs: Any) -> Any:
        # the first argument is the output; integers are sizes, not activations
        output = args[0] if args else None
        if isinstance(output, torch.Tensor) and not output.is_floating_point():
            # a plan's collective is called by this project, outside of any layer
            ours = sys._getframe(1).f_globals.get("__name__", "").startswith("megatron_r3")
            kind = GATHERS if _inside_moe() else PLANS if ours else None
            if kind:
                counts[kind] += 1
        return original(*args, **kwargs)

    setattr(dist, name, collective)
