"""How many recorded rows of a rollout take each expert.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, ROLLOUTS

from megatron_r3.data.store import RolloutStore, StoreError, write_shard
from megatron_r3.data.store.expert_load import count_recorded, expert_load
from megatron_r3.replay.routes import Routes


def counted(rollout):
    """The load of a rollout, counted one id at a time."""
    load_LE = np.zeros((3, 16), np.int64)
    for layer in range(3):
        for row, recorded in enumerate(rollout.routes.recorded_T):
            for expert in rollout.routes.ids_LTK[layer, row]:
                load_LE[layer, expert] += recorded
    return load_LE


def test_rows_that_were_not_recorded_do_not_count(tmp_path):
    ids_LTK = ROLLOUTS[0].routes.ids_LTK
    recorded_T = np.arange(ids_LTK.shape[1]) != 1
    gap = replace(ROLLOUTS[0], routes=Routes.from_array(ids_LTK, 16, recorded_T))
    write_shard(tmp_path, INFO, [gap, ROLLOUTS[1]])
    store = RolloutStore([tmp_path])
    for rollout, written in enumerate((gap, ROLLOUTS[1])):
        assert expert_load(store, rollout).tolist() == counted(written).tolist()
    assert expert_load(store, 0).sum() == 3 * 3 * 4  # 3 layers, 3 of 4 rows recorded, top-4


def test_an_id_out_of_range_is_damage():
    ids_LTK = np.array([[[0, 1]], [[2, 16]]], np.uint8)
    with pytest.raises(StoreError) as refusal:
        count_recorded(ids_LTK, np.ones(1, bool), 16, "rollouts")
    assert str(refusal.value) == (
        "rollouts: MoE layer 1 has the expert id 16; there are 16 experts: the store is damaged; "
        "megatron-r3 rollouts verify says where"
    )
    # the row was not recorded, so that its ids may be anything
    assert count_recorded(ids_LTK, np.zeros(1, bool), 16, "rollouts").sum() == 0
