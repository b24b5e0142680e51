"""Write the commits of a checkout as the series of a release line, or compare them with the series.

git format-patch writes the patches, and git am makes commits of them again. A series that is
committed and exported again has the same bytes. The number in the name of a patch file stands for
one subject in all release lines; the bytes in the file do not depend on the number.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from keepers.clone import borrow, git_path, refuse_unfinished
from keepers.rules import broken_rules, plan_numbers
from megatron_r3.patching.git import PatchingError, git, names, run_git
from megatron_r3.patching.series import Patch, Series, read_patch, read_series
from megatron_r3.patching.tree_files import read_file, replace_files
from megatron_r3.patching.versions import KnownTree, Line, Versions, read_versions

# The committer for `am`: the user may have set no name, and no patch contains the committer.
_COMMITTER = {"GIT_COMMITTER_NAME": "megatron-r3", "GIT_COMMITTER_EMAIL": "megatron-r3@localhost"}
# Each option of git format-patch that a configuration or another version of git could change. For
# example diff.noprefix drops the "a/" and "b/", and format.signature ends the mail with a text.
_FORMAT = (
    *("--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--suffix=.patch"),
    *("--subject-prefix=PATCH", "--filename-max-length=96", "--no-cover-letter", "--no-attach"),
    *("--no-thread", "--no-from", "--no-to", "--no-cc", "--no-add-header", "--no-notes"),
    *("--no-base", "--encode-email-headers", "--no-renames", "--diff-algorithm=myers"),
    *("--indent-heuristic", "--unified=3", "--inter-hunk-context=0", "--src-prefix=a/"),
    *("--dst-prefix=b/", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative"),
    *("--ignore-submodules=none", "--submodule=short"),
)
# With these options git am keeps what format-patch wrote: brackets in the subject ("[MoE] ..."), CR
# at the end of a line, and the text above a line like "-- >8 --" ("scissors").
_AM = ("--quiet", "--keep-non-patch", "--keep-cr", "--no-scissors", "--no-message-id", "--no-3way")


@dataclass(frozen=True)
class Exported:
    """The result of `export_series`.

    Attributes:
        folder: the folder of the release line.
        names: the file names of the series, in order.
        differ: the files that were written or removed; with `check`, those that would be.
    """

    folder: Path
    names: tuple[str, ...]
    differ: tuple[str, ...]


@dataclass(frozen=True)
class Base:
    """The commit a series starts from."""

    line: Line
    commit: str
    tree: KnownTree


class MailFailed(PatchingError):
    """git am stopped at a patch, and is still in progress in the checkout."""


def export_series(root: Path, patches: Path, *, line: str = "", check: bool = False) -> Exported:
    """Export the commits of the checkout `root` above its base to the folder of `line`.

    The base is the nearest commit of a known tree, of `line` if it is given. With `check` nothing
    is written. If HEAD is the base itself, `check` commits the series in a temporary repository and
    exports it from there. All files are written or none.

    Raises:
        PatchingError: the checkout or a commit is not fit for export; the message says why.
    """
    root, versions = root.resolve(), read_versions(patches)
    refuse_unfinished(root)
    start = find_base(root, versions, line)
    folder = start.line.folder
    if check and not commits_above(root, start.commit):
        new = reexport(root, start.commit, read_series(folder), start.tree)
        old = _read(folder, start.tree)
    else:
        new = export_commits(root, start.commit, versions, start.line.name)
        old = _read(folder)
    differ = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
    if not check:
        write_series(patches, start.line.name, new)
    return Exported(folder, tuple(new), tuple(differ))


def export_commits(root: Path, base: str, versions: Versions, line: str) -> dict[str, bytes]:
    """The commits of `root` above `base` as a series of `line`: the bytes of each file.

    Raises:
        PatchingError: there are no commits, or one is not fit for a series; nothing is written.
    """
    others = [read_series(other.folder) for other in versions.lines if other.name != line]
    taken = {patch.number for series in others for patch in series.patches}
    # A number of this line counts only if no other line uses the number for another subject.
    own = _own_numbers(versions.folder / line)
    known = {subject: number for subject, number in own.items() if number not in taken}
    for series in reversed(others):  # if lines disagree, the number of the first line counts
        known |= {patch.subject: patch.number for patch in series.patches}
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as temp:
        written = _format(root, base, Path(temp, "by place"))
        if not written:
            raise PatchingError(f"{root} has no commits above {base[:12]}: nothing to export")
        subjects = [read_patch(file).subject for file in written]
        folder = Path(temp, line)
        folder.mkdir()
        for file, number in zip(written, plan_numbers(subjects, known, taken), strict=True):
            # to another folder: in the same folder a rename could overwrite a file of `written`
            file.rename(folder / f"{number:04d}{file.name[4:]}")
        series = read_series(folder)
        if wrong := [rule for patch in series.patches for rule in broken_rules(patch)]:
            raise PatchingError(
                "these commits are not fit for a series, amend them:\n  " + "\n  ".join(wrong)
            )
        return {patch.file.name: patch.file.read_bytes() for patch in series.patches}


def reexport(root: Path, base: str, series: Series, tree: KnownTree | None) -> dict[str, bytes]:
    """Commit a series on `base` in a temporary repository, and return the bytes of its export.

    The repository reads the objects of `root`. A patch is left out if versions.toml says that
    `tree` lacks all files of the patch.

    Raises:
        PatchingError: a patch does not apply.
    """
    due = [patch for patch in series.patches if not _absent(patch, tree)]
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as temp:
        work = borrow(root, Path(temp, "tree"))
        git(work, "checkout", "--quiet", "--detach", base)
        am(work, [patch.file for patch in due])
        written = _format(work, base, Path(temp, "by place"))
        return {
            f"{patch.number:04d}{file.name[4:]}": file.read_bytes()
            for patch, file in zip(due, written, strict=True)
        }


def write_series(
    patches: Path, line: str, new: Mapping[str, bytes], also: Mapping[str, bytes] | None = None
) -> None:
    """Replace the patches of `line` by `new`, and write `also`, files by path below `patches`.

    Raises:
        PatchingError: the files cannot be written. All files are as they were, unless the message
            says otherwise.
    """
    gone = (file.name for file in (patches / line).glob("*.patch") if file.name not in new)
    wanted: dict[str, bytes | None] = {f"{line}/{name}": data for name, data in new.items()}
    wanted |= {f"{line}/{name}": None for name in gone} | dict(also or {})
    old = {path: read_file(patches, path) for path in wanted}
    changes = {path: data for path, data in wanted.items() if data != old[path].data}
    replace_files(patches, changes, old)


def _own_numbers(folder: Path) -> dict[str, int]:
    """The numbers of the line's patches by subject, without patches that cannot be read."""
    numbers = {}
    for file in folder.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        with suppress(PatchingError):
            patch = read_patch(file)
            numbers[patch.subject] = patch.number
    return numbers


