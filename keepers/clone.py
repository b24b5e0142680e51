"""Reads a maintainer's clone of Megatron-LM through git, which obeys the clone's own settings.

Nothing is written to the clone. Commits are made in repositories from `borrow`, which read the
clone's objects.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_r3.patching.git import PatchingError, git, names, new_repository, run_git
from megatron_r3.patching.tree_files import FileOnDisk

_IN_PROGRESS = {
    "rebase-apply": "git am or git rebase",
    "rebase-merge": "git rebase",
    "MERGE_HEAD": "git merge",
    "CHERRY_PICK_HEAD": "git cherry-pick",
    "REVERT_HEAD": "git revert",
}


def check_clone(repo: Path) -> None:
    """Refuse a folder unless it is the top of a work tree or a bare repository.

    Raises:
        PatchingError: `repo` is no git repository, or git does not trust its owner.
    """
    if not repo.is_dir():
        raise PatchingError(f"{repo} is no git repository: there is no such folder")
    found = run_git(repo, "rev-parse", "--git-dir", check=False)
    if found.returncode:
        raise PatchingError(f"{repo} is no git repository: {found.stderr.decode().strip()}")


def git_path(repo: Path, name: str) -> Path:
    """The path of `name` in the git directory of `repo`, for example of objects or rebase-apply."""
    return (repo / git(repo, "rev-parse", "--git-path", name)).resolve()


def resolve(repo: Path, revision: str) -> str:
    """The id of the commit that `revision` names in `repo`.

    Raises:
        PatchingError: `repo` is no git repository, or has no such commit.
    """
    check_clone(repo)
    # --end-of-options: a revision that begins with "-" is a name too, never an option
    command = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    parsed = run_git(repo, *command, check=False)
    if parsed.returncode:
        raise PatchingError(f"{repo} has no commit {revision!r}: fetch it there first")
    return parsed.stdout.decode().strip()


def has_commit(repo: Path, commit: str) -> bool:
    """Whether `repo` holds this commit; a shallow clone may lack it."""
    check_clone(repo)
    return run_git(repo, "cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode == 0


def borrow(repo: Path, folder: Path) -> Path:
    """Make a repository in `folder` that can read the objects of `repo`; return `folder`.

    The settings, attributes, notes and hooks of `repo` have no effect in `folder`.
    """
    check_clone(repo)
    git_dir = new_repository(folder) / ".git"
    # The file `alternates` has one path a line, in C quotes: a newline in a path becomes \012.
    objects = os.fsencode(git_path(repo, "objects"))
    quoted = re.sub(rb'["\\\x00-\x1f]', lambda c: b"\\%03o" % ord(c[0]), objects)
    (git_dir / "objects" / "info").mkdir(exist_ok=True)
    (git_dir / "objects" / "info" / "alternates").write_bytes(b'"%s"\n' % quoted)
    if (shallow := git_path(repo, "shallow")).is_file():
        shutil.copy2(shallow, git_dir / "shallow")
    return folder


def committed_files(repo: Path, commit: str, paths: Iterable[str]) -> dict[str, FileOnDisk]:
    """The files at `paths` as the commit has them; a file that the commit lacks has the data None.

    Raises:
        PatchingError: `repo` lacks the data of a file, as a partial clone may.
    """
    files = dict.fromkeys(paths, FileOnDisk(None))
    # one entry: "100644 blob <id>\tmegatron/core/a.py"
    for entry in git(repo, "ls-tree", "-z", commit, "--", *files).split("\0")[:-1]:
        head, path = entry.split("\t", 1)
        files[path] = FileOnDisk(run_git(repo, "cat-file", "blob", head.split()[2]).stdout)
    return files


def dirty_files(repo: Path) -> list[str]:
    """The tracked files of a checkout that differ from its HEAD, staged or not."""
    flags = ("--porcelain", "-z", "--no-renames", "--untracked-files=no")
    listed = git(repo, "status", *flags, "--ignore-submodules=all")
    return sorted(entry[3:] for entry in listed.split("\0") if entry)


def refuse_unfinished(repo: Path) -> None:
    """Refuse a folder that is no checkout, has uncommitted changes, or is in a merge or rebase.

    Raises:
        PatchingError: the message says which of these it is.
    """
    if not repo.is_dir() or run_git(repo, "rev-parse", "HEAD", check=False).returncode:
        raise PatchingError(f"{repo} is no git checkout")
    for name, action in _IN_PROGRESS.items():
        if git_path(repo, name).exists():
            raise PatchingError(f"{action} is in progress in {repo}: finish or abort it first")
    if dirty := dirty_files(repo):
        raise PatchingError(f"{repo} has uncommitted changes: {names(dirty)}; commit them first")
