"""What every patch keeps to, so that it can be read, carried to another line, and dropped."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.series import Patch, Series

__all__ = ["MOST_CHANGED", "broken_rules", "numbers_by_subject", "plan_numbers", "unequal_numbers"]

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
