"""Shards that change while they are in use: one error with the file, never another's rollouts.

Shape suffixes (docs/glossary.md): N.
"""

import errno
import gc
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import INFO, ROLLOUTS, make_rollout, opened

from megatron_r3.data.store import (
    RolloutStore,
    StoreError,
    files,
    open_stores,
    shard_file,
    write_shard,
)

SHARD = "shard-00000.safetensors"


def other_store(folder):
    """Valid rollouts of the same shapes, with other routes and tokens."""
    lengths = [len(rollout.tokens_N) for rollout in ROLLOUTS[:2]]
    rollouts = [make_rollout(n, seed=90 + n, sample=i) for i, n in enumerate(lengths)]
    return write_shard(folder / "other", INFO, rollouts)


def replaced_by_rename(path, tmp_path):
    os.replace(other_store(tmp_path), path)


def removed(path, tmp_path):
    path.unlink()


def directory_removed(path, tmp_path):
    shutil.rmtree(path.parent)


def truncated(path, tmp_path):
    os.truncate(path, 600)


def truncated_to_nothing(path, tmp_path):
    os.truncate(path, 0)


def grown(path, tmp_path):
    with path.open("ab") as file:
        file.write(b"\0")


def overwritten_in_place(path, tmp_path):
    data = other_store(tmp_path).read_bytes()
    assert len(data) == path.stat().st_size
    with path.open("r+b") as file:
        file.write(data)


