"""Which files of a checkout are not as its commit has them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_r3.patching.cleanroom import read_git, setting
from megatron_r3.patching.git import blob_id

__all__ = ["dirty_files", "left_out_files"]


class _Entry(NamedTuple):
    tag: str  # H, or S for a file that the checkout leaves out (sparse)
    mode: str
    blob: str


def dirty_files(root: Path) -> list[str]:
    """The tracked files of the checkout `root` that differ from its HEAD, staged or not.

    Git compares, in a clean room: sizes and times first, then bytes. A file that differs only in
    having CRLF where the commit has LF is not dirty: a checkout with core.autocrlf writes such
    files, and that setting may be the user's own, which is out of reach here. Other filters are
    not run: a file of theirs (Git LFS) is dirty once it is newer than git's index.
    """
    what = ("status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=no")
    status = read_git(root, *what, "--ignore-submodules=all", work_tree=True)
    entries = [os.fsdecode(entry) for entry in status.stdout.split(b"\0") if entry]
    if not any(entry.startswith(" M ") for entry in entries):
        return [entry[3:] for entry in entries]
    index, modes = _index(root), setting(root, "core.filemode") != "false"
    return [
        entry[3:]
        for entry in entries
        if not (entry.startswith(" M ") and _is_crlf(root / entry[3:], index[entry[3:]], modes))
    ]


def left_out_files(root: Path, paths: Iterable[str]) -> list[str]:
    """Those of `paths` that are in the commit and left out of the checkout `root` (sparse)."""
    index = _index(root)
    return [p for p in paths if p in index and index[p].tag == "S" and not (root / p).exists()]


def _index(root: Path) -> dict[str, _Entry]:
    """Every file of git's index."""
    # "H 100644 <blob> 0\t<path>"
    listed = os.fsdecode(read_git(root, "ls-files", "-t", "--stage", "-z").stdout)
    pairs = (entry.split("\t", 1) for entry in listed.split("\0") if entry)
    return {path: _Entry(*head.split()[:3]) for head, path in pairs}


def _is_crlf(file: Path, entry: _Entry, modes: bool) -> bool:
    """Whether a file has the bytes of its index entry but for CRLF in place of LF."""
    try:
        info = file.lstat()
        data = file.read_bytes() if stat.S_ISREG(info.st_mode) else b""
    except OSError:
        return False
    if modes and bool(info.st_mode & 0o100) != (entry.mode == "100755"):
        return False
    algorithm = "sha1" if len(entry.blob) == 40 else "sha256"
    return b"\r\n" in data and blob_id(data.replace(b"\r\n", b"\n"), algorithm) == entry.blob
