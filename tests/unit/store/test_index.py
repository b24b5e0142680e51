"""What one process tells of a store is what a look at the store would find.

Shape suffixes (docs/glossary.md): C, N.
"""

import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
from stored import GROUPED_ROLLOUTS, INFO, OTHER, make_rollout

from megatron_r3.store import RolloutStore, open_stores, write_shard
from megatron_r3.store.index import Index

COLUMNS = ("reward", "group", "sample", "policy_version", "num_tokens", "prompt_digest")


@pytest.fixture
def folders(tmp_path):
    """Two directories, three policies, one rollout with version spans, one with an advantage."""
    spans = np.array([[2, 7], [4, 9]], np.int64)
    for number, info in enumerate((INFO, replace(INFO, router_fingerprint=OTHER), INFO)):
        rollouts = [replace(r, policy_version=7 + number) for r in GROUPED_ROLLOUTS]
        if number == 1:
            rollouts[3] = replace(rollouts[3], versions_C2=np.add(spans, [0, 1]))
        write_shard(tmp_path / "a", info, rollouts)
    write_shard(tmp_path / "b", replace(INFO, policy_stamp="ab" * 8), [make_rollout(70)])
    return [tmp_path / "a", tmp_path / "b"]


def same(store, other):
    assert len(store) == len(other) == 16
    for name in COLUMNS:
        assert np.array_equal(store.column(name), other.column(name))
    assert np.array_equal(store.groups(), other.groups())
    assert np.array_equal(store.newest_versions(), other.newest_versions())
    assert store.recorded_share() == other.recorded_share()
    assert store.index.identities() == other.index.identities()
    for shard, twin in zip(store.shards, other.shards, strict=True):
        assert (shard.path, shard.identity, shard.info) == (twin.path, twin.identity, twin.info)
        assert shard.num_rollouts == twin.num_rollouts
        for rollout in range(shard.num_rollouts):
            assert np.array_equal(shard.turns(rollout), twin.turns(rollout))
            spans, others = shard.extras.versions_C2(rollout), twin.extras.versions_C2(rollout)
            assert (spans is None) == (others is None)
            assert spans is None or np.array_equal(spans, others)
    for rollout in (0, 8, 15):
        assert np.array_equal(store.rollout(rollout).tokens_N, other.rollout(rollout).tokens_N)


def test_a_store_that_is_told_is_the_store_that_was_looked_at(folders):
    looked = RolloutStore(folders, mixed_policies=True)
    told = RolloutStore.told(pickle.loads(pickle.dumps(looked.index)))
    assert not any(shard.is_open for shard in told.shards)
    same(looked, told)
    assert sum(shard.is_open for shard in told.shards) == 3  # those whose rollouts were read
    same(looked, RolloutStore.told(Index.unpacked(looked.index.packed())))


def test_what_is_unpacked_cannot_be_an_object_of_python(folders):
    """A pickle may run code when it is read."""
    columns = {"texts": np.zeros(1, np.uint8), "table": np.array([print], object)}
    buffer = io.BytesIO()
    np.savez(buffer, **columns)
    with pytest.raises(ValueError, match="allow_pickle"):
        Index.unpacked(buffer.getvalue())


def test_an_index_that_grew_is_that_of_the_whole_store(folders):
    looked = RolloutStore(folders, mixed_policies=True)
    index = RolloutStore.told(looked.index).index
    kinds = index.table["info"]
    assert kinds.tolist() == [0, 1, 0, 2]
    grown = None
    for folder, number in ((0, 0), (0, 1), (0, 2), (1, 0)):
        place = 3 * folder + number
        piece = type(index).of(looked.directories, [looked.shards[place]])
        grown = piece if grown is None else grown.plus(piece)
    same(looked, RolloutStore.told(grown))
    assert grown.infos == index.infos
    assert grown.table.tolist() == index.table.tolist()


def test_a_store_without_a_shard_has_an_index(tmp_path):
    followed = open_stores([tmp_path / "later"], follow_s=0.0, waits=False)
    assert len(followed) == 0
    write_shard(tmp_path / "later", INFO, [make_rollout(5)])
    followed.refresh()
    assert len(followed) == 1
