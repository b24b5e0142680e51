"""Commits to patch mails and back, with git format-patch and git am; the same bytes everywhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_r3.patching.cleanroom import borrow_objects, git_path
from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.git import run_git

__all__ = ["COMMITTER", "MailFailed", "am", "format_commits"]

COMMITTER = {"GIT_COMMITTER_NAME": "megatron-r3", "GIT_COMMITTER_EMAIL": "megatron-r3@localhost"}
"""Who commits what `am` applies: the user may have no name, and it is in no patch."""

# all that a configuration, or another version of git, could decide
_FORMAT = (
    *("--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--suffix=.patch"),
    *("--subject-prefix=PATCH", "--filename-max-length=64", "--no-cover-letter", "--no-attach"),
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
