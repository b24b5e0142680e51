"""The outcomes of a try, and what counts as one clear line, for all classes of tries."""

from __future__ import annotations

import io
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TypeVar

import hypothesis

RIGHT = "right"  # accepted, with the right content
REFUSED = "refused"  # with one clear line
WRONGLY_REFUSED = "wrong refusal"  # the input had nothing wrong with it
SILENT = "silent wrong"  # wrong content or impossible input was accepted, or a promise was broken
CRASH = "crash"  # an exception that is not meant for users, or too much memory
HANG = "hang"  # no end within the limit
BAD_MESSAGE = "bad message"  # refused, but not with one clear line

MOST_CHARACTERS = 1000  # of a clear line; a path of a try has about 50
LIMIT_S = 30.0  # generous: other programs may be busy on the machine
_MOST_LINES = 60  # lines that `apply` may list below its error

T = TypeVar("T")


class Fault(Exception):
    """What hypothesis looks for and shrinks: an outcome that is neither right nor refused."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome, self.detail = outcome, detail


class _Hang(BaseException):
    """Raised in code that takes too long; no `except Exception` of that code catches a `_Hang`."""


def note(folder: Path, text: str) -> None:
    """Note what is wrong with a try's input, also in a file, as the try may kill its process."""
    hypothesis.note(text)
    (folder / "what").write_text(text, errors="backslashreplace")


def bad_line(text: str, names: Sequence[str]) -> str | None:
    """Why a text is not one clear line, in a few words; None if it is a clear line.

    Args:
        text: an error message.
        names: names of the input, such as a file, a request or an option. A clear line has at least
            one of them.
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


def bad_stderr(text: str, names: Sequence[str]) -> str | None:
    """Why the stderr of a command is not one clear `error:` line; None if it is such a line.

    A list may follow the line: `apply` names each wrong file on a line of its own.
    """
    first, *rest = text.removesuffix("\n").split("\n")
    if not first.startswith("error: "):
        return f"it does not begin with `error: `: {text[:2000]!a}"
    wrong = bad_line(first, names if not rest else [first])
    if wrong is None and not any(name in text for name in names):
        wrong = f"names none of {list(names)[:3]}"
    if wrong is None and len(rest) > _MOST_LINES:
        wrong = f"{len(rest)} lines below the error"
    for line in rest:
        if not line.isprintable() or "Traceback" in line or line.startswith("error:"):
            wrong = "a line below the error is no part of a list"
    return wrong if wrong is None else f"{wrong}: {text[:2000]!a}"


def judged(
    action: Callable[[], T],
    difference: Callable[[T], str | None],
    names: Sequence[str],
    must: bool = False,
) -> str:
    """Call the code under test once, and return RIGHT or REFUSED.

    Args:
        action: calls the code under test.
        difference: says what is wrong with the result of `action`; None if nothing is.
        names: see `bad_line`.
        must: whether the input is right, so that any refusal is a fault.

    Raises:
        Fault: any other outcome.
    """
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings(), _limited():
            warnings.simplefilter("always")
            got = action()
    except KeyboardInterrupt:
        raise
    except _Hang:
        raise Fault(HANG, f"no end in {LIMIT_S:g} s") from None
    except BaseException as error:  # SystemExit too: it would end the process of a user
        outcome = _refusal(error, names, must)
    else:
        wrong = difference(got)
        if wrong is not None:
            raise Fault(SILENT, wrong)
        outcome = RIGHT
    if said.getvalue():
        raise Fault(BAD_MESSAGE, f"{outcome}, but this was printed: {said.getvalue()[:3000]!a}")
    return outcome


def _refusal(error: BaseException, names: Sequence[str], must: bool) -> str:
    """REFUSED for a clear ValueError, a plain one or a subclass of this project; else a Fault."""
    own = type(error) is ValueError or type(error).__module__.partition(".")[0] == "megatron_r3"
    if not (isinstance(error, ValueError) and own):
        raise Fault(CRASH, "".join(traceback.format_exception(error, limit=-4)).strip())
    wrong = bad_line(str(error), names)
    if wrong is not None:
        raise Fault(BAD_MESSAGE, f"{wrong}: {str(error)[:2000]!a}")
    if must:
        raise Fault(WRONGLY_REFUSED, str(error))
    return REFUSED


@contextmanager
def _limited() -> Iterator[None]:
    """Stop a block after LIMIT_S, for example a block that opens a pipe to which nobody writes."""

    def ring(number: int, frame: object) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
