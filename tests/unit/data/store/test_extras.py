"""Kept sets, version spans and advantages on disk: read back, damaged, and impossible.

Shape suffixes (docs/glossary.md): C, K, L, N, T, V.
"""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, ROLLOUTS, make_rollout, opened
from wrongs import CUT, with_extras

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.store import RolloutStore, SamplingSettings, StoreError, write_shard
from megatron_r3.data.store.verify_shard import ReadChecks, verify_shard

SHARD = "shard-00000.safetensors"
# rollout 2 has no kept sets, version spans or advantage
ALL = [with_extras(rollout, i) if i != 2 else rollout for i, rollout in enumerate(ROLLOUTS)]


@pytest.fixture
def extra_dir(tmp_path):
    write_shard(tmp_path / "s", CUT, ALL[:3])
    write_shard(tmp_path / "s", CUT, ALL[3:])
    return tmp_path / "s"


def test_what_was_written_is_read(extra_dir):
    store = opened(extra_dir)
    assert store.info == CUT
    for index, wanted in enumerate(ALL):
        got = store.rollout(index)
        assert (got.kept is None) == (index == 2)
        if index == 2:
            assert (got.kept, got.versions_C2, got.advantage) == (None, None, None)
            assert store.kept(index) is None
            assert set(store.versions(index)[got.response_N].tolist()) == {7}
            continue
        for kept in (got.kept, store.kept(index)):
            assert np.array_equal(kept.sizes_N, wanted.kept.sizes_N)
            assert np.array_equal(kept.ids_V, wanted.kept.ids_V)
        assert np.array_equal(got.versions_C2, wanted.versions_C2)
        assert got.advantage == wanted.advantage
    versions = store.versions(1)  # tokens 2 to 8 were sampled, 8 by version 9, the others by 7
    assert versions.tolist() == [-1, -1, 7, 7, 7, 7, 7, 7, 9]
    assert versions.dtype == np.int64


def test_a_rollout_that_is_read_can_be_written_again(extra_dir, tmp_path):
    store = opened(extra_dir)
    again = [store.rollout(i) for i in range(len(store))]
    write_shard(tmp_path / "t", CUT, again[:3])
    write_shard(tmp_path / "t", CUT, again[3:])
    for path in extra_dir.iterdir():
        assert (tmp_path / "t" / path.name).read_bytes() == path.read_bytes()


def test_rows_get_the_kept_set_of_the_next_token(extra_dir):
    store = opened(extra_dir)
    rows_T, expected = [-1], [[]]
    for index, rollout in enumerate(ALL):
        for token, row in enumerate(store.row_ids(index).tolist(), start=1):
            rows_T.append(row)
            expected.append([] if rollout.kept is None else rollout.kept.of(token).tolist())
    order = np.random.default_rng(0).permutation(len(rows_T))
    kept = store.kept_of_next(np.array(rows_T)[order])
    got = [kept.of(place).tolist() for place in range(len(order))]
    assert got == [expected[i] for i in order]
    # control: rows do not get the sets of their own tokens
    own = [ALL[0].kept.of(token).tolist() for token in range(4)]
    assert own != [expected[1 + token] for token in range(4)]
    assert store.kept_of_next(np.array([-1, -1])).sizes_N.tolist() == [0, 0]


def test_rows_of_a_store_without_kept_sets_get_none(store_dir):
    store = opened(store_dir)
    assert store.kept_of_next(store.row_ids(1)).sizes_N.tolist() == [0] * 8
    assert store.kept(1) is None


def test_advantages_are_a_column_if_all_have_one(tmp_path):
    whole = [ALL[0], ALL[1], ALL[3]]
    write_shard(tmp_path / "s", CUT, whole)
    column = opened(tmp_path / "s").column("advantage")
    assert column.dtype == np.float32
    assert column.tolist() == [rollout.advantage for rollout in whole]
    write_shard(tmp_path / "s", CUT, [ALL[4], replace(ALL[2], advantage=None)])
    store = opened(tmp_path / "s")
    with pytest.raises(StoreError, match=r"shard-00001\.safetensors: rollout 1 has no advantage"):
        store.column("advantage")
    assert len(store.column("reward")) == 5


def test_no_advantage_at_all(store_dir):
    with pytest.raises(StoreError, match=f"{SHARD}: rollout 0 has no advantage: give every"):
        opened(store_dir).column("advantage")


