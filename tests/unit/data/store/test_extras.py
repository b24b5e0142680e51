"""Kept sets, version spans and advantages on disk: read back, damaged, and impossible.

Shape suffixes (docs/glossary.md): C, K, L, N, T, V.
"""

import hashlib
import json
import os
import zlib
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stored import INFO, ROLLOUTS, header_of, make_rollout, opened, rewrite_header

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.store import Rollout, RolloutStore, SamplingSettings, StoreError, write_shard
from megatron_r3.data.store.verify_shard import ReadChecks, check_tokens

SHARD = "shard-00000.safetensors"
CUT = replace(INFO, sampling=SamplingSettings(0.7, 0.9, 0, 0.0, 16, "processed"))
EXTRAS = ["num_kept", "kept_sizes", "kept_ids", "kept_crc32", "num_versions", "versions"]


def with_extras(rollout: Rollout, seed: int) -> Rollout:
    """The rollout with kept sets of 1 to 9 ids, two versions, and an advantage."""
    rng = np.random.default_rng(seed)
    logprobs_N, sets = rollout.logprobs_N.copy(), []
    for token, (sampled, own) in enumerate(
        zip(rollout.response_N, rollout.tokens_N.tolist(), strict=True)
    ):
        others = rng.permutation(50)[: rng.integers(0, 9)].tolist()
        sets.append(sorted({own, *others}) if sampled else [])
        if len(sets[-1]) == 1:
            logprobs_N[token] = 0
    sampled = np.flatnonzero(rollout.response_N)
    spans = [(sampled[0], 7), *([(sampled[-1], 9)] if len(sampled) > 1 else [])]
    return replace(
        rollout,
        logprobs_N=logprobs_N,
        kept=KeptSets.from_lists(sets),
        versions_C2=np.array(spans, np.int64),
        advantage=float(np.float32(rng.normal())),
    )


# rollout 2 has nothing of them
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
    versions = store.versions(1)  # of 9 tokens, 2 to 8 were sampled, and 8 by version 9
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
    # control: the sets of the rows' own tokens are others
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


def test_a_store_without_them_is_byte_for_byte_what_it_was(tmp_path):
    """The digest is that of a shard whose rollouts have none of these."""
    tokens_N = np.array([4, 8, 1, 2], np.int32)
    rollout = make_rollout(4)
    routes = replace(rollout.routes, ids_LTK=np.arange(36, dtype=np.uint8).reshape(3, 3, 4) % 16)
    info = replace(INFO, sampling=SamplingSettings(1.0, 1.0, 0, 0.0, 16))
    logprobs_N = np.array([0, 0, -0.5, -0.25], np.float32)
    plain = replace(rollout, tokens_N=tokens_N, logprobs_N=logprobs_N, routes=routes)
    path = write_shard(tmp_path / "s", info, [plain])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "734e30058ed07e83f1c31d7f2f44606dc71e244b67d26626dcb79e6dd2a02f1a"
    # control: every new part changes it
    for one in (
        write_shard(tmp_path / "a", info, [replace(plain, advantage=0.5)]),
        write_shard(tmp_path / "b", replace(info, sampling=CUT.sampling), [plain]),
    ):
        assert hashlib.sha256(one.read_bytes()).hexdigest() != digest


def test_older_readers_are_told_that_they_lack_something(extra_dir, tmp_path):
    plain = write_shard(tmp_path / "plain", CUT, ROLLOUTS)
    assert header_of(plain)["must_know"] == []
    assert header_of(extra_dir / SHARD)["must_know"] == [*EXTRAS, "advantage"]


# -- damage


def test_every_byte_of_them_is_checked(extra_dir):
    path = extra_dir / SHARD
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    for name in (*EXTRAS, "advantage"):
        first, end = header[name]["data_offsets"]
        for place in (begin + first, begin + end - 1):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(StoreError, match=SHARD):
                opened(extra_dir)
    path.write_bytes(data)
    opened(extra_dir)


@pytest.mark.parametrize("name", ["kept_sizes", "kept_ids"])
def test_damaged_kept_sets_are_found_where_they_are_read(extra_dir, name):
    path = extra_dir / SHARD
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    first = begin + json.loads(data[8:begin])[name]["data_offsets"][0]
    data[first + 4 * 2] ^= 1  # token 2 of rollout 0 is sampled, and has three ids or more
    path.write_bytes(data)
    store = RolloutStore([extra_dir])
    for read in (store.rollout, store.kept, lambda i: store.kept_of_next(store.row_ids(i))):
        with pytest.raises(StoreError, match=f"{SHARD}: rollout 0: checksum of the kept sets"):
            read(0)
    assert store.kept(1) is not None  # control: the damage is in rollout 0 alone


# -- shards that are whole and say something impossible


