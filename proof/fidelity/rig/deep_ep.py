"""A stand-in for `deep_ep` on any torch.distributed backend: DeepEP's intranode normal mode.

Megatron's flex dispatcher imports `deep_ep`, which is CUDA only. A token goes once to each *rank*
that has one of its experts; on the way back all rows of one token are added up. Example: 4 experts
on 2 ranks, experts 0 and 1 on rank 0. A token for experts 0 and 1 is sent as one row, to rank 0; a
token for experts 1 and 2 is sent as two rows, one to each rank.

The module follows the docstrings of deep_ep/buffer.py and deep_ep/utils.py in
github.com/deepseek-ai/DeepEP. As in DeepEP's intranode kernels, received rows are ordered by
sender, then by token, and sums are in float32. Two things differ: nothing overlaps here, and
activations may have other dtypes than bfloat16, but not DeepEP's FP8 with scales.

Shape suffixes (docs/glossary.md): T, K, E, R.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_r3.cpu.errors import NotEmulated

# Options that are accepted and ignored: the layout, which is computed again from topk_idx, and
# tuning and streams, which have no meaning on the CPU.
_IGNORED = {
    *("num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"),
    *("config", "previous_event", "async_finish", "allocate_on_comm_stream"),
}


def provide() -> None:
    """Put this module in the place of `deep_ep` and `deep_ep.utils`.

    Call it before Megatron is imported, because Megatron looks for these modules once.
    """
    utils = _module("deep_ep.utils", EventHandle=EventHandle, EventOverlap=EventOverlap)
    # the package has no HybridEPBuffer, so Megatron takes HybridEP to be missing
    package = _module("deep_ep", Buffer=Buffer, EventOverlap=EventOverlap, utils=utils)
    package.__path__ = []
    sys.modules.update({"deep_ep": package, "deep_ep.utils": utils})


def _module(name: str, **names: Any) -> ModuleType:
    """A module with a spec: find_spec raises a ValueError for a loaded module without one."""
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, origin=__file__)
    vars(module).update(names)
    return module


class EventHandle:
    """DeepEP's CUDA event. On the CPU all work is done when a call returns."""

    def current_stream_wait(self) -> None:
        """Do nothing: on the CPU there is nothing to wait for."""


