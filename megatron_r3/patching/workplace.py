"""The checkout that a bump works in: made once, and known again by a note in its git directory."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_r3.patching.cleanroom import borrow_objects, read_git
from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.git import run_git
from megatron_r3.patching.matrix import Line

__all__ = ["Job", "open_workplace"]

_NOTE = "megatron-r3-bump"
_TAGS = "refs/tags/"
# a person goes on with git am there, and her own configuration must not resolve anything
_CONFIG = {
    "am.threeWay": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgsign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.hooksPath": os.devnull,
    "rerere.enabled": "false",
}


@dataclass(frozen=True)
class Job:
    """One bump: from the line `old` to `commit`, which is called `tree`, as the new `line`."""

    old: Line
    commit: str
    tree: str
    line: str

    @property
    def note(self) -> str:
        """What tells its checkout from that of another one."""
        return f"{self.old.name} {self.commit} {self.line}\n"


def open_workplace(work: Path, repo: Path, job: Job) -> None:
    """Make `work` a checkout of `repo` at the job's commit, or find that it is the one of this job.

    It shares the objects of `repo`, which itself is not changed. It is there whole or not at all.

    Raises:
        PatchingError: `work` is something else.
    """
    if work.exists() and (not work.is_dir() or any(work.iterdir())):
        note = work / ".git" / _NOTE
        if work.stat().st_uid != os.geteuid():  # git runs there, with the configuration there
            raise PatchingError(f"{work} belongs to another user: choose another --work")
        if not note.is_file() or note.read_text() != job.note:
            raise PatchingError(
                f"{work} is something else than the checkout of this bump: choose another --work, "
                "or remove it"
            )
        return
    work.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{work.name}-", dir=work.parent) as temp:
        clone = Path(temp) / "clone"
        clone.mkdir()
        run_git("init", "--quiet", "--template=", cwd=clone)
        git_dir = clone / ".git"
        git = partial(run_git, cwd=clone, git_dir=git_dir)
        for key, value in _CONFIG.items():
            git("config", key, value)
        # not git clone: that runs a second git in `repo`, with the configuration of `repo`
        borrow_objects(repo, git_dir)
        tags = read_git(repo, "for-each-ref", "--format=create %(refname) %(objectname)", _TAGS)
        git("update-ref", "--stdin", stdin=tags.stdout)
        git("checkout", "--quiet", "--detach", job.commit)
        (git_dir / _NOTE).write_text(job.note)
        clone.rename(work)
