"""Apply the patches of a release line to a tree, or take them back: all or nothing."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.record import (
    Record,
    damaged,
    record_path,
    remove_record,
    series_digest,
    write_record,
)
from megatron_r3.patching.scratch import PatchFailed, patched_contents
from megatron_r3.patching.series import GROUPS, read_series
from megatron_r3.patching.tree import TreeState, TreeStatus, find_root, from_record, identify
from megatron_r3.patching.tree_files import FileOnDisk, locked, remove_leftovers, replace_files
from megatron_r3.patching.unreleased import choose, find_fits, fit_line, how_to_take
from megatron_r3.patching.versions import Versions, read_versions


@dataclass(frozen=True)
class Change:
    """What an apply or a revert did.

    Attributes:
        before: the tree's state before. If the tree was already in the wanted state, nothing was
            done and `files` is empty.
        status: the tree now, read from the disk again.
        files: the files that were written or removed.
        others: for a tree that gets a record, text about the groups that were left out and about
            the other lines that fit.
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

    Guarantees: an applied tree is not touched; a half applied tree is finished; what was written is
    read again and compared; after an error all files are as they were, or the message says in which
    state the tree is.

    Args:
        line: the name of a release line; empty for the line that fits.
        unreleased: whether to patch a tree that versions.toml does not list. All of `groups` must
            apply to such a tree exactly. Without `groups`, r3 must apply, and another group that
            does not apply is left out. The tree gets a record, which `revert_series` removes.
        groups: the groups to apply; empty for all that apply.

    Raises:
        PatchingError: `groups` is wrong; or the tree is unknown, has other patches in it, or cannot
            be written.
    """
    _check_groups(groups)
    versions, root = read_versions(patches), find_root(root)
    with locked(root):
        status, others = identify(root, versions, line), ""
        some = groups and {*groups} != {*status.groups}
        recorded = status.unreleased is not None  # patched before, maybe by other patches
        if status.state is TreeState.UNKNOWN or (
            status.state is TreeState.PRISTINE and (some or recorded)
        ):
            status, others = _take(status, versions, line, unreleased, groups)
        elif some and status.state is not TreeState.PRISTINE:
            raise PatchingError(
                f"{root} is patched with {names(status.groups)}, not with {names([*groups])}: "
                "revert the tree first"
            )
        elif recorded:
            _refuse_other_patches(status)
        return _move(status, TreeState.APPLIED, others)


def _check_groups(groups: Collection[str]) -> None:
    known = [group.name for group in GROUPS]
    if unknown := [name for name in groups if name not in known]:
        raise PatchingError(
            f"--groups {' '.join(unknown)}: there is no such group; groups are {names(known)}"
        )
    for group in GROUPS:
        missing = [name for name in group.needs if name not in groups]
        if group.name in groups and missing:
            raise PatchingError(f"--groups: {group.name} needs {names(missing)}: give these too")


def revert_series(root: Path, patches: Path, *, line: str = "") -> Change:
    """Take the series back: the tree is then byte for byte what it was before the apply.

    Modes come back too; only a file that a patch deletes gets the mode that git would give it.
    Guarantees and errors are those of `apply_series`. For a tree with a record the diff in the
    record is taken back, whatever patches `patches` has.
    """
    versions, root = read_versions(patches), find_root(root)
    with locked(root):
        status = identify(root, versions, line)
        if status.state is TreeState.UNKNOWN:
            raise PatchingError(why_not(status, versions))
        change = _move(status, TreeState.PRISTINE)
        remove_record(root)
        return change


def _take(
    status: TreeStatus, versions: Versions, line: str, unreleased: bool, groups: Collection[str]
) -> tuple[TreeStatus, str]:
    """For a tree that versions.toml does not list, or that gets only some groups: its status by the
    record that it will get, and text about groups that are left out and other lines that fit.
    """
    if status.unreleased and status.unknown:  # some files are patched already, others are unknown
        raise PatchingError(why_not(status, versions))
    known = status.state is TreeState.PRISTINE
    line = status.line.name if known else line
    fits = find_fits(status.root, versions, line, groups)
    if not fits:
        raise PatchingError(_why_no_fit(status, versions, line, groups))
    if not unreleased and not known:
        raise PatchingError(how_to_take(status.root, fits))
    fit, others = choose(status.root, fits)
    return from_record(status.root, versions, fit.tree), others


def _why_no_fit(status: TreeStatus, versions: Versions, line: str, groups: Collection[str]) -> str:
    """The message about a tree to which no line's patches apply: which patch fails, or why not."""
    hopeless = status.patched or not (status.num_recognised or line)
    try:
        if not hopeless:
            fit_line(status.root, status.line, groups)
    except PatchFailed as failed:
        command = "megatron-r3 megatron  # fetches a known tree"
        if commit := status.tree.commit:
            command = f"git -C {shlex.quote(str(status.root))} checkout {commit}  # "
            command += f"{status.tree.name}, if it is a checkout"
        num = len(read_series(status.line.folder).patches)
        return failed.explain(num, f"next: {command}")
    if groups and not status.unknown:
        return (
            f"{status.root}: the groups {names([*groups])} do not all apply to it: make status "
            "shows which groups do"
        )
    return why_not(status, versions)


