"""A store that grows, as a training sees it: advantages that it brings, whole collections.

Shape suffixes (docs/glossary.md): C.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored import INFO, make_rollout
from training_arguments import MODEL, options_of

from megatron_r3.data.store import Rollout, RolloutStore, StoreError, open_stores, write_shard
from megatron_r3.train.dataset import FollowedRollouts, RolloutDataset
from megatron_r3.train.open_store import open_store
from megatron_r3.train.schedule import SOURCES, Schedule, UseOfRollouts

UNSTAMPED = replace(INFO, router_fingerprint=())
ROLLOUT, LIVE = SOURCES.index("rollout"), SOURCES.index("live")


def shard_of(
    number: int, advantage: float | None = None, version: int | None = None
) -> list[Rollout]:
    """Two rollouts of one group, with the rewards 0 and 1."""
    return [
        replace(
            make_rollout(5, seed=2 * number + i, group=number, reward=float(i), sample=i),
            policy_version=number if version is None else version,
            advantage=None if advantage is None else advantage + i,
        )
        for i in range(2)
    ]


def followed(folder: Path, follow_s: float = 0, **changes: object) -> FollowedRollouts:
    """The training's samples of a store that grows, every shard checked as a training checks it."""
    arguments = {**MODEL, "rollouts": [str(folder)], "rollouts_follow": follow_s, **changes}
    options = options_of(**arguments, moe_router_replay=False)
    return FollowedRollouts(open_store(options), options.use, 100)


STORED = {"rollouts_advantages": "stored"}


def test_a_shard_that_comes_without_advantages_is_refused_by_name(tmp_path: Path) -> None:
    write_shard(tmp_path, UNSTAMPED, shard_of(0, advantage=7.0))
    data = followed(tmp_path, **STORED)
    write_shard(tmp_path, UNSTAMPED, shard_of(1, advantage=-3.0))
    taken = [data[i]["advantages"][1:4].tolist() for i in range(4)]
    assert taken == [[7.0] * 3, [8.0] * 3, [-3.0] * 3, [-2.0] * 3]
    first, second = shard_of(2, advantage=1.0)
    write_shard(tmp_path, UNSTAMPED, [first, replace(second, advantage=None)])
    for _ in range(2):  # and again, when the next rank or the next micro-batch asks
        with pytest.raises(
            StoreError, match=r"shard-00002\.safetensors: rollout 1 has no advantage"
        ):
            data[4]
    assert data[3]["advantages"][1] == -2.0  # what came before stays usable
    # control: worked out of the rewards, the same store trains
    worked_out = followed(tmp_path)
    assert worked_out[4]["advantages"][1] == pytest.approx(-1.0, abs=1e-4)


def test_a_store_without_advantages_is_refused_before_training_begins(tmp_path: Path) -> None:
    write_shard(tmp_path, UNSTAMPED, shard_of(0))
    for follow in ({}, {"rollouts_follow": 0.0}):
        arguments = {**MODEL, "rollouts": [str(tmp_path)], **follow}
        open_store(options_of(**arguments))  # control
        options = options_of(**arguments, **STORED)
        with pytest.raises(ValueError, match=r"shard-00000\.safetensors: rollout 0 has no advant"):
            open_store(options)


@pytest.mark.parametrize("seen_early", [1, 2, 4])
def test_what_is_too_old_does_not_depend_on_how_many_shards_a_rank_has_seen(tmp_path, seen_early):
    """Collections of two shards: of versions 0 and 2, and of 3 and 9."""
    shards = [shard_of(number, version=v) for number, v in enumerate((0, 2, 3, 9))]
    use = UseOfRollouts(8, Schedule(2, mini_steps=2), replay_max_lag=1)
    for shard in shards[:seen_early]:
        write_shard(tmp_path / "grows", UNSTAMPED, shard)
    data = FollowedRollouts(open_stores([tmp_path / "grows"], True, 20), use, 8)

    def rest() -> None:
        for shard in shards[seen_early:]:
            time.sleep(0.3)
            write_shard(tmp_path / "grows", UNSTAMPED, shard)

    writer = threading.Thread(target=rest)
    writer.start()
    found = [set(data[i]["source"][:4].tolist()) for i in range(8)]
    writer.join()
    assert found == [{LIVE}] * 2 + [{ROLLOUT}] * 2 + [{LIVE}] * 2 + [{ROLLOUT}] * 2
    for shard in shards:
        write_shard(tmp_path / "whole", UNSTAMPED, shard)
    whole = RolloutDataset(RolloutStore([tmp_path / "whole"]), use)
    assert found == [set(whole[i]["source"][:4].tolist()) for i in range(8)]


