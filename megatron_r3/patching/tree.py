"""Which known tree a directory is, and how far it is patched.

A tree is recognised by the blob ids of the files that the series changes. Its version string is not
used (upstream's tag core_v0.19.0 calls itself 0.19.1), and the tree need not be a git checkout. A
known file has a place in its chain of blobs: place 0 is the base, the last place is patched.
Example: two patches change router.py, so its chain is (a, b, c). A file with the id b has place 1:
the first patch is in it, the second is not. The chains of a release are those of its patches and of
versions.toml. An unreleased tree that was patched has a record, with a diff that counts as one
patch. Only the record and the files that the patches change are read, and git does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path

from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.record import Unreleased, read_record, record_path
from megatron_r3.patching.series import Blobs, Series, read_series
from megatron_r3.patching.tree_files import FileOnDisk, read_file
from megatron_r3.patching.versions import KnownTree, Line, Versions


class TreeState(Enum):
    """How far a tree is patched."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    HALF_APPLIED = "half applied"  # all files are known, but only some patches are in them
    UNKNOWN = "unknown"  # a file's blob id is not in its chain


@dataclass(frozen=True)
class TreeStatus:
    """A directory compared with the known tree that it matches best.

    Attributes:
        names: the names of `tree` and of other known trees that the directory matches equally well.
        files: the files of the series as they were read.
        blobs: the chain of each file in `tree`; (None,) for a file that `tree` lacks.
        unreleased: what the record of the tree says, if `series` is made from it; else None.
    """

    root: Path
    line: Line
    series: Series
    tree: KnownTree
    names: tuple[str, ...]
    files: Mapping[str, FileOnDisk]
    blobs: Mapping[str, Blobs]
    unreleased: Unreleased | None = None

    @cached_property
    def places(self) -> dict[str, int | None]:
        """The index of each file's blob id in its chain; None if the id is not in the chain."""
        ids = {path: self.files[path].blob for path in self.blobs}
        return {
            path: chain.index(ids[path]) if ids[path] in chain else None
            for path, chain in self.blobs.items()
        }

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of patches that are in the tree, or that apply would put there."""
        return self.unreleased.groups if self.unreleased else self.series.groups

    @property
    def absent(self) -> tuple[str, ...]:
        """The files of the patches that the tree is known to lack."""
        return self.unreleased.absent if self.unreleased else self.tree.absent

    def with_files(self, files: Mapping[str, FileOnDisk]) -> TreeStatus:
        """This status for other contents of the files."""
        return replace(self, files=files)

    def read_again(self) -> TreeStatus:
        """This status for the files as they are on the disk now."""
        return self.with_files({path: read_file(self.root, path) for path in self.files})

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
        """The files with blob ids that are not in their chains."""
        return [path for path, place in self.places.items() if place is None]

    @property
    def num_recognised(self) -> int:
        """How many existing files are known; 0 means that the tree is of no known version."""
        return sum(
            place is not None and self.files[path].data is not None
            for path, place in self.places.items()
        )

    def why_unknown(self, path: str) -> str:
        """What is wrong with a file of `unknown`, in a few words."""
        if self.files[path].data is None:
            return "missing; if git left it out of the checkout: git sparse-checkout disable"
        if self.blobs[path] == (None,):
            return f"{self.tree.name} has no such file"
        crlf = b"\r\n" in (self.files[path].data or b"")
        return "neither the base nor the patched file" + (": it has CRLF line ends" if crlf else "")


def find_root(root: Path) -> Path:
    """The resolved path of the tree `root`.

    Raises:
        PatchingError: `root` is no Megatron-LM tree.
    """
    root = root.resolve()
    if not root.is_dir():
        raise PatchingError(f"{root}: no such directory")
    if not (root / "megatron" / "core").is_dir():
        raise PatchingError(f"{root} is no Megatron-LM tree: there is no megatron/core in it")
    return root


def identify(root: Path, versions: Versions, line: str = "") -> TreeStatus:
    """Compare `root` with the known trees of `line`, or of every line, and return the best match.

    A tree that versions.toml shows as unknown or half applied is compared with its record too.

    Raises:
        PatchingError: `root` is no Megatron-LM tree, or a file in question is a symlink, a folder
            or unreadable; or the series or its entry in versions.toml is wrong; or the record of
            an unknown or half applied tree is damaged.
    """
    root = find_root(root)
    matches: list[TreeStatus] = []
    for candidate in [versions.line(line)] if line else versions.lines:
        series = read_series(candidate.folder)
        files = {path: read_file(root, path) for path in series.blobs}
        matches += [compare(root, candidate, series, tree, files) for tree in candidate.trees]
    # first a tree without unknown files, then by the most known files, then by the fewest unknown
    best = max(matches, key=lambda m: (not m.unknown, m.num_recognised, -len(m.unknown)))
    # A tree with only some of the groups looks like a half applied release, but has a record.
    if best.state in (TreeState.UNKNOWN, TreeState.HALF_APPLIED):
        record = read_record(root)
        if record and record.tree and line in ("", record.tree.line):
            recorded = from_record(root, versions, record.tree)
            if not recorded.unknown or (recorded.patched and best.unknown):
                return recorded
    equal = [m for m in matches if m.line is best.line and m.places == best.places]
    return replace(best, names=tuple(match.tree.name for match in equal))


def from_record(root: Path, versions: Versions, record: Unreleased) -> TreeStatus:
    """The status of `root` by its record alone, whatever patches `versions.folder` has."""
    folder = versions.folder / record.line
    gone = Line(record.line, folder, "", "", "", ())  # versions.toml may have dropped the line
    line = next((known for known in versions.lines if known.name == record.line), gone)
    patch = record.patch(record_path(root))
    series = Series(
        line.name, (patch,), {change.path: (change.pre, change.post) for change in patch.changes}
    )
    files = {path: read_file(root, path) for path in series.blobs}
    return replace(compare(root, line, series, KnownTree(record.name), files), unreleased=record)


def compare(
    root: Path, line: Line, series: Series, tree: KnownTree, files: Mapping[str, FileOnDisk]
) -> TreeStatus:
    """The status of `files` if they are compared with the chains of `tree`.

    Raises:
        PatchingError: the entry of `tree` in versions.toml does not fit the series.
    """
    blobs = {**series.blobs, **(tree.blobs or {}), **dict.fromkeys(tree.absent, (None,))}
    for path in blobs:
        if path not in series.blobs:
            raise PatchingError(
                f"versions.toml: {tree.name}: no patch of {line.name} changes {path}"
            )
        if path not in tree.absent and len(blobs[path]) != len(series.blobs[path]):
            raise PatchingError(
                f"versions.toml: {tree.name}: blobs of {path}: there must be one blob more "
                "than patches"
            )
    return TreeStatus(root, line, series, tree, (tree.name,), files, blobs)
