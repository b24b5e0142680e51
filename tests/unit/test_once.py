"""What several workers share is made once, and made again if making it failed."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from once import Once


def make(folder: Path) -> None:
    time.sleep(0.05)  # so that the other workers come while this one makes it
    with (folder.parent / "made").open("a") as file:
        file.write("x")
    (folder / "content").touch()


def be_a_worker(root: Path) -> None:
    assert (Once(root)("shared", make) / "content").exists()


def test_four_workers_make_it_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=be_a_worker, args=(tmp_path,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "once" / "made").read_text() == "x"


def test_what_failed_is_not_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no room")

    once = Once(tmp_path)
    with pytest.raises(OSError, match="no room"):
        once("shared", fail)
    assert [path.name for path in once("shared", make).iterdir()] == ["content"]
