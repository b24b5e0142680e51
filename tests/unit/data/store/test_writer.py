"""Writing shards: what does not fit is refused, and each shard in the directory is whole.

Shape suffixes (docs/glossary.md): N, U.
"""

import errno
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import INFO, OTHER, ROLLOUTS, header_of, make_rollout, opened

from megatron_r3.data.store import RolloutStore, SamplingSettings, StoreError, write_shard, writer

WRONG_INFO = {
    "router_fingerprint: 2 router digests; expected one for each of 3 layers": {
        "router_fingerprint": OTHER[:2]
    },
    "router_fingerprint must be 16 hex digits for each MoE layer, or empty; got ['a', 'b', 'c']": {
        "router_fingerprint": ("a", "b", "c")
    },
    "engine must be a text; got NoneType": {"engine": None},
    "engine_version must be a text of at most 200 characters; got 5000": {
        "engine_version": "1" * 5000
    },
    "model must be a text without control characters": {"model": "\x1b[31m"},
    "policy_stamp must be a text; got int": {"policy_stamp": 7},
    "engine_policy must be a text; got int": {"engine_policy": 7},
    "vocab_size must be a whole number from 0 to 2147483648; got -1": {"vocab_size": -1},
    "sampling must be SamplingSettings; got {}": {"sampling": {}},
    "sampling.temperature must be a number from 0 to 10000; got nan": {
        "sampling": SamplingSettings(temperature=float("nan"))
    },
    "sampling.top_p must be a number from 0 to 1; got 1.5": {
        "sampling": SamplingSettings(top_p=1.5)
    },
    "sampling.top_k must be a whole number from 0 to 2147483647; got 2.5": {
        "sampling": SamplingSettings(top_k=2.5)
    },
    "sampling.max_tokens must be a whole number from 1 to 2147483647; got 0": {
        "sampling": SamplingSettings(max_tokens=0)
    },
}


@pytest.mark.parametrize("message", WRONG_INFO)
def test_a_writer_refuses_an_impossible_info(tmp_path, message):
    with pytest.raises(StoreError) as refusal:
        write_shard(tmp_path / "new", replace(INFO, **WRONG_INFO[message]), ROLLOUTS[:1])
    assert str(refusal.value) == f"{tmp_path / 'new'}: {message}"
    assert not (tmp_path / "new").exists()


def test_a_writer_refuses_two_rollouts_of_one_name(tmp_path):
    with pytest.raises(
        StoreError, match=r"rollout 2 is sample 0 of group 1, .* the same as rollout 0"
    ):
        write_shard(tmp_path / "new", INFO, [*ROLLOUTS[:2], replace(ROLLOUTS[2], sample=0)])
    assert not (tmp_path / "new").exists()


def test_a_writer_refuses_other_models(tmp_path):
    with pytest.raises(StoreError, match=r"\(3, 4, 32\); the store has \(3, 4, 16\)"):
        write_shard(tmp_path, INFO, [make_rollout(5, experts=32)])


def test_a_full_disk_and_a_file_in_the_way_name_the_directory(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"file: no shard can be written \(File exists\)"):
        write_shard(tmp_path / "file", INFO, ROLLOUTS)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"new: no shard can be written \(No space left on device"):
        write_shard(tmp_path / "new", INFO, ROLLOUTS)
    assert not [*(tmp_path / "new").iterdir()]


def version(number):
    """The same rollouts of another policy."""
    return [replace(rollout, policy_version=number) for rollout in ROLLOUTS]


def test_shards_are_appended_and_never_overwritten(store_dir):
    before = {path.name: path.read_bytes() for path in store_dir.iterdir()}
    for number in (8, 9):
        write_shard(store_dir, INFO, version(number))
    assert len(RolloutStore([store_dir])) == 5 + 5 + 5
    assert sorted(p.name for p in store_dir.iterdir()) == [
        f"shard-{n:05d}.safetensors" for n in range(4)
    ]
    assert all((store_dir / name).read_bytes() == data for name, data in before.items())
    (store_dir / "shard-00001.safetensors").unlink()
    with pytest.raises(StoreError, match=r"shard-00001.*: is missing, though shard-00002.* is"):
        write_shard(store_dir, INFO, version(10))


