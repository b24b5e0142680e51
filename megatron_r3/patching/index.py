"""An index in a temporary git directory, where patches are tried: no tree is touched."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_r3.patching.cleanroom import borrow_objects
from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.git import run_git
from megatron_r3.patching.series import FileChange, Patch
from megatron_r3.patching.tree import FileOnDisk

__all__ = ["Index", "PatchFailed", "failed_at"]


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
