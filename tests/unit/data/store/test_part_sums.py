"""Parts of a rollout are compared with what was written, wherever they begin and end.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import os
import shutil
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stored import INFO, header_of, make_rollout, metadata_of, opened, part_sums

from megatron_r3.data.store import RolloutStore, StoreError, write_shard

SHARD = "shard-00000.safetensors"
# 200, 64, 129 and 39 rows: 4, 2, 3 and 1 parts, one of them without a row
LENGTHS = (201, 65, 130, 40)


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


def of_other_rollouts(folder, path):
    """A shard of the same shapes whose tensors lie in the same bytes, with other rollouts."""
    data = path.read_bytes()
    for seed in range(100, 200):  # the checksums in a header have more digits or fewer
        rollouts = [make_rollout(n, seed=seed + n, sample=i) for i, n in enumerate(LENGTHS)]
        other = write_shard(folder / f"other{seed}", INFO, rollouts).read_bytes()
        if len(other) == len(data) and other[:8] == data[:8]:
            return other
    raise AssertionError("no shard with a header of the same length")


def every_part(store):
    """A read of each part of a rollout, in each layer, and of all that its tokens have."""
    reads = []
    for rollout, length in enumerate(LENGTHS):
        reads.append(lambda rollout=rollout: store.fields(rollout))
        for first in range(0, length - 1, 64):
            rows = store.row_ids(rollout)[first : first + 64]
            for some in (rows, rows[:1], rows[-1:]):
                reads.append(lambda rows=some: store.shards[0].read_recorded(rows))
                for layer in range(3):
                    reads.append(lambda rows=some, layer=layer: store.routes(rows, [layer]))
    return reads


def refuse_to_look(descriptor):
    raise AssertionError("somebody looks at a file")


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("overwritten", [True, False])
def test_a_shard_with_another_written_over_it_is_refused_by_every_read(
    long_store, tmp_path, monkeypatch, overwritten, told
):
    """The other one is whole, with sums of its own: only what the sums begin with tells of it."""
    path = long_store / SHARD
    status, other = path.stat(), of_other_rollouts(tmp_path, path)
    store = RolloutStore([long_store])
    store = RolloutStore.told(store.index) if told else store
    store.trained_on(None)
    store.routes(store.row_ids(3), [0])  # the file is open, and some of its sums are in memory
    if overwritten:
        with path.open("r+b") as file:
            file.write(other)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat().st_size == status.st_size
        opened(long_store)  # control: it is a whole shard
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", refuse_to_look)
        for read in every_part(store):
            if overwritten:
                with pytest.raises(
                    StoreError, match=r"shard-00000\.safetensors: rollout .: checks"
                ):
                    read()
            else:
                read()


@pytest.fixture
def three_shards(tmp_path):
    for number in range(3):
        write_shard(tmp_path / "three", INFO, [make_rollout(70, seed=number, group=number)])
    return tmp_path / "three"


def test_a_look_asks_once_for_each_file_that_was_read(three_shards, monkeypatch):
    store, asked, fstat = RolloutStore([three_shards]), [], os.fstat
    store.trained_on(None)

    def count(descriptor):
        asked.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", count)
    for rollout in (2, 0, 2):
        store.fields(rollout)
        store.routes(store.row_ids(rollout)[3:40], [0, 2])
        assert [name for name in asked if name.startswith("shard-")] == []
    store.look()
    assert sorted(asked) == ["shard-00000.safetensors", "shard-00002.safetensors"]
    store.look()  # nothing was read since
    store.fields(1)
    assert len(asked) == 2
    store.look()
    assert asked[2:] == ["shard-00001.safetensors"]
    monkeypatch.undo()
    # control: a store that is not trained on asks after each read
    other = RolloutStore([three_shards])
    monkeypatch.setattr(os, "fstat", count)
    other.fields(1)
    assert asked[3:] == ["shard-00001.safetensors"]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_look_finds_a_file_that_was_read_and_is_gone(three_shards, change, told):
    store = RolloutStore([three_shards])
    store = RolloutStore.told(store.index) if told else store
    store.trained_on(None)
    for rollout in (0, 1):
        store.fields(rollout)
    store.look()
    path, copy = three_shards / "shard-00001.safetensors", three_shards / "copy"
    shutil.copy2(path, copy)
    if change == "removed":
        path.unlink()
    else:
        copy.replace(path)
    store.look()  # nobody has read the file since the last look
    store.fields(0)
    store.look()
    before = store.fields(1)["tokens"]  # still those of the file that was opened
    assert len(before) == 70
    with pytest.raises(
        StoreError, match=r"shard-00001\.safetensors: was removed or replaced while it is in use"
    ):
        store.look()


def test_a_shard_that_was_verified_holds_no_sums(tmp_path):
    """They are as many as its tokens make them, and a store has thousands of shards."""
    held = []
    for tokens in (200, 2000):
        write_shard(
            tmp_path / str(tokens), INFO, [make_rollout(tokens, sample=i) for i in range(4)]
        )
        store = RolloutStore([tmp_path / str(tokens)])
        store.verify()  # imports and caches come with the first time
        tracemalloc.start()
        store.verify()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert max(held) < 4 * 7 * 2000 / 64 * 4 / 2  # half of the sums alone
