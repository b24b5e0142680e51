"""Parts of a rollout are compared with what was written, wherever they begin and end.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stored import INFO, header_of, make_rollout, metadata_of, opened, part_sums

from megatron_r3.store import RolloutStore, StoreError, files, write_shard

SHARD = "shard-00000.safetensors"
LENGTHS = (
    201,
    65,
    130,
    40,
)  # 200, 64, 129 and 39 rows: 4, 2, 3 and 1 parts, one of them without a row


@pytest.fixture
def long_store(tmp_path):
    rollouts = [make_rollout(n, seed=n, sample=i) for i, n in enumerate(LENGTHS)]
    write_shard(tmp_path / "s", INFO, rollouts)
    return tmp_path / "s"


def flip(path, tensor, place):
    """Change one bit of an element, and give the file the time that it had."""
    status, entry = path.stat(), RolloutStore([path.parent]).shards[0].header.entries[tensor]
    size = (entry.end - entry.begin) // int(np.prod(entry.shape))
    with path.open("r+b") as file:
        file.seek(entry.begin + place * size)
        byte = file.read(1)[0]
        file.seek(entry.begin + place * size)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_sums_are_those_of_the_specification(long_store):
    tensors = load_file(long_store / SHARD)
    assert tensors["part_crc32"].shape == ((4 + 2 + 3 + 1) * 7,)
    assert np.array_equal(tensors["part_crc32"], part_sums(tensors))
    assert "part_crc32" not in header_of(long_store / SHARD)["must_know"]


@pytest.mark.parametrize("layers", [[0], [1, 2], [2, 0]])
def test_any_rows_are_read_as_they_were_written(long_store, layers):
    store, rng = opened(long_store), np.random.default_rng(3)
    whole = np.concatenate([store.rollout(i).routes.ids_LTK for i in range(4)], axis=1)
    for _ in range(60):
        first, last = sorted(rng.integers(0, whole.shape[1], 2).tolist())
        rows = np.arange(first, last + 1)
        if rng.random() < 0.5:
            rows = rows[rng.random(len(rows)) < 0.8]
        ids_LTK, recorded_T = store.routes(rows, layers)
        assert np.array_equal(ids_LTK, whole[layers][:, rows])
        assert recorded_T.all()


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_is_found_by_whoever_reads_its_block(long_store, seed):
    """Whichever part of the rollout is read; and by nobody who reads another block or layer."""
    rng, path = np.random.default_rng(seed), long_store / SHARD
    rollout, layer = int(rng.integers(4)), int(rng.integers(3))
    starts = np.cumsum([0, *(n - 1 for n in LENGTHS)])
    row = int(rng.integers(LENGTHS[rollout] - 1))  # in its rollout
    store = RolloutStore([long_store])
    all_rows = np.arange(starts[-1])
    before, _ = store.routes(all_rows, [0, 1, 2])
    flip(path, "routes", (layer * starts[-1] + starts[rollout] + row) * 4 + int(rng.integers(4)))
    block = row // 64 * 64, min(row // 64 * 64 + 64, LENGTHS[rollout] - 1)
    for opened_when in (store, RolloutStore([long_store])):
        for first, last in ((block[0], block[0] + 1), (block[1] - 1, block[1]), (row, row + 1)):
            rows = starts[rollout] + np.arange(first, last)
            with pytest.raises(StoreError) as refusal:
                opened_when.routes(rows, [layer])
            message = f"{path}: rollout {rollout}: checksum of the routes of MoE layer {layer}"
            assert str(refusal.value).startswith(message)
        outside = np.setdiff1d(all_rows, starts[rollout] + np.arange(*block))
        parts = [rows for rows in np.split(outside, starts[1:-1]) if len(rows)]
        for rows in parts:  # control: no other block has an error
            for some in (rows[:1], rows[-1:]):
                assert np.array_equal(
                    opened_when.routes(some, [layer])[0], before[[layer]][:, some]
                )
        others = [other for other in range(3) if other != layer]
        assert np.array_equal(opened_when.routes(all_rows, others)[0], before[others])


def test_a_flipped_recorded_bit_is_found_by_whoever_reads_its_rows(long_store):
    store = RolloutStore([long_store])
    flip(long_store / SHARD, "recorded", 70)
    with pytest.raises(
        StoreError, match="rollout 0: checksum of 'recorded' differs in rows 64 to 127"
    ):
        store.routes(np.arange(100, 110), [1])
    store.routes(np.arange(0, 64), [1])
    store.routes(np.arange(130, 140), [1])


def test_a_shard_without_sums_of_parts_is_read_as_before(long_store):
    """Of an earlier megatron-r3: whole rollouts are compared, parts of them are not."""
    path = long_store / SHARD
    tensors = load_file(path)
    del tensors["part_crc32"]
    save_file(tensors, path, metadata_of(INFO, tensors))
    store = opened(long_store)
    rows = np.arange(70, 90)
    before, _ = store.routes(rows, [1])
    flip(path, "routes", (LENGTHS[0] - 1 + 64 + 129 + 39 + 80) * 4)  # row 80 of layer 1
    assert not np.array_equal(store.routes(rows, [1])[0], before)
    with pytest.raises(StoreError, match="rollout 0: checksum of the routes of MoE layer 1 differ"):
        store.routes(np.arange(200), [1])


def test_sums_of_another_number_or_type_are_refused(long_store):
    path = long_store / SHARD
    tensors = load_file(path)
    for wrong, message in (
        (tensors["part_crc32"][:-1], "part_crc32 has 69 sums; its rollouts and layers need 70"),
        (tensors["part_crc32"].astype(np.uint64), r"part_crc32 is U64 \(70,\), not U32"),
        (tensors["part_crc32"].reshape(10, 7), r"part_crc32 is U32 \(10, 7\), not U32"),
    ):
        changed = {**tensors, "part_crc32": np.ascontiguousarray(wrong)}
        save_file(changed, path, metadata_of(INFO, changed))
        with pytest.raises(StoreError, match=message):
            RolloutStore([long_store])
    save_file(tensors, path, metadata_of(INFO, tensors))
    opened(long_store)


@pytest.mark.parametrize("place", [0, 13, 27, 69])
def test_verify_compares_the_sums_with_the_rows(long_store, place):
    """A writer that sums wrongly: its shard is whole, and every rank would refuse it later."""
    path = long_store / SHARD
    tensors = load_file(path)
    tensors["part_crc32"][place] ^= np.uint32(1 << 20)
    save_file(tensors, path, metadata_of(INFO, tensors))
    with pytest.raises(StoreError, match="checksum of"):
        RolloutStore([long_store]).verify()


def written_over(long_store, tmp_path):
    """Put a shard of the same shapes into the file that is open; its size and its time stay."""
    path = long_store / SHARD
    others = [make_rollout(n, seed=50 + n, sample=i) for i, n in enumerate(LENGTHS)]
    data = write_shard(tmp_path / "other", INFO, others).read_bytes()
    status = path.stat()
    assert len(data) == status.st_size
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


READS = {
    "tokens": lambda store: store.fields(2),
    "rows": lambda store: store.routes(np.arange(70, 90), [1]),
    "recorded": lambda store: store.shards[0].read_recorded(np.arange(300, 310)),
}


@pytest.mark.parametrize("read", READS)
def test_a_shard_that_is_written_over_is_found_by_what_is_read(
    long_store, tmp_path, read, monkeypatch
):
    """All sums in the file fit what is in it, but they begin with another number."""
    store = RolloutStore.told(RolloutStore([long_store]).index)
    store.trained_on(None)
    assert store.shards[0].header.entries  # it is open
    READS[read](RolloutStore([long_store]))  # control
    written_over(long_store, tmp_path)
    asked, real = [], os.fstat
    monkeypatch.setattr(files.os, "fstat", lambda file: (asked.append(file), real(file))[1])
    with pytest.raises(StoreError, match=rf"{SHARD}: rollout \d: checksum of .* differs in"):
        READS[read](store)
    assert asked == []  # nobody has asked the file


def test_a_step_looks_once_at_each_file_that_it_has_read(tmp_path, monkeypatch):
    for number in range(3):
        write_shard(tmp_path / "s", INFO, [make_rollout(70, seed=number, group=number)])
    store = RolloutStore.told(RolloutStore([tmp_path / "s"]).index)
    store.trained_on(None)
    asked, real = [], os.fstat
    monkeypatch.setattr(files.os, "fstat", lambda file: (asked.append(file), real(file))[1])
    for _ in range(2):
        for rollout in (0, 2):
            store.fields(rollout)
            store.routes(store.row_ids(rollout), [0, 1])
        assert asked == []
        store.look()
        assert len(asked) == 2
        store.look()  # nothing was read since
        assert len(asked) == 2
        asked.clear()
    os.replace(tmp_path / "s" / "shard-00001.safetensors", tmp_path / "moved")
    (tmp_path / "s" / "shard-00002.safetensors").unlink()
    store.fields(0)
    store.look()  # control: it is still there, and nobody reads the others
    store.fields(2)
    with pytest.raises(StoreError, match=r"shard-00002\.safetensors: was removed or replaced"):
        store.look()
