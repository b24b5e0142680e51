"""Parameters that are gathered while the forward pass runs (`--overlap-param-gather`).

After a step of the distributed optimizer each rank has a part of the new parameters. With this
option a module's hook waits, before the module's forward pass, until the module's parameters are
gathered, and then begins to gather those of the next bucket (`DistributedDataParallel` and
`param_and_grad_buffer.py` in megatron/core/distributed). An expert's parameters are sent to guests
outside of the expert's forward pass, so this file calls the hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

_WAITS = "DistributedDataParallel._make_forward_pre_hook"


def wait_for_parameters(experts: Any) -> None:
    """Wait until the experts have their parameters of this step.

    Every rank must call this function before every forward pass of a layer, with or without guests:
    the call may begin to gather a bucket, and ranks that share parameters must begin all buckets in
    the same order.
    """
    for module, hook in _waits(experts):
        hook(module)


def parameters_are_there(experts: Any) -> bool:
    """Whether the experts have their parameters of this step already; the call gathers nothing.

    Example: a layer calls this for the experts of the next layer. In the first micro-batch of a
    step the parameters of these experts may be on their way; in later ones they are there.
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
    """The modules with a hook that waits for parameters, and the hooks."""
    for module in experts.modules():
        for hook in module._forward_pre_hooks.values():
            if getattr(hook, "__qualname__", "").startswith(_WAITS):
                yield module, hook
