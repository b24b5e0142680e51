"""The patches of one release line: how they are read, what rules they keep, how they are numbered.

A series is what `git format-patch --full-index --no-renames` writes: numbered files that change,
add or delete text files. The full blob ids in a patch say which file it starts from and which file
it gives; a tree is recognised by those ids. The number of a patch is the number of its concern,
which is the same in every line; a line that does not need a concern has a gap there. Its hundred
says which group the patch is in: 0003 is of r3, 0203 of engine.
"""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.git import PatchingError, names

MOST_CHANGED = 100
"""How many lines a patch may add and remove, together; more is more than one concern."""

Blobs = tuple[str | None, ...]
"""The blob ids of one file before, between and after its patches; None where there is no file.

Two patches that change a file give three ids; a patch that adds a file gives (None, id).
"""


@dataclass(frozen=True)
class Group:
    """Patches that go into a tree together, or are left out together; see docs/how-it-works.md.

    Attributes:
        needs: the groups without which they are left out.
    """

    name: str
    needs: tuple[str, ...] = ()


# The first has the numbers from 1 to 99, the next those from 100 to 199, and so on.
GROUPS = (
    Group("r3"),
    Group("guests", ("r3",)),
    Group("engine"),
    Group("rl", ("r3", "engine")),
    Group("fixes"),
)
NEEDED = "r3"  # a tree to which this group does not apply is refused


# the head of a file's part of a patch:
#   diff --git a/megatron/a.py b/megatron/a.py
#   new file mode 100755                         (only where the file is new or deleted)
#   index 0000...0000..<40 hex> 100644           (zeros: no file; the mode is missing where it is
#                                                 in the line above)
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (100644|100755))?")
_CREATED = re.compile(r"(?:new|deleted) file mode (100644|100755)")
_NUMBERED = re.compile(r"(?!0000)\d{4}-", re.ASCII)
# what format-patch ends a mail with by default: "-- " and git's version, for example 2.39.5
_SIGNATURE = re.compile(rb"\n-- \n\d[^\n]*\n+\Z")

_OFF = re.compile(r"^Off \(the default\):[ \n]*\S")
_FORWARDED = re.compile(r"^Forwarded: *\S", re.M)


