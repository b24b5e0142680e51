"""Reads a repository that somebody else made, without running anything that the repository brings.

Git does what a repository's configuration says, and much of that runs programs: `git status` runs
clean filters and file system monitors; a partial clone fetches a missing object with the program
that its remote names. So git never runs in such a repository. Git runs in a clean room instead: a
temporary git directory of ours, with our configuration, without hooks and attributes. The room
takes from the repository only what cannot run a program:

    TEMP/common/config     written here: the few settings of `_TAKEN`
    TEMP/common/objects    a link to the repository's; the same for refs, packed-refs, reftable
    TEMP/own/HEAD, index   copies: git may write to an index that it reads
    TEMP/own/commondir     "../common", as in a work tree that `git worktree add` made

Example: with `filter.evil.clean = rm -rf ~` in .git/config and `* filter=evil` in .gitattributes,
plain `git status` runs the rm. In the room there is no filter called evil, so git compares bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.git import PatchingError, run_git

# These settings say how the files of the work tree and of the git directory are kept. A setting
# enters the room's configuration only under one of these names and with one of these values.
_SWITCH = ("true", "yes", "on", "1", "false", "no", "off", "0", "")
_TAKEN = {
    "core.checkstat": ("default", "minimal"),
    "core.filemode": _SWITCH,
    "core.ignorecase": _SWITCH,
    "core.precomposeunicode": _SWITCH,
    "core.symlinks": _SWITCH,
    "core.trustctime": _SWITCH,
    "extensions.objectformat": ("sha1", "sha256"),
    "extensions.refstorage": ("files", "reftable"),
}
# what each work tree has for itself; all work trees of a repository share everything else
_OWN = re.compile(r"index|rebase-apply|rebase-merge|[A-Z_]*HEAD")


@dataclass(frozen=True)
class GitDirs:
    """The git directory of one work tree, and the one it shares with others (often the same)."""

    own: Path
    common: Path

    def path(self, name: str) -> Path:
        """Where the repository keeps its file of this name, such as objects or rebase-apply."""
        return (self.own if _OWN.fullmatch(name) else self.common).resolve() / name

    def settings(self) -> dict[str, str]:
        """Those settings of `_TAKEN` that the repository has.

        Raises:
            PatchingError: a configuration file cannot be parsed.
        """
        taken: dict[str, str] = {}
        for file in (self.common / "config", self.own / "config.worktree"):
            if not file.is_file():
                continue
            # --file and --no-includes: git parses this one file and obeys nothing in it
            listing = ("config", "--file", str(file.resolve()), "--no-includes", "--null", "--list")
            with tempfile.TemporaryDirectory(prefix="megatron-r3-") as empty:
                listed = run_git(*listing, cwd=Path(empty), git_dir=Path(empty))
            for entry in os.fsdecode(listed.stdout).split("\0"):  # "core.filemode\nNo"
                key, has_value, value = entry.partition("\n")
                value = value.lower() if has_value else "true"  # a name alone means true
                if value in _TAKEN.get(key, ()):
                    taken[key] = value
        return taken


def find_git_dirs(repo: Path) -> GitDirs:
    """The git directories of `repo`, which is the top of a work tree or a bare repository.

    Raises:
        PatchingError: `repo` is neither.
    """
    for folder in (repo / ".git", repo):
        if repo.is_dir() and (dirs := _git_dirs(folder)) is not None:
            return dirs
    raise PatchingError(f"{repo} is no git repository: neither a checkout's top nor a bare one")


def _git_dirs(folder: Path) -> GitDirs | None:
    """The directories of `folder`: a git directory, or a .git file that names one; else None."""
    try:
        if folder.is_file():  # a submodule or worktree has a file: "gitdir: ../repo/worktrees/x"
            link = os.fsdecode(_read_small(folder))
            if not link.startswith("gitdir: "):
                return None
            folder = folder.parent / link.removeprefix("gitdir: ").rstrip("\r\n")
        common = folder
        if (folder / "commondir").is_file():
            common = folder / os.fsdecode(_read_small(folder / "commondir")).rstrip("\r\n")
        whole = (common / "objects").is_dir() and (common / "refs").is_dir()
        return GitDirs(folder, common) if whole and (folder / "HEAD").is_file() else None
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return None


def _read_small(file: Path, most: int = 1 << 16) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(most)


@contextmanager
def clean_room(repo: Path) -> Iterator[Path]:
    """Make a git directory of ours that has the refs, objects and index of `repo`, for reading.

    Raises:
        PatchingError: `repo` is no git repository, or its configuration cannot be parsed.
    """
    dirs = find_git_dirs(repo)
    settings = dirs.settings()
    with tempfile.TemporaryDirectory(prefix="megatron-r3-room-") as temp:
        common, own = Path(temp, "common"), Path(temp, "own")
        common.mkdir()
        own.mkdir()
        lines = ["[core]\nrepositoryformatversion = 1\nbare = false\n"]
        for key, value in settings.items():
            section, _, name = key.partition(".")
            lines.append(f"[{section}]\n{name} = {value}\n")
        (common / "config").write_text("".join(lines))
        (own / "commondir").write_text("../common\n")
        # A linked work tree has refs of its own (refs/bisect); its HEAD is in its own reftable.
        for room, source in ((common, dirs.common), (own, dirs.own)):
            for name in ("objects", "refs", "packed-refs", "reftable"):
                if (source / name).exists():
                    (room / name).symlink_to((source / name).resolve())
        copy_file(dirs.common / "shallow", common / "shallow")
        if (dirs.own / "HEAD").is_symlink():  # as git made it before 2006
            (own / "HEAD").write_text(f"ref: {os.readlink(dirs.own / 'HEAD')}\n")
        else:
            copy_file(dirs.own / "HEAD", own / "HEAD")
        # a split index is two files: `index` names the sharedindex.* that it changes
        for file in (dirs.own / "index", *dirs.own.glob("sharedindex.*")):
            copy_file(file, own / file.name)
        yield own


def copy_file(source: Path, target: Path) -> None:
    """Copy a plain file with its times; a missing file, a pipe or a folder is not copied.

    The time of the index matters: a file that was changed in the second in which the index was
    written may have the size and time noted there, so git hashes every file as young as the index.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISREG(source.stat().st_mode):
            shutil.copy2(source, target)


