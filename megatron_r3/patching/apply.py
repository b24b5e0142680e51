"""Apply the patches of a release line to a tree, or take them back: all or nothing."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import has_commit, is_checkout, read_git
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.record import Record, record_path, remove_record, write_record
from megatron_r3.patching.repository import PatchFailed, patched_contents
from megatron_r3.patching.series import GROUPS
from megatron_r3.patching.tree import (
    TreeState,
    TreeStatus,
    dirty_files,
    identify,
    left_out_files,
    read_file,
)
from megatron_r3.patching.unreleased import choose, find_fits, how_to_take
from megatron_r3.patching.versions import Versions, read_versions
from megatron_r3.patching.write import locked, remove_leftovers, replace_files

# With the setting alone, git does not write the files again: its index says that they are up to
# date. So they are taken out of the index, and the reset puts them and the files back.
_NO_CRLF = (
    "git config core.autocrlf false, then check out again "
    "(git rm -r --cached --quiet . && git reset --hard); not a checkout: unpack it with LF"
)


@dataclass(frozen=True)
class Change:
    """What an apply or a revert did.

    Attributes:
        before: the tree's state before. If the tree was already in the wanted state, nothing was
            done and `files` is empty.
        status: the tree now, read from the disk again.
        files: the files that were written or removed.
        others: for an unreleased tree, what to say of other lines whose patches apply too.
    """

    before: TreeState
    status: TreeStatus
    files: tuple[str, ...]
    others: str = ""


def apply_series(
    root: Path,
    patches: Path,
    *,
    line: str = "",
    unreleased: bool = False,
    groups: Collection[str] = (),
) -> Change:
    """Apply the series in `patches` that is for the tree `root`, or the series of `line`.

    Guarantees: all files are patched or none is changed; an applied tree is not touched; a half
    applied tree is finished; what was written is read again and compared.

    Args:
        unreleased: whether a tree that versions.toml does not list is taken too, if the group r3
            of a line applies to it exactly; other groups that do not are left out. It gets a record
            of itself, which `revert_series` removes.
        groups: the groups to apply; empty for all.

    Raises:
        PatchingError: the tree is no known one, has uncommitted changes, or cannot be written.
    """
    known = [group.name for group in GROUPS]
    if unknown := [name for name in groups if name not in known]:
        raise PatchingError(f"--groups {' '.join(unknown)}: the groups are {names(known)}")
    for group in GROUPS:
        missing = [name for name in group.needs if name not in groups]
        if group.name in groups and missing:
            raise PatchingError(f"--groups {group.name}: it needs {names(missing)}: give them too")
    return _move(root, patches, line, TreeState.APPLIED, unreleased, groups)


def revert_series(root: Path, patches: Path, *, line: str = "") -> Change:
    """Take the series back: the tree is then byte for byte what it was before the apply.

    Modes come back too; only a file that a patch deletes gets the mode that git would give it.
    Guarantees and errors are those of `apply_series`, but uncommitted changes in files that no
    patch touches do not matter.
    """
    return _move(root, patches, line, TreeState.PRISTINE)


def _move(
    root: Path,
    patches: Path,
    line: str,
    goal: TreeState,
    unreleased: bool = False,
    groups: Collection[str] = (),
) -> Change:
    """Bring the tree from the state in which it is to the state `goal`."""
    versions = read_versions(patches)
    reverse = goal is TreeState.PRISTINE
    others = ""
    try:
        status = identify(root, versions, line)  # refuses what is no tree and cannot be locked
        with locked(status.root):
            # Read again: another apply may have ended since the first look.
            status = identify(root, versions, line)
            if status.state is not goal and not reverse:
                _refuse_uncommitted(status)
                some = groups and {*groups} != {*status.series.groups}
                if status.state is TreeState.UNKNOWN or (
                    some and status.state is TreeState.PRISTINE
                ):
                    status, others = _take(status, versions, line, unreleased, groups)
            if groups and not reverse and {*groups} != {*status.series.groups}:
                raise PatchingError(
                    f"{status.root} is patched with {names(status.series.groups)}, not with "
                    f"{names([*groups])}: revert it first"
                )
            if status.state is goal:
                remove_leftovers(status.root, status.files)
                if reverse:
                    remove_record(status.root)
                return Change(goal, status, ())
            new = _write(status, versions, line, reverse)
            # What is on the disk now is what counts, not what was meant to be written.
            after = identify(root, versions, status.line.name)
            if reverse and after.state is goal:
                remove_record(status.root)
    except OSError as error:
        raise PatchingError(f"{root}: {error}") from error
    if after.state is not goal:
        raise PatchingError(
            f"{root} is {after.state.value}, although all its files were written: another program "
            "wrote to the tree at the same time; stop that program, then give the same command "
            "again"
        )
    return Change(status.state, after, new, others)


def _take(
    status: TreeStatus, versions: Versions, line: str, unreleased: bool, groups: Collection[str]
) -> tuple[TreeStatus, str]:
    """A tree as one that can be patched with some groups, and what to say of the rest.

    A tree to which no line fits comes back as it is, so that the patch which fails is told.

    Raises:
        PatchingError: a line fits, and the user has not said the word for that.
    """
    known = status.state is TreeState.PRISTINE
    line = status.line.name if known else line
    fits = [] if left_out_files(status) else find_fits(status.root, versions, line, groups)
    if not fits and groups:
        raise PatchingError(
            f"{status.root}: the groups {names([*groups])} do not all apply to it: make status "
            "shows which groups do, or where another one does not fit"
        )
    if not fits:
        return status, ""
    if not unreleased and not known:
        raise PatchingError(how_to_take(status.root, fits))
    fit, others = choose(fits)
    return fit.status, others


def _write(status: TreeStatus, versions: Versions, line: str, reverse: bool) -> tuple[str, ...]:
    """Write the patched files of a tree, or with `reverse` the unpatched ones; return which."""
    contents = _contents(status, versions, line, reverse)
    new = {p: data for p, data in contents.items() if data != status.files[p].data}
    changes = (change for patch in status.series.patches for change in patch.changes)
    executables = {change.path for change in changes if change.executable}
    fresh = not reverse and status.state is TreeState.PRISTINE
    first = fresh and not record_path(status.root).exists()
    if fresh:
        # Before the files, so that an apply which is killed can be finished and undone. A tree of
        # versions.toml needs no record, and one that is there is about what the tree was before.
        write_record(status.root, Record(status.unreleased))
    try:
        replace_files(status.root, new, status.files, executables)
    except BaseException:
        now = (read_file(status.root, path).data for path in status.files)
        if first and all(
            data == old.data for data, old in zip(now, status.files.values(), strict=True)
        ):
            remove_record(status.root)
        raise
    return tuple(new)


def _contents(
    status: TreeStatus, versions: Versions, line: str, reverse: bool
) -> dict[str, bytes | None]:
    """The new contents of the files of a known tree; any other tree is refused with the reason."""
    known = status.state is not TreeState.UNKNOWN
    # A patch that fails says more than "unknown file" (its place, upstream's commits), so patches
    # are tried on an unknown tree too, unless the reason why they fail is plain already.
    hopeless = reverse or status.patched or not (status.num_recognised or line)
    if not known and (hopeless or status.crlf or left_out_files(status)):
        raise PatchingError(why_not(status, versions))
    try:
        contents = patched_contents(status, reverse=reverse)
    except PatchFailed as failed:
        raise PatchingError(_explain(failed, status)) from None
    if not known:
        # The patches fit by luck: nobody has tested what they make of this file.
        raise PatchingError(why_not(status, versions))
    return contents


def why_not(status: TreeStatus, versions: Versions) -> str:
    """Why an unknown tree is refused: each file that is wrong, and the trees that are known."""
    left_out = left_out_files(status)
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
    wrong = "".join(f"\n  {path}: {reason}" for path, reason in why.items())
    if status.unreleased:
        return (
            f"{status.root} has changed since {record_path(status.root)} was written: it was "
            f"{status.line.name}, {status.tree.name}; bring back these files, or if nothing of it "
            f"is patched any more, apply it again with --unreleased:{wrong}"
        )
    if status.crlf:
        wrong += f"\nCRLF line ends: {_NO_CRLF}"
    if left_out:
        wrong += "\nfiles left out: git sparse-checkout disable"
    if status.num_recognised:
        return (
            f"{status.root} is not {status.tree.name}, nor what this megatron-r3 makes of it; "
            f"bring back these files, or revert with the version that patched them:{wrong}"
        )
    known = "; ".join(
        f"{line.name}: {names([tree.name for tree in line.trees])}" for line in versions.lines
    )
    return f"{status.root} is no tree of a known release line ({known}):{wrong}"


def _refuse_uncommitted(status: TreeStatus) -> None:
    """Refuse changes that a person could not tell from those of the patches in `git diff`."""
    if not is_checkout(status.root):
        return
    # A known file of the series is base or patched, so if git calls it changed, patches did that.
    ours = status.files.keys() - set(status.unknown)
    if dirty := [path for path in dirty_files(status.root) if path not in ours]:
        raise PatchingError(
            f"{status.root} has uncommitted changes: {names(dirty)}; commit or stash them first"
        )


def _explain(failed: PatchFailed, status: TreeStatus) -> str:
    """The five lines about a patch that does not fit a tree."""
    root, checkout = status.root, is_checkout(status.root)
    # the tree's commit; a tree from PyPI has none, so then that of the first tree of its line
    trees = (status.tree, *status.line.trees)
    name, commit = next(((t.name, t.commit) for t in trees if t.commit), (status.tree.name, ""))
    if not checkout:
        commits = "unknown: not a git checkout"
    elif not commit or not has_commit(root, commit):
        commits = f"unknown: the checkout does not hold {name}"
    else:
        commits = upstream_commits(root, (name, commit), failed.path)
    folder = failed.patch.file.parent
    if failed.path in status.unknown and checkout and commit:
        command = f"git -C {shlex.quote(str(root))} checkout {commit}  # {name}"
    elif failed.path in status.unknown:
        command = "megatron-r3 megatron  # fetches a known tree"
    elif Path(__file__).parents[1] in folder.parents:  # the file is right, so the patch is wrong
        command = "python -m pip install --force-reinstall megatron-r3"
    else:
        command = f"git -C {shlex.quote(str(folder))} checkout -- ."
    return five_lines(failed, len(status.series.patches), commits, command)


def five_lines(failed: PatchFailed, num_patches: int, commits: str, next_command: str) -> str:
    """What a user reads where a patch does not fit; `next_command` is what to do.

    patch 2 of 10 does not apply: 0002-Ask-the-hook.patch
      at: megatron/core/transformer/moe/router.py:120
      subject: Ask the hook
      upstream commits: 1a2b3c4 Rename the router since core_v0.19.0
      next: git -C /my/tree checkout 5e6f...  # core_v0.19.0
    """
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
    """The newest commits of `repo` that touched `path` since `base`: a name and a commit."""
    name, commit = base
    command = ("log", "--oneline", "--no-decorate", "--no-color", f"{commit}..{head}", "--", path)
    commits = read_git(repo, *command).stdout.decode(errors="replace").splitlines()
    shown = "; ".join(commits[:most]) or "none"
    more = f" and {len(commits) - most} more" if len(commits) > most else ""
    return f"{shown}{more} since {name}"