def forge(path, **changes):
    """Other tensors, under checksums that fit."""
    tensors = {**load_file(path), **changes}
    if "kept_ids" in tensors and "num_kept" in tensors:
        sums, token, place = [], 0, 0
        for length, count in zip(tensors["num_tokens"], tensors["num_kept"], strict=True):
            parts = (("kept_sizes", token, length), ("kept_ids", place, count))
            sums.append([zlib.crc32(tensors[n][a : a + max(b, 0)].tobytes()) for n, a, b in parts])
            token, place = token + length, place + max(count, 0)
        tensors["kept_crc32"] = np.array(sums, np.uint32)
    body = header_of(path)
    for name in body["crc32"]:
        if name in tensors:
            body["crc32"][name] = zlib.crc32(tensors[name].tobytes())
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, path, {"megatron_r3": "", "crc32": ""})
    rewrite_header(path, body)


def changed(path, name, place, value):
    tensor = load_file(path)[name].copy()
    tensor[place] = value
    return {name: tensor}


def test_forging_alone_is_not_refused(extra_dir):
    forge(extra_dir / SHARD)
    opened(extra_dir)


@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        ("kept_ids", 0, -1, "rollout 0: token 2: its kept set has id -1"),
        ("kept_ids", 0, 49, "rollout 0: token 2: its kept set must have each id once, ascending"),
        ("kept_sizes", 0, 1, "rollout 0: token 0 was not sampled, and has a kept set"),
        ("kept_sizes", 2, 0, "rollout 0: token 2 was sampled, and has no kept set"),
        ("kept_sizes", 14, 1, "rollout 2: kept sets without ids"),
        ("kept_sizes", 2, 99, "rollout 0: kept sets of"),
        ("num_kept", 0, 2**62, "num_kept: 4611686018427387904 of rollout 0"),
        ("num_kept", 0, -1, "num_kept: -1 of rollout 0"),
        ("num_versions", 2, 1, "num_versions: the counts of its rollouts add up to 5"),
        ("versions", 1, 6, "rollout 0: policy_version is 7, and its first version span is of 6"),
        ("versions", 0, 1, "rollout 0: a version span begins at token 1, which was not sampled"),
        ("versions", 0, 3, "rollout 0: its version spans begin at token 3, not at the first"),
        ("versions", 2, 2, "rollout 0: the first tokens of its version spans must ascend"),
        ("versions", 3, 7, "rollout 0: the versions of its version spans must ascend; got [7, 7]"),
        ("versions", 2, -1, "rollout 0: a version span begins at token -1"),
        ("advantage", 0, np.inf, "rollout 0: advantage inf: must be finite"),
    ],
)
def test_impossible_values_are_refused(extra_dir, name, place, value, reason):
    path = extra_dir / SHARD
    forge(path, **changed(path, name, place, value))
    with pytest.raises(StoreError) as refusal:
        opened(extra_dir)
    assert str(refusal.value).startswith(f"{path}: {reason}")


@pytest.mark.parametrize(
    ("name", "place", "value", "rollout", "reason"),
    [
        ("kept_ids", 0, -1, 0, "rollout 0: token 2: its kept set has id -1"),
        ("kept_sizes", 2, 0, 0, "rollout 0: token 2 was sampled, and has no kept set"),
        ("kept_sizes", 14, 1, 2, "rollout 2: kept sets without ids"),
        ("versions", 1, 6, 0, "rollout 0: policy_version is 7, and its first version span is of"),
        ("versions", 0, 3, 0, "rollout 0: its version spans begin at token 3, not at the first"),
    ],
)
def test_impossible_values_are_refused_where_they_are_read(
    extra_dir, name, place, value, rollout, reason
):
    """By a training that checks what it reads, of a shard that nobody has verified."""
    path = extra_dir / SHARD
    forge(path, **changed(path, name, place, value))
    store, unchecked = RolloutStore([extra_dir]), RolloutStore([extra_dir])
    store.trained_on(ReadChecks())
    unchecked.trained_on(None)
    with pytest.raises(StoreError) as refusal:
        store.fields(rollout)
    assert str(refusal.value).startswith(f"{path}: {reason}")
    for index in range(len(store)):
        unchecked.fields(index)
        if index != rollout:
            store.fields(index)


def test_a_kept_id_outside_the_trainers_vocabulary_is_refused_where_it_is_read(extra_dir):
    most = [0 if rollout.kept is None else int(rollout.kept.ids_V.max()) for rollout in ALL]
    # all of its own tokens are below, so that only the kept sets can tell
    bound = int(ALL[1].tokens_N.max()) + 1
    assert bound <= most[1]
    store = RolloutStore([extra_dir])
    store.trained_on(ReadChecks(vocab_size=bound))
    with pytest.raises(StoreError, match=rf"rollout 1: token \d: its kept set has id {most[1]}; "):
        store.fields(1)
    store.trained_on(ReadChecks(vocab_size=most[1] + 1))
    store.fields(1)


