"""A temporary git repository, in which patches are tried before a tree is touched.

Only the files that a series changes are copied into the repository. Git applies the patches there,
one after the other. A file that has the blob id from which a patch starts must afterwards have the
blob id with which the patch ends.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_r3.patching.git import PatchingError, git, new_repository, run_git
from megatron_r3.patching.series import FileChange, Patch
from megatron_r3.patching.tree import TreeStatus
from megatron_r3.patching.tree_files import FileOnDisk

# what `git apply` says of one file: "error: patch failed: a.py:29", or
# "error: a.py: No such file or directory"
_FAILED = re.compile(r"^error: patch failed: (?P<path>.+):(?P<line>\d+)$")
_MISSING = re.compile(r"^error: (?P<path>.+): (?P<why>No such file .*|already exists in .*)$")
# what `git apply --verbose` says of a hunk that is at another line than the patch names:
# "Hunk #2 succeeded at 812 (offset -30 lines)."
_OFFSET = re.compile(rb"^Hunk #\d+ succeeded at \d+ \(offset -?(\d+) lines?\)\.$", re.M)


class PatchFailed(PatchingError):
    """A patch does not fit.

    Attributes:
        number: which patch of its series this is, counted from 1.
        failures: for each file that the patch does not fit, "PATH:LINE" or "PATH: REASON".
        path, where: the first file of `failures`, and its text.
    """

    def __init__(self, number: int, patch: Patch, failures: Mapping[str, str]):
        self.number, self.patch, self.failures = number, patch, dict(failures)
        self.path, self.where = next(iter(failures.items()))
        super().__init__(f"{patch.file.name} does not apply at {self.where}")

    def explain(self, num_patches: int, *more: str) -> str:
        """The text for the user; the lines `more` are put at the end. For example:

        patch 2 of 10 does not apply: 0002-Ask-the-hook.patch
          at: megatron/core/transformer/moe/router.py:120
          subject: Ask the hook
        """
        first = f"patch {self.number} of {num_patches} does not apply: {self.patch.file.name}"
        lines = (first, f"at: {self.where}", f"subject: {self.patch.subject}", *more)
        return "\n  ".join(lines)


class Scratch:
    """Copies of a tree's files in a new git repository, because git must not run in the tree."""

    def __init__(self, folder: Path, files: Mapping[str, FileOnDisk]) -> None:
        self.folder = new_repository(folder)
        # the files have their modes, so that `diff` names the mode of a file that a patch deletes
        self._executables = {path for path, file in files.items() if file.executable}
        self.put({path: file.data for path, file in files.items()})

    def put(self, contents: Mapping[str, bytes | None]) -> None:
        """Write these files; None removes one."""
        for path, data in contents.items():
            target = self.folder / path
            if data is None:
                target.unlink(missing_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                if path in self._executables:
                    target.chmod(0o755)

    def contents(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """The bytes of these files; None for a file that is not there."""
        found = ((path, self.folder / path) for path in paths)
        return {path: file.read_bytes() if file.is_file() else None for path, file in found}

    def apply(
        self, number: int, patch: Patch, changes: Collection[FileChange], *, reverse: bool = False
    ) -> int:
        """Apply the parts `changes` of a patch: all of them, or none.

        Returns:
            The sum, over all hunks, of the lines by which the hunk is away from its place in the
            patch.

        Raises:
            PatchFailed: a part does not fit.
            PatchingError: a file has the blob id that the patch starts from, but afterwards not the
                one that the patch ends with.
        """
        diffs = {change.path: change.diff for change in changes}
        before = self.contents(diffs)
        command = ("apply", "--verbose", *(["-R"] if reverse else []), "-")
        done = run_git(self.folder, *command, stdin=b"".join(diffs.values()), check=False)
        if done.returncode:
            raise PatchFailed(number, patch, _failures(done.stderr, next(iter(diffs))))
        after = self.contents(diffs)
        for change in changes:
            old, new = change.pre, change.post
            old, new = (new, old) if reverse else (old, new)
            fits = FileOnDisk(before[change.path]).blob == old
            if fits and FileOnDisk(after[change.path]).blob != new:
                raise PatchingError(
                    f"{patch.file} is damaged: {change.path} does not get the blob id that is in "
                    "the patch; nothing was changed"
                )
        return sum(int(offset) for offset in _OFFSET.findall(done.stderr))

    def snapshot(self) -> str:
        """The id of git's tree object that has all files as they are at this time."""
        git(self.folder, "add", "--all", "--force")
        return git(self.folder, "write-tree")

    def diff(self, old: str, new: str) -> bytes:
        """One patch from the files of the snapshot `old` to those of `new`."""
        flags = ("-r", "--patch", "--full-index", "--no-renames", "--text")
        return run_git(self.folder, "diff-tree", *flags, old, new).stdout


@contextmanager
def scratch(files: Mapping[str, FileOnDisk]) -> Iterator[Scratch]:
    """Yield a `Scratch` in a temporary folder, with these files at their paths in the tree."""
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        yield Scratch(Path(folder), files)


def _failures(stderr: bytes, first: str) -> dict[str, str]:
    """For each file that git's errors name: where in the file the patch fails, or why."""
    failures: dict[str, str] = {}
    lines = stderr.decode(errors="replace").splitlines()
    for line in lines:
        if failed := _FAILED.match(line):
            failures.setdefault(failed["path"], f"{failed['path']}:{failed['line']}")
        elif failed := _MISSING.match(line):
            reason = "no such file" if failed["why"].startswith("No") else "already there"
            failures.setdefault(failed["path"], f"{failed['path']}: {reason}")
    errors = [line for line in lines if line.startswith("error: ")] or ["git gives no reason"]
    return failures or {first: f"{first}: {errors[0]}"}


def patched_contents(status: TreeStatus, *, reverse: bool = False) -> dict[str, bytes | None]:
    """The contents of a tree's files after the series is applied or, with `reverse`, taken back.

    Only the patches that a file lacks are applied to the file; with `reverse` only those that are
    in it are taken back. All patches are tried on a file with unknown content; `reverse` does not
    change such a file. None stands for a file that does not exist afterwards.

    Raises:
        PatchFailed: a patch does not fit.
        PatchingError: the patches fit, but a file then has another blob id than they promise.
    """
    due: list[tuple[int, Patch, list[FileChange]]] = []
    for number, patch in enumerate(status.series.patches, 1):
        if changes := [change for change in patch.changes if _is_due(status, change, reverse)]:
            due.append((number, patch, changes))
    with scratch(status.files) as ours:
        for number, patch, changes in reversed(due) if reverse else due:
            ours.apply(number, patch, changes, reverse=reverse)
        contents = ours.contents(status.files)
    for path, chain in status.blobs.items():
        blob = FileOnDisk(contents[path]).blob
        if status.places[path] is not None and blob != chain[0 if reverse else -1]:
            raise PatchingError(
                f"the patches of {status.line.name} are damaged: {path} does not get the blob id "
                f"that it must have for {status.tree.name}; nothing was changed"
            )
    return contents


def _is_due(status: TreeStatus, change: FileChange, reverse: bool) -> bool:
    """Whether this part of a patch is still to be applied or, with `reverse`, to be taken back.

    Example: a file with three patches has four places, 0 to 3. At place 1, patch 0 (from place 0
    to 1) is in the file and patches 1 and 2 are not: apply runs 1 and 2, revert takes back 0.
    """
    place = status.places[change.path]
    if change.path in status.tree.absent or (reverse and place is None):
        return False
    return (status.series.place(change) < (place or 0)) == reverse
