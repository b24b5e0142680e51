"""Which tokens of a batch this rank holds, and in which order its routers see them.

Megatron's own function splits for context parallelism, on the device. It is called once for each
length, with the positions 0, 1, 2 ... as the data, and the result is kept on the host. No other
code here makes the host wait for the device: values are read with `.numpy()`, which raises for a
tensor on a device.

Shape suffixes (docs/glossary.md): B, D, S.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.replay.rows import PADDING, router_order


class RankLayout:
    """This rank's place in Megatron's process groups, and which part of a batch this rank has.

    Create it after the process groups of `megatron.core.parallel_state`.

    Args:
        sequence_parallel: whether tensor parallelism splits sequences (`config.sequence_parallel`).
    """

    def __init__(self, sequence_parallel: bool) -> None:
        from megatron.core import mpu

        self.cp_size = mpu.get_context_parallel_world_size()
        self.tp_size = mpu.get_tensor_model_parallel_world_size()
        self.sp_size = self.tp_size if sequence_parallel else 1
        self.sp_rank = mpu.get_tensor_model_parallel_rank() if self.sp_size > 1 else 0
        self._positions: dict[int, Tensor] = {}  # `_of_document` for each length that was asked for

    def split(self, batch: dict[str, Tensor], fields: Iterable[str]) -> dict[str, Tensor]:
        """This context-parallel rank's part of a whole batch.

        Args:
            batch: tensors on the host, `rows` among them. A packed batch has `cu_seqlens`, int32
                `[1, D + 1]`: where its documents begin and end, padding included.
            fields: the names of the tensors `[B, S]` that are split. Other tensors stay whole.
        """
        if self.cp_size == 1:
            return batch
        positions_S = self._local(batch)
        return batch | {name: batch[name][:, positions_S] for name in fields}

    def router_order(self, field_BS: Tensor) -> Tensor:
        """A field of a split batch, flat, in the order of the tokens in this rank's routers.

        Raises:
            ValueError: as `rows.router_order`.
        """
        return router_order(field_BS, self.sp_size, self.sp_rank)

    def mean_tokens(self, rows_BS: Tensor) -> float:
        """The tokens of a whole batch that are not padding, divided by CP size times TP size."""
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

        Example: 8 tokens, context-parallel rank 0 of 2: [0, 1, 6, 7].
        """
        if length not in self._positions:
            from megatron.core import mpu
            from megatron.core.utils import get_batch_on_this_cp_rank

            whole = {"positions": torch.arange(length)[None].cuda()}
            options = {"is_hybrid_cp": False, "cp_group": mpu.get_context_parallel_group()}
            # not every release has both parameters
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

    Padding counts as part of its document here, as in upstream's pretrain_gpt.py: padding stands
    behind the tokens of the document, and a causal model does not look there.
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
