"""Which known tree a directory is, and how far it is patched.

A tree is known by the blob ids of the files that the series touches. Its version string is no
identity (upstream's tag core_v0.19.0 says 0.19.1), and it need not be a git checkout. Every file
has a place in its chain of blobs: 0 is the base, the last one is patched.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from megatron_r3.patching.cleanroom import read_git, setting
from megatron_r3.patching.git import PatchingError, blob_id
from megatron_r3.patching.series import Blobs, Series, read_series
from megatron_r3.patching.versions import KnownTree, Line, Matrix


class TreeState(Enum):
    """How far a tree is patched."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    HALF_APPLIED = "half applied"  # each file is known; an apply or revert was killed
    UNKNOWN = "unknown"  # a file is neither base nor patched


@dataclass(frozen=True)
class FileOnDisk:
    """A file as it was read; data and stat are None where there is none."""

    data: bytes | None
    stat: os.stat_result | None

    @cached_property
    def blob(self) -> str | None:
        """Its git blob id."""
        return None if self.data is None else blob_id(self.data)

    @cached_property
    def lf_blob(self) -> str | None:
        """The blob id that it would have with LF for CRLF; None where it has no CRLF."""
        if self.data is None or b"\r\n" not in self.data:
            return None
        return blob_id(self.data.replace(b"\r\n", b"\n"))


@dataclass(frozen=True)
class TreeStatus:
    """A directory beside the known tree that it matches best.

    Attributes:
        names: the known trees that it matches equally well; `tree` is the first.
        files: as they were read; none where the tree is a commit, not a directory.
        blobs: of each file of the series, as in `tree`; (None,) for one that `tree` lacks.
        places: of each file, its index in `blobs`, or None where it is none of them.
    """

    root: Path
    line: Line
    series: Series
    tree: KnownTree
    names: tuple[str, ...]
    files: Mapping[str, FileOnDisk]
    blobs: Mapping[str, Blobs]
    places: Mapping[str, int | None]

    @property
    def state(self) -> TreeState:
        """How far the tree is patched."""
        if self.unknown:
            return TreeState.UNKNOWN
        if not self.patched:
            return TreeState.PRISTINE
        whole = all(place == len(self.blobs[path]) - 1 for path, place in self.places.items())
        return TreeState.APPLIED if whole else TreeState.HALF_APPLIED

    @property
    def patched(self) -> list[str]:
        """The files that at least one patch has changed."""
        return [path for path, place in self.places.items() if place]

    @property
    def unknown(self) -> list[str]:
        """The files that are neither base nor patched."""
        return [path for path, place in self.places.items() if place is None]

    @property
    def num_recognised(self) -> int:
        """How many existing files are known: 0 says that this is another version altogether.

        A file with CRLF line ends is known by what it would be with LF.
        """
        return len(self.crlf) + sum(
            place is not None and self.files[path].data is not None
            for path, place in self.places.items()
        )

    @property
    def crlf(self) -> list[str]:
        """The files of `unknown` that would be known with LF for CRLF."""
        lf = {path: self.files[path].lf_blob for path in self.unknown}
        return [path for path, blob in lf.items() if blob is not None and blob in self.blobs[path]]

    def why_unknown(self, path: str) -> str:
        """What is wrong with a file of `unknown`, in a few words."""
        data = self.files[path].data
        if data is None:
            return "missing"
        if self.blobs[path] == (None,):
            return f"{self.tree.name} has no such file"
        if path in self.crlf:
            return "has CRLF line ends"
        return "neither the base nor the patched file"


def identify(root: Path, matrix: Matrix, line: str = "") -> TreeStatus:
    """Compare `root` with the known trees of `line`, or of every line, and return the best match.

    Raises:
        PatchingError: `root` is no Megatron-LM tree, or a file in question is a symlink, a folder
            or unreadable; or the series or its entry in versions.toml is wrong.
    """
    root = root.resolve()
    if not root.is_dir():
        raise PatchingError(f"{root}: no such directory")
    if not (root / "megatron" / "core").is_dir():
        raise PatchingError(f"{root} is no Megatron-LM tree: there is no megatron/core in it")
    matches: list[TreeStatus] = []
    read: dict[str, FileOnDisk] = {}
    for candidate in [matrix.line(line)] if line else matrix.lines:
        series = read_series(candidate.folder)
        read |= read_files(root, (path for path in series.blobs if path not in read))
        files = {path: read[path] for path in series.blobs}
        found = {path: file.blob for path, file in files.items()}
        matches += [
            replace(compare(root, candidate, series, tree, found), files=files)
            for tree in candidate.trees
        ]
    best = max(matches, key=_likeness)  # the first of equals
    names = [m.tree.name for m in matches if m.line is best.line and _same(m, best)]
    return replace(best, names=tuple(names))


def read_files(root: Path, paths: Iterable[str]) -> dict[str, FileOnDisk]:
    """Read these files of a tree.

    Raises:
        PatchingError: one is not a plain file, or lies behind a symlink.
    """
    return {path: _read(root, path) for path in paths}


def _read(root: Path, path: str) -> FileOnDisk:
    for part in (path, *map(str, Path(path).parents)):
        # a file behind a link may belong to another tree, and would not be replaced in place
        if part != "." and (root / part).is_symlink():
            raise PatchingError(f"{root / part} is a symlink: patch the tree that it points into")
    try:
        info = (root / path).stat()
        if not stat.S_ISREG(info.st_mode):
            raise PatchingError(f"{root / path} is not a plain file")
        return FileOnDisk((root / path).read_bytes(), info)
    except (FileNotFoundError, NotADirectoryError):
        return FileOnDisk(None, None)
    except OSError as error:
        raise PatchingError(f"{root / path}: {error.strerror}") from None


def compare(
    root: Path, line: Line, series: Series, tree: KnownTree, found: Mapping[str, str | None]
) -> TreeStatus:
    """How far the files whose blob ids are `found` are patched, if they are those of `tree`.

    Raises:
        PatchingError: the entry of `tree` in versions.toml does not fit the series.
    """
    blobs = {**series.blobs, **(tree.blobs or {}), **dict.fromkeys(tree.absent, (None,))}
    for path in blobs:
        if path not in series.blobs:
            raise PatchingError(
                f"versions.toml: {tree.name}: no patch of {line.name} is for {path}"
            )
        if path not in tree.absent and len(blobs[path]) != len(series.blobs[path]):
            raise PatchingError(
                f"versions.toml: {tree.name}: blobs of {path}: one more than patches"
            )
    places = {
        path: chain.index(found.get(path)) if found.get(path) in chain else None
        for path, chain in blobs.items()
    }
    return TreeStatus(root, line, series, tree, (tree.name,), {}, blobs, places)


def _likeness(match: TreeStatus) -> tuple[bool, int, int]:
    return not match.unknown, match.num_recognised, -len(match.unknown)


def _same(match: TreeStatus, best: TreeStatus) -> bool:
    return match.places == best.places and _likeness(match) == _likeness(best)


# Which files of a checkout are not as its commit has them.


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
