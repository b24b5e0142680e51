"""Git that gives the same result on every machine.

The user's configuration, attributes, hooks and environment are out of reach, and a repository is
never searched for: below another repository's work tree `git apply` prints "Skipped patch", exits
0 and changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from megatron_r3.patching.errors import PatchingError

__all__ = [
    "blob_id",
    "borrow_objects",
    "commits_since",
    "dirty_files",
    "find_git_dir",
    "git_path",
    "has_commit",
    "is_checkout",
    "resolve",
    "run_git",
]

_PINS = {
    "am.threeWay": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgsign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.fsync": "none",  # what it writes is temporary, or is fetched again
    "core.hooksPath": os.devnull,
    "gc.auto": "0",
    "init.defaultBranch": "main",
    "maintenance.auto": "false",
    "safe.directory": "*",  # the owner may be another; nothing of a repository is run
}
_ENVIRONMENT = {
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_DEFAULT_HASH": "sha1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",  # a commit is what its id says
    "GIT_OPTIONAL_LOCKS": "0",  # looking at a checkout must not write its index
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",  # the messages are parsed
}


def blob_id(data: bytes) -> str:
    """The id that git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def run_git(
    *args: str,
    cwd: Path,
    git_dir: Path | None = None,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `cwd`, which is the top of the work tree of `git_dir`.

    Raises:
        PatchingError: git is not installed, or (with `check`) it failed; the message is git's.
    """
    full_env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    full_env |= _ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent)} | (env or {})
    if git_dir is not None:
        # named, not discovered: a path with ':' cannot be a ceiling
        full_env |= {"GIT_DIR": str(git_dir.absolute()), "GIT_WORK_TREE": str(cwd.absolute())}
    pins = [word for key, value in _PINS.items() for word in ("-c", f"{key}={value}")]
    try:
        result = subprocess.run(
            ["git", *pins, *args], cwd=cwd, env=full_env, input=stdin, capture_output=True
        )
    except FileNotFoundError:
        raise PatchingError("git is not installed, or not on PATH") from None
    if check and result.returncode:
        what = result.stderr.decode(errors="replace").strip()
        raise PatchingError(f"git {args[0]} failed in {cwd}: {what}")
    return result


def is_checkout(root: Path) -> bool:
    """Whether `root` itself, not a folder above it, is the top of a git work tree."""
    dot_git = root / ".git"
    if not dot_git.exists():
        return False
    # the .git file of a submodule or worktree that was copied alone points nowhere
    return run_git("rev-parse", "HEAD", cwd=root, git_dir=dot_git, check=False).returncode == 0


def dirty_files(root: Path) -> list[str]:
    """The tracked files of the checkout `root` that differ from its HEAD, staged or not."""
    status = run_git(
        "status",
        *("--porcelain=v1", "-z", "--no-renames"),
        *("--untracked-files=no", "--ignore-submodules=all"),
        cwd=root,
        git_dir=root / ".git",
    )
    return [os.fsdecode(entry[3:]) for entry in status.stdout.split(b"\0") if entry]


def find_git_dir(repo: Path) -> Path:
    """The git directory of `repo`, which is the top of a work tree or a bare repository.

    Raises:
        PatchingError: it is neither.
    """
    if repo.is_dir():
        for folder in (repo / ".git", repo):
            found = run_git("rev-parse", "--git-dir", cwd=repo, git_dir=folder, check=False)
            if folder.exists() and found.returncode == 0:
                return folder
    raise PatchingError(f"{repo} is no git repository: neither a checkout's top nor a bare one")


def git_path(repo: Path, name: str) -> Path:
    """Where `repo` keeps its file of this name, such as objects or rebase-apply."""
    found = run_git("rev-parse", "--git-path", name, cwd=repo, git_dir=find_git_dir(repo))
    return repo.absolute() / os.fsdecode(found.stdout.removesuffix(b"\n"))


def borrow_objects(repo: Path, borrower: Path) -> None:
    """Let the git directory `borrower` read the objects of `repo`; it writes none of its own there.

    A repository made for one job has no configuration, attributes, notes or replaced objects, so
    what it says of another one's commits is the same for everybody.
    """
    objects = git_path(repo, "objects").resolve()
    (borrower / "objects" / "info").mkdir(exist_ok=True)
    (borrower / "objects" / "info" / "alternates").write_bytes(os.fsencode(objects) + b"\n")
    if (shallow := git_path(repo, "shallow")).exists():
        (borrower / "shallow").write_bytes(shallow.read_bytes())


def resolve(repo: Path, revision: str) -> str:
    """The id of the commit that `revision` names in `repo`.

    Raises:
        PatchingError: there is none.
    """
    found = run_git(
        *("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"),
        cwd=repo,
        git_dir=find_git_dir(repo),
        check=False,
    )
    if found.returncode:
        raise PatchingError(f"{repo} has no commit {revision!r}: fetch it there first")
    return found.stdout.decode().strip()


def has_commit(repo: Path, commit: str) -> bool:
    """Whether `repo` holds this commit (a shallow clone may not)."""
    return (
        run_git(
            *("cat-file", "-e", f"{commit}^{{commit}}"),
            cwd=repo,
            git_dir=find_git_dir(repo),
            check=False,
        ).returncode
        == 0
    )


def commits_since(repo: Path, base: str, path: str, head: str = "HEAD") -> list[str]:
    """The commits of `repo` after `base` and up to `head` that touched `path`, newest first."""
    log = run_git(
        *("log", "--oneline", "--no-decorate", "--no-color", f"{base}..{head}", "--", path),
        cwd=repo,
        git_dir=find_git_dir(repo),
    )
    return log.stdout.decode(errors="replace").splitlines()
