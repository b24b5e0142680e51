"""Stores on a mounted file system without link(), with lost answers, late names or stale files."""

import errno
import os
import subprocess
import sys
import threading

import pytest
from odd_filesystem import mounted
from stored import INFO, ROLLOUTS, header_of, opened

from megatron_r3.collect.resume import only_writer
from megatron_r3.data.store import RolloutStore, StoreError, open_stores, write_shard
from tests.unit.data.store.test_writer import version

NAMES = [f"shard-{number:05d}.safetensors" for number in range(40)]


@pytest.fixture
def odd(tmp_path):
    """A mount with the directory of a store in it."""
    with mounted(tmp_path / "mount", tmp_path / "folder") as mount:
        (mount.folder / "s").mkdir()
        yield mount


@pytest.fixture
def two_clients(odd, tmp_path):
    """Two mounts of the same folder."""
    with mounted(tmp_path / "second", odd.folder) as second:
        yield odd, second


def write(directory, *numbers):
    return [write_shard(directory / "s", INFO, version(number)) for number in numbers]


def assert_whole(folder, versions):
    """The folder of the server has a whole shard for each policy, and no other file."""
    paths = sorted((folder / "s").iterdir())
    assert [path.name for path in paths] == NAMES[: len(versions)]
    assert [header_of(path)["number"] for path in paths] == [*range(len(paths))]
    assert [path.stat().st_nlink for path in paths] == [1] * len(paths)
    stored = opened(folder / "s").column("policy_version").reshape(-1, len(ROLLOUTS))
    assert stored[:, 0].tolist() == [*versions]


# -- a writer


def test_a_mount_on_which_nothing_is_odd_is_a_place_for_stores(odd):
    write(odd.path, 0, 1, 2)
    assert_whole(odd.folder, [0, 1, 2])
    assert len(opened(odd.path / "s")) == 3 * len(ROLLOUTS)
    with only_writer(odd.path / "s"):
        assert len([*(odd.path / "s").iterdir()]) == 4  # the shards and the lock: no probe is left
    assert_whole(odd.folder, [0, 1, 2])


NO_LINK = ["EPERM", "EOPNOTSUPP", "ENOSYS", "EXDEV", "EMLINK"]


@pytest.mark.parametrize("name", NO_LINK)
def test_a_file_system_without_link_is_refused_and_nothing_stays(odd, name):
    number = getattr(errno, name)
    # Linux 6.16 and later answer EPERM where a FUSE server answers ENOSYS
    answers = {os.strerror(number), os.strerror(errno.EPERM if name == "ENOSYS" else number)}
    odd.switch(link=number)
    for attempt in (lambda: write(odd.path, 0), lambda: only_writer(odd.path / "s").__enter__()):
        with pytest.raises(StoreError) as refusal:
            attempt()
        assert str(refusal.value) in {
            f"{odd.path / 's'}: no shard can be written: its file system cannot link() ({answer}), "
            "and only link() gives a whole shard its name without ever replacing another: write "
            "to a local disk or another file system, and copy the finished shards"
            for answer in answers
        }
        assert not (odd.folder / "s").exists() or not [*(odd.folder / "s").iterdir()]


def test_a_link_that_fails_for_another_reason_says_so(odd):
    odd.switch(link=errno.EDQUOT)
    with pytest.raises(StoreError, match=r"no shard can be written \(Disk quota exceeded\)"):
        write(odd.path, 0)
    with (
        pytest.raises(StoreError, match=r"nothing can be written there \(Disk quota exceeded\)"),
        only_writer(odd.path / "s"),
    ):
        pytest.fail("it began")
    assert not (odd.folder / "s").exists()


def test_a_link_whose_answer_is_lost_gives_one_name(odd):
    for number in range(3):
        odd.switch(lost_answers=1)
        write(odd.path, number)
    assert_whole(odd.folder, [0, 1, 2])
    odd.switch(lost_answers=1)
    with only_writer(odd.path / "s"):
        pass
    assert_whole(odd.folder, [0, 1, 2])


def test_a_shard_is_written_though_the_answer_to_the_last_removal_is_lost(odd):
    odd.switch(lost_removals=1)
    write(odd.path, 0)
    assert_whole(odd.folder, [0])


