"""Parameters that are gathered while the forward pass runs (`--overlap-param-gather`).

A distributed optimizer leaves each rank a part of the new parameters. With that option a module
waits for its parameters in a hook before its forward pass, and the hook begins to gather those of
the next bucket (`DistributedDataParallel` and `param_and_grad_buffer.py` in megatron/core/
distributed). Guests read parameters of experts outside their forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

_WAITS = "DistributedDataParallel._make_forward_pre_hook"


def wait_for_parameters(experts: Any) -> None:
    """Let the experts have their parameters of this step, as their own forward pass would.

    Every rank must call it before every forward pass of a layer, whether or not it has guests: a
    bucket that was not begun is begun here, and the ranks that share parameters must begin all
    buckets in the same order.
    """
    for module, hook in _waits(experts):
        hook(module)


def parameters_are_there(experts: Any) -> bool:
    """Whether the experts have their parameters of this step already; nothing is begun.

    Example: in the first micro-batch of a step a layer asks this of the next layer, whose
    parameters are still on their way; from the second micro-batch on they are there.
    """
    for module, hook in _waits(experts):
        groups = inspect.getclosurevars(hook).nonlocals["self"].param_to_bucket_group
        for parameter in module.parameters(recurse=False):
            group = groups.get(parameter)
            if group is not None and not (
                group.param_gather_dispatched and group.param_gather_handle is None
            ):
                return False
    return True


def _waits(experts: Any) -> Iterator[tuple[Any, Any]]:
    """The modules whose hook waits for parameters, and the hooks."""
    for module in experts.modules():
        for hook in module._forward_pre_hooks.values():
            if getattr(hook, "__qualname__", "").startswith(_WAITS):
                yield module, hook
