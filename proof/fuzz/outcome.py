"""The outcomes of a try, and what counts as one clear line. Nothing else decides either of them."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

RIGHT = "right"  # accepted, with the content that it must have
REFUSED = "refused"  # by an error of one clear line
WRONGLY_REFUSED = "wrong refusal"  # the input had nothing wrong with it
SILENT = "silent wrong"  # accepted with wrong content, or although the input is impossible
CRASH = "crash"  # the process died, or an exception came that is not meant for users
HANG = "hang"  # no end within the limit of the class
BAD_MESSAGE = "bad message"  # refused, but not with one clear line
OUTCOMES = (RIGHT, REFUSED, WRONGLY_REFUSED, SILENT, CRASH, HANG, BAD_MESSAGE)
FAULTS = OUTCOMES[2:]

MOST_CHARACTERS = 1000  # of a clear line; the paths of a try have some 50
_NOTE = "what"  # the file in the folder of a try that says what is wrong with its input

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """The outcome of one try, and a detail for people to read."""

    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class Kind:
    """A class of tries.

    Attributes:
        share: how many of 1000 tries are of this class.
        limit_s: seconds after which a try counts as hanging. It is generous, since other programs
            may be busy on the machine.
        memory_mb: by how much the process of a try may grow. If it needs more, it gets a
            MemoryError, which counts as a crash.
        prepare: makes what all tries begin with. It is called once, with a folder that stays.
        attempt: makes one try, with random numbers of its own, an empty folder, and the result of
            `prepare`. It leaves the bad input in the folder. If it raises, that is a crash.
    """

    name: str
    share: int
    limit_s: float
    memory_mb: int
    prepare: Callable[[Path], Any]
    attempt: Callable[[random.Random, Path, Any], Verdict]


def note(folder: Path, text: str) -> None:
    """Write down what is wrong with the input of this try, before the try may kill its process."""
    (folder / _NOTE).write_text(text)


def noted(folder: Path) -> str:
    """What `note` wrote last into this folder; empty if it wrote nothing."""
    path = folder / _NOTE
    return path.read_text() if path.is_file() else ""


def bad_line(text: str, names: Sequence[str]) -> str | None:
    """Why a text is not one clear line, in a few words; None if it is a clear line.

    Args:
        text: an error message.
        names: what the message may be about, such as a file, a request or an option. A clear line
            has at least one of these names in it.
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
    """Whether users may see it: a plain ValueError, or an error class of this project."""
    if not isinstance(error, ValueError):
        return False
    return type(error) is ValueError or type(error).__module__.partition(".")[0] == "megatron_r3"


def refusal(error: BaseException, names: Sequence[str], must: bool = False) -> Verdict:
    """The verdict on an exception that the code under test has raised.

    Args:
        error: the exception.
        names: see `bad_line`.
        must: whether the input has nothing wrong with it, so that any refusal is a fault.
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
    """The verdict on one call of the code under test.

    Args:
        action: calls the code under test.
        difference: says what is wrong with the result of `action`; None if nothing is.
        names, must: see `refusal`.
    """
    try:
        got = action()
    except Exception as error:
        return refusal(error, names, must)
    wrong = difference(got)
    return Verdict(RIGHT) if wrong is None else Verdict(SILENT, wrong)