def test_a_writer_counts_on_behind_names_that_it_does_not_see_yet(two_clients):
    first, second = two_clients
    write(first.path, 0, 1, 2)
    second.switch(late_s=60)
    assert not [*(second.path / "s").iterdir()]
    assert [path.name for path in write(second.path, 3)] == [NAMES[3]]
    assert_whole(second.folder, [0, 1, 2, 3])


def test_a_writer_that_sees_a_gap_refuses_and_changes_nothing(odd):
    """The writer sees its own shard 1, and not yet shard 0 of another client."""
    write(odd.folder, 0)
    odd.switch(late_s=60)
    write(odd.path, 1)
    with pytest.raises(StoreError, match=rf"{NAMES[0]}: is missing, though {NAMES[1]} is there"):
        write(odd.path, 2)
    assert_whole(odd.folder, [0, 1])
    odd.switch()
    write(odd.path, 2)
    assert_whole(odd.folder, [0, 1, 2])


WRITER = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from dataclasses import replace
from stored import INFO, ROLLOUTS
from megatron_r3.data.store import write_shard
sys.stdin.read()  # both begin at once
for version in range(int(sys.argv[3]), int(sys.argv[3]) + 20):
    write_shard(Path(sys.argv[2]), INFO, [replace(r, policy_version=version) for r in ROLLOUTS])
"""


def test_two_writers_at_once_leave_no_gap_and_lose_nothing(two_clients):
    support = os.path.dirname(sys.modules["stored"].__file__)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, support, str(client.path / "s"), str(100 * number)],
            stdin=subprocess.PIPE,
        )
        for number, client in enumerate(two_clients)
    ]
    for writer in writers:
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0, 0]
    versions = opened(two_clients[0].folder / "s").column("policy_version")[:: len(ROLLOUTS)]
    assert sorted(versions) == [*range(20), *range(100, 120)]
    assert versions[versions < 100].tolist() == [*range(20)]
    assert_whole(two_clients[0].folder, versions)


@pytest.mark.parametrize("name", ["EOPNOTSUPP", "ENOSYS"])
def test_space_is_kept_free_where_the_file_system_has_no_call_for_it(odd, name):
    odd.switch(fallocate=getattr(errno, name))
    write(odd.path, 0)
    assert_whole(odd.folder, [0])


def test_a_full_disk_is_found_before_the_first_tensor_is_written(odd):
    odd.switch(fallocate=errno.ENOSPC)
    with pytest.raises(StoreError, match=r"no shard can be written \(No space left on device\)"):
        write(odd.path, 0)
    assert not [*(odd.folder / "s").iterdir()]


@pytest.mark.parametrize("name", ["EINVAL", "EOPNOTSUPP", "ENOSYS"])
def test_directories_that_cannot_be_synced(odd, name):
    odd.switch(sync_directory=getattr(errno, name))
    write(odd.path, 0, 1)
    assert_whole(odd.folder, [0, 1])


def test_a_directory_whose_sync_fails_is_an_error(odd):
    odd.switch(sync_directory=errno.EIO)
    with pytest.raises(StoreError, match=r"no shard can be written \(Input/output error\)"):
        write(odd.path, 0)


# -- readers


def test_a_store_as_it_is_refuses_a_name_that_came_before_an_earlier_one(odd):
    write(odd.folder, 0, 1, 2)
    odd.switch(late_s=60, late_names=(NAMES[1],))
    with pytest.raises(StoreError, match=rf"{NAMES[1]}: is missing, though {NAMES[2]} is there"):
        RolloutStore([odd.path / "s"])


@pytest.mark.parametrize(("late", "first"), [((), 0), ((NAMES[0],), 0), ((NAMES[1], NAMES[2]), 1)])
def test_a_followed_store_waits_for_late_names(odd, late, first):
    write(odd.folder, 0, 1, 2, 3)
    odd.switch(late_s=60, late_names=late)
    store = open_stores([odd.path / "s"], follow_s=20, waits=False)
    for _ in range(2):
        assert len(store.shards) == first
        store.refresh()
    with pytest.raises(StoreError, match=r"rollout 19 did not come within 0 s|the first shard did"):
        open_stores([odd.path / "s"], follow_s=0).wait_for(19)
    timer = threading.Timer(0.3, odd.switch)
    timer.start()
    store.wait_for(19)
    assert store.column("policy_version").tolist() == [n for n in range(4) for _ in ROLLOUTS]
    store.verify()
    timer.join()