CHANGES = {
    replaced_by_rename: "was removed or replaced while it is in use",
    removed: "was removed or replaced while it is in use",
    directory_removed: "was removed or replaced while it is in use",
    truncated: "was changed while it is in use",
    truncated_to_nothing: "was changed while it is in use",
    grown: "was changed while it is in use",
    overwritten_in_place: "was changed while it is in use",
}
READS = {
    "tokens": lambda store: store.fields(0),
    "routes": lambda store: store.routes(store.row_ids(0), [0, 2]),
    "some rows": lambda store: store.routes(store.row_ids(0)[1:3], [1]),
    "a rollout": lambda store: store.rollout(1),
    "everything": lambda store: store.verify(),
    "a tensor": lambda store: store.shards[0].tensors["recorded"],
    "another process": lambda store: pickle.loads(pickle.dumps(store.shards[0])).read_tokens(0),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_shard_that_changes_between_two_reads(store_dir, tmp_path, change, read, monkeypatch):
    monkeypatch.setattr(shard_file, "LATE_S", 0)
    os.utime(store_dir / SHARD, (1e9, 1e9))  # so that a write now is at another time
    store = opened(store_dir)
    READS[read](store)
    change(store_dir / SHARD, tmp_path)
    with pytest.raises(StoreError) as refusal:
        READS[read](store)
    assert str(refusal.value).startswith(f"{store_dir / SHARD}: ")
    if read != "another process":
        assert CHANGES[change] in str(refusal.value)


@pytest.mark.parametrize("read", READS)
def test_a_shard_that_nobody_changes(store_dir, read):
    store = opened(store_dir)
    os.chmod(store_dir / SHARD, 0o600)
    os.link(store_dir / SHARD, store_dir / "kept")
    for _ in range(2):
        READS[read](store)


def test_a_cut_shard_does_not_end_the_process(store_dir):
    """A mapping would: by SIGBUS."""
    code = (
        "import os, sys; from megatron_r3.data.store import RolloutStore\n"
        "store = RolloutStore([sys.argv[1]]); store.fields(0)\n"
        "os.truncate(store.shards[0].path, 600)\n"
        "try:\n    store.fields(0)['tokens'].sum()\n"
        "except ValueError as error:\n    print(error)"
    )
    command = [sys.executable, "-c", code, str(store_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "was changed while it is in use" in done.stdout


def write_at(path, position, data):
    """Write in place, and give the file the time that it had: only its bytes tell."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("name", ["tokens", "response", "logprobs", "recorded", "routes"])
def test_bytes_of_a_rollout_that_is_read_whole_are_compared(store_dir, name):
    path = store_dir / SHARD
    store = RolloutStore([store_dir])
    entry = store.shards[0].header.entries[name]
    size = (entry.end - entry.begin) // load_file(path)[name].size
    last = entry.end - size  # of the second rollout, and of the last layer
    byte = path.read_bytes()[last]
    write_at(path, last, bytes([byte ^ 1]))
    part = "the routes of MoE layer 2" if name == "routes" else repr(name)
    rows = "rows 0 to 7" if name in ("routes", "recorded") else "tokens 0 to 8"
    message = f"{path}: rollout 1: checksum of {part} differs"
    for wanted in (store, RolloutStore([store_dir])):  # in use, and before
        for read in (lambda s: s.rollout(1), lambda s: s.verify()):
            with pytest.raises(StoreError) as refusal:
                read(wanted)
            assert str(refusal.value).startswith(message)
            assert "the shard is damaged, or was changed" in str(refusal.value)
        with pytest.raises(StoreError, match=f"differs in {rows}: the shard is damaged"):
            wanted.rollout(1)
        wanted.rollout(0)  # its bytes are those that were stored
    if name in ("routes", "recorded"):
        rows = np.concatenate([store.row_ids(0)[1:], store.row_ids(1)])
        with pytest.raises(StoreError, match="rollout 1: checksum of"):
            store.routes(rows, [2])
    write_at(path, last, bytes([byte]))
    store.verify()
    assert np.array_equal(store.rollout(1).tokens_N, ROLLOUTS[1].tokens_N)


def test_a_file_that_a_server_has_lost(store_dir, monkeypatch):
    """A network file system answers ESTALE, to a read and to a question about the file."""
    store = RolloutStore([store_dir])

    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    message = (
        f"{SHARD}: cannot be read any more \\(Stale file handle\\): was it removed or replaced"
    )
    for name in ("preadv", "fstat"):
        with monkeypatch.context() as patched:
            patched.setattr(files.os, name, stale)
            with pytest.raises(StoreError, match=message):
                store.fields(0)
    store.fields(0)


def test_another_process_takes_only_the_same_shard(store_dir, tmp_path):
    sent = pickle.dumps(RolloutStore([store_dir]).shards[0])
    assert len(pickle.loads(sent).tensors["reward"]) == 2
    path = store_dir / SHARD
    status = path.stat()
    os.replace(other_store(tmp_path), path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    with pytest.raises(StoreError, match="was changed or replaced since the first rank looked"):
        pickle.loads(sent).read_tokens(0)


def test_more_shards_than_a_process_may_open_at_first(tmp_path):
    """The soft limit of most systems is 1024; it is raised when it is reached."""
    for number in range(40):
        rollout = replace(ROLLOUTS[0], policy_version=number)
        write_shard(tmp_path / "s", INFO, [rollout])
    code = (
        "import resource, sys; from megatron_r3.data.store import RolloutStore\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (30, int(sys.argv[2])))\n"
        "try:\n    print(len(RolloutStore([sys.argv[1]])))\n"
        "except ValueError as error:\n    print(error)"
    )

    def run(hard):
        command = [sys.executable, "-c", code, str(tmp_path / "s"), str(hard)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    assert run(200) == "40\n"
    assert "cannot be opened (Too many open files): raise `ulimit -n`" in run(30)


def test_files_are_closed(store_dir):
    def descriptors():
        return len([*Path("/proc/self/fd").iterdir()])

    gc.collect()  # stores of other tests may wait in a reference circle to be freed
    before = descriptors()
    store = RolloutStore([store_dir])
    store.verify()
    assert descriptors() == before + 2
    del store
    assert descriptors() == before
    (store_dir / "shard-00001.safetensors").write_bytes(b"no shard at all")
    with pytest.raises(StoreError) as refusal:
        RolloutStore([store_dir])
    assert "shard-00001" in str(refusal.value)
    del refusal
    assert descriptors() == before


def test_a_store_goes_to_a_process_that_is_spawned(tmp_path):
    write_shard(tmp_path / "s", INFO, ROLLOUTS)
    store = open_stores([tmp_path / "s"], follow_s=0.0)
    there = pickle.loads(pickle.dumps(store))
    more = [replace(rollout, group=rollout.group + 100) for rollout in ROLLOUTS]
    write_shard(tmp_path / "s", INFO, more)
    there.wait_for(len(store))  # takes the lock that it has made anew
    assert len(there) == 2 * len(store)
    for index in range(len(store)):
        assert np.array_equal(there.rollout(index).tokens_N, store.rollout(index).tokens_N)