@dataclass(frozen=True)
class FileChange:
    """What one patch does to one file.

    Attributes:
        pre, post: blob ids before and after; None where the patch adds or deletes the file.
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
    """One patch; each file is in it once.

    Attributes:
        message: the body of the mail, up to the line that is only '---'.
    """

    file: Path
    subject: str
    message: str
    changes: tuple[FileChange, ...]

    @property
    def number(self) -> int:
        """The number of the patch's concern, from the name of its file."""
        return int(self.file.name[:4])

    @property
    def group(self) -> str:
        """The name of the group that the patch is in."""
        return GROUPS[self.number // 100].name

    @property
    def name(self) -> str:
        """How a message calls the patch: its release line and its file."""
        return f"{self.file.parent.name}/{self.file.name}"

    @property
    def num_changed(self) -> int:
        """How many lines the patch adds and removes, together."""
        # The signature begins with "-", and so would count as a line that is removed.
        hunks = (_SIGNATURE.sub(b"", change.diff.partition(b"\n@@")[2]) for change in self.changes)
        return sum(line[:1] in (b"+", b"-") for hunk in hunks for line in hunk.split(b"\n"))


@dataclass(frozen=True)
class Series:
    """The patches of a release line in order, and the chain of blobs of each file."""

    line: str
    patches: tuple[Patch, ...]
    blobs: Mapping[str, Blobs]

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that have patches here."""
        return tuple(dict.fromkeys(patch.group for patch in self.patches))

    def part(self, groups: Collection[str]) -> Series:
        """The patches of these groups alone.

        A chain of blobs is then as long as it must be, and no more is known of it: the ids between
        the patches of a file are others where a patch between them is left out. Those of a tree are
        in its record.
        """
        patches = tuple(patch for patch in self.patches if patch.group in groups)
        blobs: dict[str, Blobs] = {}
        for change in (change for patch in patches for change in patch.changes):
            blobs[change.path] = (*blobs.get(change.path, (change.pre,)), change.post)
        return Series(self.line, patches, blobs)

    def place(self, change: FileChange) -> int:
        """Where in the file's chain of blobs the change starts; it ends one place later."""
        changes = [each for patch in self.patches for each in patch.changes]
        return [each for each in changes if each.path == change.path].index(change)


def read_series(folder: Path) -> Series:
    """Read the patches of the release line that `folder` is named after.

    Raises:
        PatchingError: naming the patch that is missing, unreadable or does not follow the others.
    """
    files = sorted(folder.glob("*.patch"))
    if not files:
        raise PatchingError(f"{folder}: no patches")
    for before, file in zip([None, *files], files, strict=False):
        if not _NUMBERED.match(file.name):
            raise PatchingError(f"{file}: the patches are numbered; expected 0001-*.patch and on")
        if int(file.name[:4]) >= 100 * len(GROUPS):
            raise PatchingError(f"{file}: no group has the numbers from {file.name[:2]}00 on")
        if before and before.name[:4] == file.name[:4]:
            raise PatchingError(f"{file}: there are two patches of the number {file.name[:4]}")
    patches = tuple(read_patch(file) for file in files)
    blobs: dict[str, list[str | None]] = {}
    for patch in patches:
        for change in patch.changes:
            chain = blobs.setdefault(change.path, [change.pre])
            # No id may come twice: a file's id must say how many of its patches are applied.
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
    diffs = re.split(rb"^(?=diff --git )", data.partition(b"\n---\n")[2], flags=re.MULTILINE)[1:]
    if not subject or not diffs:
        raise PatchingError(f"{file}: not a patch made by git format-patch")
    changes = tuple(_file_change(diff, file) for diff in diffs)
    paths = [change.path for change in changes]
    if len(set(paths)) < len(paths):
        raise PatchingError(f"{file}: a file is in it twice: {names(sorted(paths))}")
    message = data.partition(b"\n\n")[2].partition(b"\n---\n")[0].decode(errors="replace")
    return Patch(file, subject, message, changes)


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

    Both halves are equally long: "a/x b/x" has 7 characters, and pair[2:3] is the path.
    """
    path = pair[2 : len(pair) // 2]
    parts = path.split("/")
    if pair != f"a/{path} b/{path}" or not path or {"", ".", "..", ".git"} & set(parts):
        raise PatchingError(f"{file}: cannot patch {pair!r}: one plain path in the tree, no rename")
    return path


def broken_rules(patch: Patch) -> list[str]:
    """What is wrong with one patch, each in one line; an empty list for a good patch."""
    paragraphs = [part for part in re.split(r"\n[ \t]*\n", patch.message.strip()) if part]
    wrong = []
    if patch.num_changed > MOST_CHANGED:
        wrong.append(f"changes {patch.num_changed} lines, more than {MOST_CHANGED}: split it")
    if not any(_OFF.search(paragraph) for paragraph in paragraphs):
        wrong.append("its message has no paragraph 'Off (the default): ...'")
    if not paragraphs or not _FORWARDED.search(paragraphs[-1]):
        wrong.append("its message has no trailer 'Forwarded: ...' at its end")
    return [f"{patch.name}: {reason}" for reason in wrong]


def unequal_numbers(several: Sequence[Series], line: str = "") -> list[str]:
    """Where two lines use one number for two concerns, or two numbers for one.

    With `line`, only the conflicts that this line is part of. The first line that has a number or
    a subject is taken to be right.
    """
    wrong: list[str] = []
    first_numbers: dict[int, Patch] = {}
    first_subjects: dict[str, Patch] = {}
    for patch in (patch for series in several for patch in series.patches):
        number = first_numbers.setdefault(patch.number, patch)
        subject = first_subjects.setdefault(patch.subject, patch)
        for first in {number.file: number, subject.file: subject}.values():
            same = (first.number, first.subject) == (patch.number, patch.subject)
            lines = (patch.file.parent.name, first.file.parent.name)
            if not same and (not line or line in lines):
                wrong.append(
                    f"{patch.name} and {first.name}: "
                    "a number and its subject must go together in every line"
                )
    return wrong


def plan_numbers(
    subjects: Sequence[str], known: Mapping[str, int], taken: Collection[int]
) -> list[int]:
    """The number of each subject of a series, in order.

    A `known` subject keeps its number. A new subject gets the first number after the patch before
    it that no other line has `taken`. Example: subjects A, new, B with A = 1 and B = 4 give
    1, 2, 4; if another line has taken 2, they give 1, 3, 4; if 3 is taken too, there is no number.

    Raises:
        PatchingError: a subject is there twice, or is not where its number belongs.
    """
    numbers: list[int] = []
    for place, subject in enumerate(subjects):
        if subject in subjects[:place]:
            raise PatchingError(f"two commits have the subject {subject!r}: one concern, one patch")
        before = numbers[-1] if numbers else 0
        number = known.get(subject, before + 1)
        while subject not in known and number in taken:
            number += 1
        after = [known[later] for later in subjects[place + 1 :] if later in known]
        if subject in known and number <= before:
            raise PatchingError(
                f"{subject!r} has the number {number}, but comes after {subjects[place - 1]!r}, "
                f"which has {before}: put the commits into the order of the numbers"
            )
        if subject not in known and number >= min(after, default=number + 1):
            raise PatchingError(
                f"{subject!r} is new, and there is no free number between {before} and "
                f"{min(after)}: put it last, or if it was renamed give it its subject back (to "
                "rename a concern, edit the patches of every line)"
            )
        numbers.append(number)
    return numbers
