"""The patches of one release line, read and checked without a tree.

A series is what `git format-patch --full-index --no-renames` writes: numbered files that change,
add or delete text files. The full blob ids in them say which file they start from and which one
they give; a tree is known by those ids. A number is a concern, the same in every line; a line that
does not need a concern has a gap there.
"""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.git import PatchingError, names

Blobs = tuple[str | None, ...]
"""The blob ids of one file before, between and after its patches; None: there is no such file."""

_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (100644|100755))?")
_NUMBERED = re.compile(r"(?!0000)\d{4}-", re.ASCII)
_CREATED = re.compile(r"(?:new|deleted) file mode (100644|100755)")
# what format-patch ends a mail with where nobody tells it not to
_SIGNATURE = re.compile(rb"\n-- \n\d[^\n]*\n+\Z")


@dataclass(frozen=True)
class FileChange:
    """What one patch does to one file.

    Attributes:
        pre, post: blob ids; None where the file is added or deleted.
        executable: its mode, as git keeps it.
        diff: this file's part of the patch.
    """

    path: str
    pre: str | None
    post: str | None
    executable: bool
    diff: bytes


@dataclass(frozen=True)
class Patch:
    """One patch; no file is in it twice.

    Attributes:
        message: the body of the mail up to the line that is only '---'.
    """

    file: Path
    subject: str
    message: str
    changes: tuple[FileChange, ...]

    @property
    def number(self) -> int:
        """The number of its concern, from the name of its file."""
        return int(self.file.name[:4])

    @property
    def num_changed(self) -> int:
        """How many lines it adds and removes, together."""
        bodies = (change.diff.partition(b"\n@@")[2] for change in self.changes)
        lines = (line for body in bodies for line in _SIGNATURE.sub(b"", body).split(b"\n"))
        return sum(line[:1] in (b"+", b"-") for line in lines)


@dataclass(frozen=True)
class Series:
    """The patches of a release line in order; each starts where the one before ended."""

    line: str
    patches: tuple[Patch, ...]
    blobs: Mapping[str, Blobs]


def read_series(folder: Path) -> Series:
    """Read the patches of the release line that `folder` is named after.

    Raises:
        PatchingError: naming the patch that is missing, unreadable or does not follow the others.
    """
    files = sorted(folder.glob("*.patch"))
    if not files:
        raise PatchingError(f"{folder}: no patches")
    before: set[str] = set()
    for file in files:
        if not _NUMBERED.match(file.name):
            raise PatchingError(f"{file}: the patches are numbered; expected 0001-*.patch and on")
        if file.name[:4] in before:
            raise PatchingError(f"{file}: there are two patches of the number {file.name[:4]}")
        before.add(file.name[:4])
    patches = tuple(read_patch(file) for file in files)
    blobs: dict[str, list[str | None]] = {}
    for patch in patches:
        for change in patch.changes:
            chain = blobs.setdefault(change.path, [change.pre])
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
        PatchingError: it is none, or does what is not supported (renames, modes, binary files).
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PatchingError(f"{file}: {error.strerror}") from None
    mail = email.message_from_bytes(data, policy=email.policy.default)
    subject = re.sub(r"^\[PATCH[^]]*\] *", "", str(mail["subject"] or "")).strip()
    # the message may quote a diff: the patch begins after the first line that is only '---'
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
    head, *lines = re.split(rb"^(?:--- |@@ )", diff, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    path = _path(head.decode(errors="replace").removeprefix("diff --git "), file)
    ids, executable = None, False
    for line in (raw.decode(errors="replace") for raw in lines):
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
    path = pair[2 : len(pair) // 2]
    parts = path.split("/")
    if pair != f"a/{path} b/{path}" or not path or {"", ".", "..", ".git"} & set(parts):
        raise PatchingError(f"{file}: cannot patch {pair!r}: one plain path in the tree, no rename")
    return path


# What every patch keeps to, so that it can be read, carried to another line, and dropped.

MOST_CHANGED = 100
"""How many lines a patch may add and remove, together; more is more than one concern."""

_OFF = re.compile(r"^Off \(the default\):[ \n]*\S")
_FORWARDED = re.compile(r"^Forwarded: *\S", re.M)


def broken_rules(patch: Patch) -> list[str]:
    """What is wrong with one patch, each in one line; empty for a good one."""
    paragraphs = [text for text in re.split(r"\n[ \t]*\n", patch.message.strip()) if text]
    wrong = []
    if patch.num_changed > MOST_CHANGED:
        wrong.append(f"changes {patch.num_changed} lines, more than {MOST_CHANGED}: split it")
    if not any(_OFF.search(text) for text in paragraphs):
        wrong.append("its message has no paragraph 'Off (the default): ...'")
    if not paragraphs or not _FORWARDED.search(paragraphs[-1]):
        wrong.append("its message has no trailer 'Forwarded: ...' at its end")
    return [f"{patch.file.parent.name}/{patch.file.name}: {what}" for what in wrong]


def unequal_numbers(several: Sequence[Series], line: str = "") -> list[str]:
    """Where two lines use one number for two concerns, or two numbers for one.

    With `line` only what that line has to do with; the first line that has a number is right.
    """
    wrong: list[str] = []
    first_numbers: dict[int, Patch] = {}
    first_subjects: dict[str, Patch] = {}
    for patch in (patch for series in several for patch in series.patches):
        number = first_numbers.setdefault(patch.number, patch)
        subject = first_subjects.setdefault(patch.subject, patch)
        for first in {number.file: number, subject.file: subject}.values():
            both = (patch.file.parent.name, first.file.parent.name)
            if first is not patch and not _alike(first, patch) and (not line or line in both):
                wrong.append(
                    f"{_name(patch)} and {_name(first)}: "
                    "same number and same subject go together, in every line"
                )
    return wrong


def numbers_by_subject(several: Iterable[Series]) -> dict[str, int]:
    """The number of every subject; that of the first line that has it."""
    numbers: dict[str, int] = {}
    for series in several:
        for patch in series.patches:
            numbers.setdefault(patch.subject, patch.number)
    return numbers


def plan_numbers(
    subjects: Sequence[str], known: Mapping[str, int], taken: Collection[int]
) -> list[int]:
    """The number of each subject of a series, in order.

    A `known` subject keeps its number; a new one gets the next after the patch before it that no
    other line has `taken`.

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


def _alike(one: Patch, other: Patch) -> bool:
    return (one.number, one.subject) == (other.number, other.subject)


def _name(patch: Patch) -> str:
    return f"{patch.file.parent.name}/{patch.file.name}"
