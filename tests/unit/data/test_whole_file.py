"""Files that are there whole or not at all, and the digests by which they are compared."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from megatron_r3.data.digest import digest, digest_number, file_digest, short_digest
from megatron_r3.data.whole_file import whole_file, write_whole


def write_half(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"half")
        raise RuntimeError


def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    with pytest.raises(RuntimeError):
        write_half(path)
    assert [*path.parent.iterdir()] == []
    write_whole(path, "whole")
    with pytest.raises(RuntimeError):
        write_half(path)
    assert path.read_text() == "whole"
    assert [*path.parent.iterdir()] == [path]


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, "first")
    write_whole(path, b"second", sync=False)
    assert path.read_text() == "second"
    assert [*tmp_path.iterdir()] == [path]


def test_the_umask_says_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "a")):
        write_whole(tmp_path / "a" / "b", "")


def test_digests_are_those_of_hashlib(tmp_path: Path) -> None:
    data = os.urandom(5 << 20)  # more than is read at a time
    (tmp_path / "a").write_bytes(data)
    whole = hashlib.sha256(data).hexdigest()
    assert digest(data) == file_digest(tmp_path / "a") == whole
    assert short_digest(data) == whole[:16]
    assert digest("ä") == hashlib.sha256("ä".encode()).hexdigest()
    assert digest_number(data, 63) == int.from_bytes(bytes.fromhex(whole)[:8], "big") >> 1
