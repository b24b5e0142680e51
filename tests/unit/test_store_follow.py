"""A store that grows while it is read."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, ROLLOUTS

from megatron_r3.store import RolloutStore, StoreError, write_shard


def test_a_store_that_grows_is_followed(tmp_path):
    def write_later():
        time.sleep(0.3)
        write_shard(tmp_path / "s", INFO, ROLLOUTS[:2])
        time.sleep(0.3)
        newer = [replace(r, policy_version=8) for r in ROLLOUTS[2:]]
        write_shard(tmp_path / "s", replace(INFO, router_fingerprint=("x", "y", "z")), newer)

    writer = threading.Thread(target=write_later)
    writer.start()
    store = RolloutStore([tmp_path / "s"], mixed_policies=True, follow_s=20)
    other = RolloutStore([tmp_path / "s"], mixed_policies=True, follow_s=0)
    assert len(store) == len(other) == 2
    store.wait_for(4)
    writer.join()
    rows = store.row_ids(4)
    ids, _ = other.routes(rows, [1])  # another process hears of a row before it knows the shard
    assert np.array_equal(ids[0], ROLLOUTS[4].routes.ids_LTK[1])
    assert other.shards_of(rows) == [1]
    with pytest.raises(StoreError, match=r"rollout 5 did not come within 0 s; it has 5 rollouts"):
        other.wait_for(5)
    write_shard(tmp_path / "s", INFO, ROLLOUTS[:1])
    with pytest.raises(StoreError, match=r"shard-00002.*policy version 7 after 8"):
        other.wait_for(5)


def test_one_store_can_be_followed(store_dir, tmp_path):
    with pytest.raises(StoreError, match="one store can be followed"):
        RolloutStore([store_dir, tmp_path], follow_s=1)
    with pytest.raises(StoreError, match="the first shard did not come"):
        RolloutStore([tmp_path / "none"], follow_s=0)


def test_a_store_that_is_not_followed_stays_as_it_was(store_dir):
    store = RolloutStore([store_dir])
    write_shard(store_dir, INFO, ROLLOUTS[:1])
    store.refresh()
    assert len(store) == 5
    assert len(RolloutStore([store_dir])) == 6