def test_the_rollouts_of_a_collection_are_all_of_it(tmp_path: Path) -> None:
    """A rank that did not use the last shard of the collection names the same rollouts."""
    write_shard(tmp_path, UNSTAMPED, shard_of(0))
    use = UseOfRollouts(8, Schedule(4))
    data = FollowedRollouts(open_stores([tmp_path], True, 0), use, 8)
    write_shard(tmp_path, UNSTAMPED, shard_of(1))
    assert len(data.store) == 2
    assert data.rollouts_of(range(4)) == [0, 1, 2, 3]
    with pytest.raises(StoreError, match="rollout 5 did not come within 0 s; it has 4 rollouts"):
        data.rollouts_of(range(4, 6))


def test_the_wait_begins_anew_with_each_shard(tmp_path: Path) -> None:
    """Five shards, 0.5 s apart, of a sampler that is waited for 1.5 s."""
    write_shard(tmp_path, UNSTAMPED, shard_of(0))
    store = open_stores([tmp_path], True, 1.5)

    def sample() -> None:
        for number in range(1, 6):
            time.sleep(0.5)
            write_shard(tmp_path, UNSTAMPED, shard_of(number))

    sampler = threading.Thread(target=sample)
    sampler.start()
    store.wait_for(11)
    sampler.join()
    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"rollout 12 did not come within 1\.5 s"):
        store.wait_for(12)
    assert 1.5 <= time.monotonic() - begin < 10


def test_a_long_rollout_may_come_after_rollouts_that_began_later(tmp_path: Path) -> None:
    def long(group: int, first: int, last: int) -> Rollout:
        spans_C2 = np.array([(2, first), (4, last)], np.int64)
        rollout = make_rollout(5, seed=group, group=group)
        return replace(rollout, policy_version=first, versions_C2=spans_C2)

    write_shard(tmp_path, UNSTAMPED, [make_rollout(5)])  # of version 7
    write_shard(tmp_path, UNSTAMPED, [long(1, 6, 8)])
    assert len(open_stores([tmp_path], True, 0)) == 2
    write_shard(tmp_path, UNSTAMPED, [long(2, 6, 7)])  # it ended before the one of 8
    with pytest.raises(StoreError, match=r"shard-00002.*policy version 7 comes after 8 of .*00001"):
        open_stores([tmp_path], True, 0).wait_for(2)


@pytest.mark.parametrize("change", [{"rollouts_check": "reads"}, {"rollouts_follow": 0.0}])
def test_a_damaged_part_is_refused_by_whoever_reads_it(tmp_path, change):
    path = write_shard(tmp_path / "s", UNSTAMPED, [make_rollout(200), make_rollout(5, sample=1)])
    entry = RolloutStore([tmp_path / "s"]).shards[0].header.entries["routes"]
    data = bytearray(path.read_bytes())
    data[entry.begin + 4 * 100] ^= 1  # of row 100 in the first layer
    path.write_bytes(data)
    arguments = {**MODEL, "rollouts": [str(tmp_path / "s")], "seq_length": 256}
    store = open_store(options_of(**arguments, **change))
    store.routes(np.arange(64), [0, 1])  # control: the damage is in other rows
    message = "rollout 0: checksum of the routes of MoE layer 0 differs in rows 64 to 127"
    with pytest.raises(StoreError, match=message):
        store.routes(np.arange(90, 95), [0])
