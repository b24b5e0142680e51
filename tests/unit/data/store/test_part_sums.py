"""What is read is compared with the sums of its parts, wherever it begins and ends.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import zlib

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import INFO, header_of, make_rollout, opened, rewrite

from megatron_r3.data.store import RolloutStore, StoreError, write_shard
from megatron_r3.data.store.verify_shard import verify_shard

SHARD = "shard-00000.safetensors"
# 200, 64, 129 and 39 rows, in 4, 2, 3 and 1 parts; the second part of 65 tokens has no row
LENGTHS = (201, 65, 130, 40)


@pytest.fixture
def long_store(tmp_path):
    rollouts = [make_rollout(n, seed=n, sample=i) for i, n in enumerate(LENGTHS)]
    write_shard(tmp_path / "s", INFO, rollouts)
    return tmp_path / "s"


def flip(path, tensor, place):
    """Change one bit of an element."""
    entry = RolloutStore([path.parent]).shards[0].header.entries[tensor]
    size = (entry.end - entry.begin) // int(np.prod(entry.shape))
    with path.open("r+b") as file:
        file.seek(entry.begin + place * size)
        byte = file.read(1)[0]
        file.seek(entry.begin + place * size)
        file.write(bytes([byte ^ 1]))


def test_the_sums_are_those_of_the_specification(long_store):
    path = long_store / SHARD
    tensors, whole, crc32 = load_file(path), path.read_bytes(), header_of(path)["crc32"]
    assert tensors["route_sums"].shape == (4 + 2 + 3 + 1, 3)
    assert tensors["token_sums"].shape == (4 + 2 + 3 + 1, 4)
    assert crc32 == {name: zlib.crc32(tensor.tobytes()) for name, tensor in tensors.items()}
    rewrite(path)  # sums as docs/rollout-store.md specifies them
    written = load_file(path)
    assert written.keys() == tensors.keys()
    assert all(written[name].tobytes() == tensors[name].tobytes() for name in tensors)
    path.write_bytes(whole)


@pytest.mark.parametrize("layers", [[0], [1, 2], [2, 0]])
def test_any_rows_are_read_as_they_were_written(long_store, layers):
    store, rng = opened(long_store), np.random.default_rng(3)
    whole = np.concatenate([store.rollout(i).routes.ids_LTK for i in range(4)], axis=1)
    for _ in range(60):
        first, last = sorted(rng.integers(0, whole.shape[1], 2).tolist())
        rows = np.arange(first, last + 1)
        if rng.random() < 0.5:
            rows = rows[rng.random(len(rows)) < 0.8]
        if rng.random() < 0.5:
            rows = rng.choice(rows, len(rows))  # in any order, with repeats
        ids_LTK, recorded_T = store.routes(rows, layers)
        assert np.array_equal(ids_LTK, whole[layers][:, rows])
        assert recorded_T.all()


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_is_found_by_whoever_reads_its_block(long_store, seed):
    """A read of any rows of the wrong part fails; a read of other parts or layers does not."""
    rng, path = np.random.default_rng(seed), long_store / SHARD
    rollout, layer = int(rng.integers(4)), int(rng.integers(3))
    starts = np.cumsum([0, *(n - 1 for n in LENGTHS)])
    row = int(rng.integers(LENGTHS[rollout] - 1))  # counted in its rollout
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


@pytest.mark.parametrize("table", ["route_sums", "token_sums"])
@pytest.mark.parametrize("place", [(0, 0), (3, 2), (5, 1), (9, 0)])
def test_verify_compares_the_sums_with_the_rows(long_store, table, place):
    """If a writer sums wrongly, tensors have right checksums, but every rank would refuse them."""
    path = long_store / SHARD
    sums = load_file(path)[table]
    sums[place] ^= np.uint32(1 << 20)
    rewrite(path, **{table: sums})
    with pytest.raises(StoreError, match=r"rollout \d: checksum of .* differs in (rows|tokens) "):
        RolloutStore([long_store]).verify()
    # control: the checksums of whole tensors fit
    verify_shard(RolloutStore([long_store]).shards[0], thorough=False)
