"""Which known tree a directory is, and how far it is patched.

A tree is recognised by the blob ids of the files that the series touches. Its version string says
nothing (upstream's tag core_v0.19.0 calls itself 0.19.1), and the tree need not be a git checkout.
Every file has a place in its chain of blobs: place 0 is the base, the last place is patched.
Example: two patches change router.py, so its chain is (a, b, c). A file with the id b has place 1:
the first patch is in it, the second is not. The chains of a release are those of its patches and of
versions.toml; those of an unreleased tree that was patched are in the tree's own record.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property, partial
from pathlib import Path

from megatron_r3.patching.cleanroom import is_checkout, read_git
from megatron_r3.patching.git import PatchingError, blob_id
from megatron_r3.patching.record import Unreleased, read_record, record_path, series_digest
from megatron_r3.patching.series import Blobs, Series, read_series
from megatron_r3.patching.versions import KnownTree, Line, Versions


class TreeState(Enum):
    """How far a tree is patched."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    HALF_APPLIED = "half applied"  # each file is known; an apply or revert was killed
    UNKNOWN = "unknown"  # a file is neither base nor patched


@dataclass(frozen=True)
class FileOnDisk:
    """A file as it was read; data and stat are None where there is no file."""

    data: bytes | None
    stat: os.stat_result | None

    @cached_property
    def blob(self) -> str | None:
        """The file's git blob id."""
        return None if self.data is None else blob_id(self.data)

    @cached_property
    def lf_blob(self) -> str | None:
        """The blob id that the file would have with LF for CRLF; None for a file without CRLF."""
        if self.data is None or b"\r\n" not in self.data:
            return None
        return blob_id(self.data.replace(b"\r\n", b"\n"))


