"""What this rank holds of a batch, still on the host, and the routes of those tokens.

Values are read through numpy, which refuses a tensor on a device: nothing here can make the host
wait for one.

Shape suffixes: B batch, S sequence (of this context-parallel rank once it is split), T tokens of
this rank in the router's order, D documents of a pack, L MoE layers of a model chunk, K top-k.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.replay import MicrobatchRoutes
from megatron_r3.rows import PADDING, router_order, spread_padding
from megatron_r3.store.reader import RolloutStore
from megatron_r3.training.dataset import SEQUENCE_FIELDS


class RankBatches:
    """Splits batches as Megatron splits the model's input.

    Args:
        args: Megatron's arguments.
    """

    def __init__(self, args: Any) -> None:
        from megatron.core import mpu

        self.cp_size = args.context_parallel_size
        self.tp_size = args.tensor_model_parallel_size
        self.sp_size = self.tp_size if args.sequence_parallel else 1
        self.sp_rank = mpu.get_tensor_model_parallel_rank() if self.sp_size > 1 else 0
        self._positions: dict[int, Tensor] = {}  # by document length

    def split(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This context-parallel rank's part."""
        if self.cp_size == 1:
            return batch
        positions_S = self._local(batch)
        return batch | {name: batch[name][:, positions_S] for name in SEQUENCE_FIELDS}

    def router_order(self, field_BS: Tensor) -> Tensor:
        """A field of a split batch, `[T]`, as this rank's routers see it."""
        return router_order(field_BS, self.sp_size, self.sp_rank)

    def mean_tokens(self, rows_BS: Tensor) -> float:
        """A whole batch's real tokens, on average over the ranks that share its sequences."""
        return np.count_nonzero(rows_BS.numpy() != PADDING) / (self.cp_size * self.tp_size)

    def _local(self, batch: dict[str, Tensor]) -> Tensor:
        """This rank's positions of a sequence, or of a pack: each document is split for itself."""
        if "cu_seqlens" not in batch:
            return self._of_document(batch["rows"].shape[1])
        starts, lengths = _documents(batch)
        return torch.cat(
            [
                start + self._of_document(length)
                for start, length in zip(starts, lengths, strict=True)
            ]
        )

    def _of_document(self, length: int) -> Tensor:
        """Asked of Megatron once a length: it splits on the device, and reading the row ids back
        for every microbatch would make the host wait.
        """
        if length not in self._positions:
            from megatron.core import mpu
            from megatron.core.utils import get_batch_on_this_cp_rank

            whole = {"positions": torch.arange(length)[None].cuda()}
            how = {"is_hybrid_cp": False, "cp_group": mpu.get_context_parallel_group()}
            accepted = inspect.signature(get_batch_on_this_cp_rank).parameters  # 0.16, 0.18 added
            part = get_batch_on_this_cp_rank(
                whole, **{name: value for name, value in how.items() if name in accepted}
            )
            self._positions[length] = part["positions"][0].cpu()
        return self._positions[length]


def _documents(batch: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """Where the documents of a pack begin, and their lengths."""
    bounds_D = batch["cu_seqlens"][0].numpy()
    return bounds_D[:-1].tolist(), np.diff(bounds_D).tolist()


def packed_seq_params(batch: dict[str, Tensor]) -> Any:
    """Megatron's description of a packed batch, or None for one that is not packed.

    Real and padded lengths are the same there, as in upstream's pretrain_gpt.py: padding stands
    behind the tokens of its document, which do not see it.
    """
    if "cu_seqlens" not in batch:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = max(_documents(batch)[1])
    bounds_D = batch["cu_seqlens"][0].cuda(non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds_D,
        cu_seqlens_kv=bounds_D,
        cu_seqlens_q_padded=bounds_D,
        cu_seqlens_kv_padded=bounds_D,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@dataclass(frozen=True)
class HostRoutes:
    """The routes that one rank needs for one microbatch, on the host.

    Attributes:
        ids_LTK: uint8 or int16; padding is spread over all experts.
        live_T: bool, tokens whose route was not recorded.
        padding_T: bool.
        mean_tokens: the whole batch's real tokens, on average over the ranks that share it.
        rows_T: int64, the row ids.
        packed: the bytes of the first three, one after the other, in pinned memory: they are views.
    """

    ids_LTK: np.ndarray
    live_T: np.ndarray
    padding_T: np.ndarray
    rows_T: np.ndarray
    mean_tokens: float
    packed: Tensor

    @classmethod
    def pack(
        cls,
        ids_LTK: np.ndarray,
        live_T: np.ndarray,
        padding_T: np.ndarray,
        rows_T: np.ndarray,
        mean_tokens: float,
    ) -> HostRoutes:
        """Put what goes to the device into one piece of memory, so that one copy takes it there."""
        parts = (ids_LTK, live_T, padding_T)
        size = sum(part.nbytes for part in parts)
        packed = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        memory, views, start = packed.numpy(), [], 0
        for part in parts:
            view = memory[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
            view[...] = part
            views.append(view)
            start += part.nbytes
        return cls(views[0], views[1], views[2], rows_T, mean_tokens, packed)

    def on_device(self, layer_numbers: list[int], device: Any) -> MicrobatchRoutes:
        """A microbatch that has not run yet; one copy."""
        moved = self.packed.to(device, non_blocking=True, copy=True)
        num_tokens, num_bytes = len(self.live_T), self.ids_LTK.nbytes
        dtype = torch.uint8 if self.ids_LTK.dtype == np.uint8 else torch.int16
        ids_LTK = moved[:num_bytes].view(dtype).reshape(self.ids_LTK.shape)
        live_T, padding_T = moved[num_bytes:].view(torch.bool).split(num_tokens)
        return MicrobatchRoutes(
            dict(zip(layer_numbers, ids_LTK, strict=True)),
            live_T=live_T if self.live_T.any() else None,
            padding_T=padding_T,
            mean_tokens=self.mean_tokens,
            checked=True,  # the store's ids were, on the host
        )


def read_routes(
    store: RolloutStore, rows_T: Tensor, layer_numbers: list[int], mean_tokens: float
) -> HostRoutes:
    """Read what one rank needs for one microbatch: its layers, its tokens.

    Args:
        rows_T: int64 on the host, the row ids in the router's order, -1 for padding.
        layer_numbers: Megatron's, from 1.
    """
    trace = [store.info.moe_layers.index(number - 1) for number in layer_numbers]
    ids_LTK, recorded_T = store.routes(rows_T.numpy(), trace)
    padding_T = rows_T.numpy() == PADDING
    ids_LTK[:, padding_T] = spread_padding(
        int(padding_T.sum()), store.info.topk, store.info.num_experts
    ).numpy()
    if ids_LTK.dtype == np.uint16:
        ids_LTK = ids_LTK.astype(np.int16)  # torch has no gather for uint16
    live_T = ~recorded_T & ~padding_T
    return HostRoutes.pack(ids_LTK, live_T, padding_T, rows_T.numpy(), mean_tokens)
