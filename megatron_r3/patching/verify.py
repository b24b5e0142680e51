"""Check whole series against the commits they are made for, without a checkout.

In an index of its own the patches are applied one by one, and taken back last patch first. Every
blob id on the way must be the promised one, and the tree at the end the one of the start.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import find_git_dir, has_commit, resolve
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.index import Index, run_series
from megatron_r3.patching.series import Series, broken_rules, read_series, unequal_numbers
from megatron_r3.patching.tree import TreeState, TreeStatus, compare
from megatron_r3.patching.versions import KnownTree, Line, Matrix


@dataclass(frozen=True)
class Verified:
    """A series that gives what it promises on one tree, and gives that tree back.

    Attributes:
        base: the commit that it was applied to.
        base_tree, patched_tree: ids of the whole trees before and after.
        num_patches, num_files: how many were applied and touched.
    """

    line: Line
    tree: KnownTree
    base: str
    base_tree: str
    patched_tree: str
    num_patches: int
    num_files: int


@dataclass(frozen=True)
class TreeCheck:
    """One known tree in `verify_repo`; neither `verified` nor `error`: its base is not there."""

    line: Line
    tree: KnownTree
    verified: Verified | None = None
    error: str = ""


def verify_tree(repo: Path, line: Line, tree: KnownTree) -> Verified | None:
    """Check the series of `line` on the base of `tree` in the git repository `repo`.

    The base of a tree with a commit is that commit; of one from the package index it is HEAD, if
    its files are those of the tree. None: `repo` has no such base. Nothing is written to `repo`.

    Raises:
        PatchingError: a patch does not fit, does not give the files that are promised, or cannot
            be taken back; or `repo` is no git repository.
    """
    series = read_series(line.folder)
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        index = Index(Path(folder), repo)
        if tree.commit and has_commit(repo, tree.commit):
            base = tree.commit
        elif tree.pypi and has_commit(repo, "HEAD"):
            base = resolve(repo, "HEAD")
        else:
            return None
        base_tree = index.read_tree(base)
        status = _status(index, repo, line, series, tree)
        if status.state is not TreeState.PRISTINE:
            if base != tree.commit:
                return None
            raise PatchingError(_not_the_base(status))
        return _there_and_back(index, status, base, base_tree)


def _status(index: Index, repo: Path, line: Line, series: Series, tree: KnownTree) -> TreeStatus:
    return compare(repo, line, series, tree, index.blobs())


def _not_the_base(status: TreeStatus) -> str:
    wrong = status.unknown or status.patched
    return f"the commit of {status.tree.name} has other files than the patches: {names(wrong)}"


def _there_and_back(index: Index, status: TreeStatus, base: str, base_tree: str) -> Verified:
    touched = {path for path, _ in run_series(index, status)}
    patched_tree = index.write_tree()
    applied = _status(index, status.root, status.line, status.series, status.tree)
    if applied.state is not TreeState.APPLIED:
        raise PatchingError(f"after all patches {status.tree.name} is {applied.state.value}")
    for _ in run_series(index, applied, reverse=True):
        pass
    if (after := index.write_tree()) != base_tree:
        raise PatchingError(
            f"{status.tree.name}: reverting gives the tree {after}, not {base_tree} again"
        )
    skipped = status.tree.absent
    num_patches = sum(
        any(change.path not in skipped for change in patch.changes)
        for patch in status.series.patches
    )
    return Verified(
        status.line, status.tree, base, base_tree, patched_tree, num_patches, len(touched)
    )


def verify_repo(repo: Path, matrix: Matrix, line: str = "") -> list[TreeCheck]:
    """Check every known tree, or those of `line`, as far as `repo` has its base.

    Raises:
        PatchingError: `repo` is no git repository, or there is no such line.
    """
    find_git_dir(repo)
    checks = []
    for candidate in [matrix.line(line)] if line else matrix.lines:
        for tree in candidate.trees:
            try:
                checks.append(TreeCheck(candidate, tree, verify_tree(repo, candidate, tree)))
            except PatchingError as error:
                checks.append(TreeCheck(candidate, tree, error=str(error)))
    return checks


def check_rules(matrix: Matrix, line: str = "") -> list[str]:
    """What breaks the rules for patches in every line, or in `line`; each in one text line.

    Raises:
        PatchingError: a series cannot be read.
    """
    several = [read_series(candidate.folder) for candidate in matrix.lines]
    chosen = [series for series in several if not line or series.line == matrix.line(line).name]
    wrong = [what for series in chosen for patch in series.patches for what in broken_rules(patch)]
    return wrong + unequal_numbers(several, line)
