"""The commits of a checkout above the commit that a series starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import git_path, has_commit, is_checkout, read_git, resolve
from megatron_r3.patching.dirty import dirty_files
from megatron_r3.patching.errors import PatchingError, names
from megatron_r3.patching.matrix import KnownTree, Line, Matrix

__all__ = ["Base", "am_in_progress", "commits_above", "find_base", "refuse_unfinished"]

_IN_PROGRESS = {
    "rebase-apply": "git am or git rebase",
    "rebase-merge": "git rebase",
    "MERGE_HEAD": "git merge",
    "CHERRY_PICK_HEAD": "git cherry-pick",
    "REVERT_HEAD": "git revert",
}


@dataclass(frozen=True)
class Base:
    """Where a series starts; `tree` is None for a commit that versions.toml does not name."""

    line: Line
    commit: str
    tree: KnownTree | None


def am_in_progress(root: Path) -> bool:
    """Whether git am has stopped in the checkout `root` and waits."""
    return (git_path(root, "rebase-apply") / "applying").exists()


def refuse_unfinished(root: Path) -> None:
    """Refuse what is no checkout, has uncommitted changes, or is in the middle of something.

    Raises:
        PatchingError: saying which.
    """
    if not is_checkout(root):
        raise PatchingError(f"{root} is no git checkout")
    for name, what in _IN_PROGRESS.items():
        if git_path(root, name).exists():
            raise PatchingError(f"{what} is in progress in {root}: finish or abort it first")
    if dirty := dirty_files(root):
        raise PatchingError(f"{root} has uncommitted changes: {names(dirty)}; commit them first")


def find_base(root: Path, matrix: Matrix, line: str = "", base: str = "") -> Base:
    """The commit below HEAD that the series of `line` starts from: `base`, or the nearest known.

    Raises:
        PatchingError: HEAD is above no known tree, or above those of two lines alike.
    """
    if base:
        if not line:
            raise PatchingError("which line? a base commit does not say; give --line with --base")
        commit = resolve(root, base)
        trees = [tree for tree in matrix.line(line).trees if tree.commit == commit]
        return Base(matrix.line(line), commit, trees[0] if trees else None)
    lines = [matrix.line(line)] if line else matrix.lines
    known = [Base(each, tree.commit, tree) for each in lines for tree in each.trees if tree.commit]
    below = [base for base in known if _is_below(root, base.commit)]
    if not below:
        known_names = names([base.tree.name for base in known if base.tree])
        raise PatchingError(
            f"HEAD of {root} is above no known commit ({known_names}); give --base and --line"
        )
    distances = [_distance(root, base.commit) for base in below]
    nearest = [base for base, n in zip(below, distances, strict=True) if n == min(distances)]
    if len({base.line.name for base in nearest}) > 1:
        several = names([base.line.name for base in nearest])
        raise PatchingError(
            f"HEAD of {root} is above the commit of several lines: give --line, one of {several}"
        )
    return nearest[0]


def commits_above(root: Path, base: str) -> list[str]:
    """The commits of `root` after `base`, the first one first.

    Raises:
        PatchingError: HEAD is not above `base`, or one of them is a merge.
    """
    if not _is_below(root, base):
        raise PatchingError(f"HEAD of {root} is not above {base[:12]}")
    entries = [entry.split() for entry in _list(root, "--reverse", "--parents", f"{base}..HEAD")]
    if merges := [commit[:12] for commit, *parents in entries if len(parents) != 1]:
        raise PatchingError(
            f"{root} has merge commits above {base[:12]}: {names(merges)}; a series is one line "
            "of commits: git rebase"
        )
    return [commit for commit, _ in entries]


def _is_below(root: Path, base: str) -> bool:
    if not has_commit(root, base):
        return False
    arguments = ("merge-base", "--is-ancestor", base, "HEAD")
    return read_git(root, *arguments, check=False).returncode == 0


def _distance(root: Path, base: str) -> int:
    return int(_list(root, "--count", f"{base}..HEAD")[0])


def _list(root: Path, *args: str) -> list[str]:
    return read_git(root, "rev-list", *args).stdout.decode().splitlines()
