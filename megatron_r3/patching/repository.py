"""Git repositories of our own, in which patches are tried before a tree is touched.

The files of a tree go into the index of a temporary repository, and `git apply --cached` applies
the patches there one by one. After each patch its files must have the blob ids that it promises.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import borrow_objects
from megatron_r3.patching.git import PatchingError, run_git
from megatron_r3.patching.series import FileChange, Patch
from megatron_r3.patching.tree import FileOnDisk, TreeStatus

# what `git apply` says of one file: "error: patch failed: a.py:29", or
# "error: a.py: does not exist in index"
_FAILED = re.compile(r"^error: patch failed: (?P<path>.+):(?P<line>\d+)$")
_MISSING = re.compile(r"^error: (?P<path>.+): (?P<state>does not exist|already exists) in index$")


class PatchFailed(PatchingError):
    """A patch does not fit.

    Attributes:
        number: the place of the patch in its series, from 1.
        failures: each file that the patch does not fit, with a line or a reason.
        path: the first of those files; `where` says how it failed.
    """

    def __init__(self, number: int, patch: Patch, failures: Mapping[str, str]):
        self.number, self.patch, self.failures = number, patch, dict(failures)
        self.path, self.where = next(iter(failures.items()))
        super().__init__(f"{patch.file.name} does not apply at {self.where}")


@dataclass(frozen=True)
class OwnRepository:
    """A git repository in `folder` that this project made, so that git may run in it."""

    folder: Path

    @classmethod
    def new(cls, folder: Path, borrow_from: Path | None = None) -> OwnRepository:
        """Make a repository with an empty index in `folder`, which is made where it is missing.

        With `borrow_from` it can also read the objects of that repository.
        """
        folder.mkdir(exist_ok=True)
        # without a template there are no sample hooks and no info/exclude
        run_git("init", "--quiet", "--template=", cwd=folder)
        if borrow_from is not None:
            borrow_objects(borrow_from, folder / ".git")
        return cls(folder)

    def run(
        self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git here; see `run_git`."""
        git_dir = self.folder / ".git"
        return run_git(*args, cwd=self.folder, git_dir=git_dir, stdin=stdin, env=env, check=check)

    def git(self, *args: str, stdin: bytes = b"") -> str:
        """Run git here and return what it prints, without the last line end."""
        return os.fsdecode(self.run(*args, stdin=stdin).stdout).removesuffix("\n")

    def check_out(self, commit: str) -> None:
        """Make the work tree and the index those of a commit, on no branch."""
        self.git("checkout", "--quiet", "--detach", commit)

    def add(self, files: Mapping[str, FileOnDisk]) -> None:
        """Put these files into the index; there need be no work tree."""
        entries = []
        for path, file in files.items():
            if file.data is not None and file.stat is not None:
                mode = "100755" if file.stat.st_mode & 0o100 else "100644"
                blob = self.git("hash-object", "-w", "--stdin", stdin=file.data)
                entries.append(f"{mode} {blob}\t{path}\0")
        self._put(entries)

    def _put(self, entries: Iterable[str]) -> None:
        self.git("update-index", "-z", "--index-info", stdin=os.fsencode("".join(entries)))

    def blobs(self, paths: Iterable[str]) -> dict[str, str]:
        """The blob id of each of these files that the index has."""
        # one entry: "100644 <blob id> 0\tmegatron/core/a.py"
        entries = self.git("ls-files", "--stage", "-z", "--", *paths).split("\0")[:-1]
        pairs = (entry.split("\t", 1) for entry in entries)
        return {path: head.split()[1] for head, path in pairs}

    def contents(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """The bytes of these files in the index; None for a file that it lacks."""
        blobs = self.blobs(paths := list(paths))
        read = {path: self.run("cat-file", "blob", blob).stdout for path, blob in blobs.items()}
        return {path: read.get(path) for path in paths}

    def apply(
        self, number: int, patch: Patch, changes: Collection[FileChange], *, reverse: bool = False
    ) -> None:
        """Apply these parts of a patch to the index: all of them, or none.

        Raises:
            PatchFailed: one of them does not fit.
        """
        diffs = {change.path: change.diff for change in changes}
        command = ("apply", "--cached", *(["-R"] if reverse else []), "-")
        done = self.run(*command, stdin=b"".join(diffs.values()), check=False)
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip() or "git gives no reason"
            first = next(iter(diffs))
            failures = _failures(message) or {first: f"{first}: {message.splitlines()[0]}"}
            raise PatchFailed(number, patch, failures)
        # git 2.47 loses the mode of a file that the patch deletes: it comes back as 100644
        back = [change.path for change in changes if change.executable and change.post is None]
        if reverse and back:
            self._put(f"100755 {blob}\t{path}\0" for path, blob in self.blobs(back).items())


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A path beside `target` where the body makes a folder, which then becomes `target`.

    A body that raises leaves nothing behind. It may put other files beside the path.

    Raises:
        PatchingError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".megatron-", dir=target.parent) as temp:
            yield Path(temp, "tree")
            Path(temp, "tree").rename(target)
    except OSError as error:
        raise PatchingError(f"{target}: {error}") from error


