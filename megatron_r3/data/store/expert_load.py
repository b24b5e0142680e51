"""Counts how many rows take each expert: the load of the ranks that own the experts.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import numpy as np

from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.schema import StoreError
from megatron_r3.replay.routes import RoutesError
from megatron_r3.replay.rows import count_tokens


def expert_load(store: RolloutStore, rollout: int) -> np.ndarray:
    """How many recorded rows of a rollout take each expert, int64 `[layers, experts]`.

    Raises:
        StoreError: the shard is damaged or was changed, or an id is out of range.
    """
    layers = range(len(store.info.moe_layers))
    ids_LTK, recorded_T = store.routes(store.row_ids(rollout), layers)
    return count_recorded(ids_LTK, recorded_T, store.info.num_experts, store.name(rollout))


def count_recorded(
    ids_LTK: np.ndarray, recorded_T: np.ndarray, num_experts: int, where: str
) -> np.ndarray:
    """How many recorded rows take each expert, int64 `[layers, experts]`.

    Args:
        where: what the error calls the data: a rollout, a file or a folder.

    Raises:
        StoreError: an id is out of range.
    """
    if not recorded_T.all():
        ids_LTK = ids_LTK[:, recorded_T]
    try:
        return count_tokens(ids_LTK, num_experts)
    except RoutesError as error:
        raise StoreError(
            f"{where}: {error}: the store is damaged; megatron-r3 rollouts verify says where"
        ) from error
