"""How many of a rollout's rows take each expert: written beside the routes, and read without them.

Routes are gigabytes, and what loads the ranks is a hundredth of that: a count for each rollout,
layer and expert. Rows that the engine did not return are not counted.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_r3.data.store.schema import StoreError
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
