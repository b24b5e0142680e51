"""Which sample of the store each sample of a training is, and whose routes its tokens take.

Shape suffixes (docs/glossary.md): T.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import INFO, make_rollout

from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.data.store.schema import StoreError
from megatron_r3.train.dataset import PackedRollouts, RolloutDataset
from megatron_r3.train.schedule import SOURCES, Place, Schedule, UseOfRollouts

TWICE_TWO = Schedule(batch=2, mini_steps=2, epochs=2)


def test_the_order_of_the_example() -> None:
    assert [TWICE_TWO.in_store(i) for i in range(16)] == [
        *(0, 1, 2, 3, 0, 1, 2, 3),
        *(4, 5, 6, 7, 4, 5, 6, 7),
    ]
    assert TWICE_TWO.place(5) == Place(collection=1, epoch=0, mini_step=1)
    assert [TWICE_TWO.place(i).begins_collection for i in range(5)] == [True, *[False] * 3, True]


def test_one_step_on_a_collection_changes_no_order() -> None:
    assert [Schedule(3).in_store(i) for i in range(9)] == list(range(9))
    assert [Schedule(3).used(i) for i in range(9)] == list(range(9))


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 200), st.integers(0, 50)
)
def test_a_schedule(batch: int, mini_steps: int, epochs: int, sample: int, consumed: int) -> None:
    schedule = Schedule(batch, mini_steps, epochs)
    in_store = schedule.in_store(sample)
    place = schedule.place(sample // batch)
    assert schedule.collection_of(in_store) == place.collection
    assert in_store in schedule.of_collection(place.collection)
    # each collection is whole before the next one begins
    size = len(schedule.of_collection(0)) * epochs
    first = place.collection * size
    uses = [schedule.in_store(i) for i in range(first, first + size)]
    assert uses == [*schedule.of_collection(place.collection)] * epochs
    # `used` counts the samples of the store that were used at least once
    assert schedule.used(consumed) == len({schedule.in_store(i) for i in range(consumed)})


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_a_seed_mixes_each_step_alike_in_every_epoch(batch, mini_steps, epochs, seed):
    plain, mixed = (Schedule(batch, mini_steps, epochs, s) for s in (None, seed))
    size = batch * mini_steps
    for first in range(0, 2 * size * epochs, batch):
        samples = range(first, first + batch)
        here = [mixed.in_store(i) for i in samples]
        assert sorted(here) == [plain.in_store(i) for i in samples]
        # `mixed` says the same by the order of the store, which the pass of the old policy goes by
        assert here == [mixed.mixed(plain.in_store(i)) for i in samples]
    per_epoch = [[mixed.in_store(e * size + i) for i in range(size)] for e in range(epochs)]
    assert all(one == per_epoch[0] for one in per_epoch)
    consumed = 2 * batch
    assert mixed.used(consumed) == plain.used(consumed)


def order_of_step(step: int, batch: int, seed: int) -> list[int]:
    """Which of its global batch each sample of a step is."""
    first = step * batch
    return [Schedule(batch, seed=seed).in_store(first + sample) - first for sample in range(batch)]


def test_two_steps_are_mixed_in_two_ways() -> None:
    first, second = (order_of_step(step, 8, seed=1) for step in (0, 1))
    assert first != [*range(8)]
    assert first != second
    assert first != order_of_step(0, 8, seed=2)


def test_the_order_does_not_change_from_one_version_to_the_next() -> None:
    """A training that is resumed with a later numpy must go on in the same order."""
    assert order_of_step(0, 8, seed=1) == [2, 4, 7, 5, 0, 6, 3, 1]


def test_all_places_are_equally_likely() -> None:
    orders = np.array([order_of_step(step, 4, seed=5) for step in range(4000)])
    counts = np.stack([(orders == place).sum(0) for place in range(4)])
    assert (abs(counts - 1000) < 150).all()


def test_a_collection_larger_than_the_store_is_refused(tmp_path) -> None:
    rollouts = [make_rollout(8, seed=i, group=i // 2, sample=i) for i in range(8)]
    write_shard(tmp_path / "s", INFO, rollouts)
    store = RolloutStore([tmp_path / "s"])
    use = UseOfRollouts(16, Schedule(4, mini_steps=2))
    RolloutDataset(store, use).check_collection()
    with pytest.raises(StoreError, match=r"s: has 8 samples, .* of 5 needs 10: lower --global-b"):
        RolloutDataset(store, replace(use, schedule=Schedule(5, 2))).check_collection()
    with pytest.raises(StoreError, match=r"has 4 samples"):  # two rollouts fit into a pack
        PackedRollouts(store, use).check_collection()
    # one step on a collection may use a small store in several epochs, as before
    RolloutDataset(store, replace(use, schedule=Schedule(64))).check_collection()


@pytest.mark.parametrize("source", SOURCES)
def test_a_token_without_a_recorded_route_is_live_unless_the_old_policy_routes_it(tmp_path, source):
    rollout = make_rollout(6)
    recorded_T = np.array([True, False, True, True, False])
    rollout = replace(rollout, routes=replace(rollout.routes, recorded_T=recorded_T))
    write_shard(tmp_path / "s", INFO, [rollout])
    use = UseOfRollouts(8, Schedule(1), source=source)
    found = RolloutDataset(RolloutStore([tmp_path / "s"]), use)[0]["source"].tolist()[:5]
    names = [SOURCES[i] for i in found]
    if source == "rollout":
        assert names == ["rollout", "live", "rollout", "rollout", "live"]
    else:
        assert names == [source] * 5
