"""What this rank holds of a batch, still on the host, and the routes of those tokens.

Values are read through numpy, which refuses a tensor on a device. So nothing here can make the host
wait for the device by accident.

Shape suffixes (docs/glossary.md): B, S, T, D, L, K.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.microbatch import MicrobatchRoutes
from megatron_r3.rows import PADDING, router_order, spread_padding
from megatron_r3.store.reader import RolloutStore
from megatron_r3.training.dataset import SEQUENCE_FIELDS
from megatron_r3.training.options import RolloutOptions


class RankBatches:
    """Splits batches as Megatron splits the model's input.

    Args:
        options: the sizes of the parallel groups, and whether tensor parallelism splits sequences.
    """

    def __init__(self, options: RolloutOptions) -> None:
        from megatron.core import mpu

        self.cp_size, self.tp_size = options.context_parallel, options.tensor_parallel
        self.sp_size = self.tp_size if options.sequence_parallel else 1
        self.sp_rank = mpu.get_tensor_model_parallel_rank() if self.sp_size > 1 else 0
        self._positions: dict[int, Tensor] = {}  # by document length

    def split(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This context-parallel rank's part of a batch."""
        if self.cp_size == 1:
            return batch
        positions_S = self._local(batch)
        return batch | {name: batch[name][:, positions_S] for name in SEQUENCE_FIELDS}

    def router_order(self, field_BS: Tensor) -> Tensor:
        """A field of a split batch, `[T]`, as this rank's routers see it."""
        return router_order(field_BS, self.sp_size, self.sp_rank)

    def mean_tokens(self, rows_BS: Tensor) -> float:
        """A whole batch's real tokens, as an average over the ranks that share its sequences."""
        return np.count_nonzero(rows_BS.numpy() != PADDING) / (self.cp_size * self.tp_size)

    def _local(self, batch: dict[str, Tensor]) -> Tensor:
        """This rank's positions of a sequence, or of a pack, document by document."""
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
        """This rank's positions of a document, int64, as Megatron itself chooses them.

        Megatron splits on the device. The choice depends on the length alone. So Megatron is asked
        once for each length, with the positions 0, 1, 2 ... as the data, and the answer is kept on
        the host. Example: 8 tokens, context parallel rank 0 of 2 (zig-zag): [0, 1, 6, 7].
        """
        if length not in self._positions:
            from megatron.core import mpu
            from megatron.core.utils import get_batch_on_this_cp_rank

            whole = {"positions": torch.arange(length)[None].cuda()}
            options = {"is_hybrid_cp": False, "cp_group": mpu.get_context_parallel_group()}
            # 0.16 added the one parameter, 0.18 the other
            accepted = inspect.signature(get_batch_on_this_cp_rank).parameters
            part = get_batch_on_this_cp_rank(
                whole, **{name: value for name, value in options.items() if name in accepted}
            )
            self._positions[length] = part["positions"][0].cpu()
        return self._positions[length]


def _documents(batch: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """Where the documents of a pack begin, and their lengths."""
    bounds_D = batch["cu_seqlens"][0].numpy()
    return bounds_D[:-1].tolist(), np.diff(bounds_D).tolist()


def packed_seq_params(batch: dict[str, Tensor]) -> Any:
    """Megatron's description of a packed batch; None for a batch that is not packed.

    Real and padded lengths are the same in it, as in upstream's pretrain_gpt.py: padding stands
    behind the tokens of its document, and a causal model does not look there.
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
        rows_T: int64, the row ids.
        mean_tokens: the whole batch's real tokens, as an average over the ranks that share it.
        packed: the bytes of `ids_LTK`, `live_T` and `padding_T`, which are views of it, in pinned
            memory.
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
        # Example with 2 layers, 3 tokens, top-2, one byte an id: ids fill bytes 0 to 11, live_T
        # bytes 12 to 14, padding_T bytes 15 to 17. The widest type stands first: all are aligned.
        memory, views, start = packed.numpy(), [], 0
        for part in parts:
            view = memory[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
            view[...] = part
            views.append(view)
            start += part.nbytes
        return cls(views[0], views[1], views[2], rows_T, mean_tokens, packed)

    def on_device(
        self, layer_numbers: list[int], device: Any, **microbatch: Any
    ) -> MicrobatchRoutes:
        """The routes as a microbatch that has not run yet; one copy, and no wait.

        Args:
            microbatch: further arguments of MicrobatchRoutes.
        """
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
            checked=True,  # the reader of the store has checked the ids, on the host
            **microbatch,
        )


def read_routes(
    store: RolloutStore, rows_T: Tensor, layer_numbers: list[int], mean_tokens: float
) -> HostRoutes:
    """Read what one rank needs for one micro-batch: its layers, its tokens.

    Args:
        rows_T: int64 on the host, the row ids in the router's order, -1 for padding.
        layer_numbers: the layers, Megatron's numbers, from 1.
        mean_tokens: see HostRoutes.
    """
    trace = [store.info.moe_layers.index(number - 1) for number in layer_numbers]
    ids_LTK, recorded_T = store.routes(rows_T.numpy(), trace)
    padding_T = rows_T.numpy() == PADDING
    ids_LTK[:, padding_T] = spread_padding(
        int(padding_T.sum()), store.info.topk, store.info.num_experts
    ).numpy()
    if ids_LTK.dtype == np.uint16:
        ids_LTK = ids_LTK.astype(np.int16)  # torch cannot gather with uint16; ids stay below 32768
    live_T = ~recorded_T & ~padding_T
    return HostRoutes.pack(ids_LTK, live_T, padding_T, rows_T.numpy(), mean_tokens)
