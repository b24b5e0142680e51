"""Check whole series against the commits they are made for, without a checkout.

The files of a series are read from the commit; the patches are applied to them and then taken back,
last patch first. Every blob id must be the one in the patch or in versions.toml, and at the end the
files must be the same as at the start, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepers.clone import check_clone, committed_files, has_commit, resolve
from keepers.rules import broken_rules, unequal_numbers
from megatron_r3.patching.git import PatchingError, git, names
from megatron_r3.patching.scratch import patched_contents
from megatron_r3.patching.series import read_series
from megatron_r3.patching.tree import TreeState, TreeStatus, compare
from megatron_r3.patching.tree_files import FileOnDisk
from megatron_r3.patching.versions import KnownTree, Line, Versions


@dataclass(frozen=True)
class Verified:
    """The result of a check that passed: the series fits the tree exactly.

    Attributes:
        base: the commit that the series was applied to.
        num_patches, num_files: how many patches were applied, and how many files they touch.
    """

    base: str
    num_patches: int
    num_files: int


@dataclass(frozen=True)
class TreeCheck:
    """What `verify_repo` found about one known tree.

    If `verified` is None and `error` is empty, the repository lacks the tree's commit or files.
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
        PatchingError: a patch does not fit, gives other files than its blob ids say, or cannot be
            taken back; or `repo` is no git repository.
    """
    series = read_series(line.folder)
    if tree.commit and has_commit(repo, tree.commit):
        base = tree.commit
    elif tree.pypi and has_commit(repo, "HEAD"):
        base = resolve(repo, "HEAD")
    else:
        return None
    status = compare(repo, line, series, tree, committed_files(repo, base, series.blobs))
    if status.state is not TreeState.PRISTINE:
        if base != tree.commit:  # HEAD does not have the package's files
            return None
        wrong = names(status.unknown or status.patched)
        raise PatchingError(
            f"the patches start from other contents than the commit of {tree.name} has: {wrong}"
        )
    _there_and_back(status)
    _compare_modes(status, base)
    due = [{c.path for c in patch.changes} - {*tree.absent} for patch in series.patches]
    return Verified(base, sum(map(bool, due)), len(set().union(*due)))


def _there_and_back(status: TreeStatus) -> None:
    """Apply the patches and take them back; both ways compare the files with the blob ids."""
    contents = patched_contents(status)
    applied = status.with_files({path: FileOnDisk(data) for path, data in contents.items()})
    patched_contents(applied, reverse=True)


def _compare_modes(status: TreeStatus, base: str) -> None:
    """Refuse patches whose mode of a file is not the mode in `base`: revert would change it."""
    wanted = {c.path: c for patch in status.series.patches for c in patch.changes if c.pre}
    # one entry: "100755 blob <id>\tmegatron/core/a.sh"
    for entry in git(status.root, "ls-tree", "-z", base, "--", *wanted).split("\0")[:-1]:
        head, path = entry.split("\t", 1)
        if (head.split()[0] == "100755") != wanted[path].executable:
            raise PatchingError(
                f"{status.tree.name}: the patches name another mode of {path} than {head[:6]}: "
                "reverting would change the file's mode"
            )


def verify_repo(repo: Path, versions: Versions, line: str = "") -> list[TreeCheck]:
    """Check every known tree, or the trees of `line`; one result for each.

    Raises:
        PatchingError: `repo` is no git repository, or there is no such line.
    """
    check_clone(repo)
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
    """Each breach of the rules for patches, in all lines or in `line`, as one line of text.

    Raises:
        PatchingError: a series cannot be read.
    """
    several = [read_series(candidate.folder) for candidate in versions.lines]
    chosen = [series for series in several if not line or series.line == versions.line(line).name]
    wrong = [rule for series in chosen for patch in series.patches for rule in broken_rules(patch)]
    return wrong + unequal_numbers(several, line)
