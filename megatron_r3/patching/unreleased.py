"""Trees that versions.toml does not list, to which groups of patches apply all the same.

Such a tree lies between two releases: a commit that a framework pins, or a fork. The patches must
apply to its files exactly, as `git apply` means it: every line of context is there, in the same
order; only the line numbers may differ. They must also come off again and leave every byte. A group
that does not apply is left out, but for r3. A release of which some groups are wanted is such a
tree too.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from megatron_r3 import __version__
from megatron_r3.patching.cleanroom import is_checkout, resolve
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.record import Unreleased, series_digest
from megatron_r3.patching.repository import OwnRepository, PatchFailed
from megatron_r3.patching.series import (
    GROUPS,
    NEEDED,
    Blobs,
    FileChange,
    Patch,
    Series,
    read_series,
)
from megatron_r3.patching.tree import FileOnDisk, TreeStatus, compare, read_file
from megatron_r3.patching.versions import KnownTree, Line, Versions

# what git says of a hunk that is not where the patch names it:
# "Hunk #2 succeeded at 812 (offset -30 lines)."
_OFFSET = re.compile(rb"^Hunk #\d+ succeeded at \d+ \(offset -?(\d+) lines?\)\.$", re.M)


@dataclass(frozen=True)
class Fit:
    """A tree to which groups of a line's patches apply: the tree, and its nearest known tree.

    Attributes:
        status: the tree, compared with itself: unpatched.
        tree: what the record of the tree will say.
        moved: by how many lines the hunks are away from where the patches name them, together.
        left_out: why other groups are not in: the place that does not fit, by the group's name.
    """

    status: TreeStatus
    tree: Unreleased
    moved: int
    left_out: Mapping[str, str]

    @property
    def size(self) -> str:
        """How near the known tree is, in a few words.

        Example: "main (8 of 11 files differ from main of 2026-08-22, hunks moved by 40 lines)".
        """
        tree = self.tree
        files = f"{len(tree.differ)} of {len(tree.blobs)} files differ from {tree.near}"
        without = f", without {names([*self.left_out])}" if self.left_out else ""
        return f"{tree.line} ({files}, hunks moved by {self.moved} lines{without})"

    @property
    def missing(self) -> str:
        """A line for each group that is left out, with the place that does not fit."""
        return "\n".join(f"left out: {name}: {why}" for name, why in self.left_out.items())

    @property
    def distance(self) -> tuple[int, int, int, int]:
        """What orders the lines that fit: the nearest one has the least.

        A patch that applies is one that the tree needs. Example: 14346b65 lacks a fix that main
        has, so the patch with this fix, of core_r0.19.0, applies to it. More of its files are those
        of main, whose patches have no such fix and apply too; with these a training ends with an
        error, since they expect the padding mask to have another shape.
        """
        num_patches = len(self.status.series.patches)
        return len(self.left_out), -num_patches, len(self.tree.differ), self.moved


def find_fits(
    root: Path, versions: Versions, line: str = "", wanted: Collection[str] = ()
) -> list[Fit]:
    """The lines, or that `line`, whose patches apply to the unpatched tree `root`.

    The line with the fewest groups to leave out is the first; of equal ones that with the most
    patches, then that with the fewest files that differ from a known tree of it, then that in whose
    patches the hunks are nearest to where they fit.

    Args:
        wanted: the groups to apply, all of them; empty for r3 and what else applies.

    Raises:
        PatchingError: a file in question is a symlink, a folder or unreadable, or a series is
            wrong.
    """
    root = root.resolve()
    read = cache(partial(read_file, root))  # most files are in the series of every line
    candidates = [versions.line(line)] if line else versions.lines
    fits = [fit for candidate in candidates if (fit := _fit(root, candidate, read, wanted))]
    return sorted(fits, key=lambda fit: fit.distance)


def _fit(
    root: Path, line: Line, read: Callable[[str], FileOnDisk], wanted: Collection[str]
) -> Fit | None:
    series = read_series(line.folder)
    files = {path: read(path) for path in series.blobs}
    ids = {path: file.blob for path, file in files.items()}
    matches = [compare(root, line, series, tree, ids, files) for tree in line.trees]
    nearest = min(matches, key=lambda match: len(match.unknown))
    absent = nearest.tree.absent
    # With a patched file the tree is no base, whatever can still be applied to it.
    if nearest.patched or any(files[path].data is not None for path in absent):
        return None
    commit = resolve(root, "HEAD") if is_checkout(root) else ""
    if not wanted and commit and commit in [tree.commit for tree in line.trees]:
        return None  # a release whose files the patches do not name: a patch is missing
    present = {path: file for path, file in files.items() if path not in absent}
    taken = _there_and_back(present, series, wanted)
    if taken is None:
        return None
    whole, series, blobs = series, series.part(taken.groups), taken.blobs
    absent = tuple(path for path in absent if path in series.blobs)
    differ = tuple(path for path in nearest.unknown if path in series.blobs)
    for path, chain in blobs.items():
        # A file that is the release's own must become what it becomes in the release.
        is_whole = len(series.blobs[path]) == len(whole.blobs[path])
        if is_whole and path not in differ and chain != nearest.blobs[path]:
            raise PatchingError(
                f"the patches of {line.name} are damaged: they do not give the {path} that is "
                f"promised for {nearest.tree.name}; nothing was changed"
            )
    tree = Unreleased(
        *(line.name, nearest.tree.name, differ, commit),
        *(series_digest(series), __version__, absent),
        blobs=blobs,
        groups=taken.groups,
    )
    known = KnownTree(tree.name, absent=absent, blobs=blobs)
    files = {path: file for path, file in files.items() if path in series.blobs}
    status = compare(root, line, series, known, ids, files)
    return Fit(replace(status, unreleased=tree), tree, taken.moved, taken.left_out)


@dataclass(frozen=True)
class _Taken:
    """What a tree takes of a series.

    Attributes:
        blobs: the chain of each file that the taken groups change.
        moved: by how many lines hunks moved, together.
        left_out: as in `Fit`.
    """

    groups: tuple[str, ...]
    blobs: Mapping[str, Blobs]
    moved: int
    left_out: Mapping[str, str]


def _there_and_back(
    files: Mapping[str, FileOnDisk], series: Series, wanted: Collection[str]
) -> _Taken | None:
    """Apply one group after the other, without those that do not apply, and take all off again.

    None where a group that must apply does not, or where the patches do not come off again.
    """
    done: list[tuple[int, Patch, list[FileChange]]] = []
    chains: dict[str, Blobs] = {}
    groups: list[str] = []
    left_out: dict[str, str] = {}
    moved = 0
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        repo = OwnRepository.new(Path(folder))
        repo.add(files)
        first = repo.blobs(files)
        base = before = repo.git("write-tree")
        for group in (group for group in GROUPS if group.name in series.groups):
            if wanted and group.name not in wanted:
                continue
            if missing := [name for name in group.needs if name not in groups]:
                left_out[group.name] = f"it needs {names(missing)}"
                continue
            parts = [
                (number, patch, [change for change in patch.changes if change.path in files])
                for number, patch in enumerate(series.patches, 1)
                if patch.group == group.name
            ]
            longer, offsets = dict(chains), 0
            try:
                for number, patch, changes in (part for part in parts if part[2]):
                    offsets += _offsets(repo, changes)
                    repo.apply(number, patch, changes)
                    after = repo.blobs(change.path for change in changes)
                    for path in (change.path for change in changes):
                        longer[path] = (*longer.get(path, (first.get(path),)), after.get(path))
            except PatchFailed as failed:
                repo.git("read-tree", before)
                left_out[group.name] = failed.where
                continue
            chains, moved, before = longer, moved + offsets, repo.git("write-tree")
            groups.append(group.name)
            done += [part for part in parts if part[2]]
        if {*(wanted or [NEEDED])} - {*groups}:
            return None
        places = {path: len(chain) - 1 for path, chain in chains.items()}
        try:
            for number, patch, changes in reversed(done):
                repo.apply(number, patch, changes, reverse=True)
                after = repo.blobs(change.path for change in changes)
                for path in (change.path for change in changes):
                    places[path] -= 1
                    # Where the same lines are in a file twice, git may take a patch off at the
                    # other place: then the tree would be patched, and could never be reverted.
                    if after.get(path) != chains[path][places[path]]:
                        return None
        except PatchFailed:
            return None
        if repo.git("write-tree") != base:
            return None
    # A file's id must say how many of its patches are in it.
    if any(len(set(chain)) < len(chain) for chain in chains.values()):
        return None
    return _Taken(tuple(groups), chains, moved, left_out)


def _offsets(repo: OwnRepository, changes: list[FileChange]) -> int:
    """By how many lines the hunks of a patch are away from where the patch names them."""
    diffs = b"".join(change.diff for change in changes)
    told = repo.run("apply", "--cached", "--check", "--verbose", "-", stdin=diffs, check=False)
    return sum(int(offset) for offset in _OFFSET.findall(told.stderr))


def choose(fits: list[Fit]) -> tuple[Fit, str]:
    """The nearest line of those that fit, and what to say of the other ones.

    Raises:
        PatchingError: two lines fit equally well, so that nothing says which one is meant.
    """
    first, others = fits[0], fits[1:]
    equal = [fit for fit in others if fit.distance == first.distance]
    if equal:
        lines = ", ".join(fit.size for fit in (first, *equal))
        raise PatchingError(
            f"{first.status.root}: the patches of several release lines apply, and none is nearer "
            f"than the others: {lines}; choose one: --line {first.tree.line}"
        )
    said = [first.missing] if first.left_out else []
    if others:
        rest = ", ".join(fit.size for fit in others)
        said.append(f"{first.size} is nearer than the other lines that fit: {rest}")
    return first, "\n".join(said)


def how_to_take(root: Path, fits: list[Fit]) -> str:
    """What to say where the patches fit, and the user has not said the word."""
    tree, others = fits[0].tree, [fit.size for fit in fits[1:]]
    quoted = shlex.quote(str(root))
    also = f" (so do those of {names(others)})" if others else ""
    differ = "".join(f"\n  {path}" for path in tree.differ)
    missing = f"\n{fits[0].missing}\nthe other" if fits[0].left_out else "\nall"
    return (
        f"{root} is close to {tree.near}, but no release: {len(tree.differ)} of its "
        f"{len(tree.blobs)} files differ:{differ}{missing} patches of {tree.line} apply to it "
        f"exactly{also}, but nobody has tested what they make of it: bring back these files; or if "
        f"they are meant to be as they are, apply with --unreleased (make apply MEGATRON={quoted} "
        f"UNRELEASED=1), then test the tree with make check MEGATRON={quoted}"
    )
