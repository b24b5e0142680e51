"""Runs git so that it gives the same result on every machine.

The user's configuration, attributes, hooks and GIT_* variables have no effect. Apply, revert and
status run git in a temporary folder, never in the tree: a repository's configuration can name
programs, and git would run them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

# Settings that git would otherwise take from a configuration file, or with a file of the user as
# their default: core.attributesFile is by default ~/.config/git/attributes.
_PINS = {
    "am.threeWay": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgsign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.fsync": "none",  # what is written is temporary, or can be fetched again
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
    "GIT_LITERAL_PATHSPECS": "1",  # a path is the name of a file, never a pattern
    "GIT_NO_REPLACE_OBJECTS": "1",  # `git replace` would show another commit under the same id
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` must not refresh the index of the user's checkout
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",  # git's messages are parsed, so they must be English
}


class PatchingError(ValueError):
    """A tree, a patch or a record that cannot be used, or a program that failed."""


def names(items: Sequence[str], most: int = 5) -> str:
    """One line of text: the first `most` items, then how many more there are."""
    listed = ", ".join(items[:most])
    return listed if len(items) <= most else f"{listed} and {len(items) - most} more"


def blob_id(data: bytes) -> str:
    """The id that git gives to a file of these bytes, as `git hash-object` prints it.

    Example: b"hi\\n" is hashed as b"blob 3\\0hi\\n".
    """
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def run_git(
    folder: Path,
    *args: str,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`; git looks for no repository above it.

    Raises:
        PatchingError: git is not installed, or (with `check`) it failed; the message is git's.
    """
    full_env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    # If "." were on PATH, a program called `git` in `folder` would be run.
    full_env["PATH"] = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))
    # If `folder` is inside another repository's work tree, `git apply` without this ceiling prints
    # "Skipped patch", changes nothing and exits with 0.
    full_env |= _ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    pins = [word for key, value in _PINS.items() for word in ("-c", f"{key}={value}")]
    try:
        result = subprocess.run(
            ["git", *pins, *args],
            cwd=folder,
            env=full_env | (env or {}),
            input=stdin,
            capture_output=True,
        )
    except FileNotFoundError:
        raise PatchingError("git is not installed, or not on PATH") from None
    if check and result.returncode:
        message = result.stderr.decode(errors="replace").strip()
        raise PatchingError(f"git {args[0]} failed in {folder}: {message}")
    return result


def git(folder: Path, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> str:
    """Run git as `run_git` does, and return what it prints, without the last line end."""
    return os.fsdecode(run_git(folder, *args, stdin=stdin, env=env).stdout).removesuffix("\n")


def new_repository(folder: Path) -> Path:
    """Make an empty git repository in `folder`, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--template=")  # no sample hooks, no info/exclude
    return folder
