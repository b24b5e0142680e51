"""Reading a repository that somebody else made, without running anything of it.

Git does what a repository's configuration says, and much of that runs programs: `git status` runs
clean filters and file system monitors; a partial clone fetches a missing object with the program
that its remote names. So git never runs in such a repository. Git runs in a clean room, which is
a temporary git directory of ours. Its configuration is ours, and it has no hooks and no
attributes. It takes from the repository what nothing can be run by: refs and objects (links), the
index (a copy), and the few settings in `_TAKEN`.
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

# settings that say how the work tree and the files of the git directory are kept; nothing is
# written to the room's configuration but these names, with one of these values
_TAKEN = {
    "core.checkstat": ("default", "minimal"),
    "core.filemode": ("true", "false"),
    "core.ignorecase": ("true", "false"),
    "core.precomposeunicode": ("true", "false"),
    "core.symlinks": ("true", "false"),
    "core.trustctime": ("true", "false"),
    "extensions.objectformat": ("sha1", "sha256"),
    "extensions.refstorage": ("files", "reftable"),
}
_TRUE, _FALSE = ("yes", "on", "1"), ("no", "off", "0", "")
# of one work tree; everything else is shared by all work trees of a repository
_OWN = re.compile(r"index|rebase-apply|rebase-merge|[A-Z_]*HEAD")


@dataclass(frozen=True)
class _GitDirs:
    """The git directory of one work tree, and the one that it shares (often the same)."""

    own: Path
    common: Path

    def config(self) -> dict[str, str]:
        """The settings in `_TAKEN` that the repository has, and no others.

        Raises:
            PatchingError: the file cannot be parsed.
        """
        found: dict[str, str] = {}
        for file in (self.common / "config", self.own / "config.worktree"):
            if not file.is_file():
                continue
            # --file: that file alone, of no repository; what it includes is not read
            listing = ("config", "--file", str(file.resolve()), "--no-includes", "--null", "--list")
            with tempfile.TemporaryDirectory(prefix="megatron-r3-") as empty:
                listed = run_git(*listing, cwd=Path(empty), git_dir=Path(empty))
            for entry in os.fsdecode(listed.stdout).split("\0"):
                key, equals, value = entry.partition("\n")
                value = value.lower() if equals else "true"  # a name alone means true
                if "true" in _TAKEN.get(key, ()):
                    value = "true" if value in _TRUE else "false" if value in _FALSE else value
                if value in _TAKEN.get(key, ()):
                    found[key] = value
        return found


def _git_dirs(folder: Path) -> _GitDirs | None:
    """What `folder`, a git directory or the .git file that names one, is; None: it is neither."""
    try:
        if folder.is_file():
            text = os.fsdecode(_read_small(folder))
            if not text.startswith("gitdir: "):
                return None
            folder = folder.parent / text.removeprefix("gitdir: ").rstrip("\r\n")
        common = folder
        if (folder / "commondir").is_file():
            common = folder / os.fsdecode(_read_small(folder / "commondir")).rstrip("\r\n")
        there = (common / "objects").is_dir() and (common / "refs").is_dir()
        return _GitDirs(folder, common) if there and (folder / "HEAD").is_file() else None
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return None


def _read_small(file: Path, most: int = 1 << 16) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(most)


@contextmanager
def clean_room(repo: Path) -> Iterator[Path]:
    """A git directory of ours that has the refs, objects and index of `repo`, for reading.

    Raises:
        PatchingError: `repo` is no git repository, or its configuration cannot be parsed.
    """
    dirs = _git_dirs(find_git_dir(repo))
    assert dirs is not None  # find_git_dir looked
    config = dirs.config()
    with tempfile.TemporaryDirectory(prefix="megatron-r3-room-") as temp:
        common = Path(temp, "common")
        common.mkdir()
        lines = ["[core]\nrepositoryformatversion = 1\nbare = false\n"]
        lines += [f"[{k.split('.')[0]}]\n{k.split('.')[1]} = {v}\n" for k, v in config.items()]
        (common / "config").write_text("".join(lines))
        for name in ("objects", "refs", "packed-refs", "reftable"):
            if (dirs.common / name).exists():
                (common / name).symlink_to((dirs.common / name).resolve())
        _copy(dirs.common / "shallow", common / "shallow")
        room = common
        if dirs.own.resolve() != dirs.common.resolve():
            (common / "HEAD").write_text("ref: refs/heads/none\n")
            room = Path(temp, "own")
            room.mkdir()
            (room / "commondir").write_text("../common\n")
            for name in ("refs", "reftable"):
                if (dirs.own / name).exists():
                    (room / name).symlink_to((dirs.own / name).resolve())
        if (dirs.own / "HEAD").is_symlink():  # as git made it before 2006
            (room / "HEAD").write_text(f"ref: {os.readlink(dirs.own / 'HEAD')}\n")
        else:
            _copy(dirs.own / "HEAD", room / "HEAD")
        _copy(dirs.own / "index", room / "index")
        for shared in dirs.own.glob("sharedindex.*"):  # what a split index refers to
            _copy(shared, room / shared.name)
        yield room


def _copy(source: Path, target: Path) -> None:
    """Copy a plain file, if there is one, with its time.

    Git hashes a file again that was changed in the moment in which the index was written, so the
    time of the index is part of it. A copy, not a link: git may touch a shared index that it reads.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISREG(source.stat().st_mode):
            shutil.copy2(source, target)


