"""Reads a series: the patches of a release line.

A series is what `git format-patch --full-index --no-renames` writes: numbered patch files that
change, add or delete text files. A patch has the full blob ids of each text file before and after;
a tree is recognised by these ids. A number stands for the same subject in every line; a line that
has no such patch leaves out the number. The first two digits of the number say in which group the
patch is: 0003 is in r3, and 0203 in engine.
"""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.git import PatchingError, names

Blobs = tuple[str | None, ...]
"""The blob ids of one file before, between and after its patches; None where there is no file.

Two patches that change a file give three ids; a patch that adds a file gives (None, id).
"""


@dataclass(frozen=True)
class Group:
    """Patches that go into a tree together, or are left out together; see docs/how-it-works.md.

    Attributes:
        needs: the groups that must be in the tree, too; else this group is left out.
    """

    name: str
    needs: tuple[str, ...] = ()


# The first group has the numbers from 1 to 99, the next those from 100 to 199, and so on.
GROUPS = (
    Group("r3"),
    Group("guests", ("r3",)),
    Group("engine"),
    Group("rl", ("r3", "engine")),
    Group("fixes"),
)
NEEDED = "r3"  # without --groups, a tree to which this group does not apply is refused


# the head of a file's part of a patch:
#   diff --git a/megatron/a.py b/megatron/a.py
#   new file mode 100755                         (only if the file is new or deleted)
#   index 0000...0000..<40 hex> 100644           (zeros: no file; without a mode if the line above
#                                                 has the mode)
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (100644|100755))?")
_CREATED = re.compile(r"(?:new|deleted) file mode (100644|100755)")
_NUMBERED = re.compile(r"(?!0000)\d{4}-", re.ASCII)


@dataclass(frozen=True)
class FileChange:
    """What one patch does to one file.

    Attributes:
        pre, post: the file's blob ids before and after the patch. `pre` is None if the patch adds
            the file, and `post` if it deletes the file.
        executable: whether the file has git's mode 100755.
        diff: the part of the patch that is about this file.
    """

    path: str
    pre: str | None
    post: str | None
    executable: bool
    diff: bytes


@dataclass(frozen=True)
class Patch:
    """One patch; no two of `changes` are about the same file.

    Attributes:
        message: the body of the mail, up to the line that is only '---'.
    """

    file: Path
    subject: str
    message: str
    changes: tuple[FileChange, ...]

    @property
    def number(self) -> int:
        """The number at the beginning of the file's name."""
        return int(self.file.name[:4])

    @property
    def group(self) -> str:
        """The name of the group that the patch is in."""
        return GROUPS[self.number // 100].name

    @property
    def name(self) -> str:
        """How a message calls the patch: its release line and its file."""
        return f"{self.file.parent.name}/{self.file.name}"


@dataclass(frozen=True)
class Series:
    """The patches of a release line in order, and the blob ids of each file that they change."""

    line: str
    patches: tuple[Patch, ...]
    blobs: Mapping[str, Blobs]

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that have patches in this series."""
        return tuple(dict.fromkeys(patch.group for patch in self.patches))

    def place(self, change: FileChange) -> int:
        """The index of the change's blob id `pre` in the file's chain in `blobs`."""
        changes = [each for patch in self.patches for each in patch.changes]
        return [each for each in changes if each.path == change.path].index(change)


def read_series(folder: Path) -> Series:
    """Read the patches of the release line that `folder` is named after.

    Raises:
        PatchingError: the folder has no patches; or a patch is unreadable, has a wrong number, or
            does not start from the files that the patches before it give.
    """
    files = sorted(folder.glob("*.patch"))
    if not files:
        raise PatchingError(f"{folder}: no patches")
    for before, file in zip([None, *files], files, strict=False):
        if not _NUMBERED.match(file.name):
            raise PatchingError(f"{file}: expected a name with four digits first: 0001-*.patch")
        if int(file.name[:4]) >= 100 * len(GROUPS):
            raise PatchingError(f"{file}: no group has the numbers from {file.name[:2]}00 on")
        if before and before.name[:4] == file.name[:4]:
            raise PatchingError(f"{file}: there are two patches with the number {file.name[:4]}")
    patches = tuple(read_patch(file) for file in files)
    blobs: dict[str, list[str | None]] = {}
    for patch in patches:
        for change in patch.changes:
            chain = blobs.setdefault(change.path, [change.pre])
            # No id may come twice: from a file's id follows how many of its patches are applied.
            if chain[-1] != change.pre or change.post in chain:
                raise PatchingError(
                    f"{patch.file}: does not follow the patches before it in {change.path}: "
                    "export the whole series again"
                )
            chain.append(change.post)
    return Series(folder.name, patches, {path: tuple(chain) for path, chain in blobs.items()})


def read_patch(file: Path) -> Patch:
    """Read one patch mail.

    Raises:
        PatchingError: the file is no patch, or renames, changes modes or has binary files.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PatchingError(f"{file}: {error.strerror}") from None
    mail = email.message_from_bytes(data, policy=email.policy.default)
    subject = re.sub(r"^\[PATCH[^]]*\] *", "", str(mail["subject"] or "")).strip()
    # The message may quote a diff: the patch begins after the first line that is only '---'.
    changes = read_changes(data.partition(b"\n---\n")[2], file)
    if not subject or not changes:
        raise PatchingError(f"{file}: not a patch made by git format-patch")
    message = data.partition(b"\n\n")[2].partition(b"\n---\n")[0].decode(errors="replace")
    return Patch(file, subject, message, changes)


def read_changes(diff: bytes, file: Path) -> tuple[FileChange, ...]:
    """The parts of a diff, one for each file that it changes; errors name `file`."""
    parts = re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE)[1:]
    changes = tuple(_file_change(part, file) for part in parts)
    paths = [change.path for change in changes]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise PatchingError(f"{file}: the patch has a file twice: {names(twice)}")
    return changes


def _file_change(diff: bytes, file: Path) -> FileChange:
    head = re.split(rb"^(?:--- |@@ )", diff, maxsplit=1, flags=re.MULTILINE)[0]
    first, *lines = head.decode(errors="replace").splitlines()
    path = _path(first.removeprefix("diff --git "), file)
    ids, executable = None, False
    for line in lines:
        if index := _INDEX.fullmatch(line):
            ids = index.group(1, 2)
            executable |= index[3] == "100755"
        elif created := _CREATED.fullmatch(line):
            executable = created[1] == "100755"
        else:
            raise PatchingError(
                f"{file}: {path}: {line!r} is not supported; "
                "export with git format-patch --full-index --no-renames"
            )
    if ids is None:
        raise PatchingError(f"{file}: {path}: no index line with full blob ids")
    pre, post = (None if set(blob) == {"0"} else blob for blob in ids)
    return FileChange(path, pre, post, executable, diff)


def _path(pair: str, file: Path) -> str:
    """The path in "a/PATH b/PATH". A rename, or a path that leaves the tree, is refused.

    Example: "a/x b/x" has 7 characters, so the path is pair[2:3].
    """
    path = pair[2 : len(pair) // 2]
    parts = path.split("/")
    if pair != f"a/{path} b/{path}" or not path or {"", ".", "..", ".git"} & set(parts):
        raise PatchingError(
            f"{file}: cannot patch {pair!r}: expected one plain path in the tree, no rename"
        )
    return path
