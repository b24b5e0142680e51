"""Finds the patches that apply to a tree that versions.toml does not list.

Such a tree is for example a commit between two releases that a framework pins, or a fork. The
patches must apply to its files exactly, as `git apply` means it: every line of context is there, in
the same order; only the line numbers may differ. The group r3 must apply; any other group that does
not apply is left out. With --groups every named group must apply. A release that shall get only
some groups is handled in the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_r3 import __version__
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.record import Unreleased, series_digest
from megatron_r3.patching.scratch import PatchFailed, Scratch, scratch
from megatron_r3.patching.series import GROUPS, NEEDED, Series, read_series
from megatron_r3.patching.tree import compare
from megatron_r3.patching.tree_files import read_file
from megatron_r3.patching.versions import Line, Versions


@dataclass(frozen=True)
class Fit:
    """Groups of a line's patches that apply to an unpatched tree.

    Attributes:
        tree: what the record of the tree will say.
        moved: the sum, over all hunks, of the lines by which the hunk is away from its place in
            the patch.
        left_out: for each group that was tried and left out, the reason: the file and line that do
            not fit, or the groups that it needs.
    """

    tree: Unreleased
    moved: int
    left_out: Mapping[str, str]

    @property
    def size(self) -> str:
        """The release line and how far the tree is from the nearest known tree, in a few words.

        Example: "main (8 of 11 files differ from main of 2026-08-22, hunks moved by 40 lines)".
        """
        tree = self.tree
        files = f"{len(tree.differ)} of {tree.num_files} files differ from {tree.near}"
        without = f", without {names([*self.left_out])}" if self.left_out else ""
        return f"{tree.line} ({files}, hunks moved by {self.moved} lines{without})"

    @property
    def missing(self) -> str:
        """A line for each group of `left_out`, with its reason."""
        return "\n".join(f"left out: {name}: {why}" for name, why in self.left_out.items())

    @property
    def distance(self) -> tuple[int, int, int, int]:
        """The sort key of the lines that fit: the nearest line has the smallest key.

        The number of patches counts before the number of differing files: if a patch applies, the
        tree lacks what the patch brings. Example: the series of main and of core_r0.19.0 both apply
        to commit 14346b65, and fewer of the commit's files differ from main. But the commit lacks a
        fix that main has, and that core_r0.19.0 has as a patch. With the patches of main a training
        would end with an error, because these expect another shape of the padding mask.
        """
        tree = self.tree
        return len(self.left_out), -tree.num_patches, len(tree.differ), self.moved


def find_fits(
    root: Path, versions: Versions, line: str = "", wanted: Collection[str] = ()
) -> list[Fit]:
    """A `Fit` for each line with patches that apply to the unpatched tree `root`, nearest first.

    With `line` only this line is tried. `Fit.distance` gives the order.

    Args:
        wanted: the groups to apply, which must all fit; empty for r3 and every group that fits.

    Raises:
        PatchingError: there is no such `line`; or a file in question is a symlink, a folder or
            unreadable; or a series is wrong.
    """
    fits = []
    for candidate in [versions.line(line)] if line else versions.lines:
        with suppress(PatchFailed):
            if fit := fit_line(root.resolve(), candidate, wanted):
                fits.append(fit)
    return sorted(fits, key=lambda fit: fit.distance)


def fit_line(root: Path, line: Line, wanted: Collection[str] = ()) -> Fit | None:
    """The groups of `line` that apply to the tree `root`.

    Returns None if the tree has patched files, or a file that the nearest known tree lacks, or if
    the line has no patches of a wanted group.

    Raises:
        PatchFailed: a group that must apply does not apply.
    """
    series = read_series(line.folder)
    files = {path: read_file(root, path) for path in series.blobs}
    matches = [compare(root, line, series, tree, files) for tree in line.trees]
    nearest = min(matches, key=lambda match: len(match.unknown))
    if nearest.patched or any(files[path].data is not None for path in nearest.tree.absent):
        return None
    present = {path: file for path, file in files.items() if path not in nearest.tree.absent}
    with scratch(present) as ours:
        base = ours.snapshot()
        groups, left_out, moved = _apply_groups(ours, series, wanted, present)
        if {*(wanted or [NEEDED])} - {*groups}:
            return None
        diff = ours.diff(base, ours.snapshot())
    patches = [patch for patch in series.patches if patch.group in groups]
    taken = {change.path for patch in patches for change in patch.changes}
    tree = Unreleased(
        line.name,
        nearest.tree.name,
        differ=tuple(path for path in nearest.unknown if path in taken),
        absent=tuple(path for path in nearest.tree.absent if path in taken),
        groups=tuple(groups),
        left_out=tuple(name for name in series.groups if name not in groups),
        num_patches=len(patches),
        series=series_digest(series, groups),
        version=__version__,
        diff=diff.decode(errors="surrogateescape"),
    )
    return Fit(tree, moved, left_out)


def _apply_groups(
    ours: Scratch, series: Series, wanted: Collection[str], present: Collection[str]
) -> tuple[list[str], dict[str, str], int]:
    """The groups that applied, why others were left out, and the sum of the hunks' offsets."""
    groups: list[str] = []
    left_out: dict[str, str] = {}
    moved = 0
    for group in (group for group in GROUPS if group.name in series.groups):
        if wanted and group.name not in wanted:
            continue
        if missing := [name for name in group.needs if name not in groups]:
            left_out[group.name] = f"it needs {names(missing)}"
            continue
        before = ours.contents(present)
        try:
            moved += _apply_group(ours, series, group.name, present)
        except PatchFailed as failed:
            if group.name in (wanted or [NEEDED]):
                raise
            ours.put(before)
            left_out[group.name] = failed.where
            continue
        groups.append(group.name)
    return groups, left_out, moved


