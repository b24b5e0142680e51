"""What NCCL can do and gloo cannot: uneven collectives, sends of tensors that are freed at once."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_r3.cpu.errors import NotEmulated

_MAX_IN_FLIGHT = 256  # how many copies may wait until they are sent
_in_flight: deque[tuple[Any, torch.Tensor]] = deque()


def patch() -> None:
    """Replace all_gather, reduce_scatter and isend of torch.distributed."""
    dist.all_gather = _with_uneven(dist.all_gather, _uneven_all_gather)
    dist.reduce_scatter = _with_uneven(dist.reduce_scatter, _uneven_reduce_scatter)
    # batch_isend_irecv accepts only the isend of its own module, distributed_c10d
    dist.isend = distributed_c10d.isend = _sending_a_copy(dist.isend)


def _with_uneven(even: Callable[..., Any], uneven: Callable[..., None]) -> Callable[..., Any]:
    """A collective: `uneven` if the tensors in its list argument differ in shape, else `even`."""

    @functools.wraps(even)
    def collective(*args: Any, **kwargs: Any) -> Any:
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
        if not lists or len({tensor.shape for tensor in lists[0]}) <= 1:
            return even(*args, **kwargs)
        if kwargs.get("async_op"):
            raise NotEmulated(f"{even.__name__} of uneven sizes with async_op=True is not emulated")
        return uneven(*args, **kwargs)

    return collective


def _uneven_all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """All-gather tensors of different shapes, by a broadcast from each rank."""
    for rank, output in enumerate(tensor_list):
        part = tensor if dist.get_rank(group) == rank else output
        # broadcast writes into its tensor, which must not be the caller's
        part = part.detach().contiguous().clone()
        dist.broadcast(part, group=group, group_src=rank)
        output.copy_(part)


def _uneven_reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """Reduce-scatter tensors of different shapes, by an all-reduce of each rank's tensor."""
    for rank, part in enumerate(input_list):
        total = part.detach().contiguous().clone()  # all_reduce would overwrite the input
        dist.all_reduce(total, op=op, group=group)
        if dist.get_rank(group) == rank:
            output.copy_(total)


def _sending_a_copy(isend: Callable[..., Any]) -> Callable[..., Any]:
    """An isend that sends a private copy and keeps it alive until it has been sent.

    Up to 0.17 Megatron's interleaved schedule with overlapped sends frees a tensor as soon as
    isend returns (`deallocate_output_tensor` in megatron/core/pipeline_parallel/schedules.py). On a
    GPU that is safe, because the stream orders the send before what follows. Gloo reads the tensor
    later, in a thread of its own, and would send junk.
    """

    @functools.wraps(isend)
    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = tensor.detach().clone()
        work = isend(copy, *args, **kwargs)
        _keep(work, copy)
        return work

    return send


def _keep(work: Any, copy: torch.Tensor) -> None:
    """Hold a copy until it is sent; if too many wait, wait for the oldest one."""
    _in_flight.append((work, copy))
    while _in_flight and (_in_flight[0][0] is None or _in_flight[0][0].is_completed()):
        _in_flight.popleft()
    if len(_in_flight) > _MAX_IN_FLIGHT:
        _in_flight.popleft()[0].wait()
