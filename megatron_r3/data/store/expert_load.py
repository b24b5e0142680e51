"""How many of a rollout's rows take each expert: written beside the routes, and read without them.

Routes are gigabytes, and what loads the ranks is a hundredth of that: a count for each rollout,
layer and expert. Rows that the engine did not return are not counted.

Shape suffixes (docs/glossary.md): E, K, L, M, T.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.store.header import EXPERT_LOAD
from megatron_r3.data.store.layout import DTYPES
from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.store.shard_file import ShardFile
from megatron_r3.replay.routes import Routes


def count_rows(
    ids_TK: np.ndarray, recorded_T: np.ndarray, num_experts: int, where: str
) -> np.ndarray:
    """How many recorded rows of a layer take each expert, int64 `[E]`.

    Example: two rows of a layer with 4 experts, `[[0, 2], [2, 3]]`, are counted as `1 0 2 1`.

    Args:
        where: the file or folder and the layer, for the error.

    Raises:
        StoreError: an id is out of range.
    """
    if not recorded_T.all():
        ids_TK = ids_TK[recorded_T]
    counts_E = np.bincount(ids_TK.reshape(-1), minlength=num_experts)
    # The counts are as many as the largest id wants, which shows an id out of range.
    if len(counts_E) > num_experts:
        raise StoreError(
            f"{where} has the expert id {len(counts_E) - 1}, but there are {num_experts} experts: "
            "the store is damaged; megatron-r3 rollouts verify says where"
        )
    return counts_E


def load_tensor(routes: Sequence[Routes]) -> np.ndarray:
    """The tensor of a shard with these rollouts, `[M, L, E]`: uint16 where each count fits in."""
    most = max(one.num_rows for one in routes)
    dtype = np.uint16 if most <= np.iinfo(np.uint16).max else np.uint32
    return np.stack([_load(one).astype(dtype) for one in routes])


def _load(routes: Routes) -> np.ndarray:
    """How many recorded rows of a rollout take each expert, int64 `[L, E]`."""
    counts = [
        count_rows(ids_TK, routes.recorded_T, routes.num_experts, f"MoE layer {layer}")
        for layer, ids_TK in enumerate(routes.ids_LTK)
    ]
    return np.stack(counts)


class StoredLoad:
    """The load that a shard has of each of its rollouts.

    Args:
        opened: the shard's file.
        row_start_M: `[M + 1]`, where each rollout's rows begin.
    """

    def __init__(self, opened: ShardFile, row_start_M: np.ndarray) -> None:
        self._opened, self._row_start_M = opened, row_start_M

    def read(self) -> np.ndarray | None:
        """The load as it is stored, int64 `[M, L, E]`; None in a shard that has none.

        An earlier megatron-r3, or another program, writes shards without it.

        Raises:
            StoreError: the file is damaged or was changed, or the counts are none of routes.
        """
        file, header = self._opened.file, self._opened.header
        if (entry := header.entries.get(EXPERT_LOAD)) is None:
            return None
        stored_MLE: np.ndarray = np.empty(entry.shape, DTYPES[entry.dtype])
        file.read(stored_MLE, entry.begin)
        self._opened.after_read()
        if zlib_ng.crc32(stored_MLE.data) != header.crc32[EXPERT_LOAD]:
            raise file.damaged(f"checksum of {EXPERT_LOAD!r}")
        load_MLE = stored_MLE.astype(np.int64)
        self._check_possible(load_MLE)
        return load_MLE

    def _check_possible(self, load_MLE: np.ndarray) -> None:
        """Refuse counts that no routes have: a recorded row counts for K experts in each layer."""
        rows_M, topk = np.diff(self._row_start_M), self._opened.header.info.topk
        total_ML = load_MLE.sum(2)
        wrong_ML = (load_MLE > rows_M[:, None, None]).any(2) | (total_ML % topk != 0)
        wrong_ML |= total_ML != total_ML[:, :1]
        if wrong_ML.any():
            rollout, layer = np.argwhere(wrong_ML)[0].tolist()
            raise StoreError(
                f"{self._opened.path}: rollout {rollout}: {EXPERT_LOAD} of MoE layer {layer} has "
                f"{total_ML[rollout, layer]} (row, expert) pairs, at most "
                f"{load_MLE[rollout, layer].max()} of one expert; {rows_M[rollout]} rows with "
                f"top-{topk} cannot have that: write the shard again"
            )

    def of_layer(self, layer: int, ids_TK: np.ndarray, recorded_T: np.ndarray) -> np.ndarray:
        """The load of each rollout in one layer, counted, int64 `[M, E]`.

        Args:
            ids_TK: the ids of all rows of the shard.
            recorded_T: bool.

        Raises:
            StoreError: an id is out of range, naming the file, the rollout and the layer.
        """
        counts = [
            count_rows(
                ids_TK[begin:end],
                recorded_T[begin:end],
                self._opened.header.info.num_experts,
                f"{self._opened.path}: rollout {rollout}: MoE layer {layer}",
            )
            for rollout, (begin, end) in enumerate(pairwise(self._row_start_M.tolist()))
        ]
        return np.stack(counts)

    def compare(self, layer: int, stored_ME: np.ndarray, counted_ME: np.ndarray) -> None:
        """Refuse a shard whose load of a layer is not what its routes have.

        Raises:
            StoreError: naming the file, the rollout, the layer and the expert.
        """
        if (wrong_ME := stored_ME != counted_ME).any():
            rollout, expert = np.argwhere(wrong_ME)[0].tolist()
            raise StoreError(
                f"{self._opened.path}: rollout {rollout}: {EXPERT_LOAD} says that "
                f"{stored_ME[rollout, expert]} rows take expert {expert} in MoE layer {layer}; its "
                f"routes say {counted_ME[rollout, expert]}: write the shard again"
            )
