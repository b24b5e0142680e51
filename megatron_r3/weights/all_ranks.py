"""Ranks exchange values and tensors here, and all raise if a step fails on any rank.

Without process groups this process is the only rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_r3.replay.words import one_line

T = TypeVar("T")


def my_rank() -> int:
    """The number of this rank; 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def everyones(value: T) -> list[T]:
    """The `value` of each rank, in the order of ranks. All ranks must call this function."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(error: Exception | None) -> None:
    """Raise on all ranks if any rank has an error. All ranks must call this function.

    Args:
        error: this rank's error, or None.

    Raises:
        ValueError: the error of the first rank that has one; the same on every rank.
    """
    reasons = everyones(None if error is None else _reason(error))
    if failed := [rank for rank, reason in enumerate(reasons) if reason is not None]:
        where = f" (on rank {failed[0]})" if len(reasons) > 1 else ""
        raise ValueError(f"{reasons[failed[0]]}{where}") from error


def _reason(error: Exception) -> str:
    text = one_line(str(error), 1000)
    # An error of another type is a bug, and its text may say little, so the type is named. The type
    # is also named if there is no text.
    expected = isinstance(error, (ValueError, OSError)) and text
    return text if expected else f"{type(error).__name__}: {text}"


def together(step: Callable[[], T]) -> T:
    """Run a step on all ranks; if the step fails on one rank, all ranks raise.

    If one rank raised alone, the other ranks would wait for it.

    Args:
        step: called on every rank; it must not communicate.

    Returns:
        What the step returned on this rank.

    Raises:
        ValueError: the step's error on the first rank that failed; the same on every rank.
    """
    result: Any = None
    failure = None
    try:
        result = step()
    except Exception as error:
        failure = error
    agree(failure)
    return result


def on_first_rank(step: Callable[[], None]) -> None:
    """`together` for a step that only rank 0 runs."""
    together(lambda: step() if my_rank() == 0 else None)


def send(tensor: Tensor, to: int) -> None:
    """Send a tensor of any dtype and device to the rank `to`, which calls `receive`."""
    # NCCL moves only tensors on the GPU, gloo only those on the host.
    dist.send(tensor.to(_device()).contiguous().flatten().view(torch.uint8), to)


def receive(shape: tuple[int, ...], dtype: torch.dtype, sender: int) -> Tensor:
    """The tensor that the rank `sender` sent, on the host."""
    tensor = torch.empty(shape, dtype=dtype, device=_device())
    dist.recv(tensor.flatten().view(torch.uint8), sender)
    return tensor.cpu()


def _device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
