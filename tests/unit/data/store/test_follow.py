"""A store that grows while it is read.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, OTHER, ROLLOUTS

from megatron_r3.data.store import RolloutStore, StoreError, open_stores, write_shard


def test_a_store_that_grows_is_followed(tmp_path):
    def write_later():
        time.sleep(0.3)
        write_shard(tmp_path / "s", INFO, ROLLOUTS[:2])
        time.sleep(0.3)
        newer = [replace(r, policy_version=8) for r in ROLLOUTS[2:]]
        write_shard(tmp_path / "s", replace(INFO, router_fingerprint=OTHER), newer)

    writer = threading.Thread(target=write_later)
    writer.start()
    store = open_stores([tmp_path / "s"], mixed_policies=True, follow_s=20)
    other = open_stores([tmp_path / "s"], mixed_policies=True, follow_s=0)
    assert len(store) == len(other) == 2
    store.wait_for(4)
    writer.join()
    rows = store.row_ids(4)
    ids, _ = other.routes(rows, [1])  # another process hears of a row before it knows the shard
    assert np.array_equal(ids[0], ROLLOUTS[4].routes.ids_LTK[1])
    assert other.shards_of(rows) == [1]
    with pytest.raises(StoreError, match=r"rollout 5 did not come within 0 s; it has 5 rollouts"):
        other.wait_for(5)
    write_shard(tmp_path / "s", INFO, [replace(ROLLOUTS[0], sample=9)])
    with pytest.raises(StoreError, match=r"shard-00002.*policy version 7 comes after 8"):
        other.wait_for(5)


def test_one_store_can_be_followed(store_dir, tmp_path):
    with pytest.raises(StoreError, match="only one store can be followed: name one"):
        open_stores([store_dir, tmp_path], follow_s=1)
    with pytest.raises(StoreError, match="the first shard did not come"):
        open_stores([tmp_path / "none"], follow_s=0)


@pytest.mark.parametrize("follow_s", [None, 0])
def test_every_shard_is_checked_before_it_is_used(store_dir, follow_s):
    checked = []
    store = open_stores([store_dir], follow_s=follow_s, check=lambda s: checked.append(s.path.name))
    assert checked == [shard.path.name for shard in store.shards]

    def refuse(shard):
        if shard.path.name == checked[1]:
            raise ValueError(f"{shard.path}: not for this model")

    error = ValueError if follow_s is None else StoreError
    with pytest.raises(error, match=f"{checked[1]}: not for this model"):
        open_stores([store_dir], follow_s=follow_s, check=refuse)


def test_a_shard_that_was_refused_is_not_in_the_store(tmp_path):
    def refuse(shard):
        if 8 in shard.tensors["policy_version"]:
            raise ValueError(f"{shard.path}: not for this model")

    write_shard(tmp_path, INFO, ROLLOUTS)
    store = open_stores([tmp_path], follow_s=0, check=refuse)
    write_shard(tmp_path, INFO, [replace(rollout, policy_version=8) for rollout in ROLLOUTS])
    for _ in range(2):  # the second time the shard is refused again, and is not called a copy
        with pytest.raises(StoreError, match=r"shard-00001.*: not for this model"):
            store.wait_for(5)
        assert len(store) == len(ROLLOUTS)


def test_readers_in_other_threads_see_whole_shards(tmp_path):
    """While one thread takes new shards, another finds each row in the shard that holds it."""
    write_shard(tmp_path, INFO, ROLLOUTS)
    store, wrong = open_stores([tmp_path], follow_s=20), []

    def read():
        while len(store) < 150:
            rollout = len(store) - 1
            expected = ROLLOUTS[rollout % 5].tokens_N
            if not np.array_equal(store.fields(rollout)["tokens"], expected):
                wrong.append(rollout)
            if store.locate(int(store.row_ids(rollout)[0])) != (rollout, 0):
                wrong.append(rollout)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(8, 8 + 29):
        write_shard(tmp_path, INFO, [replace(r, policy_version=version) for r in ROLLOUTS])
        store.refresh()
    reader.join()
    assert wrong == []


def test_a_store_that_is_not_followed_stays_as_it_was(store_dir):
    store = RolloutStore([store_dir])
    write_shard(store_dir, INFO, [replace(ROLLOUTS[0], sample=9)])
    store.refresh()
    store.wait_for(4)
    with pytest.raises(StoreError, match=f"{store_dir}: has no rollout 5: it has 5, numbered"):
        store.wait_for(5)
    assert len(store) == 5
    assert len(RolloutStore([store_dir])) == 6


def test_shards_that_come_in_another_order_have_the_row_ids_of_their_numbers(tmp_path):
    """rsync, parallel copies or two writers may bring shards in any order."""
    whole, grows = tmp_path / "whole", tmp_path / "grows"
    grows.mkdir()
    for number in range(4):
        write_shard(whole, INFO, [replace(r, policy_version=number) for r in ROLLOUTS[number:]])
    want = RolloutStore([whole])
    names = [shard.path.name for shard in want.shards]
    store = None
    for arrived, taken in ((0, 1), (2, 1), (3, 1), (1, 4)):
        os.link(whole / names[arrived], grows / names[arrived])
        store = store or open_stores([grows], follow_s=0)
        store.refresh()
        assert len(store.shards) == taken
        if arrived == 3:
            missing = f"has 5 rollouts, {names[1]} is missing and {names[2]} is there: is the sampl"
            with pytest.raises(
                StoreError, match=f"rollout 5 did not come within 0 s; it {missing}"
            ):
                store.wait_for(5)
    assert [shard.path.name for shard in store.shards] == names
    assert len(store) == len(want) == 5 + 4 + 3 + 2
    for rollout in range(len(want)):
        assert np.array_equal(store.row_ids(rollout), want.row_ids(rollout))
        assert np.array_equal(store.fields(rollout)["tokens"], want.fields(rollout)["tokens"])
        rows = want.row_ids(rollout)
        assert np.array_equal(store.routes(rows, [1])[0], want.routes(rows, [1])[0])


def test_the_first_shard_of_a_followed_store_is_number_0(store_dir):
    (store_dir / "shard-00000.safetensors").rename(store_dir / "kept")
    missing = "has 0 rollouts, shard-00000.safetensors is missing and shard-00001.safetensors is"
    with pytest.raises(StoreError, match=f"the first shard did not come within 0 s; it {missing}"):
        open_stores([store_dir], follow_s=0)


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_folder_that_takes_the_place_of_a_followed_store(tmp_path, exchanged):
    """Shard 0 was read from the first folder; shard 1 is in the folder that took its name."""
    shards = [[replace(r, policy_version=v) for r in ROLLOUTS] for v in (7, 8)]
    for name in ("s", "other"):
        write_shard(tmp_path / name, INFO, shards[0])
    store = open_stores([tmp_path / "s"], follow_s=0)
    if exchanged:
        (tmp_path / "s").rename(tmp_path / "moved")
        (tmp_path / "other").rename(tmp_path / "s")
        store.refresh()  # nothing new is there yet
    write_shard(tmp_path / "s", INFO, shards[1])
    if not exchanged:
        store.wait_for(9)
        return
    for _ in range(2):
        message = f"{tmp_path / 's'}: another folder took its place .* after shard 0 was taken"
        with pytest.raises(StoreError, match=message):
            store.wait_for(9)
    assert len(store) == 5
