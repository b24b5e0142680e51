"""What a try can come to, and what one clear line is: the only place that says so."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

RIGHT = "right"  # accepted, with the content that it must have
REFUSED = "refused"  # with one clear line
WRONGLY_REFUSED = "wrong refusal"  # of input that has nothing wrong with it
SILENT = "silent wrong"  # accepted, with other content, or although the content is impossible
CRASH = "crash"  # the process died, or an exception came that is not meant for users
HANG = "hang"
BAD_MESSAGE = "bad message"  # refused, but not with one clear line
OUTCOMES = (RIGHT, REFUSED, WRONGLY_REFUSED, SILENT, CRASH, HANG, BAD_MESSAGE)
FAULTS = OUTCOMES[2:]

MOST_CHARACTERS = 1000  # of a line; a path of the fuzz's own has some 50
_NOTE = "what"

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """What one try came to; `detail` is for people."""

    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class Kind:
    """A class of tries.

    Attributes:
        share: of 1000 tries that are shared out over all classes.
        limit_s: a try that takes longer hangs; generous, as other work may be on the machine.
        memory_mb: how far a try's process may grow; beyond it is a MemoryError, and that a crash.
        prepare: makes what all tries begin with, once, in a folder that stays.
        attempt: one try, with its own random numbers, in an empty folder, on what was prepared.
            The bad input is left in the folder. An exception out of it is a crash.
    """

    name: str
    share: int
    limit_s: float
    memory_mb: int
    prepare: Callable[[Path], Any]
    attempt: Callable[[random.Random, Path, Any], Verdict]


def note(folder: Path, text: str) -> None:
    """Say what is wrong with the input of this try; it is read when the process is dead, too."""
    (folder / _NOTE).write_text(text)


def noted(folder: Path) -> str:
    """What `note` said."""
    path = folder / _NOTE
    return path.read_text() if path.is_file() else ""


def bad_line(text: str, names: Sequence[str]) -> str | None:
    """Why a text is not one clear line about one of these, in a few words; None if it is one.

    Args:
        names: of the file, the request, the option that the line must be about: one is enough.
    """
    if not text.strip():
        return "it says nothing"
    if "Traceback" in text:
        return "a traceback"
    if "\n" in text:
        return f"{text.count(chr(10)) + 1} lines"
    odd = next((character for character in text if not character.isprintable()), None)
    if odd is not None:
        return f"has the character {odd!a}, which is not printable"
    if len(text) > MOST_CHARACTERS:
        return f"{len(text)} characters"
    if not any(name in text for name in names):
        return f"names none of {list(names)}"
    return None


def _for_users(error: BaseException) -> bool:
    """A ValueError, or one of this project's kinds of it; not UnicodeDecodeError and the like."""
    if not isinstance(error, ValueError):
        return False
    return type(error) is ValueError or type(error).__module__.partition(".")[0] == "megatron_r3"


def refusal(error: BaseException, names: Sequence[str], must: bool = False) -> Verdict:
    """What an exception out of the code under test comes to.

    Args:
        must: the input has nothing wrong with it.
    """
    if not _for_users(error):
        frames = "".join(traceback.format_exception(error, limit=-4))
        return Verdict(CRASH, frames.strip())
    wrong = bad_line(str(error), names)
    if wrong is not None:
        return Verdict(BAD_MESSAGE, f"{wrong}: {str(error)[:2000]!a}")
    return Verdict(WRONGLY_REFUSED if must else REFUSED, str(error))


def judged(
    action: Callable[[], T],
    difference: Callable[[T], str | None],
    names: Sequence[str],
    must: bool = False,
) -> Verdict:
    """Do it, and compare what it gives with what it must give.

    Args:
        action: the code under test.
        difference: what is wrong with its result, or None.
        names, must: those of `refusal`.
    """
    try:
        got = action()
    except Exception as error:
        return refusal(error, names, must)
    wrong = difference(got)
    return Verdict(RIGHT) if wrong is None else Verdict(SILENT, wrong)
