"""The rules for patches: how long a patch may be, what its message says, how it is numbered."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.series import Patch, Series

MOST_CHANGED = 100
"""The most lines that a patch may add and remove, together."""

# the end of a mail from format-patch by default: "-- " and git's version, for example 2.39.5
_SIGNATURE = re.compile(rb"\n-- \n\d[^\n]*\n+\Z")
_OFF = re.compile(r"^Off \(the default\):[ \n]*\S")
_FORWARDED = re.compile(r"^Forwarded: *\S", re.M)


def num_changed(patch: Patch) -> int:
    """How many lines the patch adds and removes, together."""
    # The signature begins with "-", and would count as a removed line.
    hunks = (_SIGNATURE.sub(b"", change.diff.partition(b"\n@@")[2]) for change in patch.changes)
    return sum(line[:1] in (b"+", b"-") for hunk in hunks for line in hunk.split(b"\n"))


def broken_rules(patch: Patch) -> list[str]:
    """What is wrong with one patch, each in one line; an empty list for a good patch."""
    paragraphs = [part for part in re.split(r"\n[ \t]*\n", patch.message.strip()) if part]
    wrong = []
    if (num := num_changed(patch)) > MOST_CHANGED:
        wrong.append(f"changes {num} lines, more than {MOST_CHANGED}: split it")
    if not any(_OFF.search(paragraph) for paragraph in paragraphs):
        wrong.append("its message has no paragraph 'Off (the default): ...'")
    if not paragraphs or not _FORWARDED.search(paragraphs[-1]):
        wrong.append("its message has no trailer 'Forwarded: ...' at its end")
    return [f"{patch.name}: {reason}" for reason in wrong]


def unequal_numbers(several: Sequence[Series], line: str = "") -> list[str]:
    """Each place where release lines give one number to two subjects, or one subject two numbers.

    With `line`, only conflicts that involve this line are returned. The first series that has a
    number or a subject counts as right.
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
                    "each number must have the same subject in every line"
                )
    return wrong


def plan_numbers(
    subjects: Sequence[str], known: Mapping[str, int], taken: Collection[int]
) -> list[int]:
    """The number of each subject of a series, in order.

    A `known` subject keeps its number. A new subject gets the smallest number that is larger than
    the number of the subject before, and is not in `taken`, the numbers of other release lines.
    Example: the subjects A, new, B with A = 1 and B = 4 get 1, 2, 4; if 2 is taken, 1, 3, 4.

    Raises:
        PatchingError: a subject is there twice, the known numbers do not rise, or no number between
            two known ones is free for a new subject.
    """
    numbers: list[int] = []
    for place, subject in enumerate(subjects):
        if subject in subjects[:place]:
            raise PatchingError(
                f"two commits have the subject {subject!r}: make one commit of them, or change the "
                "subject of one"
            )
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
                f"{min(after)}: put this commit last; or, if its subject was changed, restore the "
                "old one (to change a subject, edit the patches of every line)"
            )
        numbers.append(number)
    return numbers