def test_two_writers_at_once_number_their_shards(tmp_path, monkeypatch):
    """Each writer finds an empty directory; each header has the number of its file's name."""
    real = writer.shards_in_order
    monkeypatch.setattr(writer, "shards_in_order", lambda directory: [])
    paths = [write_shard(tmp_path, INFO, version(number)) for number in range(11)]
    monkeypatch.setattr(writer, "shards_in_order", real)
    assert [path.name for path in paths] == [f"shard-{n:05d}.safetensors" for n in range(11)]
    assert [header_of(path)["number"] for path in paths] == [*range(11)]
    assert opened(tmp_path).column("policy_version").tolist() == [
        n for n in range(11) for _ in "12345"
    ]


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("taken", [0, 1])
def test_a_link_whose_answer_was_lost_and_that_is_asked_for_again(
    tmp_path, monkeypatch, taken, seen
):
    """NFS may ask a second time: then the file itself has the name already."""
    for number in range(taken):
        write_shard(tmp_path, INFO, version(number))

    link, stat = os.link, os.stat

    def asked_twice(source, target):
        link(source, target)
        patched.setattr(os, "link", link)
        link(source, target)

    def unseen(path, **options):
        if str(path).endswith(".safetensors"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", asked_twice)
        # another writer was quicker
        patched.setattr(writer, "shards_in_order", lambda directory: [])
        if not seen:
            patched.setattr(os, "stat", unseen)
        path = write_shard(tmp_path, INFO, version(taken))
    assert path.name == f"shard-{taken:05d}.safetensors"
    assert header_of(path)["number"] == taken
    assert len([*tmp_path.iterdir()]) == taken + 1
    assert opened(tmp_path).column("policy_version").tolist() == [
        n for n in range(taken + 1) for _ in ROLLOUTS
    ]


@pytest.mark.slow
def test_killed_writers_leave_whole_shards_only(tmp_path):
    write_shard(tmp_path, INFO, version(0))
    cut_short, store, rng = 0, opened(tmp_path), np.random.default_rng(0)
    for attempt in range(1000):  # on a busy machine a writer may not have begun when it is killed
        if attempt >= 50 and cut_short > 5 and len(store.shards) > 5:
            break
        child = os.fork()
        if not child:
            for number in range(1000):
                write_shard(tmp_path, INFO, version(1000 * attempt + 1 + number))
            os._exit(0)
        time.sleep(rng.uniform(0.0, 0.02 + 0.001 * attempt))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        cut_short += len([*tmp_path.glob(".shard-*")]) > cut_short
        store = opened(tmp_path)
        assert len(store) == 5 * len(store.shards)
    assert cut_short > 5, "hardly any writer was killed in the middle of a shard"
    assert len(store.shards) > 5


def test_turns_are_kept_also_where_one_follows_the_other(tmp_path):
    one = ROLLOUTS[3]
    response = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1], bool)
    runs = replace(one, response_N=response, logprobs_N=np.where(response, one.logprobs_N, 0))
    assert runs.spans_U2.tolist() == [[2, 5], [7, 9], [10, 12]]
    split = replace(runs, turns_U2=np.array([[2, 3], [3, 5], [7, 9], [10, 12]]), sample=6)
    write_shard(tmp_path, INFO, [runs, split, ROLLOUTS[0]])
    store = opened(tmp_path)
    assert store.rollout(0).spans_U2.tolist() == runs.spans_U2.tolist()
    assert store.rollout(1).spans_U2.tolist() == split.spans_U2.tolist()
    assert store.column("sample").tolist() == [3, 6, 0]


PIECES = [np.arange(i % 7, dtype=np.uint8) for i in range(3000)]  # some are empty


def written(path):
    whole = np.concatenate(PIECES)
    routes = writer.Streamed(whole.dtype, whole.shape, [PIECES[:2500], PIECES[2500:]])
    with path.open("wb", buffering=0) as file:
        crc32 = {}
        written = writer.write_tensors(file, {"routes": routes}, {"crc32": "9" * 10}, crc32)
        written.write_header({"crc32": str(crc32["routes"])})
    return load_file(path)["routes"]


def test_more_pieces_than_a_system_takes_at_once(tmp_path):
    assert len(PIECES) > os.sysconf("SC_IOV_MAX")
    assert np.array_equal(written(tmp_path / "file"), np.concatenate(PIECES))


@pytest.mark.parametrize("most", [1, 1000])
def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch, most):
    def short(descriptor, pieces):
        return os.write(descriptor, b"".join(pieces)[:most])

    monkeypatch.setattr(writer.os, "writev", short)
    assert np.array_equal(written(tmp_path / "file"), np.concatenate(PIECES))