def read_git(
    repo: Path, *args: str, work_tree: bool = False, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run a git command that only reads, in a clean room of `repo`.

    Args:
        work_tree: let it see the files of the checkout too.

    Raises:
        PatchingError: `repo` is no git repository, or (with `check`) git failed.
    """
    with clean_room(repo) as room:
        cwd = repo if work_tree else room
        result = run_git(*args, cwd=cwd, git_dir=room, check=False)
    if check and result.returncode:
        what = result.stderr.decode(errors="replace").strip()
        raise PatchingError(f"git {args[0]} failed for {repo}: {what}")
    return result


def is_checkout(root: Path) -> bool:
    """Whether `root` itself, not a folder above it, is the top of a git work tree."""
    # the .git file of a submodule or worktree that was copied alone points nowhere
    if _git_dirs(root / ".git") is None:
        return False
    try:
        return read_git(root, "rev-parse", "HEAD", check=False).returncode == 0
    except PatchingError:
        return False


def find_git_dir(repo: Path) -> Path:
    """The git directory of `repo`, which is the top of a work tree or a bare repository.

    Raises:
        PatchingError: it is neither.
    """
    for folder in (repo / ".git", repo):
        if repo.is_dir() and _git_dirs(folder) is not None:
            return folder
    raise PatchingError(f"{repo} is no git repository: neither a checkout's top nor a bare one")


def setting(repo: Path, name: str) -> str:
    """What `repo` has for a setting of `_TAKEN`, such as core.filemode; "" where it has none."""
    dirs = _git_dirs(find_git_dir(repo))
    return dirs.config().get(name, "") if dirs else ""


def git_path(repo: Path, name: str) -> Path:
    """Where `repo` keeps its file of this name, such as objects or rebase-apply."""
    dirs = _git_dirs(find_git_dir(repo))
    assert dirs is not None
    return (dirs.own if _OWN.fullmatch(name) else dirs.common).resolve() / name


def borrow_objects(repo: Path, borrower: Path) -> None:
    """Let the git directory `borrower` read the objects of `repo`; it writes none of its own there.

    A repository made for one job has no configuration, attributes, notes or replaced objects, so
    what it says of another one's commits is the same for everybody.
    """
    objects = os.fsencode(git_path(repo, "objects").resolve())
    # one path a line, so quoted: a newline in it is \012
    quoted = re.sub(rb'["\\\x00-\x1f]', lambda c: b"\\%03o" % ord(c[0]), objects)
    (borrower / "objects" / "info").mkdir(exist_ok=True)
    (borrower / "objects" / "info" / "alternates").write_bytes(b'"%s"\n' % quoted)
    _copy(git_path(repo, "shallow"), borrower / "shallow")


def resolve(repo: Path, revision: str) -> str:
    """The id of the commit that `revision` names in `repo`.

    Raises:
        PatchingError: there is none.
    """
    what = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    found = read_git(repo, *what, check=False)
    if found.returncode:
        raise PatchingError(f"{repo} has no commit {revision!r}: fetch it there first")
    return found.stdout.decode().strip()


def has_commit(repo: Path, commit: str) -> bool:
    """Whether `repo` holds this commit (a shallow clone may not)."""
    return read_git(repo, "cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode == 0


def commits_since(repo: Path, base: str, path: str, head: str = "HEAD") -> list[str]:
    """The commits of `repo` after `base` and up to `head` that touched `path`, newest first."""
    what = ("log", "--oneline", "--no-decorate", "--no-color", f"{base}..{head}", "--", path)
    return read_git(repo, *what).stdout.decode(errors="replace").splitlines()