def _apply_group(ours: Scratch, series: Series, group: str, present: Collection[str]) -> int:
    """Apply a group's patches to the present files; return the sum of the hunks' offsets."""
    moved = 0
    for number, patch in enumerate(series.patches, 1):
        changes = [change for change in patch.changes if change.path in present]
        if patch.group == group and changes:
            moved += ours.apply(number, patch, changes)
    return moved


def choose(root: Path, fits: list[Fit]) -> tuple[Fit, str]:
    """The nearest fit, and text about the groups that it leaves out and the other lines that fit.

    Raises:
        PatchingError: two lines are equally near; the message asks for --line.
    """
    first, others = fits[0], fits[1:]
    equal = [fit for fit in others if fit.distance == first.distance]
    if equal:
        lines = ", ".join(fit.size for fit in (first, *equal))
        raise PatchingError(
            f"{root}: the patches of several release lines apply, and none is nearer "
            f"than the others: {lines}; choose one: --line {first.tree.line}"
        )
    said = [first.missing] if first.left_out else []
    if others:
        rest = ", ".join(fit.size for fit in others)
        said.append(f"{first.size} is nearer than the other lines that fit: {rest}")
    return first, "\n".join(said)


def how_to_take(root: Path, fits: list[Fit]) -> str:
    """The message about a tree that the patches fit, if --unreleased was not given."""
    tree, others = fits[0].tree, [fit.size for fit in fits[1:]]
    quoted = shlex.quote(str(root))
    also = f" (so do those of {names(others)})" if others else ""
    differ = "".join(f"\n  {path}" for path in tree.differ)
    missing = f"\n{fits[0].missing}\nthe other" if fits[0].left_out else "\nall"
    return (
        f"{root} is close to {tree.near}, but no release: {len(tree.differ)} of the "
        f"{tree.num_files} files to patch differ:{differ}{missing} patches of {tree.line} apply to "
        f"it exactly{also}, but the patched tree was never tested: restore these files; or, if "
        f"they are meant to differ, apply with --unreleased (make apply MEGATRON={quoted} "
        f"UNRELEASED=1), then test the tree with make check MEGATRON={quoted}"
    )