def test_the_format_is_byte_for_byte_what_it_was(tmp_path):
    """If this digest changes, the format has changed, and FORMAT_VERSION must grow."""
    tokens_N = np.array([4, 8, 1, 2], np.int32)
    rollout = make_rollout(4)
    routes = replace(rollout.routes, ids_LTK=np.arange(36, dtype=np.uint8).reshape(3, 3, 4) % 16)
    info = replace(INFO, sampling=SamplingSettings(1.0, 1.0, 0, 0.0, 16))
    logprobs_N = np.array([0, 0, -0.5, -0.25], np.float32)
    plain = replace(rollout, tokens_N=tokens_N, logprobs_N=logprobs_N, routes=routes)
    path = write_shard(tmp_path / "s", info, [plain])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "acb687edee4fcb87503bcf8c72e063959c80e101637237dede265755f03abc54"
    # control: an advantage or other settings change the digest
    for one in (
        write_shard(tmp_path / "a", info, [replace(plain, advantage=0.5)]),
        write_shard(tmp_path / "b", replace(info, sampling=CUT.sampling), [plain]),
    ):
        assert hashlib.sha256(one.read_bytes()).hexdigest() != digest


def test_a_kept_id_outside_the_trainers_vocabulary_is_refused_where_it_is_read(extra_dir):
    most = [0 if rollout.kept is None else int(rollout.kept.ids_V.max()) for rollout in ALL]
    # all tokens of rollout 1 are below `bound`: only ids of its kept sets are not
    bound = int(ALL[1].tokens_N.max()) + 1
    assert bound <= most[1]
    store = RolloutStore([extra_dir])
    store.trained_on(ReadChecks(vocab_size=bound))
    with pytest.raises(StoreError, match=rf"rollout 1: token \d: its kept set has id {most[1]}; "):
        store.fields(1)
    with pytest.raises(StoreError, match=f"ids go from 0 to {bound - 1}"):
        verify_shard(store.shards[0], ReadChecks(vocab_size=bound))
    store.trained_on(ReadChecks(vocab_size=most[1] + 1))
    store.fields(1)


# -- what the writer refuses


def write_one(tmp_path, info=CUT, **changes):
    write_shard(tmp_path / "s", info, [replace(ALL[1], **changes)])


def test_wrong_rollouts_are_refused(tmp_path):
    sets = [ALL[1].kept.of(token).tolist() for token in range(9)]
    for changes, reason in (
        ({"kept": KeptSets.from_lists(sets[:-1])}, "rollout 0: 8 kept sets for 9 tokens"),
        ({"kept": KeptSets.from_lists([*sets[:-1], []])}, "rollout 0: token 8 was sampled, and"),
        ({"versions_C2": np.array([[2, 7], [4, 3]])}, "the versions of its version spans must asc"),
        ({"versions_C2": np.array([2, 7])}, "must be int64 pairs of first token and version"),
        ({"policy_version": 8}, "rollout 0: policy_version is 8; it must be "),
        ({"advantage": float("nan")}, "advantage must be a finite number, in float32; got nan"),
        ({"advantage": 1e39}, "advantage must be a finite number, in float32"),
    ):
        with pytest.raises(StoreError) as refusal:
            write_one(tmp_path, **changes)
        assert reason in str(refusal.value)
    assert not (tmp_path / "s").exists()
    with pytest.raises(StoreError, match=r"its kept set has id .*; ids go from 0 to 49"):
        write_one(
            tmp_path,
            replace(CUT, vocab_size=50),
            kept=KeptSets.from_lists([*sets[:-1], [*sets[-1], 50]]),
        )
    write_one(tmp_path)


@pytest.mark.parametrize("of", [None, "raw"])
def test_kept_sets_need_log_probs_of_the_cut_distribution(tmp_path, of):
    info = replace(CUT, sampling=replace(CUT.sampling, logprobs_of=of))
    with pytest.raises(StoreError, match=r"has kept sets, and sampling\.logprobs_of is"):
        write_one(tmp_path, info)
    write_one(tmp_path, info, kept=None)  # control: without kept sets it is accepted


def test_logprobs_of_is_one_of_two(tmp_path):
    info = replace(INFO, sampling=SamplingSettings(logprobs_of="cooked"))
    with pytest.raises(
        StoreError, match="logprobs_of must be raw, processed or None; got 'cooked'"
    ):
        write_shard(tmp_path / "s", info, ROLLOUTS)
