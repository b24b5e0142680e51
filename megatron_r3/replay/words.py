"""The words of errors: how a value or a text from outside is shown.

Such a text may have control characters, which a terminal would obey.
"""

from __future__ import annotations

import reprlib
from typing import Any


def one_line(text: str, most: int = 4000) -> str:
    """The first `most` characters of a text from outside, as one line that a terminal can show.

    Line ends become spaces. Other characters that are not printable (escape sequences, marks that
    turn the direction of writing) are spelled out: the character ESC becomes `\\x1b`.
    """
    text = text if len(text) <= most else f"{text[:most]}..."
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quoted(value: Any, most: int = 80) -> str:
    """The beginning of `repr(value)`, as one line; it never raises.

    It is safe for a whole number of 5,000 digits, which Python refuses to print, for a list that
    contains itself, and for a text of a gigabyte, which `repr` would copy before it could be cut.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = most
    short.maxlist = short.maxtuple = short.maxdict = 20
    try:
        return one_line(short.repr(value), most)
    except Exception:  # the `__repr__` of another library's object may raise anything
        return f"a {type(value).__name__}"


def said(value: Any, most: int = 500) -> str:
    """What a server wrote for people, as one line: a text without quotes, other values quoted."""
    return one_line(value, most) if isinstance(value, str) else quoted(value, most)


def wrong_whole(name: str, value: Any, least: int, most: int) -> str | None:
    """The error if `value` is no int from `least` to `most` (True is no int here), else None."""
    if type(value) is int and least <= value <= most:
        return None
    return must_be(name, f"a whole number from {least} to {most}", value)


def must_be(name: str, expected: str, got: Any) -> str:
    """The error "NAME must be EXPECTED; got VALUE"."""
    return f"{name} must be {expected}; got {quoted(list(got) if isinstance(got, tuple) else got)}"
