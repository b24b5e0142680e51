"""Open shards are cut or lost, go to another process, are many, and are closed.

Shape suffixes (docs/glossary.md): N.
"""

import errno
import gc
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored import INFO, ROLLOUTS

from megatron_r3.data.store import RolloutStore, StoreError, files, open_stores, write_shard

SHARD = "shard-00000.safetensors"


def test_a_cut_shard_does_not_end_the_process(store_dir):
    """A process that had mapped the file into memory would end with SIGBUS."""
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
    assert "was cut while it is in use" in done.stdout


def test_a_file_that_a_server_has_lost(store_dir, monkeypatch):
    """A network file system answers a read with ESTALE."""
    store = RolloutStore([store_dir])

    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    message = (
        f"{SHARD}: cannot be read any more \\(Stale file handle\\): was it removed or replaced"
    )
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "preadv", stale)
        with pytest.raises(StoreError, match=message):
            store.fields(0)
    store.fields(0)


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

    gc.collect()  # stores of other tests may be in reference cycles that are not freed yet
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
    there.wait_for(len(store))  # takes the new lock that `__setstate__` has made
    assert len(there) == 2 * len(store)
    for index in range(len(store)):
        assert np.array_equal(there.rollout(index).tokens_N, store.rollout(index).tokens_N)
