"""An index in a temporary git directory, where patches are tried: no tree is touched."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import borrow_objects
from megatron_r3.patching.git import PatchingError, run_git
from megatron_r3.patching.series import FileChange, Patch
from megatron_r3.patching.tree import FileOnDisk, TreeStatus


class PatchFailed(PatchingError):
    """A patch does not fit; `where` is the file, with the line where git knows it, or the error."""

    def __init__(self, number: int, patch: Patch, path: str, where: str):
        super().__init__(f"{patch.file.name} does not apply at {where}")
        self.number, self.patch, self.path, self.where = number, patch, path, where


class Index:
    """A new git directory in `folder`; its index is empty.

    With `repo` it also reads the objects of that repository, and still writes none there.
    """

    def __init__(self, folder: Path, repo: Path | None = None):
        self.folder = folder
        run_git("init", "--quiet", "--template=", cwd=folder)
        if repo is not None:
            borrow_objects(repo, folder / ".git")

    def add(self, files: Mapping[str, FileOnDisk]) -> None:
        """Put these files into the index."""
        entries = []
        for path, file in files.items():
            if file.data is not None and file.stat is not None:
                mode = "100755" if file.stat.st_mode & 0o100 else "100644"
                blob = self.git("hash-object", "-w", "--stdin", stdin=file.data).decode().strip()
                entries.append(f"{mode} {blob}\t{path}\0")
        self.git("update-index", "-z", "--index-info", stdin="".join(entries).encode())

    def read_tree(self, commit: str) -> str:
        """Make the index that of a commit; the id of its tree."""
        self.git("read-tree", commit)
        return self.git("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()

    def write_tree(self) -> str:
        """The id of the tree that the index is."""
        return self.git("write-tree").decode().strip()

    def git(self, *args: str, stdin: bytes = b"") -> bytes:
        """Run git here; its output."""
        git_dir = self.folder / ".git"
        return run_git(*args, cwd=self.folder, git_dir=git_dir, stdin=stdin).stdout

    def apply(self, number: int, patch: Patch, changes: list[FileChange], reverse: bool) -> None:
        """Apply these parts of a patch to the index, all or none."""
        result = run_git(
            *("apply", "--cached", *(["-R"] if reverse else []), "-"),
            cwd=self.folder,
            git_dir=self.folder / ".git",
            stdin=b"".join(change.diff for change in changes),
            check=False,
        )
        if result.returncode:
            text = result.stderr.decode(errors="replace")
            raise PatchFailed(number, patch, *failed_at(text, changes[0].path))

    def blobs(self) -> dict[str, str]:
        """The blob id of every file."""
        entries = os.fsdecode(self.git("ls-files", "--stage", "-z")).split("\0")[:-1]
        pairs = (entry.split("\t", 1) for entry in entries)
        return {path: head.split()[1] for head, path in pairs}

    def contents(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """What is in these files; None where there is none."""
        blobs = self.blobs()
        return {p: self.git("cat-file", "blob", blobs[p]) if p in blobs else None for p in paths}


def failed_at(text: str, path: str) -> tuple[str, str]:
    """The file that git's message is about, and where in it the patch failed.

    `path` is the answer where the message does not say.
    """
    if failed := re.search(r"^error: patch failed: (.+):(\d+)$", text, re.M):
        return failed[1], f"{failed[1]}:{failed[2]}"
    if failed := re.search(r"^error: (.+): (does not exist|already exists) in index$", text, re.M):
        what = "no such file" if failed[2] == "does not exist" else "already there"
        return failed[1], f"{failed[1]}: {what}"
    reason = text.strip().splitlines()[:1] or ["git says nothing"]
    return path, f"{path}: {reason[0]}"


# What the files of a tree become, worked out beside it: the tree is not touched.
#
# The files go into a temporary git directory with its own index, and the patches are applied there
# one by one. After each, the blob ids must be those that the patch promises.


@dataclass(frozen=True)
class Computed:
    """The files of a tree after an apply or a revert.

    Attributes:
        contents: of each file; None where there is none.
        blobs: the ids that each file went through, its first one included: what an entry of
            versions.toml says of a file whose base is not the one that the patches name.
    """

    contents: dict[str, bytes | None]
    blobs: dict[str, list[str | None]]


@dataclass(frozen=True)
class _Step:
    """One file of one patch, and its place in the file's chain of blobs."""

    change: FileChange
    place: int


def compute(status: TreeStatus, *, reverse: bool = False) -> Computed:
    """Apply what is not applied yet, or with `reverse` undo what is, last patch first.

    Files that are half way are taken from where they are. Files that the tree is known to lack
    are left out. Unknown files are tried from the first patch on and cannot be reverted.

    Raises:
        PatchFailed: a patch does not fit.
        PatchingError: a patch fits but does not give the file that it promises.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        index = Index(Path(folder))
        index.add(status.files)
        blobs = {path: [file.blob] for path, file in status.files.items()}
        for path, blob in run_series(index, status, reverse=reverse):
            blobs[path].append(blob)
        return Computed(index.contents(status.files), blobs)


def run_series(
    index: Index, status: TreeStatus, *, reverse: bool = False
) -> Iterator[tuple[str, str | None]]:
    """Apply to `index`, which holds the files of `status`, what is due; see `compute`.

    Yields after each patch its files, each with the blob id that it has now.
    """
    patches = list(_due(status, reverse))
    for number, patch, steps in reversed(patches) if reverse else patches:
        index.apply(number, patch, [step.change for step in steps], reverse)
        after = index.blobs()
        for path, place in ((step.change.path, step.place) for step in steps):
            promised = status.blobs[path][place if reverse else place + 1]
            if status.places[path] is not None and after.get(path) != promised:
                raise PatchingError(
                    f"{patch.file} is damaged: it does not give the {path} that is promised "
                    f"for {status.tree.name}; nothing was changed"
                )
            yield path, after.get(path)


def _due(status: TreeStatus, reverse: bool) -> Iterator[tuple[int, Patch, list[_Step]]]:
    """Each patch with something to do, its number from 1, and the files it has to do it to."""
    places: Counter[str] = Counter()
    for number, patch in enumerate(status.series.patches, 1):
        steps = []
        for change in patch.changes:
            step, here = _Step(change, places[change.path]), status.places[change.path]
            places[change.path] += 1
            if change.path in status.tree.absent or (reverse and here is None):
                continue
            if (step.place < (here or 0)) == reverse:
                steps.append(step)
        if steps:
            yield number, patch, steps