def _read(folder: Path, tree: KnownTree | None = None) -> dict[str, bytes]:
    """The patches in `folder`, except those that `reexport` leaves out."""
    return {
        file.name: file.read_bytes()
        for file in folder.glob("*.patch")
        if not (tree and tree.absent and _absent(read_patch(file), tree))
    }


def _absent(patch: Patch, tree: KnownTree | None) -> bool:
    return tree is not None and all(change.path in tree.absent for change in patch.changes)


def _format(repo: Path, base: str, folder: Path) -> list[Path]:
    """Write the commits of `repo` above `base` as patches to `folder`, numbered from 1.

    Neither the configuration nor the attributes of `repo` or of the user change what is written.

    Raises:
        PatchingError: a commit changes nothing, so git format-patch would skip it.
    """
    commits = commits_above(repo, base)
    if not commits:
        return []
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as temp:
        ours = borrow(repo, Path(temp))
        commit_range = f"{base}..{commits[-1]}"
        # With a path, here the whole tree, rev-list leaves out commits that change nothing in it.
        changing = git(ours, "rev-list", commit_range, "--", ".").splitlines()
        for commit in commits:
            if commit not in changing:
                raise PatchingError(f"commit {commit[:12]} changes nothing: drop it")
        output = ("--output-directory", str(folder.absolute()))
        written = git(ours, "format-patch", *_FORMAT, *output, commit_range)
        return [Path(file) for file in written.splitlines()]


