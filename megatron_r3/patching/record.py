"""The record of a tree: how an unreleased tree was patched, and when a tree was checked.

versions.toml knows the files of releases. For a tree between two releases the same facts, the chain
of blob ids of each file, are worked out when it is patched, and are written into the tree:

    .git/megatron-r3.json     in a checkout, inside the git directory of this work tree: git does
                              not see the file, and neither git clean nor git stash removes it
    .megatron-r3.json         at the top of any other tree

A copy of the whole folder takes the record along; a git clone does not. The record has a digest of
itself, so that a record which was edited by hand is refused as a whole.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_r3.data.digest import digest
from megatron_r3.patching.cleanroom import find_git_dirs
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.series import Blobs, Series

NAME = "megatron-r3.json"
_FORMAT = 2
_MOST_BYTES = 1 << 20  # a record has some 5 kB


@dataclass(frozen=True)
class Unreleased:
    """What versions.toml would say of a tree that it does not list.

    Attributes:
        line: the release line whose patches fit.
        near: the known tree of that line with the fewest other files.
        differ: the files of the series that are not those of `near`.
        commit: HEAD at that time; empty for a tree that is no checkout.
        series: the digest of the patches, from `series_digest`.
        version: the version of megatron-r3 that had those patches.
        absent: files of the series that the tree lacks, as `near` does.
        blobs: the chain of each other file of the series.
        groups: the groups whose patches are in it; `series` is of these patches alone.
    """

    line: str
    near: str
    differ: tuple[str, ...]
    commit: str
    series: str
    version: str
    absent: tuple[str, ...]
    blobs: Mapping[str, Blobs]
    groups: tuple[str, ...]

    @property
    def name(self) -> str:
        """How messages call the tree: "14346b651c68, close to core_v0.19.0 (1 file differs)"."""
        num = len(self.differ)
        differ = f"{num} file differs" if num == 1 else f"{num} files differ"
        what = self.commit[:12] or "unreleased"
        return f"{what}, close to {self.near} ({differ})"


@dataclass(frozen=True)
class CheckedOn:
    """A `make check` that passed.

    Attributes:
        date: the day, in UTC: 2026-11-22.
        files: what `files_digest` gave for the tree that was checked.
        version: the version of megatron-r3 that checked it.
        not_run: the checks for which there was nothing to run, such as tests that are not there.
    """

    date: str
    files: str
    version: str
    not_run: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """The contents of the file; a tree of versions.toml has `tree` None."""

    tree: Unreleased | None = None
    checked: CheckedOn | None = None


def record_path(root: Path) -> Path:
    """Where the record of `root` is, or would be written."""
    try:
        # the git directory of this work tree, which `git worktree add` makes one for each
        inside = find_git_dirs(root).own.resolve() / NAME if (root / ".git").exists() else None
    except PatchingError:  # a .git that points to nothing
        inside = None
    outside = root / f".{NAME}"
    # A tree that became a checkout later keeps the record that it has.
    return outside if inside is None or (outside.exists() and not inside.exists()) else inside


def read_record(root: Path) -> Record | None:
    """The record of `root`; None where there is none.

    Raises:
        PatchingError: the file is damaged, was edited, or is of a newer megatron-r3.
    """
    path = record_path(root)
    try:
        # O_NOFOLLOW, O_NONBLOCK: a link is refused, and a pipe does not wait for a writer
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(opened, "rb") as file:
            info = os.fstat(opened)
            if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_BYTES:
                raise _damaged(path, "not a small plain file")
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:  # a folder too
        raise _damaged(path, error.strerror or str(error)) from None
    try:
        return _parse(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from None


def _damaged(path: Path, why: str) -> PatchingError:
    return PatchingError(
        f"{path} does not say how the tree was patched, because it is damaged or was edited "
        f"({why}): bring it back; or bring back the unpatched files (git checkout -- megatron), "
        "remove the record, and apply again"
    )


def _parse(data: Any) -> Record:
    if not isinstance(data, dict) or data.get("format") not in (1, _FORMAT):
        raise ValueError(f"its format is not {_FORMAT}")
    if data.get("digest") != _digest(data):
        raise ValueError("its digest is another one")
    tree, checked = data["tree"], data["checked"]
    if tree is not None:
        blobs = {path: tuple(chain) for path, chain in tree["blobs"].items()}
        # format 1 knew no groups: its patches are not those of today, and `tree.py` says so
        lists = {key: tuple(tree.get(key, ())) for key in ("differ", "absent", "groups")}
        tree = Unreleased(**{**tree, **lists, "blobs": blobs})
    if checked is not None:
        checked = CheckedOn(**{**checked, "not_run": tuple(checked["not_run"])})
    return Record(tree, checked)


def _digest(data: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in data.items() if key != "digest"}
    return digest(json.dumps(rest, sort_keys=True))


def write_record(root: Path, record: Record) -> None:
    """Write the record of `root`, whole or not at all; a record that says nothing is removed.

    Raises:
        PatchingError: the file cannot be written.
    """
    if record == Record():
        remove_record(root)
        return
    data: dict[str, Any] = {
        "about": "written by megatron-r3, which reads it; megatron-r3 revert removes it",
        "format": _FORMAT,
        **asdict(record),
    }
    data = json.loads(json.dumps(data))  # tuples are lists from here on, as they are in the file
    data["digest"] = _digest(data)
    path = record_path(root)
    # The name is the same in every run: what a killed run has left is written over by the next.
    waiting = path.with_name(f"{path.name}-new")
    try:
        waiting.unlink(missing_ok=True)
        # O_EXCL: if somebody puts a link in this place now, it is not followed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(waiting, flags, 0o644), "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
        os.replace(waiting, path)
    except OSError as error:
        with suppress(OSError):
            waiting.unlink(missing_ok=True)
        raise PatchingError(f"cannot write {path}: {error.strerror or error}") from error


def remove_record(root: Path) -> None:
    """Remove the record of `root`, if it has one.

    Raises:
        PatchingError: the file cannot be removed.
    """
    path = record_path(root)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise PatchingError(f"cannot remove {path}: {error.strerror or error}") from error


def series_digest(series: Series) -> str:
    """What tells two versions of a series apart: every byte that the patches change."""
    diffs = [change.diff for patch in series.patches for change in patch.changes]
    return digest(b"".join(b"%d " % len(diff) + diff for diff in diffs))


def files_digest(root: Path) -> str:
    """A digest of the files that a check runs: every Python file of `megatron/`, and the script."""
    texts = []
    for path in sorted([*(root / "megatron").rglob("*.py"), root / "pretrain_gpt.py"]):
        if path.is_file():
            data = path.read_bytes()
            texts.append(os.fsencode(f"{path.relative_to(root).as_posix()}\n{len(data)}\n") + data)
    return digest(b"".join(texts))