@dataclass(frozen=True)
class TreeStatus:
    """A directory compared with the known tree that it matches best.

    Attributes:
        names: the known trees that the directory matches equally well; `tree` is the first.
        files: the files as they were read; empty where the tree is a commit, not a directory.
        blobs: the chain of each file of the series in `tree`; (None,) for a file that `tree` lacks.
        places: the index of each file in its chain, or None where its id is not in the chain.
        unreleased: what the record of the tree says, if `tree` is made of it; else None.
    """

    root: Path
    line: Line
    series: Series
    tree: KnownTree
    names: tuple[str, ...]
    files: Mapping[str, FileOnDisk]
    blobs: Mapping[str, Blobs]
    places: Mapping[str, int | None]
    unreleased: Unreleased | None = None

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
        """How many existing files are known; 0 means another version altogether.

        A file with CRLF line ends counts if it is known with LF in their place.
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
        if self.files[path].data is None:
            return "missing"
        if self.blobs[path] == (None,):
            return f"{self.tree.name} has no such file"
        if path in self.crlf:
            return "has CRLF line ends"
        return "neither the base nor the patched file"


def identify(root: Path, versions: Versions, line: str = "") -> TreeStatus:
    """Compare `root` with the known trees of `line`, or of every line, and return the best match.

    A tree that no entry of versions.toml knows is compared with its own record too.

    Raises:
        PatchingError: `root` is no Megatron-LM tree, or a file in question is a symlink, a folder
            or unreadable; or the series or its entry in versions.toml is wrong; or the record of
            an unknown tree is damaged, or is about other patches.
    """
    root = root.resolve()
    if not root.is_dir():
        raise PatchingError(f"{root}: no such directory")
    if not (root / "megatron" / "core").is_dir():
        raise PatchingError(f"{root} is no Megatron-LM tree: there is no megatron/core in it")
    matches: list[TreeStatus] = []
    read = cache(partial(read_file, root))  # most files are in the series of every line
    for candidate in [versions.line(line)] if line else versions.lines:
        series = read_series(candidate.folder)
        files = {path: read(path) for path in series.blobs}
        ids = {path: file.blob for path, file in files.items()}
        for tree in candidate.trees:
            matches.append(compare(root, candidate, series, tree, ids, files))
    best = _best(matches)
    # A tree that has some of the groups looks like a release that is half patched.
    odd = best.state in (TreeState.UNKNOWN, TreeState.HALF_APPLIED)
    if odd and (recorded := _recorded(root, versions, line)):
        if recorded.patched and not recorded.unknown:
            return recorded
        # A release that has as many of the files is the better name for an unpatched tree.
        matches = [recorded, *matches] if recorded.patched else [*matches, recorded]
        best = _best(matches)
    equal = [m for m in matches if m.line is best.line and m.places == best.places]
    return replace(best, names=tuple(match.tree.name for match in equal))


def _best(matches: list[TreeStatus]) -> TreeStatus:
    """The first of the best matches: no unknown file, then as many known files as possible."""
    return max(matches, key=lambda m: (not m.unknown, m.num_recognised, -len(m.unknown)))


def _recorded(root: Path, versions: Versions, line: str) -> TreeStatus | None:
    """`root` compared with the tree of its record; None where the record does not matter.

    Raises:
        PatchingError: the record is damaged, or other patches than those of today are in the tree.
    """
    record = read_record(root)
    if record is None or (tree := record.tree) is None or (line and tree.line != line):
        return None
    own = next((candidate for candidate in versions.lines if candidate.name == tree.line), None)
    series = read_series(own.folder).part(tree.groups) if own else None
    if own is None or series is None or series_digest(series) != tree.series:
        base = {path: chain[0] for path, chain in tree.blobs.items()}
        if all(read_file(root, path).blob == blob for path, blob in base.items()):
            return None  # nothing is patched, so it does not matter how it was patched before
        raise PatchingError(
            f"{root} was patched by other patches of {tree.line}, those of megatron-r3 "
            f"{tree.version}: revert with that version; or bring back the unpatched files (git "
            f"checkout -- megatron) and remove {record_path(root)}; then apply again"
        )
    files = {path: read_file(root, path) for path in series.blobs}
    ids = {path: file.blob for path, file in files.items()}
    known = KnownTree(tree.name, absent=tree.absent, blobs=tree.blobs)
    return replace(compare(root, own, series, known, ids, files), unreleased=tree)


def read_file(root: Path, path: str) -> FileOnDisk:
    """Read one file of a tree.

    Raises:
        PatchingError: it is not a plain file, or lies behind a symlink.
    """
    for part in (path, *map(str, Path(path).parents)):
        # A file behind a link may belong to another tree; writing it would change that tree.
        if part != "." and (root / part).is_symlink():
            raise PatchingError(f"{root / part} is a symlink: patch the tree that it points into")
    try:
        info = (root / path).stat()
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            raise PatchingError(f"{root / path} is not a plain file")
        return FileOnDisk((root / path).read_bytes(), info)
    except (FileNotFoundError, NotADirectoryError):
        return FileOnDisk(None, None)
    except OSError as error:
        raise PatchingError(f"{root / path}: {error.strerror}") from None


def compare(
    root: Path,
    line: Line,
    series: Series,
    tree: KnownTree,
    ids: Mapping[str, str | None],
    files: Mapping[str, FileOnDisk] | None = None,
) -> TreeStatus:
    """How far the files with the blob `ids` are patched, if they are the files of `tree`.

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
                f"versions.toml: {tree.name}: blobs of {path}: there must be one blob more "
                "than patches"
            )
    places = {
        path: chain.index(ids.get(path)) if ids.get(path) in chain else None
        for path, chain in blobs.items()
    }
    return TreeStatus(root, line, series, tree, (tree.name,), files or {}, blobs, places)


def dirty_files(root: Path) -> list[str]:
    """The tracked files of the checkout `root` that differ from its HEAD, staged or not.

    A file that differs only in having CRLF where the commit has LF is not dirty. Filters are not
    run: a file of Git LFS is dirty once it is newer than git's index.
    """
    # git diff compares bytes where the size in the index is another, as with CRLF; git status and
    # the plumbing (git diff-files) call such a file changed without looking into it.
    dirty: set[str] = set()
    for staged in ([], ["--cached"]):
        command = ("diff", *staged, "--name-only", "-z", "--no-renames", "--ignore-submodules=all")
        listed = read_git(root, *command, work_tree=True).stdout
        dirty.update(os.fsdecode(listed).split("\0")[:-1])
    return sorted(dirty)


def left_out_files(status: TreeStatus) -> list[str]:
    """The missing files of the series that git leaves out on purpose (sparse checkout)."""
    missing = [path for path in status.unknown if status.files[path].data is None]
    if not missing or not is_checkout(status.root):
        return []
    # one entry: "H <path>", or "S <path>" for a file that git does not expect in the work tree
    listed = read_git(status.root, "ls-files", "-t", "-z", "--", *missing).stdout
    return [entry[2:] for entry in os.fsdecode(listed).split("\0") if entry.startswith("S ")]