@pytest.mark.parametrize("name", [*EXTRAS, "advantage"])
def test_a_tensor_that_is_missing_or_has_another_shape_is_refused(extra_dir, name):
    path, data = extra_dir / SHARD, (extra_dir / SHARD).read_bytes()
    tensor = load_file(path)[name]
    for other in (None, tensor[:-1], tensor[None], tensor.astype(np.float64)):
        tensors = {**load_file(path), name: other}
        body = header_of(path)
        if other is not None:
            body["crc32"][name] = zlib.crc32(other.tobytes())
        tensors = {n: np.ascontiguousarray(t) for n, t in tensors.items() if t is not None}
        save_file(tensors, path, {"megatron_r3": "", "crc32": ""})
        rewrite_header(path, body)
        with pytest.raises(StoreError, match=SHARD):
            opened(extra_dir)
        path.write_bytes(data)
    opened(extra_dir)


def test_a_larger_vocabulary_than_the_trainers_is_refused(extra_dir):
    shard = opened(extra_dir).shards[0]
    most = max(int(rollout.kept.ids_V.max()) for rollout in (ALL[0], ALL[1]))
    check_tokens(shard, 50)
    with pytest.raises(StoreError, match=rf"token \d+.*id {most}; the vocabulary has ids 0 to"):
        check_tokens(shard, most)


def of_other_kept_sets(folder, path):
    """A shard of the same shapes whose tensors lie in the same bytes, with other kept sets."""
    data = path.read_bytes()
    for shift in range(100, 300):  # the checksums in a header have more digits or fewer
        shifted = [
            replace(
                one,
                tokens_N=one.tokens_N + np.int32(shift),
                kept=None
                if one.kept is None
                else KeptSets(one.kept.sizes_N, one.kept.ids_V + shift),
            )
            for one in ALL[:3]
        ]
        other = write_shard(folder / f"other{shift}", CUT, shifted)
        if len(other.read_bytes()) == len(data) and other.read_bytes()[:8] == data[:8]:
            return other
    raise AssertionError("no shard with a header of the same length")


@pytest.mark.parametrize("told", [False, True])
def test_kept_sets_of_a_shard_that_is_written_over_are_refused(tmp_path, told):
    """All sums in the file fit its own kept sets; the header that was read has others."""
    path = write_shard(tmp_path / "s", CUT, ALL[:3])
    other, status = of_other_kept_sets(tmp_path, path), path.stat()
    store = RolloutStore([path.parent])
    store = RolloutStore.told(store.index) if told else store
    store.trained_on(None)
    store.fields(0)  # the file is open, and no kept set was read
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    written = RolloutStore([path.parent])  # control: it is a shard that is right
    assert written.kept(0).ids_V.tolist() == RolloutStore([other.parent]).kept(0).ids_V.tolist()
    assert written.kept(0).ids_V.tolist() != ALL[0].kept.ids_V.tolist()
    with pytest.raises(StoreError, match=r"checksum of ('kept_crc32'|the kept sets) differs"):
        store.kept(0)


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
        ({"policy_version": 8}, "rollout 0: policy_version is 8, and its first version span is of"),
        ({"advantage": float("nan")}, "advantage must be a finite number, in float32; got nan"),
        ({"advantage": 1e39}, "advantage must be a finite number, in float32"),
    ):
        with pytest.raises(StoreError) as refusal:
            write_one(tmp_path, **changes)
        assert reason in str(refusal.value)
    assert not (tmp_path / "s").exists()
    with pytest.raises(StoreError, match=r"its kept set has id .*; the vocabulary has ids 0 to 49"):
        write_one(
            tmp_path,
            replace(CUT, vocab_size=50),
            kept=KeptSets.from_lists([*sets[:-1], [*sets[-1], 50]]),
        )
    write_one(tmp_path)


@pytest.mark.parametrize("of", [None, "raw"])
def test_kept_sets_need_log_probs_of_the_cut_distribution(tmp_path, extra_dir, of):
    info = replace(CUT, sampling=replace(CUT.sampling, logprobs_of=of))
    with pytest.raises(StoreError, match=r"has kept sets, and sampling\.logprobs_of is"):
        write_one(tmp_path, info)
    write_one(tmp_path, info, kept=None)  # control: without kept sets it is accepted
    body = header_of(extra_dir / SHARD)
    body["info"]["sampling"]["logprobs_of"] = of
    rewrite_header(extra_dir / SHARD, body)
    with pytest.raises(StoreError, match="has kept sets, and sampling"):
        RolloutStore([extra_dir])


def test_logprobs_of_is_one_of_two(tmp_path):
    info = replace(INFO, sampling=SamplingSettings(logprobs_of="cooked"))
    with pytest.raises(
        StoreError, match="logprobs_of must be raw, processed or None; got 'cooked'"
    ):
        write_shard(tmp_path / "s", info, ROLLOUTS)
