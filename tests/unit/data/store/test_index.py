"""A store that is made of a sent index is the store that reading the directories gives.

Shape suffixes (docs/glossary.md): M, V.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, OTHER, files_open, make_rollout
from wrongs import CUT, with_extras

from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.data.store.index import Index

# the infos of shards 0, 1 and 2 of a store: of two policies
INFOS = (CUT, replace(CUT, router_fingerprint=OTHER), CUT)


@pytest.fixture
def directories(tmp_path):
    """Two stores of three and two shards, whose groups both begin at 0."""
    for name, shards in (("b", 3), ("a", 2)):
        for number in range(shards):
            lengths = [5 + number, 9, 3 + number, 70][: 2 + number]
            rollouts = [
                make_rollout(n, seed=n + 10 * number + ord(name), group=i // 2 + number, sample=i)
                for i, n in enumerate(lengths)
            ]
            if number != 1:
                rollouts[1:] = [with_extras(one, number) for one in rollouts[1:]]
            rollouts = [replace(one, sample=10 * number + i) for i, one in enumerate(rollouts)]
            write_shard(tmp_path / name, INFOS[number], rollouts)
    return [tmp_path / "b", tmp_path / "a"]


def of_parts(directories, cuts):
    """The index of all shards, joined from the indices of parts of the shards."""
    shards = [*RolloutStore(directories, mixed_policies=True).shards]
    parts = np.split(np.arange(len(shards)), cuts)
    indices = [Index.of(directories, [shards[i] for i in part]) for part in parts]
    whole = indices[0]
    whole.groups()  # computed for the first part only; `plus` must not keep them
    for index in indices[1:]:
        whole = whole.plus(index)
    return whole


def assert_same_index(got, wanted):
    assert (got.directories, got.resolved, got.infos) == (
        wanted.directories,
        wanted.resolved,
        wanted.infos,
    )
    assert np.array_equal(got.table, wanted.table)
    assert np.array_equal(got.groups(), wanted.groups())
    assert got.columns.keys() == wanted.columns.keys()
    for name, column in wanted.columns.items():
        assert got.columns[name].dtype == column.dtype, name
        assert got.columns[name].tobytes() == column.tobytes(), name
    assert (got.names(), got.identities()) == (wanted.names(), wanted.identities())
    assert got.has_namesakes() == wanted.has_namesakes()
    assert np.array_equal(got.first_rollout, wanted.first_rollout)
    assert np.array_equal(got.first_row, wanted.first_row)


def test_an_index_says_what_its_shards_say(directories):
    store = RolloutStore(directories, mixed_policies=True)
    index, shards = store.index, [*store.shards]
    assert index.names() == [f"shard-{number:05d}.safetensors" for number in (0, 1, 2, 0, 1)]
    assert index.identities() == [shard.identity for shard in shards]
    assert len(index.infos) == 2
    assert [index.infos[place] for place in index.table["info"]] == [s.info for s in shards]
    assert index.table["folder"].tolist() == [0, 0, 0, 1, 1]
    assert index.table["rollouts"].tolist() == [2, 3, 4, 2, 3]
    assert index.table["recorded_rows"].sum() == index.first_row[-1] == store.row_ids(13)[-1] + 1
    for name in ("reward", "group", "sample", "policy_version", "num_tokens", "prompt_digest"):
        wanted = np.concatenate([shard.tensors[name] for shard in shards])
        assert np.array_equal(index.columns[name], wanted)
        assert np.array_equal(store.column(name), wanted)
    wanted = np.concatenate([shard.newest_version_M for shard in shards])
    assert np.array_equal(store.newest_versions(), wanted)
    assert {7, 9} == {*wanted.tolist()}
    # rollouts are of one group if directory, group and policy version are the same
    names = [
        (shard.path.parent, int(group), int(version))
        for shard in shards
        for group, version in zip(
            shard.tensors["group"], shard.tensors["policy_version"], strict=True
        )
    ]
    same = [[one == other for other in names] for one in names]
    groups = store.groups()
    assert (groups[:, None] == groups).tolist() == same
    assert not index.has_namesakes()


@pytest.mark.parametrize("cuts", [[], [0], [1], [3], [5], [1, 2, 3, 4], [2, 2, 4]])
def test_an_index_in_parts_is_the_index_of_all(directories, cuts):
    wanted = RolloutStore(directories, mixed_policies=True).index
    got = of_parts(directories, cuts)
    if 0 in cuts or cuts == [5]:  # control: a part is empty
        assert len(Index.of(directories, []).table) == 0
    assert_same_index(pickle.loads(pickle.dumps(got)), wanted)


def assert_same_store(got, wanted):
    assert len(got) == len(wanted)
    assert got.info == wanted.info
    assert got.recorded_share() == wanted.recorded_share()
    layers = range(len(wanted.info.moe_layers))
    for rollout in range(len(wanted)):
        assert got.name(rollout) == wanted.name(rollout)
        rows = wanted.row_ids(rollout)
        assert np.array_equal(got.row_ids(rollout), rows)
        assert got.locate(int(rows[-1])) == (rollout, len(rows) - 1)
        for mine, other in zip(got.routes(rows, layers), wanted.routes(rows, layers), strict=True):
            assert np.array_equal(mine, other)
        one, other = got.rollout(rollout), wanted.rollout(rollout)
        for name in ("reward", "group", "sample", "policy_version", "prompt_digest", "advantage"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("tokens_N", "response_N", "logprobs_N", "spans_U2"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert np.array_equal(got.versions(rollout), wanted.versions(rollout))
        assert (one.kept is None) == (other.kept is None)
        if one.kept is not None:
            assert one.kept.ids_V.tolist() == other.kept.ids_V.tolist()
    for mine, other in zip(got.shards, wanted.shards, strict=True):
        assert (mine.path, mine.identity, mine.info) == (other.path, other.identity, other.info)
        assert mine.recorded_rows == other.recorded_rows


@pytest.mark.parametrize("cuts", [[], [2], [1, 3, 4]])
def test_a_store_that_is_told_is_the_store_that_was_looked_at(directories, cuts):
    wanted = RolloutStore(directories, mixed_policies=True)
    told = RolloutStore.told(pickle.loads(pickle.dumps(of_parts(directories, cuts))))
    there = files_open(told)  # those that `wanted` has opened
    assert_same_store(told, wanted)
    assert files_open(told) == sorted([*there, *(shard.path.name for shard in told.shards)])
    assert_same_store(pickle.loads(pickle.dumps(told)), wanted)  # in another process


def test_shards_that_come_behind_keep_those_that_are_there(directories):
    store = RolloutStore(directories, mixed_policies=True)
    shards = [*store.shards]
    known = Index.of(directories, shards[:2])
    first = known[1]
    longer = known.plus(Index.of(directories, shards[2:]))
    assert longer[1] is first
    assert longer[2:] == shards[2:]
    assert len(known) == 2
    assert_same_index(longer, store.index)


def test_an_index_of_one_store_with_rollouts_of_one_name(tmp_path):
    """Two rollouts may have one name in two directories, but not in one directory."""
    for name in ("a", "b"):
        write_shard(tmp_path / name, INFO, [make_rollout(5, seed=ord(name))])
    directories = [tmp_path / "a", tmp_path / "b"]
    store = RolloutStore(directories)
    assert not store.index.has_namesakes()
    assert store.groups().tolist() == [0, 1]
    in_one = replace(store.index, table=store.index.table.copy())
    in_one.table["folder"] = 0
    assert in_one.has_namesakes()
