"""Write the commits of a checkout as the series of a release line, or check that they are it.

A file is named by the number of its concern, which is the number that its subject has in the other
lines; the bytes in it do not depend on the number.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import (
    borrow_objects,
    git_path,
    has_commit,
    is_checkout,
    read_git,
    resolve,
)
from megatron_r3.patching.git import PatchingError, names, run_git
from megatron_r3.patching.series import (
    Patch,
    Series,
    broken_rules,
    numbers_by_subject,
    plan_numbers,
    read_patch,
    read_series,
)
from megatron_r3.patching.tree import dirty_files, read_files
from megatron_r3.patching.versions import KnownTree, Line, Matrix, read_matrix
from megatron_r3.patching.write import replace_files


@dataclass(frozen=True)
class Exported:
    """What an export gives.

    Attributes:
        names: the file names of the series, in order.
        differ: those that were written or removed; with check, those that would be.
    """

    folder: Path
    names: tuple[str, ...]
    differ: tuple[str, ...]


def export_series(
    root: Path, patches: Path, *, line: str = "", base: str = "", check: bool = False
) -> Exported:
    """Export the commits of the checkout `root` above `base` to the folder of `line`.

    Without `base` it is the nearest commit of a known tree, of `line` if given. With `check`
    nothing is written; on the base itself the series is then committed in a temporary repository
    and exported from there. All files are written or none.

    Raises:
        PatchingError: the checkout or a commit is not fit for export; the message says which.
    """
    root, matrix = root.resolve(), read_matrix(patches)
    refuse_unfinished(root)
    found = find_base(root, matrix, line, base)
    folder = found.line.folder
    if check and not commits_above(root, found.commit):
        new = reexport(root, found.commit, read_series(folder), found.tree)
        old = _read(folder, found.tree)
    else:
        new, old = export_commits(root, found.commit, matrix, found.line.name), _read(folder)
    differ = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
    if not check:
        write_series(patches, found.line.name, new)
    return Exported(folder, tuple(new), tuple(differ))


def export_commits(root: Path, base: str, matrix: Matrix, line: str) -> dict[str, bytes]:
    """The series that the commits of `root` above `base` are for `line`: each file's bytes.

    Raises:
        PatchingError: there are none, or one is not fit for a series; nothing is written.
    """
    commits = commits_above(root, base)
    if not commits:
        raise PatchingError(f"{root} has no commits above {base[:12]}: nothing to export")
    others = [read_series(other.folder) for other in matrix.lines if other.name != line]
    taken = {patch.number for series in others for patch in series.patches}
    own = _own_numbers(matrix.folder / line)
    known = {subject: number for subject, number in own.items() if number not in taken}
    known |= numbers_by_subject(others)
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as temp:
        folder = Path(temp) / line
        written = format_commits(root, enumerate(commits, 1), folder)
        subjects = [read_patch(file).subject for file in written]
        for file, number in zip(
            reversed(written), reversed(plan_numbers(subjects, known, taken)), strict=True
        ):
            # from the last one on: a number is never smaller than the place it was written at
            file.rename(folder / f"{number:04d}{file.name[4:]}")
        series = read_series(folder)
        _refuse_broken(series.patches)
        return {patch.file.name: patch.file.read_bytes() for patch in series.patches}


def reexport(root: Path, base: str, series: Series, tree: KnownTree | None) -> dict[str, bytes]:
    """Commit a series on `base`, from the objects of `root`, in a temporary repository; export it.

    Patches all of whose files `tree` is known to lack are left out.

    Raises:
        PatchingError: a patch does not apply.
    """
    due = [patch for patch in series.patches if not _absent(patch, tree)]
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as temp:
        work = Path(temp) / "tree"
        work.mkdir()
        run_git("init", "--quiet", "--template=", cwd=work)
        borrow_objects(root, work / ".git")
        run_git("checkout", "--quiet", "--detach", base, cwd=work, git_dir=work / ".git")
        am(work, [patch.file for patch in due])
        folder = Path(temp) / series.line
        commits = commits_above(work, base)
        numbers = [patch.number for patch in due]
        written = format_commits(work, zip(numbers, commits, strict=True), folder)
        return {file.name: file.read_bytes() for file in written}


def write_series(
    patches: Path, line: str, new: Mapping[str, bytes], also: Mapping[str, bytes] | None = None
) -> None:
    """Make the patches of `line` the `new` ones, and no others; with them the files of `also`.

    Raises:
        PatchingError: they cannot be written; all are as they were, or the message says not.
    """
    gone = (file.name for file in (patches / line).glob("*.patch") if file.name not in new)
    wanted: dict[str, bytes | None] = {f"{line}/{name}": data for name, data in new.items()}
    wanted |= {f"{line}/{name}": None for name in gone} | dict(also or {})
    old = read_files(patches, wanted)
    changes = {path: data for path, data in wanted.items() if data != old[path].data}
    replace_files(patches, changes, old)


def _own_numbers(folder: Path) -> dict[str, int]:
    """The numbers that the line has now; a patch that cannot be read is about to be replaced."""
    numbers = {}
    for file in folder.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        with suppress(PatchingError):
            patch = read_patch(file)
            numbers[patch.subject] = patch.number
    return numbers


def _read(folder: Path, tree: KnownTree | None = None) -> dict[str, bytes]:
    """The patches in `folder`, but for those that `reexport` leaves out."""
    return {
        file.name: file.read_bytes()
        for file in folder.glob("*.patch")
        if not (tree and tree.absent and _absent(read_patch(file), tree))
    }


def _absent(patch: Patch, tree: KnownTree | None) -> bool:
    return tree is not None and all(change.path in tree.absent for change in patch.changes)


def _refuse_broken(patches: Sequence[Patch]) -> None:
    if wrong := [what for patch in patches for what in broken_rules(patch)]:
        raise PatchingError("not fit for a series, amend the commits:\n  " + "\n  ".join(wrong))


# Commits to patch mails and back, with git format-patch and git am; the same bytes everywhere.

COMMITTER = {"GIT_COMMITTER_NAME": "megatron-r3", "GIT_COMMITTER_EMAIL": "megatron-r3@localhost"}
"""Who commits what `am` applies: the user may have no name, and it is in no patch."""

# all that a configuration, or another version of git, could decide
_FORMAT = (
    *("--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--suffix=.patch"),
    *("--subject-prefix=PATCH", "--filename-max-length=96", "--no-cover-letter", "--no-attach"),
    *("--no-thread", "--no-from", "--no-to", "--no-cc", "--no-add-header", "--no-notes"),
    *("--no-base", "--encode-email-headers", "--no-renames", "--diff-algorithm=myers"),
    *("--indent-heuristic", "--unified=3", "--inter-hunk-context=0", "--src-prefix=a/"),
    *("--dst-prefix=b/", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative"),
    *("--ignore-submodules=none", "--submodule=short"),
)
# keep what format-patch wrote: brackets in the subject, CR at a line's end, lines like '-- >8 --'
_AM = ("--quiet", "--keep-non-patch", "--keep-cr", "--no-scissors", "--no-message-id", "--no-3way")


class MailFailed(PatchingError):
    """git am stopped.

    Attributes:
        place: of the patch among those given, from 0.
        text: what git said.
    """

    def __init__(self, place: int, patch: Path, text: str):
        super().__init__(f"git am stopped at {patch.name}: {text}")
        self.place, self.text = place, text


def format_commits(repo: Path, commits: Iterable[tuple[int, str]], folder: Path) -> list[Path]:
    """Write each commit of `repo`, given with the number of its concern, as a patch to `folder`.

    Neither the configuration nor the attributes of `repo` or of the user change what is written.

    Raises:
        PatchingError: a commit changes nothing.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as temp:
        run_git("init", "--quiet", "--template=", cwd=Path(temp))
        borrow_objects(repo, Path(temp, ".git"))
        files = []
        for number, commit in commits:
            if not _git(temp, "diff-tree", f"{commit}^", commit):
                raise PatchingError(f"commit {commit[:12]} changes nothing: drop it")
            where = ("--output-directory", str(folder.absolute()), "--start-number", str(number))
            written = _git(temp, "format-patch", "-1", *_FORMAT, *where, commit)
            files.append(Path(os.fsdecode(written.removesuffix(b"\n"))))
        return files


def _git(folder: str, *args: str) -> bytes:
    return run_git(*args, cwd=Path(folder), git_dir=Path(folder, ".git")).stdout


def am(tree: Path, patches: Sequence[Path]) -> None:
    """Commit the patches to the checkout `tree`, with the authors, dates and messages they have.

    Raises:
        MailFailed: one does not apply; git am is left in progress there.
    """
    result = run_git(
        *("am", *_AM, "--committer-date-is-author-date"),
        *(str(patch.absolute()) for patch in patches),
        cwd=tree,
        git_dir=tree / ".git",
        env=COMMITTER,
        check=False,
    )
    if result.returncode:
        text = (result.stderr + result.stdout).decode(errors="replace").strip()
        following = git_path(tree, "rebase-apply") / "next"
        if not following.exists():
            raise PatchingError(f"git am failed in {tree}: {text}")
        place = int(following.read_text()) - 1
        raise MailFailed(place, patches[place], text)


# The commits of a checkout above the commit that a series starts from.

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
