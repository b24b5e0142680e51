"""What came from outside, as errors quote it: one short line, whatever it is."""

from __future__ import annotations

import reprlib
from typing import Any

from megatron_r3.untrusted import one_line

__all__ = ["quoted", "said"]


def quoted(value: Any, most: int = 80) -> str:
    """The beginning of `repr(value)`, as one line; it never raises.

    Neither a whole number of 5,000 digits (Python refuses to print it) nor lists in lists without
    end, nor a text of a gigabyte, which would be copied before it is cut, can do harm.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = most
    short.maxlist = short.maxtuple = short.maxdict = 20
    try:
        return one_line(short.repr(value), most)
    except Exception:  # another library's object: its errors are its own
        return f"a {type(value).__name__}"


def said(value: Any, most: int = 500) -> str:
    """What a server wrote for people: a text as it is, anything else quoted."""
    return one_line(value, most) if isinstance(value, str) else quoted(value, most)
