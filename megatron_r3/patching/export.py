"""Write the commits of a checkout as the series of a release line, or check that they are it.

A file is named by the number of its concern, which is the number that its subject has in the other
lines; the bytes in it do not depend on the number.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import borrow_objects
from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.git import run_git
from megatron_r3.patching.history import commits_above, find_base, refuse_unfinished
from megatron_r3.patching.mail import am, format_commits
from megatron_r3.patching.matrix import KnownTree, Matrix, read_matrix
from megatron_r3.patching.rules import broken_rules, numbers_by_subject, plan_numbers
from megatron_r3.patching.series import Patch, Series, read_patch, read_series
from megatron_r3.patching.tree import read_files
from megatron_r3.patching.write import replace_files

__all__ = ["Exported", "export_commits", "export_series", "reexport", "write_series"]


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