def _failures(message: str) -> dict[str, str]:
    """Each file that git's message is about, and where in it the patch failed."""
    failures: dict[str, str] = {}
    for line in message.splitlines():
        if failed := _FAILED.match(line):
            failures.setdefault(failed["path"], f"{failed['path']}:{failed['line']}")
        elif failed := _MISSING.match(line):
            reason = "no such file" if failed["state"] == "does not exist" else "already there"
            failures.setdefault(failed["path"], f"{failed['path']}: {reason}")
    return failures


def patched_contents(status: TreeStatus, *, reverse: bool = False) -> dict[str, bytes | None]:
    """The contents of a tree's files after the series is applied or, with `reverse`, taken back.

    Each file starts from the place in its chain at which it is now. Unknown files are tried from
    the first patch on, and cannot be reverted. None stands for a file that is then not there.

    Raises:
        PatchFailed: a patch does not fit.
        PatchingError: a patch fits but does not give the file that it promises.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        repo = OwnRepository.new(Path(folder))
        repo.add(status.files)
        run_series(repo, status, reverse=reverse)
        return repo.contents(status.files)


def run_series(
    repo: OwnRepository, status: TreeStatus, *, reverse: bool = False
) -> list[tuple[Patch, list[FileChange]]]:
    """Apply what is due to the index of `repo`, which holds the files of `status`.

    With `reverse` what is applied is taken back, last patch first; errors as `patched_contents`.

    Returns:
        Each patch that changed a file, and the files that it changed.
    """
    due: list[tuple[int, Patch, list[FileChange]]] = []
    for number, patch in enumerate(status.series.patches, 1):
        if changes := [change for change in patch.changes if _is_due(status, change, reverse)]:
            due.append((number, patch, changes))
    for number, patch, changes in reversed(due) if reverse else due:
        repo.apply(number, patch, changes, reverse=reverse)
        after = repo.blobs(change.path for change in changes)
        for change in changes:
            step = status.series.place(change) + (not reverse)
            promised = status.blobs[change.path][step]
            if status.places[change.path] is not None and after.get(change.path) != promised:
                raise PatchingError(
                    f"{patch.file} is damaged: it does not give the {change.path} that is promised "
                    f"for {status.tree.name}; nothing was changed"
                )
    return [(patch, changes) for _, patch, changes in due]


def _is_due(status: TreeStatus, change: FileChange, reverse: bool) -> bool:
    """Whether this part of a patch is still to be applied or, with `reverse`, to be taken back.

    Example: a file with three patches has four places, 0 to 3. At place 1, patch 0 (from place 0
    to 1) is in the file and patches 1 and 2 are not: apply runs 1 and 2, revert takes back 0.
    """
    place = status.places[change.path]
    if change.path in status.tree.absent or (reverse and place is None):
        return False
    return (status.series.place(change) < (place or 0)) == reverse
