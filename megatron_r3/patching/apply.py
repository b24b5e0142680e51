"""Apply the patches of a release line to a tree, or take them back: all or nothing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import commits_since, has_commit, is_checkout
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.index import PatchFailed, compute
from megatron_r3.patching.tree import TreeState, TreeStatus, dirty_files, identify, left_out_files
from megatron_r3.patching.versions import Matrix, read_matrix
from megatron_r3.patching.write import locked, remove_leftovers, replace_files

# with the setting alone git keeps the files that it believes to be up to date
_NO_CRLF = (
    "git config core.autocrlf false, then check out again "
    "(git rm -r --cached --quiet . && git reset --hard); not a checkout: unpack it with LF"
)


@dataclass(frozen=True)
class Change:
    """What an apply or a revert did.

    Attributes:
        before: the tree's state before; the goal itself means that nothing was done.
        status: the tree now, read from the disk again.
        files: those that were written or removed.
    """

    before: TreeState
    status: TreeStatus
    files: tuple[str, ...]


def apply_series(root: Path, patches: Path, *, line: str = "") -> Change:
    """Apply the series in `patches` that is for the tree `root`, or for `line` if given.

    Guarantees: all files are patched or none is changed; an applied tree is not touched; a half
    applied one is finished; what was written is read again and compared.

    Raises:
        PatchingError: the tree is no known one, has uncommitted changes, or cannot be written.
    """
    return _move(root, patches, line, TreeState.APPLIED)


def revert_series(root: Path, patches: Path, *, line: str = "") -> Change:
    """Take the series back: the tree is then byte for byte the one that it was applied to.

    Modes too, but for a file that a patch deletes: it gets the one that git would give it.
    Guarantees and errors are those of `apply_series`; uncommitted changes elsewhere do not matter.
    """
    return _move(root, patches, line, TreeState.PRISTINE)


def _move(root: Path, patches: Path, line: str, goal: TreeState) -> Change:
    matrix = read_matrix(patches)
    reverse = goal is TreeState.PRISTINE
    try:
        status = identify(root, matrix, line)
        with locked(status.root):
            status = identify(root, matrix, line)
            if status.state is goal:
                remove_leftovers(status.root, status.files)
                return Change(goal, status, ())
            if not reverse:
                _refuse_uncommitted(status)
            new = _compute(status, matrix, line, reverse)
            changes = {path: new[path] for path in new if new[path] != status.files[path].data}
            executables = {
                change.path
                for patch in status.series.patches
                for change in patch.changes
                if change.executable
            }
            replace_files(status.root, changes, status.files, executables)
            after = identify(root, matrix, status.line.name)
    except OSError as error:
        raise PatchingError(f"{root}: {error}") from error
    if after.state is not goal:
        raise PatchingError(
            f"{root} is {after.state.value} again, after all its files were written: another "
            "program writes there; stop that program, then give the same command again"
        )
    return Change(status.state, after, tuple(changes))


def _compute(
    status: TreeStatus, matrix: Matrix, line: str, reverse: bool
) -> dict[str, bytes | None]:
    """The new contents of the files of a known tree; any other one is refused with the reason."""
    known = status.state is not TreeState.UNKNOWN
    hopeless = reverse or status.patched or not (status.num_recognised or line)
    if not known and (hopeless or status.crlf or _left_out(status)):
        raise PatchingError(why_not(status, matrix))  # where a patch fails would tell nothing
    try:
        contents = compute(status, reverse=reverse).contents
    except PatchFailed as failed:
        commits, following = _upstream_commits(status, failed.path), _next_command(failed, status)
        patches = len(status.series.patches)
        raise PatchingError(five_lines(failed, patches, commits, following)) from None
    if not known:
        # the patches fit by luck: nobody has tested what they make of this file
        raise PatchingError(why_not(status, matrix))
    return contents


def why_not(status: TreeStatus, matrix: Matrix) -> str:
    """Why an unknown tree is refused: each file that is wrong, and the trees that are known."""
    left_out = _left_out(status)
    why = {path: status.why_unknown(path) for path in status.unknown}
    why |= dict.fromkeys(left_out, "left out of the checkout (git sparse-checkout)")
    if status.num_recognised and left_out and len(left_out) == len(why):
        return (
            f"{status.root} is a sparse checkout of {status.tree.name}, without {names(left_out)}: "
            "git sparse-checkout disable"
        )
    if status.crlf and len(status.crlf) == len(why):
        return (
            f"{status.root} is {status.tree.name} with CRLF line ends in {names(status.crlf)}: "
            + _NO_CRLF
        )
    wrong = [f"\n  {path}: {reason}" for path, reason in why.items()]
    if status.crlf:
        wrong.append(f"\nCRLF line ends: {_NO_CRLF}")
    if left_out:
        wrong.append("\nfiles left out: git sparse-checkout disable")
    if status.num_recognised:
        return (
            f"{status.root} is not {status.tree.name}, nor what this megatron-r3 makes of it; "
            "bring back these files, or revert with the version that patched them:" + "".join(wrong)
        )
    known = "; ".join(
        f"{line.name}: {names([tree.name for tree in line.trees])}" for line in matrix.lines
    )
    return f"{status.root} is no tree of a known release line ({known}):" + "".join(wrong)


def _left_out(status: TreeStatus) -> list[str]:
    """The files of the series that git has and a sparse checkout has not."""
    missing = [path for path in status.unknown if status.files[path].data is None]
    if not missing or not is_checkout(status.root):
        return []
    return left_out_files(status.root, missing)


def _refuse_uncommitted(status: TreeStatus) -> None:
    if not is_checkout(status.root):
        return
    ours = status.files.keys() - set(status.unknown)
    if dirty := [path for path in dirty_files(status.root) if path not in ours]:
        raise PatchingError(
            f"{status.root} has uncommitted changes: {names(dirty)}; commit or stash them first"
        )


def _upstream_commits(status: TreeStatus, path: str) -> str:
    if not is_checkout(status.root):
        return "unknown: not a git checkout"
    base = _base(status)
    if not base or not has_commit(status.root, base[1]):
        return f"unknown: the checkout does not hold {base[0] if base else status.tree.name}"
    return upstream_commits(status.root, base, path)


def _base(status: TreeStatus) -> tuple[str, str] | None:
    """The name and commit of the tree, or of the first one of its line that has a commit."""
    for tree in (status.tree, *status.line.trees):
        if tree.commit:
            return tree.name, tree.commit
    return None


def _next_command(failed: PatchFailed, status: TreeStatus) -> str:
    if failed.path not in status.unknown:
        # the file is the right one, so the patch is not
        folder = failed.patch.file.parent
        if Path(__file__).parents[1] in folder.parents:
            return "python -m pip install --force-reinstall megatron-r3"
        return f"git -C {shlex.quote(str(folder))} checkout -- ."
    base = _base(status)
    if base and is_checkout(status.root):
        return f"git -C {shlex.quote(str(status.root))} checkout {base[1]}  # {base[0]}"
    return "megatron-r3 megatron  # fetches a known tree"


# What a user is told where a patch does not fit: five lines, the last one what to do.


def five_lines(failed: PatchFailed, num_patches: int, commits: str, next_command: str) -> str:
    """Which patch, where, what it is for, which upstream `commits` touched it, and what to do."""
    return "\n".join(
        (
            f"patch {failed.number} of {num_patches} does not apply: {failed.patch.file.name}",
            f"  at: {failed.where}",
            f"  subject: {failed.patch.subject}",
            f"  upstream commits: {commits}",
            f"  next: {next_command}",
        )
    )


def upstream_commits(
    repo: Path, base: tuple[str, str], path: str, head: str = "HEAD", most: int = 3
) -> str:
    """The newest commits that touched `path` since `base`, which is a name and a commit."""
    name, commit = base
    commits = commits_since(repo, commit, path, head)
    shown = "; ".join(commits[:most]) or "none"
    more = f" and {len(commits) - most} more" if len(commits) > most else ""
    return f"{shown}{more} since {name}"