def read_git(
    repo: Path, *args: str, work_tree: bool = False, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run a git command that only reads, in a clean room of `repo`.

    Args:
        work_tree: whether the command sees the files of the checkout too. A file that has CRLF
            where git's index has LF then counts as unchanged.

    Raises:
        PatchingError: `repo` is no git repository, or (with `check`) git failed.
    """
    # A checkout with core.autocrlf=true has CRLF in its files, and the setting may stand in the
    # user's own configuration, which is not read here. With `input` git turns CRLF into LF before
    # it compares: "a\r\n" equals the committed "a\n", and a file that was committed with CRLF is
    # compared as it is.
    options = ("-c", "core.autocrlf=input") if work_tree else ()
    with clean_room(repo) as room:
        cwd = repo if work_tree else room
        result = run_git(*options, *args, cwd=cwd, git_dir=room, check=False)
    if check and result.returncode:
        message = result.stderr.decode(errors="replace").strip()
        raise PatchingError(f"git {args[0]} failed for {repo}: {message}")
    return result


def is_checkout(root: Path) -> bool:
    """Whether `root` itself, not a folder above it, is the top of a git work tree."""
    # The .git file of a submodule or worktree that was copied alone points to nothing.
    if _git_dirs(root / ".git") is None:
        return False
    try:
        return read_git(root, "rev-parse", "HEAD", check=False).returncode == 0
    except PatchingError:
        return False


def borrow_objects(repo: Path, git_dir: Path) -> None:
    """Let our own `git_dir` read the objects of `repo`; new objects go into `git_dir` alone.

    So commands that need many objects and no index need no clean room: nothing else of `repo`,
    such as notes, grafts or replaced objects, reaches them.
    """
    dirs = find_git_dirs(repo)
    objects = os.fsencode(dirs.path("objects").resolve())
    # The file has one path a line, in C quotes where it is needed: a newline becomes \012.
    quoted = re.sub(rb'["\\\x00-\x1f]', lambda c: b"\\%03o" % ord(c[0]), objects)
    (git_dir / "objects" / "info").mkdir(exist_ok=True)
    (git_dir / "objects" / "info" / "alternates").write_bytes(b'"%s"\n' % quoted)
    copy_file(dirs.path("shallow"), git_dir / "shallow")


def resolve(repo: Path, revision: str) -> str:
    """The id of the commit that `revision` names in `repo`.

    Raises:
        PatchingError: `repo` has no such commit.
    """
    # --end-of-options: a revision that begins with "-" is a name too, never an option
    command = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    parsed = read_git(repo, *command, check=False)
    if parsed.returncode:
        raise PatchingError(f"{repo} has no commit {revision!r}: fetch it there first")
    return parsed.stdout.decode().strip()


def has_commit(repo: Path, commit: str) -> bool:
    """Whether `repo` holds this commit (a shallow clone may not)."""
    return read_git(repo, "cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode == 0
