"""The record of a tree: how an unreleased tree was patched, and when a tree was checked.

versions.toml knows the files of releases. For any other tree, and for a release that gets only some
groups, `apply` writes a record of what it does: one diff, with the blob ids of each file before and
after. The diff is enough to finish an apply that was killed, and to take the patches back with a
later megatron-r3 that has other patches. The record lies in the tree:

    .git/megatron-r3.json     in a checkout, inside the git directory of this work tree: git does
                              not see the file, and neither git clean nor git stash removes it
    .megatron-r3.json         at the top of any other tree

A copy of the folder takes the record along, unless the folder is a submodule or a linked work tree:
its git directory lies elsewhere. A git clone has no record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_r3.data.digest import digest
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.series import Patch, Series, read_changes
from megatron_r3.patching.tree_files import read_file, replace_files

NAME = "megatron-r3.json"
_FORMAT = 3


@dataclass(frozen=True)
class Unreleased:
    """What was done to a tree that versions.toml does not list, or that got only some groups.

    Attributes:
        line: the release line of the patches.
        near: the known tree of that line from which the fewest files differ.
        differ: the files that the patches change and that, unpatched, are not those of `near`.
        absent: files of the patches that both `near` and the tree lack.
        groups, left_out: the groups of patches that are in the tree, and the line's other groups.
        num_patches: how many patches `groups` have.
        series: the digest of the patches of `groups`, from `series_digest`.
        version: the version of megatron-r3 that applied the patches.
        diff: from the unpatched files to the patched files. A byte that is not UTF-8 is written as
            Python's surrogate, for example "\\udcff" for the byte 0xff.
    """

    line: str
    near: str
    differ: tuple[str, ...]
    absent: tuple[str, ...]
    groups: tuple[str, ...]
    left_out: tuple[str, ...]
    num_patches: int
    series: str
    version: str
    diff: str

    @property
    def name(self) -> str:
        """How messages call the tree, for example "close to core_v0.19.0 (1 file differs)"."""
        num = len(self.differ)
        differ = f"{num} file differs" if num == 1 else f"{num} files differ"
        return f"close to {self.near} ({differ})" if num else self.near

    @property
    def num_files(self) -> int:
        """How many files the diff changes."""
        return len(self.patch(Path(NAME)).changes)

    def patch(self, file: Path) -> Patch:
        """The diff as one patch; errors name `file` as its source."""
        diff = self.diff.encode(errors="surrogateescape")
        return Patch(file, "what this record says", "", read_changes(diff, file))


@dataclass(frozen=True)
class CheckedOn:
    """A `make check` that passed.

    Attributes:
        date: the day, in UTC: 2026-11-22.
        files: what `files_digest` gave for the tree that was checked.
        version: the version of megatron-r3 that checked it.
        not_run: the checks for which the tree had nothing to run, for example no tests.
    """

    date: str
    files: str
    version: str
    not_run: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """The contents of a record file; `tree` is None for a release that has all groups."""

    tree: Unreleased | None = None
    checked: CheckedOn | None = None


def record_path(root: Path) -> Path:
    """Where the record of `root` is, or would be written."""
    outside, git = root / f".{NAME}", root / ".git"
    if git.is_file():  # `git worktree add` and submodules: "gitdir: ../repo/.git/worktrees/name"
        git = root / git.read_text(errors="replace").removeprefix("gitdir: ").strip()
    inside = git.resolve() / NAME if (git / "HEAD").is_file() else outside
    # A tree that became a checkout after it was patched keeps the record outside .git.
    return outside if outside.exists() and not inside.exists() else inside


def read_record(root: Path) -> Record | None:
    """The record of `root`; None where there is none.

    Raises:
        PatchingError: the file is damaged, or has a format that this megatron-r3 does not read.
    """
    path = record_path(root)
    try:
        if (data := read_file(path.parent, path.name).data) is None:
            return None
        return _parse(json.loads(data), path)
    # PatchingError and errors of JSON are ValueErrors
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path, str(error) or type(error).__name__) from None


def damaged(path: Path, why: str) -> PatchingError:
    """The error about a record that cannot be used."""
    return PatchingError(
        f"{path} does not say how the tree was patched: it is damaged, was edited, or has another "
        f"format ({why}): restore this file; or restore the unpatched files (git checkout -- "
        f"megatron), remove {path.name} and the files that patches added, and apply again"
    )


def _parse(data: Any, path: Path) -> Record:
    if data["format"] != _FORMAT:
        raise ValueError(f"its format is {data['format']!r}, and this megatron-r3 reads {_FORMAT}")
    tree, checked = (_with_tuples(data[key]) for key in ("tree", "checked"))
    record = Record(Unreleased(**tree) if tree else None, CheckedOn(**checked) if checked else None)
    if record.tree is not None and not record.tree.patch(path).changes:
        raise ValueError("its diff is empty")
    return record


def _with_tuples(fields: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a JSON object, each list as a tuple; {} for null."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in (fields or {}).items()}


def write_record(root: Path, record: Record) -> None:
    """Write the record of `root`, whole or not at all; an empty `Record()` removes the file.

    Raises:
        PatchingError: the file cannot be written.
    """
    about = "written by megatron-r3, which reads it; megatron-r3 revert removes it"
    text = json.dumps({"about": about, "format": _FORMAT, **asdict(record)}, indent=1) + "\n"
    path = record_path(root)
    data = None if record == Record() else text.encode()
    replace_files(path.parent, {path.name: data}, {path.name: read_file(path.parent, path.name)})


def remove_record(root: Path) -> None:
    """Remove the record of `root`, if it has one; errors as `write_record`."""
    write_record(root, Record())


def series_digest(series: Series, groups: Collection[str] = ()) -> str:
    """A digest of the diffs of a series' patches; with `groups` only of the patches in these."""
    patches = [patch for patch in series.patches if not groups or patch.group in groups]
    diffs = [change.diff for patch in patches for change in patch.changes]
    return digest(b"".join(b"%d " % len(diff) + diff for diff in diffs))


def files_digest(root: Path) -> str:
    """A digest of what a check runs: every Python file of `megatron/`, and pretrain_gpt.py."""
    texts = []
    for path in sorted([*(root / "megatron").rglob("*.py"), root / "pretrain_gpt.py"]):
        if path.is_file():
            data = path.read_bytes()
            texts.append(os.fsencode(f"{path.relative_to(root).as_posix()}\n{len(data)}\n") + data)
    return digest(b"".join(texts))
