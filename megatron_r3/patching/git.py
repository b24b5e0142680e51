"""Git that gives the same result on every machine.

The user's configuration, attributes, hooks and environment are out of reach, and a repository is
never searched for: below another repository's work tree `git apply` prints "Skipped patch", exits
0 and changes nothing. Git runs only in git directories that this project made; a repository of
somebody else is read through `cleanroom`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

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


def blob_id(data: bytes, algorithm: str = "sha1") -> str:
    """The id that git gives a file of these bytes; `algorithm` may be sha256 too."""
    return hashlib.new(
        algorithm, b"blob %d\0" % len(data) + data, usedforsecurity=False
    ).hexdigest()


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
    # with "." on PATH a program `git` that lies in the tree would be run
    full_env["PATH"] = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))
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


# What the user of the patching tool is told: every refusal is a PatchingError.


class PatchingError(ValueError):
    """A refusal; the message names the file and what to do. The tree is as it was before."""


def names(items: Sequence[str], most: int = 5) -> str:
    """The items as one line of text: at most `most` of them, then how many more there are."""
    text = ", ".join(items[:most])
    return text if len(items) <= most else f"{text} and {len(items) - most} more"