def am(tree: Path, patches: Sequence[Path]) -> None:
    """Commit the patches to the checkout `tree`, with the authors, dates and messages in them.

    Raises:
        MailFailed: a patch does not apply; git am is left in progress in `tree`.
        PatchingError: git am failed without being in progress.
    """
    files = [str(patch.absolute()) for patch in patches]
    command = ("am", *_AM, "--committer-date-is-author-date", *files)
    done = run_git(tree, *command, env=_COMMITTER, check=False)
    if done.returncode:
        message = (done.stderr + done.stdout).decode(errors="replace").strip()
        if not (place := am_stopped_at(tree)):
            raise PatchingError(f"git am failed in {tree}: {message}")
        raise MailFailed(f"git am stopped at {patches[place - 1].name}: {message}")


def am_stopped_at(root: Path) -> int:
    """At which patch, counted from 1, git am stopped in `root`; 0 if no git am is in progress."""
    state = git_path(root, "rebase-apply")  # git rebase has this folder too, without `applying`
    return int((state / "next").read_text()) if (state / "applying").exists() else 0


def find_base(root: Path, versions: Versions, line: str = "") -> Base:
    """The nearest commit below HEAD that the series of `line`, or of any line, starts from.

    Raises:
        PatchingError: HEAD is above no known tree, or is equally near to the trees of two lines.
    """
    lines = [versions.line(line)] if line else versions.lines
    known = [Base(each, tree.commit, tree) for each in lines for tree in each.trees if tree.commit]
    distances = {commit: distance for distance, (commit, *_) in enumerate(_history(root))}
    below = [start for start in known if start.commit in distances]
    if not below:
        known_names = names([start.tree.name for start in known])
        raise PatchingError(f"HEAD of {root} is above no known commit ({known_names})")
    shortest = min(distances[start.commit] for start in below)
    nearest = [start for start in below if distances[start.commit] == shortest]
    if len({start.line.name for start in nearest}) > 1:
        several = names([start.line.name for start in nearest])
        raise PatchingError(
            f"HEAD of {root} is equally near to known commits of several lines: give --line, one "
            f"of {several}"
        )
    return nearest[0]


def commits_above(root: Path, base: str) -> list[str]:
    """The commits of `root` after `base`, oldest first.

    Raises:
        PatchingError: HEAD is not above `base`, or one of the commits is a merge.
    """
    history = _history(root)
    above = list(takewhile(lambda entry: entry[0] != base, history))
    if len(above) == len(history):
        raise PatchingError(f"HEAD of {root} is not above {base[:12]}")
    if merges := [commit[:12] for commit, *parents in above if len(parents) > 1]:
        raise PatchingError(
            f"{root} has merge commits above {base[:12]}: {names(merges)}; a series is one line "
            "of commits: remove the merges by git rebase"
        )
    return [commit for commit, *_ in reversed(above)]


def _history(root: Path) -> list[list[str]]:
    """A list [commit, its parents ...] for each commit from HEAD of `root` down.

    The order is topological: every commit comes after all commits that were made from it. Without
    merges the commits before `base` in this list are therefore the commits above `base`.
    """
    listed = git(root, "rev-list", "--topo-order", "--parents", "HEAD")
    return [entry.split() for entry in listed.splitlines()]