def _refuse_other_patches(status: TreeStatus) -> None:
    tree = status.unreleased
    folder = status.line.folder
    today = series_digest(read_series(folder), tree.groups) if tree and folder.is_dir() else ""
    if tree and tree.series != today:
        raise PatchingError(
            f"{status.root} was patched with other patches of {tree.line}, those of megatron-r3 "
            f"{tree.version}: revert the tree first, then apply again"
        )


def _move(status: TreeStatus, goal: TreeState, others: str = "") -> Change:
    """Bring a known tree to the state `goal`: write the files that are not in this state."""
    root, reverse = status.root, goal is TreeState.PRISTINE
    if status.state is goal:
        remove_leftovers(root, status.files)
        return Change(goal, status, ())
    contents = _contents(status, reverse)
    new = {p: data for p, data in contents.items() if data != status.files[p].data}
    changes = (change for patch in status.series.patches for change in patch.changes)
    executables = {change.path for change in changes if change.executable}
    if status.state is TreeState.PRISTINE:
        # The record is written before the files, so that a killed apply can be finished or undone.
        # For a release with all groups this removes an old record, which is no longer true.
        write_record(root, Record(status.unreleased))
    try:
        replace_files(root, new, status.files, executables)
    except BaseException:
        if status.state is TreeState.PRISTINE and not status.read_again().patched:
            remove_record(root)
        raise
    after = status.read_again()
    if after.state is not goal:
        raise PatchingError(
            f"{root} is {after.state.value}, although all its files were written: another program "
            "wrote to the tree at the same time; stop that program, then give the same command "
            "again"
        )
    return Change(status.state, after, tuple(new), others)


def _contents(status: TreeStatus, reverse: bool) -> dict[str, bytes | None]:
    """The new contents of the files of a known tree."""
    try:
        contents = patched_contents(status, reverse=reverse)
        if status.unreleased and not reverse:  # check that the patches can be taken back
            files = {path: FileOnDisk(data) for path, data in contents.items()}
            patched_contents(status.with_files(files), reverse=True)
        return contents
    except PatchFailed as failed:  # the files are known ones, so the patch is damaged
        if status.unreleased:
            raise damaged(failed.patch.file, str(failed)) from None
        folder = failed.patch.file.parent
        command = f"git -C {shlex.quote(str(folder))} checkout -- ."
        if Path(__file__).parents[1] in folder.parents:
            command = "python -m pip install --force-reinstall megatron-r3"
        text = failed.explain(len(status.series.patches), f"next: {command}")
        raise PatchingError(text) from None


def why_not(status: TreeStatus, versions: Versions) -> str:
    """Why an unknown tree is refused: each wrong file; if no file is known, the known trees too."""
    wrong = "".join(f"\n  {path}: {status.why_unknown(path)}" for path in status.unknown)
    if status.unreleased:
        return (
            f"{status.root} has changed since {record_path(status.root)} was written: it was "
            f"{status.line.name}, {status.tree.name}; restore these files, or all unpatched files "
            f"(git checkout -- megatron), then apply again:{wrong}"
        )
    if status.num_recognised:
        return (
            f"{status.root} is neither {status.tree.name} nor {status.tree.name} with the patches "
            "of this megatron-r3; restore these files, or revert with the megatron-r3 version that "
            f"patched them:{wrong}"
        )
    known = "; ".join(
        f"{line.name}: {names([tree.name for tree in line.trees])}" for line in versions.lines
    )
    return f"{status.root} is no tree of a known release line ({known}):{wrong}"
