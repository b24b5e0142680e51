"""Check whole series against the commits they are made for, without a checkout.

In an index of our own the patches are applied one by one, and taken back last patch first. Every
blob id on the way must be the promised one, and at the end git must give the same tree id as at
the start: that id covers every byte and mode of every file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import find_git_dirs, has_commit, resolve
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.repository import OwnRepository, run_series
from megatron_r3.patching.series import broken_rules, read_series, unequal_numbers
from megatron_r3.patching.tree import TreeState, TreeStatus, compare
from megatron_r3.patching.versions import KnownTree, Line, Versions


@dataclass(frozen=True)
class Verified:
    """A series that gives what it promises on one tree, and gives that tree back.

    Attributes:
        base: the commit that the series was applied to.
        base_tree, patched_tree: ids of the whole trees before and after.
        num_patches, num_files: how many were applied and touched.
    """

    base: str
    base_tree: str
    patched_tree: str
    num_patches: int
    num_files: int


@dataclass(frozen=True)
class TreeCheck:
    """One known tree in `verify_repo`.

    Without `verified` and without `error` the tree was not checked: the repository lacks its base.
    """

    line: Line
    tree: KnownTree
    verified: Verified | None = None
    error: str = ""


def verify_tree(repo: Path, line: Line, tree: KnownTree) -> Verified | None:
    """Check the series of `line` on the base of `tree` in the git repository `repo`.

    The base of a tree with a commit is that commit. The base of a tree from the package index is
    HEAD, if HEAD has the files of the tree. Returns None if `repo` has no such base. Nothing is
    written to `repo`.

    Raises:
        PatchingError: a patch does not fit, does not give the files that are promised, or cannot
            be taken back; or `repo` is no git repository.
    """
    series = read_series(line.folder)
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        ours = OwnRepository.new(Path(folder), borrow_from=repo)
        if tree.commit and has_commit(repo, tree.commit):
            base = tree.commit
        elif tree.pypi and has_commit(repo, "HEAD"):
            base = resolve(repo, "HEAD")
        else:
            return None
        ours.git("read-tree", base)
        base_tree = ours.git("write-tree")
        status = compare(repo, line, series, tree, ours.blobs(series.blobs))
        if status.state is not TreeState.PRISTINE:
            if base != tree.commit:  # HEAD is some other commit than the package's files
                return None
            wrong = names(status.unknown or status.patched)
            raise PatchingError(
                f"the commit of {tree.name} has other files than the patches: {wrong}"
            )
        return _there_and_back(ours, status, base, base_tree)


def _there_and_back(ours: OwnRepository, status: TreeStatus, base: str, base_tree: str) -> Verified:
    line, series, tree = status.line, status.series, status.tree
    steps = run_series(ours, status)
    patched_tree = ours.git("write-tree")
    applied = compare(status.root, line, series, tree, ours.blobs(series.blobs))
    if applied.state is not TreeState.APPLIED:
        raise PatchingError(f"after all patches {tree.name} is {applied.state.value}")
    run_series(ours, applied, reverse=True)
    # Equal blob ids are not enough: a patch that says "deleted file mode 100644" of an executable
    # file gives the bytes back and loses the mode, which only the id of the whole tree shows.
    if (after := ours.git("write-tree")) != base_tree:
        raise PatchingError(f"{tree.name}: reverting gives the tree {after}, not {base_tree} again")
    num_files = len({change.path for _, changes in steps for change in changes})
    return Verified(base, base_tree, patched_tree, len(steps), num_files)


def verify_repo(repo: Path, versions: Versions, line: str = "") -> list[TreeCheck]:
    """Check every known tree, or those of `line`, as far as `repo` has its base.

    Raises:
        PatchingError: `repo` is no git repository, or there is no such line.
    """
    find_git_dirs(repo)
    checks = []
    for candidate in [versions.line(line)] if line else versions.lines:
        for tree in candidate.trees:
            # One tree that fails must not hide what is wrong with the others.
            try:
                checks.append(TreeCheck(candidate, tree, verify_tree(repo, candidate, tree)))
            except PatchingError as error:
                checks.append(TreeCheck(candidate, tree, error=str(error)))
    return checks


def check_rules(versions: Versions, line: str = "") -> list[str]:
    """What breaks the rules for patches in every line, or in `line`; each in one text line.

    Raises:
        PatchingError: a series cannot be read.
    """
    several = [read_series(candidate.folder) for candidate in versions.lines]
    chosen = [series for series in several if not line or series.line == versions.line(line).name]
    wrong = [rule for series in chosen for patch in series.patches for rule in broken_rules(patch)]
    return wrong + unequal_numbers(several, line)