class EventOverlap(EventHandle):
    """An event that a caller may wait for, also as a context manager."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Handle(NamedTuple):
    """Where the tokens of one dispatch went: for the combine, or to dispatch the same way again.

    Attributes:
        tokens: how many tokens this rank had.
        rows: the token of each row that this rank sent, in the order of the destination ranks.
            Example: tokens 0 and 2 go to rank 0, token 1 to both ranks: [0, 1, 2, 1].
        sent: how many rows this rank sent to each rank; in the example [3, 1].
        received: how many rows this rank got from each rank.
    """

    tokens: int
    rows: torch.Tensor
    sent: list[int]
    received: list[int]


class _Config:
    """DeepEP's config, which is asked for buffer sizes: 0, since there are no buffers."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0 bytes: there is no buffer, neither for NVLink nor for RDMA."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    """DeepEP's communication buffer. The stand-in holds a process group, and no memory.

    Args:
        group: the ranks, each with the same number of experts, in their order.
        num_nvl_bytes: stored only because Megatron compares the sizes of buffers.
        num_rdma_bytes: stored for the same reason.
        options: other options of DeepEP's. One that would change a result is refused.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        **options: Any,
    ) -> None:
        _refuse(options)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Do nothing: on the CPU there are no SMs to set aside."""

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        """DeepEP's config for dispatching, which changes nothing here."""
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, **options: Any
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Which ranks each token goes to.

        Args:
            topk_idx: the experts of each token `[T, K]`, int64. -1 stands for no expert.
            num_experts: how many experts all ranks have together.
            options: streams, which change nothing.

        Returns:
            Tokens for each rank, None (RDMA), tokens for each expert, whether a token goes to a
            rank `[T, R]`, and an event.
        """
        _refuse(options)
        # floor division takes -1 to -1, which is no rank
        rank_TK = topk_idx // (num_experts // self.group_size)
        in_rank_TR = (rank_TK.unsqueeze(-1) == torch.arange(self.group_size)).any(dim=1)
        tokens_E = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        event = EventOverlap(EventHandle())
        return in_rank_TR.sum(0).int(), None, tokens_E, in_rank_TR, event

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Handle | None = None,
        *,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Send each token to every rank that has one of its experts.

        Args:
            x: the hidden states of the tokens, a row each.
            handle: the handle of an earlier dispatch, to send other tokens the same way (the
                gradients of a combine). With a handle leave the next three arguments out; without
                one all three are needed.
            num_tokens_per_expert: `[E]`, as get_dispatch_layout returned it.
            topk_idx: the experts of each token `[T, K]`, int64. -1 stands for no expert.
            topk_weights: the weights of those experts `[T, K]`, float32.
            options: the rest of the layout, which follows from the experts; streams and tuning,
                which change nothing.

        Returns:
            The rows received; their experts, counted from this rank's first one (-1 for an expert
            of another rank); their weights (0 for an expert of another rank); the number of tokens
            for each expert of this rank; the handle; an event. With `handle`: the rows, None four
            times, and an event.
        """
        _refuse(options)
        if handle is not None:
            return self._send(x, handle), None, None, None, None, EventOverlap(EventHandle())
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_tokens_per_expert is not None
        num_experts = num_tokens_per_expert.numel()
        *_, in_rank, event = self.get_dispatch_layout(topk_idx, num_experts)
        handle = self._make_handle(in_rank)
        local = num_experts // self.group_size
        ids = self._send(topk_idx, handle) - self.rank * local
        elsewhere = (ids < 0) | (ids >= local)
        weights = self._send(topk_weights, handle).masked_fill(elsewhere, 0.0)
        received = torch.bincount(ids[~elsewhere], minlength=local).tolist()
        ids = ids.masked_fill(elsewhere, -1)
        return self._send(x, handle), ids, weights, received, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send every row back to the rank of its token, and add up the rows of each token.

        Args:
            x: a row of the hidden size for each row that the dispatch of `handle` received.
            handle: the handle that the dispatch returned.
            topk_weights: K float32 numbers for each row, added up in the same way (the gradients
                of a dispatch's weights), or None. The rows are not multiplied by them.
            options: streams and tuning, which change nothing.

        Returns:
            The tokens, a row each, the weights `[T, K]` or None, and an event.
        """
        _refuse(options)
        if topk_weights is not None:
            topk_weights = self._add_up(topk_weights, handle)
        return self._add_up(x, handle), topk_weights, EventOverlap(EventHandle())

    def _make_handle(self, in_rank: torch.Tensor) -> Handle:
        """The handle of a layout `[T, R]`; all ranks exchange how many rows each will send."""
        # nonzero reads the transpose [R, T] row by row, so its result is sorted by destination
        rows = in_rank.t().nonzero()[:, 1]
        sent = in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return Handle(len(in_rank), rows, sent.tolist(), received.tolist())

    def _send(self, tokens: torch.Tensor, handle: Handle) -> torch.Tensor:
        return self._exchange(tokens[handle.rows], handle.sent, handle.received)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """The rows that the ranks sent to this rank, sorted by sender."""
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(output, rows.detach().contiguous(), received, sent, self.group)
        return output

    def _add_up(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Send rows back, and sum them for each token, in float32 or a wider type."""
        back = self._exchange(rows, handle.received, handle.sent)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = back.new_zeros((handle.tokens, *rows.shape[1:]), dtype=wide)
        return total.index_add_(0, handle.rows, back.to(wide)).to(rows.dtype)


def _refuse(options: dict[str, Any]) -> None:
    """Refuse DeepEP's options that would change a result."""
    if unknown := sorted(options.keys() - _IGNORED):
        raise NotEmulated(
            f"deep_ep on the CPU does not emulate {', '.join(unknown)}: leave these options out"
        )
